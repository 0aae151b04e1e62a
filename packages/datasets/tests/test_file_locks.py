from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gaudi_datasets.file_locks import hold_lock


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
