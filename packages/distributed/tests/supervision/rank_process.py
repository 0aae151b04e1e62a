"""A rank that only pretends to compute: it meets the others at every step through files, and fails as it is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from gaudi_distributed.place import Place
from gaudi_distributed.supervision import Member, exit_now, host_supervision, join_supervision

STEP_SECONDS = 0.03


class FolderCommunicator:
    """Gathers through a folder, and waits for ever for a rank that does not come."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder, self.rank, self.size, self.local_rank, self.local_size = folder, rank, size, rank, size
        self._calls = 0

    def gather(self, content: bytes) -> list[bytes]:
        self._calls += 1
        own = self._path(self.rank)
        draft = own.with_suffix(".draft")
        draft.write_bytes(content)
        draft.rename(own)
        paths = [self._path(rank) for rank in range(self.size)]
        while not all(path.exists() for path in paths):
            time.sleep(0.002)
        return [path.read_bytes() for path in paths]

    def _path(self, rank: int) -> Path:
        return self._folder / f"{self._calls}-{rank}"


def announce(text: str) -> None:
    time.sleep(0.1)  # as a terminal may take; nobody leaves before the line is there
    print(f"announced: {text}", file=sys.stderr, flush=True)


def fail(fault: str, member: Member) -> None:
    if fault in ("SIGKILL", "SIGSTOP", "SIGABRT"):
        os.kill(os.getpid(), signal.Signals[fault])
    elif fault == "raise":
        exit_now(member.report("a.json: field x is 3; must be 4", 65).status)
    elif fault == "communication":
        exit_now(member.report("allreduce failed", 75, certain=False).status)
    elif fault == "unforeseen":
        raise ZeroDivisionError("nobody reports this")
    elif fault == "go on":  # waits for nobody, so only a report can end it at once
        for step in range(100000):
            member.at(step, "step")
            time.sleep(STEP_SECONDS)
    elif fault == "hang":
        threading.Lock().acquire()
        threading.Event().wait()


def main(kind: str, folder: str, rank: int, size: int, steps: int, fault: str, fault_step: int) -> None:
    host = f"host{rank}"
    place = Place(rank, size, rank, size, host)
    communicator = FolderCommunicator(Path(folder), rank, size)
    if kind == "hosted":
        member = host_supervision(communicator, place, os.environ, announce)  # type: ignore[arg-type]
    else:
        member = join_supervision(place, os.environ, announce)
    assert member is not None
    for step in range(steps):
        member.at(step, "step")
        if step == fault_step:
            fail(fault, member)
        time.sleep(STEP_SECONDS)
        stops = communicator.gather(b"stop" if member.stop_requested else b"")
        if b"stop" in stops:
            member.leave("stopped by SIGTERM; it is saved", 75)
            sys.exit(75)
    cause = member.leave()
    sys.exit(0 if cause is None else cause.status)


if __name__ == "__main__":
    _, kind, folder, rank, size, steps, fault, fault_step = sys.argv
    main(kind, folder, int(rank), int(size), int(steps), fault, int(fault_step))
