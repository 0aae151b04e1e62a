"""Records that are converted into a bucket are those of a folder, through faults and kills, and take little room."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.remote.conftest import BUCKET, LISTS, SECRET, Bucket, open_scenes

from gaudi_datasets.detection.records import write_records
from gaudi_datasets.errors import FlagError, TransferError, UnsafeError
from gaudi_datasets.records.remote_records import RemoteRecords

URL = f"s3://{BUCKET}/made"


def convert(scenes: Path, split: str = "train", url: str = URL, **flags: bool | int) -> dict[str, object]:
    annotations, images = open_scenes(scenes, split).read()
    options = {"shards": 3, "keep_empty": split == "val", **flags}
    return write_records(annotations, images, url, split, **options)  # type: ignore[arg-type]


def command(scenes: Path, *flags: str, url: str = URL) -> list[str]:
    annotations = scenes / "annotations" / "instances_train.json"
    source = ["--annotations", str(annotations), "--images", str(scenes / "train"), "--split", "train"]
    return [
        sys.executable,
        "-m",
        "gaudi_datasets",
        "convert",
        "coco",
        *source,
        "--output_dir",
        url,
        "--shards",
        "3",
        *flags,
    ]


def require_equal(bucket: Bucket, records: Path, split: str = "train") -> None:
    names = {path.name for path in records.glob(f"{split}*")}
    assert {name for name in bucket.list("made/") if name.startswith(split)} == names
    assert all(bucket.get(f"made/{name}") == (records / name).read_bytes() for name in names)


@pytest.mark.parametrize("processes", [1, 2])
def test_records_are_those_of_a_folder(
    bucket: Bucket, scenes: Path, records: Path, tmp_path: Path, processes: int
) -> None:
    bucket.aim("PUT", ".tfrecord", "503", "spoil")
    convert(scenes, processes=processes)
    convert(scenes, "val", processes=processes)
    assert not bucket.aimed
    for split in ("train", "val"):
        require_equal(bucket, records, split)
    written = [path.rpartition("/")[2] for method, path in bucket.requests if method == "PUT" and "train" in path]
    assert written[0] == "train.unfinished.json"
    assert written[-2:] == ["train.index", "train.json"]
    assert not list((tmp_path / "cache" / "gaudi" / "conversions").rglob("*.tfrecord"))
    assert RemoteRecords(URL, "train").fetch().is_dir()


def test_the_same_call_does_nothing_and_another_is_refused(bucket: Bucket, scenes: Path, records: Path) -> None:
    convert(scenes)
    before = bucket.count("PUT", "made")
    convert(scenes)
    assert bucket.count("PUT", "made") == before
    with pytest.raises(UnsafeError) as caught:
        convert(scenes, shards=2)
    assert caught.value.path == URL
    convert(scenes, shards=2, overwrite=True)
    names = {"train.json", "train.index", "train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord"}
    assert bucket.list("made/") == names
    bucket.delete("made/train.index")
    with pytest.raises(UnsafeError):
        convert(scenes, shards=2)
    convert(scenes, overwrite=True)
    require_equal(bucket, records)


@pytest.mark.parametrize("name", ["train-00000-of-00003.tfrecord", "train.index"])
def test_files_of_somebody_else_stay(bucket: Bucket, scenes: Path, name: str) -> None:
    bucket.put(f"made/{name}", b"of somebody")
    with pytest.raises(UnsafeError) as caught:
        convert(scenes, overwrite=True)
    assert caught.value.path == f"{URL}/{name}"
    assert bucket.list("made/") == {name}


def test_a_list_that_lags_behind(bucket: Bucket, scenes: Path, records: Path) -> None:
    bucket.remember()
    convert(scenes)
    for late in ((), ("late",)):
        bucket.aim("GET", LISTS, *late)
        with pytest.raises(UnsafeError) as caught:
            convert(scenes, shards=2)
        assert caught.value.path == URL
    require_equal(bucket, records)


def test_what_is_gone_and_listed_still_is_nobodys(bucket: Bucket, scenes: Path, records: Path) -> None:
    bucket.put("made/train-00000-of-00009.tfrecord", b"of somebody")
    bucket.remember()
    bucket.delete("made/train-00000-of-00009.tfrecord")
    bucket.aim("GET", LISTS, "late")
    convert(scenes)
    assert not bucket.aimed
    require_equal(bucket, records)


@pytest.mark.parametrize("meanwhile", ["nothing", "other machine", "spoilt index"])
def test_a_killed_conversion_goes_on(
    bucket: Bucket, scenes: Path, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    bucket.aim("PUT", "train-00001", "stall", "stall")
    first = subprocess.Popen(command(scenes), stdout=subprocess.DEVNULL)
    assert bucket.stalled.wait(600)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    bucket.aimed.clear()
    assert "train.json" not in bucket.list("made/")
    if meanwhile == "spoilt index":
        (part,) = (tmp_path / "cache").rglob("train-00000*.index")
        part.write_bytes(bytes(part.stat().st_size))
    if meanwhile == "other machine":
        monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path / "other"))
    before = bucket.count("PUT", "train-00000")
    assert before == 1
    found = subprocess.run(command(scenes), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert bucket.count("PUT", "train-00000") == before + (meanwhile != "nothing")
    require_equal(bucket, records)


def test_a_conversion_from_something_else_takes_the_place_of_one_that_was_stopped(
    bucket: Bucket, scenes: Path, records: Path
) -> None:
    bucket.aim("PUT", "train-00003", *["503"] * 6)
    with pytest.raises(TransferError) as caught:
        convert(scenes, shards=4)
    assert caught.value.path == f"{URL}/train-00003-of-00004.tfrecord"
    convert(scenes)
    require_equal(bucket, records)


@pytest.mark.parametrize(("fault", "status"), [("expired", 77)])
def test_a_refusal_is_named(bucket: Bucket, scenes: Path, fault: str, status: int) -> None:
    bucket.aim("PUT", "made", *[fault] * 9)
    found = subprocess.run(command(scenes), capture_output=True, text=True)
    assert found.returncode == status
    assert URL in found.stderr
    assert SECRET not in found.stderr


def test_a_manifest_that_is_damaged_is_named(bucket: Bucket, scenes: Path) -> None:
    convert(scenes)
    manifest = json.loads(bucket.get("made/train.json"))
    bucket.put("made/train.json", json.dumps({**manifest, "kind": "other"}).encode())
    found = subprocess.run(command(scenes), capture_output=True, text=True)
    assert found.returncode == 65
    assert f"{URL}/train.json" in found.stderr


def test_credentials_in_a_url_are_refused(scenes: Path) -> None:
    with pytest.raises(FlagError):
        convert(scenes, url=f"s3://user:{SECRET}@{BUCKET}/made")
    found = subprocess.run(command(scenes, url=f"s3://a:{SECRET}@b/c"), capture_output=True, text=True)
    assert found.returncode == 64
    assert SECRET not in found.stderr
