"""What a worker of the tests does: `python worker_program.py FOLDER`, where files tell it to end a round, or itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from gaudi_distributed.elastic import WORKER, Seats


def main() -> int:
    """Take part in rounds until the file `done` is there.

    The file `again_N` ends round N; `end_N` has the status that worker N ends with, or a signal's number below zero.
    """
    folder, worker = Path(sys.argv[1]), os.environ[WORKER]
    seats, number = Seats(os.environ), 0
    while (variables := seats.take()) is not None:
        number += 1
        rank, size = variables["HOROVOD_RANK"], variables["HOROVOD_SIZE"]
        (folder / f"round_{number}_of_{worker}").write_text(f"rank {rank} of {size}")
        is_over = False
        while not is_over:
            # Looked at first: what a test orders before it ends the round is there by then.
            is_over = (folder / f"again_{number}").exists() or seats.are_changing()
            if (folder / "done").exists():
                return 0
            if (order := folder / f"end_{worker}").exists():
                end(int(order.read_text()))
            time.sleep(0.02)
    return 0


def end(status: int) -> None:
    """End with a status, or by a signal."""
    if status < 0:
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    # As our programs do, it ends by SIGTERM with what it has saved.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    sys.exit(main())
