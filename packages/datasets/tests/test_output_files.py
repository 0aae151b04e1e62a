from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.output_files import hold_lock, resumable_folder, staging_folder, write_atomically, write_json


def test_what_is_renamed_out_stays(tmp_path: Path) -> None:
    output_dir = tmp_path / "a" / "b"
    with staging_folder(output_dir) as staging:
        assert staging.parent == output_dir
        (staging / "x").write_text("x")
        (staging / "left").write_text("y")
        (staging / "x").rename(output_dir / "x")
    assert [path.name for path in output_dir.iterdir()] == ["x"]


def test_nothing_is_left_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with staging_folder(tmp_path / "a" / "b") as staging:
            (staging / "x").write_text("x")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    with staging_folder(tmp_path):
        pass
    assert tmp_path.is_dir()


def test_unfinished_work_stays_unless_the_data_is_at_fault(tmp_path: Path) -> None:
    folder = tmp_path / "a" / ".work"

    def work(error: BaseException) -> None:
        with resumable_folder(folder):
            (folder / "x").write_text("x")
            raise error

    for error in (KeyboardInterrupt(), OSError("the disk is full")):
        with pytest.raises(type(error)):
            work(error)
        assert [path.name for path in folder.parent.iterdir()] == [".work"]
        assert (folder / "x").exists()
    with pytest.raises(DataError):
        work(DataError("fault"))
    assert list(folder.parent.iterdir()) == []


def test_nothing_stays_of_finished_or_empty_work(tmp_path: Path) -> None:
    folder = tmp_path / "a" / ".work"
    with pytest.raises(KeyboardInterrupt), resumable_folder(folder):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with resumable_folder(folder):
        (folder / "x").write_text("x")
        (folder / "left").write_text("y")
        (folder / "x").rename(folder.parent / "x")
    assert [path.name for path in folder.parent.iterdir()] == ["x"]


def test_one_process_at_a_time_works_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / ".work"
    with resumable_folder(folder):
        with pytest.raises(UnsafeError, match="another process writes"), resumable_folder(folder):
            pass
        assert folder.is_dir()


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "x.txt"
    for content in ("one", "two"):
        with write_atomically(path, durable=durable) as temporary:
            temporary.write_text(content)
            assert temporary.suffix == ".txt"
    assert [each.name for each in tmp_path.iterdir()] == ["x.txt"]
    assert path.read_text() == "two"


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt(), MissingInputError("gone")])
def test_an_error_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    def fail(temporary: Path) -> None:
        temporary.write_text("new")
        raise error

    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(type(error)) as caught, write_atomically(path) as temporary:
        fail(temporary)
    assert caught.value is error
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert path.read_text() == "old"


def test_the_error_of_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_json(path, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]
    assert json.loads(path.read_text()) == {"a": 1}


def test_the_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, write_atomically(tmp_path / "x"):
        (tmp_path / "other").read_bytes()
    assert caught.value.filename == str(tmp_path / "other")


def count_up(lock: Path, counter: Path) -> None:
    for _ in range(20):
        with hold_lock(lock):
            number = int(counter.read_text())
            os.sched_yield()  # now another process would read the same
            counter.write_text(str(number + 1))


def test_processes_exclude_each_other(tmp_path: Path) -> None:
    counter, lock = tmp_path / "counter", tmp_path / "below" / ".lock"
    counter.write_text("0")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=count_up, args=(lock, counter)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert counter.read_text() == "60"
    assert not lock.exists()


def hold(lock: Path, held: Any) -> None:
    with hold_lock(lock):
        held.set()
        signal.pause()


def test_the_end_of_a_process_releases_its_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held = context.Event()
    worker = context.Process(target=hold, args=(tmp_path / ".lock", held))
    worker.start()
    assert held.wait(600)

    def refuse() -> None:
        raise RuntimeError("it is held")

    with pytest.raises(RuntimeError, match="it is held"), hold_lock(tmp_path / ".lock", waiting=refuse):
        pass
    worker.kill()
    worker.join()
    with hold_lock(tmp_path / ".lock", waiting=refuse):
        pass
    assert list(tmp_path.iterdir()) == []
