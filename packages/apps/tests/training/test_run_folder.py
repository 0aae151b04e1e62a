from __future__ import annotations

import contextlib
import json
import multiprocessing
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gaudi_apps.runtime.errors import RunChangedError, RunInUseError
from gaudi_apps.runtime.session import EVALUATIONS, HISTORY, LOG, SUMMARIES, Session
from gaudi_apps.training import checkpoint, run
from gaudi_apps.training.checkpoint import MANIFEST, CheckpointFolder, load_checkpoint
from gaudi_apps.training.recipe import Choice, Recipe, read_recipe
from gaudi_apps.training.run_dir import LOCK, RUN_FILE, RunFolder, describe_data
from gaudi_datasets.documents import CHECKSUM, seal
from gaudi_datasets.errors import DataError, UnsafeError

SETTINGS: dict[str, Any] = {
    "batch_size": 8,
    "base_lr": float("inf"),
    "drops": (40.0, 50.0),
    "data": "abc",
    "file": None,
}
FILES, FOLDERS = ("history.jsonl", "curves.png"), ("pictures",)


def begin(folder: Path, **changes: Any) -> bool:
    return RunFolder(folder).begin({**SETTINGS, **changes}, files=FILES, folders=FOLDERS)


def validate(folder: Path, **changes: Any) -> bool:
    return RunFolder(folder).validate({**SETTINGS, **changes}, files=FILES, folders=FOLDERS)


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def save_checkpoint(folder: Path, step: int = 1) -> None:
    CheckpointFolder(folder / "checkpoints").save(step, {"a": np.zeros(3)}, {})


def edit_record(folder: Path, **changes: Any) -> None:
    path = folder / RUN_FILE
    path.write_text(json.dumps(seal(json.loads(path.read_text()) | changes)))


def test_a_run_is_begun_once_and_then_continued(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    assert not validate(folder)
    assert list(tmp_path.iterdir()) == []
    assert not begin(folder)
    assert list_files(folder) == [RUN_FILE]
    before = (folder / RUN_FILE).read_bytes()
    save_checkpoint(folder)
    (folder / "history.jsonl").touch()
    assert validate(folder)
    assert begin(folder)
    assert (folder / RUN_FILE).read_bytes() == before


def test_a_run_that_was_begun_under_former_names_of_flags_goes_on(tmp_path: Path) -> None:
    begin(tmp_path, pretrained_filepath="a.pth")
    now, aliases = {**SETTINGS, "weights": "a.pth"}, {"pretrained_filepath": "weights"}
    assert RunFolder(tmp_path).begin(now, files=FILES, folders=FOLDERS, aliases=aliases)
    with pytest.raises(RunChangedError) as caught:
        RunFolder(tmp_path).begin({**now, "weights": "b.pth"}, files=FILES, folders=FOLDERS, aliases=aliases)
    assert caught.value.field == "weights"


@pytest.mark.parametrize(
    ("changes", "field", "named"),
    [
        ({"batch_size": 16}, "batch_size", "8, this one 16;"),
        ({"drops": (40.0, 51.0)}, "drops", r"\[40.0, 50.0\], this one \[40.0, 51.0\]"),
        ({"file": "a.pth"}, "file", "None, this one 'a.pth'"),
        ({"new": 1}, "new", "None, this one 1"),
        (
            *({"base_lr": 1, "data": "x", "batch_size": 9}, "base_lr"),
            r"inf, this one 1 \(and 2 more: batch_size, data\)",
        ),
    ],
)
def test_changed_settings_are_refused_and_named(
    tmp_path: Path, changes: dict[str, Any], field: str, named: str
) -> None:
    begin(tmp_path)
    for refuse in (begin, validate):
        with pytest.raises(RunChangedError, match=f" {field} {named}") as caught:
            refuse(tmp_path, **changes)
        assert (caught.value.exit_status, caught.value.path, caught.value.field) == (
            78,
            str(tmp_path / RUN_FILE),
            field,
        )
    assert "--clean to start over" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["checkpoints", "history.jsonl", "curves.png", "pictures"])
@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_what_no_run_wrote_is_not_written_over(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "dangling link":
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
    else:
        (tmp_path / name).mkdir() if kind == "folder" else (tmp_path / name).write_text("mine")
    (tmp_path / "notes.txt").write_text("mine")
    for refuse in (begin, validate):
        with pytest.raises(UnsafeError, match=r"run\.json no run wrote") as caught:
            refuse(tmp_path)
        assert (caught.value.exit_status, caught.value.path) == (77, str(tmp_path / name))
    assert not (tmp_path / RUN_FILE).exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "gaudi-apps run", "version": 2, "settings": {}, "files": []}',
        '{"format": "gaudi-apps run", "version": 3, "settings": {}, "files": []}',
        '{"format": "gaudi-apps run", "version": "1", "settings": {}, "files": []}',
        '{"format": "gaudi-apps run", "version": 1, "settings": [], "files": []}',
        '{"format": "gaudi-apps run", "version": 1, "settings": {}, "files": "abc"}',
        '{"format": "gaudi-apps run", "version": 1, "settings": {}, "files": [3]}',
        '{"format": "gaudi-apps run", "version": 1, "settings": {}, "files": ["a\\u0000b"]}',
        "\udcff",
        "[" * 100_000,
    ],
    ids=lambda text: text[:9],
)
def test_a_record_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN_FILE).write_text(text, errors="surrogateescape")
    (tmp_path / "a").write_text("mine")
    run = RunFolder(tmp_path)
    for act in (lambda: begin(tmp_path), run.clean, lambda: run.register_files(tmp_path / "a")):
        with pytest.raises(DataError, match="no record of") as caught:
            act()
        assert caught.value.path == str(tmp_path / RUN_FILE)
        assert "\n" not in str(caught.value)
    assert list_files(tmp_path) == ["a", RUN_FILE]


def test_a_bit_of_a_record_that_changed_is_noticed(tmp_path: Path) -> None:
    """Of a setting's name, too: one that is unknown and at its default was taken for one of another release."""
    begin(tmp_path)
    path = tmp_path / RUN_FILE
    content = path.read_bytes()
    known = json.loads(content)
    for bit in range(0, 8 * len(content), 13):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with contextlib.suppress(DataError):
            assert validate(tmp_path)
            assert json.loads(changed) == known


def test_a_record_of_the_first_version_goes_on_and_gets_a_checksum(tmp_path: Path) -> None:
    begin(tmp_path)
    path = tmp_path / RUN_FILE
    record = json.loads(path.read_text()) | {"version": 1}
    del record[CHECKSUM]
    path.write_text(json.dumps(record))
    assert validate(tmp_path)
    RunFolder(tmp_path).register_files(tmp_path / "more")
    record = json.loads(path.read_text())
    assert record == seal(record)
    assert (record["version"], "more" in record["files"]) == (2, True)


def test_clean_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    begin(tmp_path)
    save_checkpoint(tmp_path, 1)
    save_checkpoint(tmp_path, 2)
    for name in ("history.jsonl", "notes.txt", "pictures/1.png", "pictures/mine.png", "traces/a/b/c.pb", "mine/d.pb"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    run = RunFolder(tmp_path)
    run.register_files(tmp_path / "pictures" / "1.png", tmp_path / "traces" / "a" / "b" / "c.pb")
    run.register_files(tmp_path / "pictures" / "1.png")
    assert json.loads((tmp_path / RUN_FILE).read_text())["files"] == [
        "curves.png",
        "history.jsonl",
        "pictures/1.png",
        "traces/a/b/c.pb",
    ]
    assert run.clean() == 3  # there was no curves.png
    assert list_files(tmp_path) == [
        "checkpoints",
        "checkpoints/notes.txt",
        "mine",
        "mine/d.pb",
        "notes.txt",
        "pictures",
        "pictures/mine.png",
    ]


def test_a_run_may_begin_after_clean(tmp_path: Path) -> None:
    begin(tmp_path)
    save_checkpoint(tmp_path)
    (tmp_path / "curves.png").touch()
    RunFolder(tmp_path).clean()
    assert list(tmp_path.iterdir()) == []
    assert not begin(tmp_path, batch_size=3)


def test_clean_without_a_run(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "nowhere").clean() == 0
    assert RunFolder(tmp_path).clean() == 0
    save_checkpoint(tmp_path)
    before = list_files(tmp_path)
    with pytest.raises(UnsafeError, match=r"no run\.json, so --clean") as caught:
        RunFolder(tmp_path).clean()
    assert caught.value.path == str(tmp_path)
    assert list_files(tmp_path) == before


def test_nothing_is_noted_where_no_run_is(tmp_path: Path) -> None:
    RunFolder(tmp_path).register_files(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["../mine.txt", "pictures/../../mine.txt", "{outside}/mine.txt", "linked/mine.txt", "", "."]
)
def test_clean_does_not_leave_the_folder(tmp_path: Path, name: str) -> None:
    """Somebody wrote a name into run.json, or put a link in the place of a folder."""
    folder = tmp_path / "run"
    begin(folder)
    save_checkpoint(folder)
    (folder / "history.jsonl").write_text("ours")
    (tmp_path / "mine.txt").write_text("mine")
    (folder / "linked").symlink_to(tmp_path)
    edit_record(folder, files=["history.jsonl", name.format(outside=tmp_path)])
    before = list_files(tmp_path)
    with pytest.raises(UnsafeError, match=r"is outside .*run\.json") as caught:
        RunFolder(folder).clean()
    assert caught.value.exit_status == 77
    assert list_files(tmp_path) == before


def test_clean_follows_no_link(tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    for each in (folder, other):
        begin(each)
    save_checkpoint(other)
    (folder / "history.jsonl").symlink_to(other / RUN_FILE)
    assert RunFolder(folder).clean() == 1
    assert (other / RUN_FILE).exists()

    begin(folder)
    (folder / "checkpoints").symlink_to(other / "checkpoints")
    with pytest.raises(UnsafeError, match="is outside") as caught:
        RunFolder(folder).clean()
    assert caught.value.path == str(folder / "checkpoints")
    assert CheckpointFolder(other / "checkpoints").steps() == [1]


def test_a_folder_may_be_reached_by_a_link(tmp_path: Path) -> None:
    real = tmp_path / "real"
    begin(real)
    save_checkpoint(real)
    (tmp_path / "link").symlink_to(real)
    assert begin(tmp_path / "link")
    RunFolder(tmp_path / "link").clean()
    assert list(real.iterdir()) == []


def test_the_recipe_of_a_run_is_there_before_the_run(tmp_path: Path) -> None:
    """A process that ends between the two files leaves what a second start goes on by."""
    files, recipe = (*FILES, "recipe.json"), Recipe((Choice("steps", 7, "fitted"),), minutes=1.0, is_fitted=True)
    document = recipe.to_document()
    with pytest.raises(TypeError):  # of a value that the second file cannot hold
        RunFolder(tmp_path / "a").begin({"x": object()}, files=files, folders=FOLDERS, recipe=document)
    assert list_files(tmp_path / "a") == ["recipe.json"]
    assert RunFolder(tmp_path / "a").clean() == 0
    assert not RunFolder(tmp_path / "a").begin(SETTINGS, files=files, folders=FOLDERS, recipe=document)
    assert read_recipe(tmp_path / "a", (), 1.0) == recipe

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "recipe.json").write_text('{"of": "somebody"}')
    with pytest.raises(UnsafeError):
        RunFolder(tmp_path / "b").begin(SETTINGS, files=files, folders=FOLDERS, recipe=document)


@pytest.mark.parametrize("name", ["split.json", "checked.json", "training_data.json", "metrics.csv", "mlflow.json"])
def test_files_of_somebody_else_are_not_those_of_a_run(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("own")
    with pytest.raises(UnsafeError):
        RunFolder(tmp_path).validate(SETTINGS, files=run.FILES, folders=run.FOLDERS)


def hold_folder(folder: Path, held: Any) -> None:
    with RunFolder(folder).lock():
        held.set()
        signal.pause()


def test_a_second_training_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, folder = context.Event(), tmp_path / "run"
    first = context.Process(target=hold_folder, args=(folder, held))
    first.start()
    assert held.wait(600)
    with (
        pytest.raises(RunInUseError, match=str(first.pid)) as caught,
        RunFolder(folder).lock(),
    ):
        pass
    assert (caught.value.exit_status, caught.value.path) == (75, str(folder))
    assert list_files(folder) == [LOCK]
    first.kill()
    first.join()
    with RunFolder(folder).lock():
        begin(folder)
        assert RunFolder(folder).clean() == 0  # the lock is none of its files
        begin(folder)
    assert list_files(folder) == [RUN_FILE]


def test_checkpoints_are_those_of_the_run_and_of_their_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        begin(tmp_path / name)
        for step in (1, 2):
            save_checkpoint(tmp_path / name, step)
    assert load_checkpoint(tmp_path / "a" / "checkpoints" / "step-00000002").step == 2
    own, told = CheckpointFolder(tmp_path / "a" / "checkpoints"), list[str]()
    shutil.copytree(tmp_path / "b" / "checkpoints" / "step-00000002", own.path(3))
    shutil.rmtree(own.path(2))
    shutil.copytree(tmp_path / "b" / "checkpoints" / "step-00000002", own.path(2))
    shutil.copytree(own.path(1), own.path(999))
    for step, field in ((2, "run"), (3, "step"), (999, "step")):
        with pytest.raises(DataError) as caught:
            load_checkpoint(own.path(step))
        assert (caught.value.path, caught.value.field) == (str(own.path(step)), field)
    assert own.load_newest(report=told.append).step == 1
    assert len(told) == 3


@pytest.mark.parametrize("step", [-1, True, 2.0, 2**70])
def test_steps_that_are_forged_are_no_steps(tmp_path: Path, step: Any) -> None:
    begin(tmp_path)
    save_checkpoint(tmp_path, 1)
    path = CheckpointFolder(tmp_path / "checkpoints").path(1)
    manifest = json.loads((path / MANIFEST).read_text())["manifest"]
    (path / MANIFEST).write_bytes(checkpoint._render({**manifest, "step": step}))
    with pytest.raises(DataError) as caught:
        load_checkpoint(path)
    assert caught.value.field == "step"


def test_settings_of_a_checkpoint_are_those_of_its_run(tmp_path: Path) -> None:
    begin(tmp_path)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(1, {"a": np.zeros(3)}, {"settings": {"batch_size": 8, "data": "as a former release has it"}})
    assert folder.load_newest().step == 1
    edit_record(tmp_path, settings={"batch_size": 9})
    with pytest.raises(DataError) as caught:
        load_checkpoint(folder.path(1))
    assert caught.value.field == "batch_size"


def test_runs_of_former_releases_have_no_id_and_go_on(tmp_path: Path) -> None:
    begin(tmp_path)
    record = json.loads((tmp_path / RUN_FILE).read_text()) | {"version": 1}
    del record["id"], record[CHECKSUM]
    (tmp_path / RUN_FILE).write_text(json.dumps(record))
    save_checkpoint(tmp_path)
    manifest = json.loads((tmp_path / "checkpoints" / "step-00000001" / MANIFEST).read_text())["manifest"]
    assert "run" not in manifest
    assert begin(tmp_path)
    assert CheckpointFolder(tmp_path / "checkpoints").load_newest().step == 1


def test_validation_data_belongs_to_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.begin({}, files=(), folders=())
    data = describe_data({"classes": []}, "a", {"1.png": "10 x", "2.png": "10 y"})
    folder.require_validation("val", data)
    folder.write_validation("val", data)
    other = describe_data({"classes": []}, "b", {"1.png": "10 z", "2.png": "10 y"})
    for name, described in (("val", data), ("test", other)):  # another split by its flag is allowed
        folder.require_validation(name, described)
        folder.write_validation(name, described)
    with pytest.raises(RunChangedError) as raised:
        folder.require_validation("val", other)
    assert (raised.value.field, raised.value.exit_status) == ("validation data", 78)
    assert "1.png" in str(raised.value)
    path = tmp_path / "run" / "validation_data.json"
    path.write_text(path.read_text().replace('"a"', '"c"'))  # what is damaged tells nothing
    folder.require_validation("val", data)


@pytest.mark.parametrize("size", [1, 2])
def test_files_of_others_beside_logs_are_not_the_run_s(tmp_path: Path, size: int) -> None:
    begin(tmp_path)
    logs = [f"worker_1/{name}" for name in (LOG, HISTORY, EVALUATIONS)]
    event, trace = f"{SUMMARIES}/events.out.tfevents.1.host.2.0.v2", f"{SUMMARIES}/plugins/profile/now/host.xplane.pb"
    others = ["worker_pool/thesis.txt", "worker_2/log.txt", "worker_1/notes.txt", f"{SUMMARIES}/notes.txt"]
    for name in (*logs, event, trace, f"worker_1/{event}", *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folder, ranks = RunFolder(tmp_path), SimpleNamespace(size=size)
    known = SimpleNamespace(is_root=True, model_dir=tmp_path, folder=folder, communicator=ranks)
    Session.register_logs(cast(Session, known))
    own = {event, trace} | ({*logs, f"worker_1/{event}"} if size == 2 else set())
    assert {*json.loads((tmp_path / RUN_FILE).read_text())["files"]} == {*FILES, *own}
    folder.clean()
    assert all((tmp_path / name).exists() for name in others)


@pytest.mark.parametrize("name", ["", "checkpoints", "best"])
def test_drafts_that_a_disk_kept_go_at_the_next_start(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run" / name
    draft = folder / ".unfinished.0123456789abcdef" / "step-00000001"
    draft.mkdir(parents=True)
    (draft / MANIFEST).touch()
    (folder / "own").touch()
    with RunFolder(tmp_path / "run").lock():
        assert [path.name for path in folder.iterdir() if path.name not in (LOCK, "checkpoints", "best")] == ["own"]
