"""The copy of a run and its store agree, and what is damaged, missing or of somebody else in the store is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.remote.conftest import BUCKET, FORMER, LISTS, SECRET, Bucket

from gaudi_apps.training.checkpoint import BEST, CHECKPOINTS, CheckpointFolder, RunState
from gaudi_apps.training.run_dir import RunFolder
from gaudi_apps.training.stored_runs import LOCAL_RUNS, StoredRun, fetch_run, open_stored_run, upload_results
from gaudi_datasets.errors import DataError, FlagError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.stores import find_copy

URL = f"s3://{BUCKET}/run"
SETTINGS = {"seed": 0}


def save(folder: Path, *steps: int, kind: str = CHECKPOINTS) -> None:
    metadata = RunState(settings=SETTINGS).to_json()
    for step in steps:
        CheckpointFolder(folder / kind, keep=2).save(step, {"weights": np.full(100, step, np.float32)}, metadata)


def begin(*steps: int, keep: int = 10) -> StoredRun:
    """Do what a training does in a copy, and upload it after each step."""
    fetch_run(URL, None, begins=True)
    run = open_stored_run(URL)
    RunFolder(run.folder, (CHECKPOINTS, BEST)).begin(SETTINGS, files=["history.jsonl"], folders=[])
    run.begin()
    for step in steps:
        (run.folder / "history.jsonl").write_text(f"rows up to {step}\n")
        save(run.folder, step)
        run.upload(keep)
    return run


def use_empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str = "other") -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))


def list_here(kind: str = CHECKPOINTS) -> list[int]:
    return CheckpointFolder(find_copy(URL) / kind).steps()


@pytest.fixture
def trained(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bucket:
    """Upload a run of three checkpoints, and go to an empty machine."""
    run = begin(1, 2, 3)
    save(run.folder, 2, kind=BEST)
    run.upload(10)
    use_empty_machine(monkeypatch, tmp_path)
    return bucket


def test_another_machine_has_what_it_needs(trained: Bucket) -> None:
    folder = fetch_run(URL, None)
    assert (list_here(), list_here(BEST)) == ([3], [2])
    assert (folder / "history.jsonl").read_text() == "rows up to 3\n"
    before = trained.count("GET", "history")
    fetch_run(URL, "2")
    fetch_run(URL, "all")
    assert list_here() == [1, 2, 3]
    assert trained.count("GET", "history") == before


def test_a_list_that_lags_behind_hides_no_run(trained: Bucket) -> None:
    trained.client.create_bucket(Bucket=FORMER)
    trained.aim("GET", LISTS, "late")
    folder = fetch_run(URL, None, begins=True)
    assert not trained.aimed
    assert (list_here(), (folder / "history.jsonl").read_text()) == ([3], "rows up to 3\n")


def test_files_that_are_gone_and_listed_still(trained: Bucket) -> None:
    trained.remember()
    trained.delete("run/history.jsonl")
    trained.aim("GET", LISTS, "late")
    assert not (fetch_run(URL, None) / "history.jsonl").exists()
    for name in trained.list("run/"):
        trained.delete(f"run/{name}")
    shutil.rmtree(find_copy(URL))
    trained.aim("GET", LISTS, *["late"] * 99)
    assert fetch_run(URL, None, begins=True) == find_copy(URL)


def test_the_store_keeps_as_many_as_it_is_told(bucket: Bucket) -> None:
    begin(1, 2, 3, 4, keep=3)
    found = {name.split("/")[1] for name in bucket.list("run/") if name.startswith(CHECKPOINTS)}
    assert found == {f"step-0000000{step}" for step in (2, 3, 4)}
    assert list_here() == [3, 4]


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_checkpoint_that_is_not_whole_is_none(
    trained: Bucket, capsys: pytest.CaptureFixture[str], name: str, is_gone: bool
) -> None:
    key = f"run/checkpoints/step-00000003/{name}"
    if is_gone:
        trained.delete(key)
    else:
        trained.flip(key)
    fetch_run(URL, None)
    assert list_here() == [2]
    assert ("step-00000003" in capsys.readouterr().err) is not is_gone
    if not is_gone:
        with pytest.raises(DataError) as caught:
            fetch_run(URL, "3")
        assert str(caught.value.path).startswith(f"{URL}/checkpoints/step-00000003")
    run = begin(3)  # it comes to the step again
    shutil.rmtree(run.folder)
    fetch_run(URL, "newest")
    assert list_here() == [3]


def test_no_checkpoint_that_can_be_read(trained: Bucket) -> None:
    for step in (1, 2, 3):
        trained.flip(f"run/checkpoints/step-0000000{step}/state.safetensors")
    with pytest.raises(DataError) as caught:
        fetch_run(URL, None, begins=True)
    assert caught.value.path == f"{URL}/checkpoints"


@pytest.mark.parametrize("content", [b"{}", b"", b"[" * 100_000])
def test_a_damaged_record_is_named(trained: Bucket, content: bytes) -> None:
    trained.put("run/run.json", content)
    with pytest.raises(DataError) as caught:
        fetch_run(URL, None, begins=True)
    assert caught.value.path == f"{URL}/run.json"


def test_what_no_run_wrote_is_left_alone(bucket: Bucket) -> None:
    bucket.put("run/photo.jpg", b"photo")
    with pytest.raises(UnsafeError) as caught:
        fetch_run(URL, None, begins=True)
    assert caught.value.path == f"{URL}/photo.jpg"
    with pytest.raises(MissingInputError) as missing:
        fetch_run(URL, None)
    assert missing.value.path == URL


def test_a_copy_that_is_ahead_stays_and_one_that_is_behind_follows(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = begin(1)
    save(run.folder, 2)
    (run.folder / "history.jsonl").write_text("rows up to 2\n")  # not uploaded
    fetch_run(URL, None, begins=True)
    assert (run.folder / "history.jsonl").read_text() == "rows up to 2\n"
    assert list_here() == [1, 2]
    use_empty_machine(monkeypatch, tmp_path)
    begin(2, 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetch_run(URL, None, begins=True)
    assert (run.folder / "history.jsonl").read_text() == "rows up to 3\n"
    assert list_here() == [1, 2, 3]


def test_clean_removes_what_the_run_wrote(trained: Bucket) -> None:
    trained.put("run/notes.txt", b"of somebody")
    run = open_stored_run(URL)
    run.find_stored(begins=True)
    RunFolder(run.folder, (CHECKPOINTS, BEST)).begin(SETTINGS, files=[], folders=[])
    run.begin()
    save(run.folder, 1)
    run.upload(10)
    names = {
        "notes.txt",
        "run.json",
        *(f"checkpoints/step-00000001/{each}" for each in ("state.safetensors", "manifest.json")),
    }
    assert trained.list("run/") == names
    assert json.loads(trained.get("run/run.json"))["id"] == json.loads((run.folder / "run.json").read_text())["id"]


def test_a_copy_of_another_run_is_replaced(trained: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = json.loads(trained.get("run/run.json"))
    folder = find_copy(URL)
    RunFolder(folder).begin(SETTINGS, files=[], folders=[])
    (folder / "stale.txt").write_text("of the former run")
    fetch_run(URL, None)
    assert json.loads((folder / "run.json").read_text())["id"] == record["id"]
    assert not (folder / "stale.txt").exists()
    assert list_here() == [3]


def test_results_are_uploaded_and_nothing_else(trained: Bucket) -> None:
    folder = fetch_run(URL, None)
    before = trained.list("run/")
    (folder / "evaluation.json").write_text("{}")
    shutil.rmtree(folder / CHECKPOINTS)
    upload_results(URL)
    assert trained.list("run/") - before == {"evaluation.json"}
    assert before <= trained.list("run/")


def test_copies_that_nothing_uses_make_room(trained: Bucket) -> None:
    for number in range(LOCAL_RUNS + 2):
        for name in trained.list("run/"):
            trained.put(f"run{number}/{name}", trained.get(f"run/{name}"))
        fetch_run(f"{URL}{number}", "newest")
    copies = [path for path in find_copy(URL).parent.iterdir() if path.is_dir()]
    assert len(copies) == LOCAL_RUNS
    assert find_copy(f"{URL}{LOCAL_RUNS + 1}") in copies


@pytest.mark.parametrize("url", [f"s3://user:{SECRET}@{BUCKET}/run", f"s3://{BUCKET}/run?token={SECRET}"])
def test_credentials_in_a_url_are_refused(url: str) -> None:
    with pytest.raises(FlagError) as caught:
        fetch_run(url)
    assert SECRET not in f"{caught.value}{caught.value.path}"
