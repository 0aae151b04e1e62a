"""Samples made in processes: the bits that threads make, the errors that they raise, and processes that end."""

from __future__ import annotations

import gc
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from gaudi_datasets.detection.coco import parse_coco
from gaudi_datasets.detection.pipeline import SampleProcesses, can_make_in_processes, make_sample, train_dataset
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.sources import CocoSource, RecordSource
from gaudi_datasets.errors import BackgroundError, DataError
from gaudi_datasets.layouts.checking import check_when_read
from gaudi_datasets.sampling import InputOptions
from gaudi_datasets.tf_input import read_batches
from gaudi_ops import SSD300

COUNT, DAMAGED = 6, 5
DOCUMENT = {
    "images": [{"id": n, "file_name": f"{n}.jpg", "height": 90, "width": 120} for n in range(COUNT)],
    "annotations": [
        {"id": n, "image_id": n, "category_id": 1, "bbox": [9, 9, 60, 40], "area": 2400, "iscrowd": 0}
        for n in range(COUNT)
    ],
    "categories": [{"id": 1, "name": "box"}],
}


@pytest.fixture(scope="module")
def image_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for number in range(COUNT):
        Image.fromarray(generator.integers(0, 255, (90, 120, 3), np.uint8)).save(folder / f"{number}.jpg")
    return folder


def open_images(folder: Path, kind: type[CocoSource] = CocoSource) -> CocoSource:
    """Open images with a box each."""
    return kind(parse_coco(DOCUMENT, folder / "boxes.json"), folder, keep_empty=False)


@pytest.mark.costly
def test_processes_make_the_batches_that_threads_make(image_dir: Path) -> None:
    source, earlier = check_when_read(open_images(image_dir)), psutil.Process().children()
    # Of three images, which a process makes at once, and of more steps than there are processes.
    options = InputOptions(3, seed=7, dtype="bfloat16", mosaic=0.5)
    threads, processes = (
        list(read_batches(train_dataset(source, InputOptions(**{**vars(options), "processes": count})).take(5), source))
        for count in (0, 2)
    )
    assert len(processes) == 5
    gc.collect()
    started = [each for each in psutil.Process().children() if each not in earlier]
    _, left = psutil.wait_procs(started, timeout=60)  # for what they were asked last
    assert not left  # they end with the dataset
    for one, other in zip(threads, processes, strict=True):
        assert one.keys() == other.keys()
        for name, expected in one.items():
            assert (other[name].dtype, other[name].shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(np.asarray(other[name]), np.asarray(expected), err_msg=name)


class Faulty(CocoSource):
    """Images of which one raises an error that means something else to who reads a channel."""

    def read(self, index: int) -> Any:
        if index == 0:
            raise EOFError("of the source")

        class LocalError(Exception):
            """An error that no other process can make again."""

        if index == 1:
            raise LocalError("local")
        return super().read(index)


@pytest.mark.costly
def test_a_damaged_image_is_named_and_a_process_that_ended_too(image_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(image_dir, tmp_path, dirs_exist_ok=True)
    source, options = open_images(tmp_path, Faulty), InputOptions(2, processes=1)
    processes = SampleProcesses(source, options, SSD300, 2)
    (tmp_path / f"{DAMAGED}.jpg").write_bytes(b"\xff\xd8\xff\xe0")

    def make(*indices: int) -> list[Any]:
        return processes.make(np.array(indices), np.zeros(len(indices), np.int64))

    with pytest.raises(DataError) as error:
        make(2, DAMAGED)
    assert f"{DAMAGED}.jpg" in str(error.value)
    for index, kind, text in ((0, EOFError, "of the source"), (1, RuntimeError, "LocalError: local")):
        with pytest.raises(kind) as raised:
            make(index, 2)
        assert str(raised.value) == text
    made = make(2, 3)  # it goes on
    for row, index in enumerate((2, 3)):
        for array, expected in zip(made, make_sample(source, options, SSD300, index, 0), strict=True):
            np.testing.assert_array_equal(array[row], expected)

    (worker,) = processes._workers
    worker.process.send_signal(signal.SIGKILL)
    for _ in range(2):  # whoever asks next is told, too
        with pytest.raises(BackgroundError) as ended:
            make(2, 3)
        assert "SIGKILL" in str(ended.value)


@pytest.mark.costly
def test_processes_end_with_what_started_them(image_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit(3)\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # of which nothing is imported
    processes = SampleProcesses(open_images(image_dir), InputOptions(1, processes=1), SSD300, 1)
    processes.make(np.zeros(1, np.int64), np.zeros(1, np.int64))
    (worker,) = processes._workers
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # of who ends all processes of a job
        worker.process.send_signal(number)
    processes.make(np.zeros(1, np.int64), np.zeros(1, np.int64))
    del processes
    assert worker.process.poll() == -signal.SIGKILL


# It reads a little of an endless dataset, as a user's script does, and ends while images are made.
SCRIPT = """
import json, sys
from pathlib import Path
from gaudi_datasets.detection.coco import parse_coco
from gaudi_datasets.detection.pipeline import train_dataset
from gaudi_datasets.detection.sources import CocoSource
from gaudi_datasets.sampling import InputOptions
folder = Path(sys.argv[1])
source = CocoSource(parse_coco(json.load(sys.stdin), folder / "boxes.json"), folder, keep_empty=False)
batches = iter(train_dataset(source, InputOptions(64, processes=1)))
print(next(batches)["images"].shape)
"""


@pytest.mark.slow
def test_a_script_ends_that_reads_a_part_of_an_endless_dataset(image_dir: Path) -> None:
    command, given = [sys.executable, "-c", SCRIPT, str(image_dir)], json.dumps(DOCUMENT)
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=240)
    assert (done.returncode, done.stdout) == (0, "(64, 300, 300, 3)\n"), done.stderr


def test_sources_of_one_process_are_told(image_dir: Path, tmp_path: Path) -> None:
    source = open_images(image_dir)
    annotations = parse_coco(DOCUMENT, image_dir / "boxes.json")
    write_records(annotations, image_dir, tmp_path, "train", shards=1, keep_empty=False)
    for each in (source, RecordSource(tmp_path, "train")):
        assert can_make_in_processes(each)
        assert can_make_in_processes(check_when_read(each))
        assert not can_make_in_processes(check_when_read(each, "skip"))

    class Local(CocoSource):
        """A class that other processes cannot import."""

    local = Local.__new__(Local)
    local.__dict__.update(vars(source))
    assert not can_make_in_processes(local)


def test_a_process_that_cannot_be_started_is_an_error_each_time(
    image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = SampleProcesses(open_images(image_dir), InputOptions(1, processes=1), SSD300, 1)
    monkeypatch.setattr("sys.executable", str(image_dir / "python"))
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            processes.make(np.zeros(1, np.int64), np.zeros(1, np.int64))
