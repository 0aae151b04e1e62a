"""What a rank of the tests does: `python rank_program.py MARK FOLDER WAY...`, the way of each rank by its number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    """Say that it is there, then do what it is told to."""
    mark, folder, *ways = sys.argv[1:]
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    way, _, number = ways[rank].partition("=")
    if way == "save":
        signal.signal(signal.SIGTERM, lambda *_: save(Path(folder), rank, int(number)))
    if way == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if way == "parent":
        code = "import sys, time; time.sleep(120)"
        subprocess.Popen([sys.executable, "-c", code, mark], start_new_session=True)
    print(f"rank {rank} is here", flush=True)
    (Path(folder) / f"here{rank}").touch()
    if way in ("exit", "parent"):
        return int(number or 0)
    if way == "kill":
        wait_for_all(Path(folder), len(ways))
        os.kill(os.getpid(), int(number))
    if way == "fail":
        wait_for_all(Path(folder), len(ways))
        return int(number)
    time.sleep(120)
    return 0


def wait_for_all(folder: Path, count: int) -> None:
    """Wait until all ranks have come."""
    while len(list(folder.glob("here*"))) < count:
        time.sleep(0.02)


def save(folder: Path, rank: int, status: int) -> None:
    """Take a while to save, and end."""
    time.sleep(0.5)
    (folder / f"saved{rank}").touch()
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
