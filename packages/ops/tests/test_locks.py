from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from gaudi_ops import files
from gaudi_ops.files import hold_lock, is_shared, read_owner, share_lock


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


def refuse() -> None:
    raise RuntimeError("it is held")


def test_the_end_of_a_process_releases_its_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    held, lock = context.Event(), tmp_path / ".lock"
    worker = context.Process(target=hold, args=(lock, held))
    worker.start()
    assert held.wait(600)
    with pytest.raises(RuntimeError, match="it is held"), hold_lock(lock, waiting=refuse):
        pass
    assert (read_owner(lock)["process"], read_owner(lock)["host"]) == (worker.pid, socket.gethostname())
    worker.kill()
    worker.join()
    with hold_lock(lock, waiting=refuse):
        assert read_owner(lock)["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_without_locks_of_the_file_system_the_owner_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_lock", lambda descriptor: None)
    lock, worker = tmp_path / ".lock", multiprocessing.get_context("fork").Process(target=os.getpid)
    worker.start()
    worker.join()
    here = socket.gethostname()
    for owner in ({"host": here, "process": worker.pid}, {"host": "x"}, {}):
        lock.write_text(json.dumps(owner))
        with hold_lock(lock, waiting=refuse):
            pass
    for host, process in ((here, os.getppid()), ("x", worker.pid)):
        lock.write_text(json.dumps({"host": host, "process": process}))
        with pytest.raises(RuntimeError, match="it is held"), hold_lock(lock, waiting=refuse):
            pass


def test_a_process_number_of_its_own_is_that_of_another_unless_it_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that starts again may have the name and the number of one that was killed."""
    lock = tmp_path / ".lock"
    monkeypatch.setattr(files, "_lock", lambda _: None)
    lock.write_text(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
    with hold_lock(lock, waiting=refuse):  # noqa: SIM117 - one after the other
        with pytest.raises(RuntimeError, match="it is held"), hold_lock(lock, waiting=refuse):
            pass


def test_a_wait_for_a_lock_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, seconds = tmp_path / ".lock", list[float]()

    def wait(time: float) -> None:
        seconds.append(time)
        if sum(seconds) > 30:
            lock.unlink()

    monkeypatch.setattr(files, "_lock", lambda _: None)
    monkeypatch.setattr("time.sleep", wait)
    lock.write_text(json.dumps({"host": "another", "process": 7, "began": "today"}))
    with hold_lock(lock):
        (line,) = capsys.readouterr().err.splitlines()
    assert [part in line for part in (str(lock), "7", "another", "today")] == [True] * 4


def test_locks_of_the_library_are_those_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / ".lock"
    with hold_lock(lock):
        monkeypatch.setattr(files, "fcntl", None)  # Windows has none, and there the library has other calls
        with pytest.raises(RuntimeError, match="it is held"), hold_lock(lock, waiting=refuse):
            pass
    with hold_lock(lock, waiting=refuse):
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="it is held"), hold_lock(lock, waiting=refuse):
            pass
    assert list(tmp_path.iterdir()) == []


def share(path: Path, opened: Any) -> None:
    with share_lock(path):
        opened.set()
        signal.pause()


@pytest.mark.posix
def test_a_lock_is_shared_as_long_as_one_process_has_it_open(tmp_path: Path) -> None:
    context, path = multiprocessing.get_context("fork"), tmp_path / ".lock"
    workers = []
    for _ in range(2):
        opened = context.Event()
        workers.append(context.Process(target=share, args=(path, opened)))
        workers[-1].start()
        assert opened.wait(600)
    for worker in workers:
        assert is_shared(path)
        worker.kill()
        worker.join()
    assert not is_shared(path)


@pytest.mark.parametrize("kind", ["the system", "the file system"])
def test_without_locks_every_file_may_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def refuse_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if kind == "the system":
        monkeypatch.setattr(files, "fcntl", None)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse_locks)
    with share_lock(tmp_path / ".lock") as file:
        assert file.fileno() > 0
    assert is_shared(tmp_path / ".lock")


def test_an_owner_that_may_not_be_signalled_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_signals(process: int, number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    lock = tmp_path / ".lock"
    lock.write_text(json.dumps({"host": socket.gethostname(), "process": os.getppid()}))
    monkeypatch.setattr(files, "_lock", lambda _: None)
    monkeypatch.setattr(os, "kill", refuse_signals)
    with pytest.raises(RuntimeError, match="it is held"), hold_lock(lock, waiting=refuse):
        pass
