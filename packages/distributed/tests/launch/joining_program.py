"""Be a rank that the launcher watches: `python joining_program.py FOLDER WAY...`, the way of each rank by its number.

A way is a list of words between commas, done one after another. The channel `told` of the folder hears of each.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from pathlib import Path

from gaudi_distributed.cluster.rank_info import detect_rank
from gaudi_distributed.failure import RankClient, join_coordinator


def main() -> int:
    """Do what the way of this rank says."""
    folder, ways = Path(sys.argv[1]), sys.argv[2:]
    rank_info = detect_rank(os.environ)
    client: RankClient | None = None
    for word in ways[rank_info.rank].split(","):
        name, _, argument = word.partition("=")
        if name == "join":
            client = join_coordinator(rank_info, os.environ, lambda text: print(text, file=sys.stderr))
        elif name == "report" and client is not None:  # how often it reports a phase
            phase, _, count = argument.partition(":")
            for _ in range(int(count)):
                client.set_progress(0, phase)
        elif name == "gate":
            with (folder / argument).open() as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
        elif name in ("steps", "save") and client is not None:
            train(folder, rank_info.rank, client, name)
        elif name == "exit":
            sys.exit(int(argument))
        elif name == "leave" and client is not None:
            client.leave()
        elif name == "kill":
            os.kill(os.getpid(), int(argument))
        elif name == "count":  # asks to end, until the gate is open; mpirun continues a rank before it kills it
            signal.signal(signal.SIGTERM, lambda *_: tell(folder, f"rank {rank_info.rank} is asked"))
            signal.signal(signal.SIGCONT, lambda *_: tell(folder, f"rank {rank_info.rank} is continued"))
        elif name == "hang":
            threading.Event().wait()
        tell(folder, f"rank {rank_info.rank}: {name}")
    return 0


def train(folder: Path, rank: int, client: RankClient, what: str) -> None:
    """Report steps until all are asked to save, or save and leave."""
    if what == "save":
        (folder / f"saved{rank}").touch()
        client.leave("saved", 75)
        sys.exit(75)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(folder, f"rank {rank} is ready")
    while not client.stop_requested:
        client.set_progress(1, "step")
        os.sched_yield()


def tell(folder: Path, line: str) -> None:
    with (folder / "told").open("a") as told:
        told.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
