"""A rank that only pretends to compute: it meets the others at every step through pipes, and fails as it is told."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.failure import RankClient, exit_now, join_coordinator, start_coordinator


class PipeCommunicator:
    """Gathers through a named pipe of each rank, and waits for ever for a rank that does not come."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.rank, self.size, self.local_rank, self.local_size = rank, size, rank, size
        # For reading and writing: a pipe whose rank is lost takes what is written, as a network does.
        self._pipes = [os.open(folder / f"rank{number}", os.O_RDWR) for number in range(size)]
        self._own = os.fdopen(os.dup(self._pipes[rank]), "rb")
        self._calls = 0
        self._came: defaultdict[int, dict[int, bytes]] = defaultdict(dict)

    def gather(self, content: bytes) -> list[bytes]:
        self._calls += 1
        line = json.dumps([self._calls, self.rank, content.decode()]).encode() + b"\n"
        for pipe in self._pipes:
            os.write(pipe, line)
        while len(self._came[self._calls]) < self.size:
            call, rank, text = json.loads(self._own.readline())
            self._came[call][rank] = text.encode()
        came = self._came.pop(self._calls)
        return [came[rank] for rank in range(self.size)]


def announce(folder: Path, text: str) -> None:
    """Show it, on a terminal that takes nothing before its gate is open, if it has one."""
    if (folder / "terminal").exists():
        with (folder / "terminal").open() as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
    print(f"announced: {text}", file=sys.stderr, flush=True)


def fail(fault: str, client: RankClient) -> None:
    if fault in ("SIGKILL", "SIGSTOP", "SIGABRT"):
        os.kill(os.getpid(), signal.Signals[fault])
    elif fault == "raise":
        exit_now(client.report_failure("a.json: field x is 3; must be 4", 65).status)
    elif fault == "communication":
        exit_now(client.report_failure("allreduce failed", 75, certain=False).status)
    elif fault == "unforeseen":
        raise ZeroDivisionError("nobody reports this")
    elif fault == "go on":  # waits for nobody, so only a report can end it at once
        while True:
            client.set_progress(1, "step")
    elif fault == "hang":
        signal.pause()


def main(kind: str, folder: Path, rank: int, size: int, steps: int, fault: str, fault_step: int) -> None:
    host = f"host{rank}"
    rank_info = RankInfo(rank, size, rank, size, host)
    communicator = PipeCommunicator(folder, rank, size)
    show = partial(announce, folder)
    if kind == "hosted":
        client = start_coordinator(communicator, rank_info, os.environ, show)  # type: ignore[arg-type]
    else:
        client = join_coordinator(rank_info, os.environ, show)
    assert client is not None
    signal.signal(signal.SIGUSR1, lambda *_: signal.pause())  # from then on it comes to no step, and the others wait
    with (folder / "told").open("w", buffering=1) as told:
        told.write(f"rank {rank} has joined\n")
        for step in range(steps):
            client.set_progress(step, "step")
            if step == fault_step:
                told.write(f"rank {rank} is at step {step}\n")
                fail(fault, client)
            stops = communicator.gather(b"stop" if client.stop_requested else b"")
            if b"stop" in stops:
                client.leave("stopped by SIGTERM; it is saved", 75)
                sys.exit(75)
    cause = client.leave()
    sys.exit(0 if cause is None else cause.status)


if __name__ == "__main__":
    _, kind, folder, rank, size, steps, fault, fault_step = sys.argv
    main(kind, Path(folder), int(rank), int(size), int(steps), fault, int(fault_step))
