"""Annotations, weights and results may be at URLs; what is there is what was written, or an error says so."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.remote.conftest import BUCKET, LISTS, SECRET, Bucket

from gaudi_apps.inference.exported_models import CheckedExport
from gaudi_apps.inference.predictor import read_model
from gaudi_apps.training.checkpoint import (
    BEST,
    CHECKPOINTS,
    RUN_FILE,
    CheckpointFolder,
    find_run_checkpoint,
    load_checkpoint,
)
from gaudi_apps.training.run_dir import fetch_weights
from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import (
    AccessError,
    DataError,
    FlagError,
    MissingInputError,
    TransferError,
    UnsafeError,
)
from gaudi_datasets.fetching.copies import MOST_COPIES, fetch_copy, fetch_folder, upload_copy
from gaudi_datasets.fetching.stores import find_copy
from gaudi_datasets.fetching.uploads import WritableStore
from gaudi_ops.files import hold_lock

URL = f"s3://{BUCKET}/place"


def show_nothing(done: int, of: int) -> None:
    pass


def test_a_file_is_fetched_once_until_it_changes(bucket: Bucket) -> None:
    bucket.put("place/a.json", b"one")
    assert fetch_copy(f"{URL}/a.json").read_bytes() == b"one"
    before = bucket.count("GET", "place/a.json")
    assert fetch_copy(f"{URL}/a.json").name == "a.json"
    assert bucket.count("GET", "place/a.json") == before
    bucket.put("place/a.json", b"two")
    assert fetch_copy(f"{URL}/a.json").read_bytes() == b"two"


def test_a_file_that_no_list_has_yet(bucket: Bucket) -> None:
    bucket.remember()
    bucket.put("place/a.json", b"one")
    bucket.aim("GET", LISTS, *["late"] * 9)
    assert fetch_copy(f"{URL}/a.json").read_bytes() == b"one"


def test_a_file_that_is_written_while_it_is_fetched(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    large = bytes(2**24 + 1000)
    bucket.put("place/a", large)
    download, contents = WritableStore.download, [b"1" + large, b"2" + large, b"3" + large, b"4" + large]

    def write_meanwhile(store: WritableStore, name: str, size: int, target: Path) -> None:
        download(store, name, size, target)
        bucket.put("place/a", contents.pop())

    monkeypatch.setattr(WritableStore, "download", write_meanwhile)
    with pytest.raises(TransferError) as caught:
        fetch_copy(f"{URL}/a")
    assert caught.value.path == f"{URL}/a"
    monkeypatch.setattr(WritableStore, "download", download)
    assert fetch_copy(f"{URL}/a").read_bytes() == b"3" + large


def test_folders_and_beginnings_of_names(bucket: Bucket) -> None:
    for name in ("folder/a", "folder/b/c", "model.ckpt-1.index", "model.ckpt-1.data", "model.ckpt-12.index"):
        bucket.put(f"place/{name}", name.encode())
    assert (fetch_copy(f"{URL}/folder") / "b" / "c").read_bytes() == b"folder/b/c"
    bucket.delete("place/folder/b/c")
    assert not (fetch_copy(f"{URL}/folder") / "b" / "c").exists()
    prefix = fetch_copy(f"{URL}/model.ckpt-1")
    assert {path.name for path in prefix.parent.iterdir()} == {"model.ckpt-1.index", "model.ckpt-1.data"}
    for name in ("nothing", "fold"):
        with pytest.raises(MissingInputError) as caught:
            fetch_copy(f"{URL}/{name}")
        assert caught.value.path == f"{URL}/{name}"


def test_copies_have_a_bound(bucket: Bucket) -> None:
    for number in range(MOST_COPIES + 2):
        bucket.put(f"place/{number}", b"text")
        last = fetch_copy(f"{URL}/{number}")
    assert len([path for path in find_copy(URL, "files").parent.iterdir() if path.is_dir()]) == MOST_COPIES
    assert last.exists()


def test_a_copy_that_another_process_fetches_stays(bucket: Bucket) -> None:
    for number in range(MOST_COPIES + 2):
        bucket.put(f"place/{number}", b"text")
    first = fetch_copy(f"{URL}/0")
    lock = find_copy(f"{URL}/0", "files")
    with hold_lock(lock.with_name(f"{lock.name}.lock")):
        for number in range(1, MOST_COPIES + 2):
            fetch_copy(f"{URL}/{number}")
        assert first.read_bytes() == b"text"
    fetch_copy(f"{URL}/1")
    assert not first.exists()


def test_annotations(bucket: Bucket, scenes: Path) -> None:
    path = scenes / "annotations" / "instances_val.json"
    bucket.put("place/val.json", path.read_bytes())
    assert np.array_equal(read_coco(f"{URL}/val.json").boxes_xywh, read_coco(path).boxes_xywh)


def test_weights_of_a_run_are_its_best_or_newest(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(f"place/{RUN_FILE}", b"{}")
    with pytest.raises(MissingInputError):
        fetch_weights(URL)
    for kind, step in ((CHECKPOINTS, 2), (CHECKPOINTS, 10), (BEST, 4)):
        folder = CheckpointFolder(tmp_path / kind).save(step, {"a": np.full(3, step, np.float32)}, {})
        bucket.upload(folder, f"place/{kind}/{folder.name}")
        bucket.put("place/export/onnx/export.json", b"{}")
        copy = fetch_weights(URL)
        assert find_run_checkpoint(copy) == copy / kind / folder.name
        assert load_checkpoint(copy / kind / folder.name).step == step
        assert not (copy / "export/onnx/export.json").exists()
        assert (fetch_weights(URL, "export") / "export/onnx/export.json").read_bytes() == b"{}"
    assert fetch_weights(str(tmp_path)) == tmp_path


def test_results_are_uploaded_manifest_last(bucket: Bucket) -> None:
    folder = find_copy(URL, "outputs")
    (folder / "onnx").mkdir(parents=True)
    for name in ("onnx/export.json", "onnx/model.onnx", "z.txt"):
        (folder / name).write_text(name)
    bucket.aim("PUT", "z.txt", "expired")
    with pytest.raises(AccessError) as caught:
        upload_copy(URL)
    assert caught.value.path == f"{URL}/z.txt"
    assert os.fspath(folder) in str(caught.value)
    assert "onnx/export.json" not in bucket.list("place/")
    upload_copy(URL)
    assert bucket.list("place/") == {"onnx/export.json", "onnx/model.onnx", "z.txt"}
    assert not folder.exists()


def test_results_of_another_process_stay_until_it_is_done(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = find_copy(URL, "outputs")
    draft = folder / ".unfinished.0123456789abcdef" / "openvino" / "model.bin"
    for path in (draft, folder / "onnx" / "model.onnx", folder / "table.csv"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("of this one")

    def upload(store: WritableStore, name: str, path: Path) -> None:
        upload_file(store, name, path)
        if name == "table.csv":
            path.write_text("of the other one")

    upload_file = WritableStore.upload
    monkeypatch.setattr(WritableStore, "upload", upload)
    upload_copy(URL)
    assert bucket.list("place/") == {"onnx/model.onnx", "table.csv"}
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == [draft, folder / "table.csv"]
    assert not (folder / "onnx").exists()


def test_a_folder_of_records_is_fetched_and_compared(bucket: Bucket, records: Path, tmp_path: Path) -> None:
    bucket.upload(records, "place")
    target = tmp_path / "fetched"
    assert fetch_folder(URL, target, show_nothing) == len(list(records.iterdir()))
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in records.iterdir()
    }
    before = bucket.count("GET", ".tfrecord")
    fetch_folder(URL, target, show_nothing)
    assert bucket.count("GET", ".tfrecord") == before
    (target / "train.json").write_text("another")
    with pytest.raises(UnsafeError):
        fetch_folder(URL, target, show_nothing)
    for name, field in (("train-00000-of-00003.tfrecord", "crc32c"), ("train.index", "sha256")):
        shutil.rmtree(target)
        bucket.flip(f"place/{name}")
        with pytest.raises(DataError) as caught:
            fetch_folder(URL, target, show_nothing)
        assert (caught.value.path, caught.value.field) == (f"{URL}/{name}", field)
        assert not {f"{name}", "train.json"} & {path.name for path in target.iterdir()}
        bucket.flip(f"place/{name}")
    fetch_folder(URL, target, show_nothing)
    content = (target / "train.index").read_bytes()
    (target / "train.index").write_bytes(bytes(len(content)))
    with pytest.raises(DataError) as caught:
        fetch_folder(URL, target, show_nothing)
    assert (str(caught.value.path), caught.value.field) == (str(target / "train.index"), "sha256")


def test_records_of_which_no_list_has_all(bucket: Bucket, records: Path, tmp_path: Path) -> None:
    bucket.put("place/train-00001-of-00003.tfrecord", (records / "train-00001-of-00003.tfrecord").read_bytes())
    bucket.remember()
    bucket.upload(records, "place")
    bucket.aim("GET", LISTS, *["late"] * 9)
    target = tmp_path / "fetched"
    assert fetch_folder(URL, target, show_nothing) == 5
    bucket.aimed.clear()
    assert all(path.read_bytes() == (records / path.name).read_bytes() for path in target.iterdir())
    bucket.delete("place/train.index")
    shutil.rmtree(target)
    assert fetch_folder(URL, target, show_nothing) == len(list(records.iterdir())) - 1
    assert len(RecordSource(target, "train")) == len(RecordSource(records, "train"))


def test_a_fetch_that_is_killed_goes_on(bucket: Bucket, records: Path, tmp_path: Path) -> None:
    bucket.upload(records, "place")
    bucket.aim("GET", "train-00001", "stall", "stall")
    target = tmp_path / "a"
    command = [sys.executable, "-m", "gaudi_datasets", "fetch", "store", "--output_dir", str(target), "--url", URL]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    assert bucket.stalled.wait(600)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert not (target / "train.json").exists()
    bucket.aimed.clear()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert bucket.count("GET", "train-00000") == 1
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {
        path.name: path.read_bytes() for path in records.iterdir()
    }


def test_the_command(bucket: Bucket, records: Path, tmp_path: Path) -> None:
    bucket.upload(records, "place")
    command = [sys.executable, "-m", "gaudi_datasets", "fetch", "store", "--output_dir", str(tmp_path / "a")]
    assert subprocess.run([*command, "--url", URL], capture_output=True).returncode == 0
    for url, status in ((f"s3://a:{SECRET}@b", 64), ("records", 64), (f"{URL}/none", 66)):
        found = subprocess.run([*command, "--url", url], capture_output=True, text=True)
        assert found.returncode == status, found.stderr
        assert SECRET not in found.stderr
    with pytest.raises(FlagError):
        fetch_copy(f"{URL}?token={SECRET}")


def test_a_training_on_annotations_and_weights_at_urls(bucket: Bucket, scenes: Path, tmp_path: Path) -> None:
    bucket.put("place/train.json", (scenes / "annotations" / "instances_train.json").read_bytes())
    program = str(Path(__file__).parents[2] / "packages/apps/tests/small_ssd.py")
    data = ["--train_annotations", f"{URL}/train.json", "--train_images", str(scenes / "train"), "--no_evaluate"]
    usual = [sys.executable, program, *data, "-b", "4", "-s", "1", "--device", "cpu", "-d", "fp32"]
    first = subprocess.run([*usual, "--model_dir", str(tmp_path / "first")], capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    bucket.put(f"place/run/{RUN_FILE}", (tmp_path / "first" / RUN_FILE).read_bytes())
    folder = CheckpointFolder(tmp_path / "first" / CHECKPOINTS).path(1)
    bucket.upload(folder, f"place/run/checkpoints/{folder.name}")
    weights = ["--model_dir", str(tmp_path / "second"), "--weights", f"{URL}/run"]
    second = subprocess.run([*usual, *weights], capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert f"weights: {URL}/run" in (tmp_path / "second" / "config.yaml").read_text()
    image = str(next((scenes / "val").iterdir()))
    use = ["--mode", "predict", "--inference", image, "--output_dir", f"{URL}/predictions", "--device", "cpu"]
    third = subprocess.run(
        [sys.executable, program, *use, "--model_dir", str(tmp_path / "second")], capture_output=True, text=True
    )
    assert third.returncode == 0, third.stderr
    assert bucket.list("place/predictions/")
    assert not find_copy(f"{URL}/predictions", "outputs").exists()


def test_an_export_into_a_store_is_read_there(bucket: Bucket, records: Path, tmp_path: Path) -> None:
    program = str(Path(__file__).parents[2] / "packages/apps/tests/small_ssd.py")
    usual = [sys.executable, program, "--data_dir", str(records), "--model_dir", f"{URL}/run", "--device", "cpu"]
    first = subprocess.run([*usual, "-b", "4", "-s", "1", "--no_evaluate"], capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    formats = ["--mode", "export", "--export_format", "saved_model"]
    for target in ([], ["--output_dir", f"{URL}/exports"]):
        found = subprocess.run([*usual, *formats, *target], capture_output=True, text=True)
        assert found.returncode == 0, found.stderr
        assert SECRET not in found.stdout + found.stderr
    exported = bucket.list("place/exports/")
    assert {"saved_model/saved_model.pb", "saved_model/export.json"} <= exported
    assert {f"export/{name}" for name in exported} <= bucket.list("place/run/")
    assert not find_copy(f"{URL}/exports", "outputs").exists()
    sums = []
    for place in (f"{URL}/run", f"{URL}/run/checkpoints/step-00000001"):
        found_weights = read_model(place, "tensorflow")
        assert not isinstance(found_weights, CheckedExport)
        weights, metadata = found_weights
        categories = RecordSource(records, "train").categories
        assert [one["name"] for one in metadata.classes] == [one.name for one in categories]
        sums.append(sorted((name, float(np.abs(tensor).sum())) for name, tensor in weights.tensors.items()))
    assert sums[0] == sums[1]
    flags = ["--export", f"{URL}/exports/saved_model", "--server", "tensorflow_serving", "-o", str(tmp_path / "served")]
    command = [sys.executable, "-m", "gaudi_apps.cli.run_commands", "layout", *flags]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    layout = tmp_path / "served" / "model" / "1"
    assert (layout / "saved_model.pb").read_bytes() == bucket.get("place/exports/saved_model/saved_model.pb")
