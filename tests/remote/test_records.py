"""Records in a bucket are those of a folder, through slow, cut and refused answers, kills and full caches."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.remote.conftest import BUCKET, SECRET, Bucket

from gaudi_datasets.detection.pipeline import can_make_in_processes
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.documents import CHECKSUM, seal
from gaudi_datasets.errors import AccessError, DataError, FlagError, GaudiError, MissingInputError, TransferError
from gaudi_datasets.fetching.downloads import Patience
from gaudi_datasets.records import remote_records
from gaudi_datasets.records.record_sets import check_shards, find_kind, has_records
from gaudi_datasets.records.remote_records import RemoteRecords

URL = f"s3://{BUCKET}/records"
SOON = Patience(attempts=3, silent_seconds=1, first_wait_seconds=0.01)
MANIFEST = ("",)  # one request
LINT = (sys.executable, "-m", "gaudi_datasets", "lint", "records", "--data_dir", URL, "--records", "train")


@pytest.fixture
def filled(bucket: Bucket, records: Path) -> Bucket:
    bucket.upload(records, "records")
    return bucket


def fetch(url: str = URL, split: str = "train", patience: Patience = SOON) -> Path:
    return RemoteRecords(url, split, patience=patience).fetch()


def require_equal(found: Path, records: Path, split: str = "train") -> None:
    names = sorted(path.name for path in records.glob(f"{split}*"))
    assert sorted(path.name for path in found.glob(f"{split}*")) == names
    assert [(found / name).read_bytes() for name in names] == [(records / name).read_bytes() for name in names]


@pytest.mark.parametrize("split", ["train", "val"])
def test_records_are_those_of_the_folder(filled: Bucket, records: Path, split: str) -> None:
    local, remote = RecordSource(records, split), RecordSource(URL, split)
    assert remote.fingerprint == local.fingerprint
    assert [remote.read(index).file_name for index in range(len(remote))] == [
        local.read(index).file_name for index in range(len(local))
    ]
    assert remote.name == f"{URL}:{split}"
    before = filled.count("GET", ".tfrecord")
    RecordSource(URL, split)
    assert filled.count("GET", ".tfrecord") == before == 3


def test_records_in_a_folder_of_their_split(bucket: Bucket, records: Path) -> None:
    for path in records.glob("val*"):
        bucket.put(f"records/validation/{path.name}", path.read_bytes())
    assert len(RecordSource(URL, "val")) == 8
    assert not has_records(URL, "train")


def test_the_manifest_alone_tells_kind_and_presence(filled: Bucket) -> None:
    assert has_records(URL, "train")
    assert find_kind(URL, "train") == "detection"
    check_shards(URL, "train")
    assert not filled.count("GET", ".tfrecord")
    with pytest.raises(DataError):
        RemoteRecords(URL, "train", kind="classification")


@pytest.mark.parametrize(
    "faults", [("503", "503"), ("cut", "cut"), ("stall",), ("", "503", "cut", "cut"), ("", "damage")]
)
def test_what_passes_is_tried_again(filled: Bucket, records: Path, faults: tuple[str, ...]) -> None:
    filled.add_faults(*faults)
    require_equal(fetch(), records)


@pytest.mark.parametrize(
    ("fault", "kind", "times"),
    [("403", AccessError, 1), ("expired", AccessError, 1), ("503", TransferError, 3), ("cut", TransferError, 3)],
)
def test_what_stays_is_an_error(filled: Bucket, fault: str, kind: type[GaudiError], times: int) -> None:
    filled.always = fault
    with pytest.raises(kind) as caught:
        fetch()
    assert caught.value.exit_status == kind.exit_status
    assert str(caught.value.path).startswith("s3://")
    assert SECRET not in str(caught.value)
    assert filled.count("GET", "/records/train.json") == times


def test_credentials_that_expire_meanwhile_end_it_and_new_ones_go_on(filled: Bucket, records: Path) -> None:
    filled.add_faults(*MANIFEST, "")
    filled.always = "expired"
    with pytest.raises(AccessError):
        fetch()
    filled.always = ""
    require_equal(fetch(), records)


def test_without_credentials(filled: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    filled.always = "403"
    with pytest.raises(AccessError):
        fetch()


@pytest.mark.parametrize("url", ["s3://no-such-bucket/records", f"s3://{BUCKET}/nothing"])
def test_what_is_not_there(filled: Bucket, url: str) -> None:
    with pytest.raises(MissingInputError) as caught:
        fetch(url)
    assert str(caught.value.path).startswith(url)


def test_a_shard_that_is_gone_or_another(filled: Bucket, records: Path) -> None:
    name = "train-00001-of-00003.tfrecord"
    filled.put(f"records/{name}", bytes(len((records / name).read_bytes())))
    with pytest.raises(DataError) as caught:
        fetch()
    assert (caught.value.field, caught.value.path) == ("crc32c", f"{URL}/{name}")
    filled.delete(f"records/{name}")
    with pytest.raises(MissingInputError):
        fetch()
    filled.put(f"records/{name}", (records / name).read_bytes())
    require_equal(fetch(), records)


def test_a_manifest_that_leads_elsewhere(filled: Bucket, records: Path) -> None:
    text = (records / "train.json").read_text()
    filled.put("records/train.json", text.replace("train-00001", "../n-00001").encode())
    with pytest.raises(DataError):
        fetch()


@pytest.mark.parametrize(
    "url", [f"s3://user:{SECRET}@{BUCKET}/records", f"s3://{BUCKET}/records?X-Amz-Signature={SECRET}"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(FlagError) as caught:
        fetch(url)
    assert SECRET not in f"{caught.value}{caught.value.path}"


def test_processes_of_a_host_fetch_once(filled: Bucket) -> None:
    ranks = [subprocess.Popen(LINT, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert filled.count("GET", ".tfrecord") == 3


def test_a_killed_process_loses_one_shard_at_most(filled: Bucket, records: Path, tmp_path: Path) -> None:
    filled.add_faults(*MANIFEST, *MANIFEST, "", "stall", "stall")  # to tell the kind, to open; one shard arrives
    first = subprocess.Popen(LINT, stdout=subprocess.DEVNULL)
    assert filled.stalled.wait(300)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    filled.faults = type(filled.faults)()
    assert subprocess.run(LINT, stdout=subprocess.DEVNULL).returncode == 0
    (folder,) = (path for path in (tmp_path / "cache" / "gaudi" / "records").iterdir() if path.is_dir())
    require_equal(folder, records)
    assert not list(folder.glob(".unfinished*"))


def test_sets_that_nothing_reads_make_room(filled: Bucket, records: Path, tmp_path: Path) -> None:
    size = sum(path.stat().st_size for path in records.glob("*.tfrecord"))
    flags = ("--cache_dir", str(tmp_path / "own"), "--cache_gb", str(size * 1.2e-9))
    other = (*LINT[:-1], "val")

    def list_splits() -> set[str]:
        found = (tmp_path / "own").glob("*/*.json")
        return {path.name for path in found if path.parent not in others}

    # Folders of somebody else, of which one looks like a set of records.
    others = tmp_path / "own" / "photos", tmp_path / "own" / "0123456789abcdef0123456789abcdef"
    for folder in others:
        shutil.copytree(records, folder)
        (folder / "url").write_text("s3://bucket/records\n")
    for path in records.iterdir():
        filled.put(f"copy/{path.name}", path.read_bytes())
    assert subprocess.run([*LINT, *flags], stdout=subprocess.DEVNULL).returncode == 0
    assert subprocess.run([*other, *flags], stdout=subprocess.DEVNULL).returncode == 0
    assert list_splits() == {"train.json", "val.json"}
    copied = [argument.replace(URL, f"s3://{BUCKET}/copy") for argument in (*other, *flags)]
    assert subprocess.run(copied, stdout=subprocess.DEVNULL).returncode == 0  # the oldest goes: train
    assert list_splits() == {"val.json"}
    assert all(
        {path.name for path in folder.iterdir()} > {path.name for path in records.iterdir()} for folder in others
    )


def test_sets_in_use_stay(filled: Bucket, records: Path, tmp_path: Path) -> None:
    folder = fetch()
    size = sum(path.stat().st_size for path in records.glob("train-*"))
    cache = os.fspath(tmp_path / "cache" / "gaudi" / "records")
    command = [*LINT[:-1], "val", "--cache_dir", cache, "--cache_gb", str(size * 1.01e-9)]
    found = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert found.returncode == 0
    require_equal(folder, records)
    assert not [*(tmp_path / "cache").rglob("val-*.tfrecord")]


def limit_cache(monkeypatch: pytest.MonkeyPatch, records: Path, split: str = "train", shards: int = 1) -> None:
    """Have room for so many shards and a bit, of three."""
    sizes = [path.stat().st_size for path in sorted(records.glob(f"{split}-*"))]
    monkeypatch.setattr("gaudi_datasets.records.remote_records._most_gb", (sum(sizes[:shards]) + 100) * 1e-9)


def open_both(records: Path) -> tuple[RecordSource, RecordSource]:
    remote, local = RecordSource(URL, "train"), RecordSource(records, "train")
    assert remote.fingerprint == local.fingerprint
    assert remote.list_files() == local.list_files()
    return remote, local


@pytest.mark.parametrize("faults", [(), ("503", "cut", "damage", "stall")])
def test_records_that_do_not_fit_are_read_by_ranges(
    filled: Bucket, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: tuple[str, ...]
) -> None:
    limit_cache(monkeypatch, records)
    if faults:
        monkeypatch.setattr("gaudi_datasets.fetching.downloads.Patience", lambda: SOON)
    remote, local = open_both(records)
    filled.aim("GET", "train-00002", *faults)
    assert can_make_in_processes(local)
    assert not can_make_in_processes(remote)  # one process fetches ahead
    for number, order in enumerate((np.arange(len(local)), np.arange(len(local))[::-1])):
        if number:  # announced, as a training does
            remote.expect(order)
        assert [remote.read(index).encoded for index in order] == [local.read(index).encoded for index in order]
    assert not filled.aimed
    assert filled.count("GET", "train-00000") == 1
    assert local.manifest is not None
    asked, least = filled.count("GET", "train-00001"), 2 * local.manifest["shards"][1]["records"]
    assert asked >= least if faults else asked == least  # on a busy machine a request is late for so little patience
    (kept,) = (tmp_path / "cache").rglob("train-*.tfrecord")
    assert kept.name == "train-00000-of-00003.tfrecord"


def test_more_room_is_used_and_less_room_kept_to(
    filled: Bucket, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shards in (1, 3, 2, 0):
        remote_records._held.clear()  # as by processes that have ended
        limit_cache(monkeypatch, records, shards=shards)
        remote, local = open_both(records)
        assert remote.read(5).encoded == local.read(5).encoded
        kept = sorted(path.name for path in (tmp_path / "cache").rglob("train-*.tfrecord"))
        assert kept == [f"train-0000{number}-of-00003.tfrecord" for number in range(shards)]


def test_a_record_that_cannot_be_read_ends_it(filled: Bucket, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_cache(monkeypatch, records)
    remote, local = open_both(records)
    filled.aim("GET", "train-00001", "expired")
    remote.expect(np.arange(3))
    with pytest.raises(AccessError) as refused:
        remote.read(1)
    assert (refused.value.path, refused.value.exit_status) == (f"{URL}/train-00001-of-00003.tfrecord", 77)
    assert SECRET not in str(refused.value)
    assert remote.read(1).encoded == local.read(1).encoded
    filled.put(
        "records/train-00001-of-00003.tfrecord", bytes((records / "train-00001-of-00003.tfrecord").stat().st_size)
    )
    with pytest.raises(DataError) as damaged:
        remote.read(4)
    assert (damaged.value.path, damaged.value.record) == (f"{URL}/train-00001-of-00003.tfrecord", "record 1")


@pytest.mark.parametrize(("fault", "status"), [("expired", 77), ("damage", 65)])
def test_a_training_ends_where_a_record_cannot_be_read(
    filled: Bucket, records: Path, tmp_path: Path, fault: str, status: int
) -> None:
    room = sum(path.stat().st_size for path in records.glob("*-00000-*"))
    program = Path(__file__).parents[2] / "packages/apps/tests/small_ssd.py"
    flags = ["--data_dir", URL, "--cache_gb", str((room + 100) * 1e-9), "--model_dir", os.fspath(tmp_path / "run")]
    flags += ["-b", "4", "-s", "3", "--device", "cpu", "-d", "fp32", "--no_evaluate"]
    filled.aim("GET", "train-00001", *[fault] * 99)
    found = subprocess.run([sys.executable, program, *flags], capture_output=True, text=True)
    assert found.returncode == status, found.stderr
    assert f"{URL}/train-00001-of-00003.tfrecord" in found.stderr.splitlines()[-1]
    assert SECRET not in found.stdout + found.stderr


def test_records_without_an_index_have_to_fit(filled: Bucket, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_cache(monkeypatch, records)
    filled.flip("records/train.index")
    with pytest.raises(DataError) as caught:
        RecordSource(URL, "train")
    assert (caught.value.path, caught.value.field) == (f"{URL}/train.index", "index")
    manifest = json.loads(filled.get("records/train.json"))
    former = {name: value for name, value in manifest.items() if name not in ("index", CHECKSUM)}
    filled.put("records/train.json", json.dumps(seal(former)).encode())
    with pytest.raises(FlagError) as refused:
        RecordSource(URL, "train")
    assert (refused.value.path, refused.value.flag) == (URL, "--cache_gb")


def test_a_training_computes_the_same_weights(filled: Bucket, records: Path, tmp_path: Path) -> None:
    hashes: list[object] = []
    program = Path(__file__).parents[2] / "packages/apps/tests/small_ssd.py"
    room = sum(path.stat().st_size for path in records.glob("*-00000-*"))
    small = ["--cache_dir", os.fspath(tmp_path / "small"), "--cache_gb", str((room + 100) * 1e-9)]
    for data_dir, cache in ((os.fspath(records), []), (URL, []), (URL, small)):
        run = tmp_path / f"run-{len(hashes)}"
        flags = [
            "--data_dir",
            data_dir,
            "--model_dir",
            os.fspath(run),
            *["-b", "4", "-s", "3", "--device", "cpu", "-d", "fp32", *cache],
        ]
        found = subprocess.run([sys.executable, program, *flags], capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        (manifest,) = run.glob("checkpoints/step-00000003/manifest.json")
        hashes.append(json.loads(manifest.read_text())["manifest"]["sha256"])
    assert hashes[0] == hashes[1] == hashes[2]
    assert f"data_dir: {URL}" in (run / "config.yaml").read_text()


@pytest.mark.parametrize(("fault", "status"), [("expired", 77), ("", 66)])
def test_a_training_ends_before_tensorflow(bucket: Bucket, tmp_path: Path, fault: str, status: int) -> None:
    bucket.always = fault
    command = [sys.executable, "-X", "importtime", "-m", "gaudi_apps.ssd_train", "--data_dir", URL]
    found = subprocess.run([*command, "--model_dir", tmp_path / "run"], capture_output=True, text=True)
    assert found.returncode == status
    assert " tensorflow\n" not in found.stderr
    assert SECRET not in found.stdout + found.stderr
    assert not (tmp_path / "run").exists()
