"""Be a rank of the tests: `python rank_program.py MARK FOLDER WAY...`, the way of each rank by its number.

It says on the channel `told` of the folder what it does, and waits at the folder's gates `all_here` and `disk`.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn


def main() -> int:
    """Say that it is there, then do what it is told to."""
    mark, name, *ways = sys.argv[1:]
    folder = Path(name)
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    way, _, number = ways[rank].partition("=")
    if way == "save":
        signal.signal(signal.SIGTERM, lambda *_: save(folder, rank, int(number)))
    if way == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: tell(folder, f"rank {rank} is asked to end"))
    if way == "parent":
        code = "import signal; signal.pause()"
        subprocess.Popen([sys.executable, "-c", code, mark], start_new_session=True)
    print(f"rank {rank} is here", flush=True)
    tell(folder, f"rank {rank} is here")
    if way in ("exit", "parent"):
        return int(number or 0)
    if way == "kill":
        pass_gate(folder / "all_here")
        os.kill(os.getpid(), int(number))
    if way == "fail":
        pass_gate(folder / "all_here")
        return int(number)
    return stay()


def stay() -> NoReturn:
    """Hear signals until one ends this process, also one just before the wait, which signal.pause would miss."""
    heard, noted = os.pipe()
    os.set_blocking(noted, False)
    signal.set_wakeup_fd(noted)
    while True:
        os.read(heard, 1)


def tell(folder: Path, line: str) -> None:
    (folder / "told").write_text(f"{line}\n")


def pass_gate(path: Path) -> None:
    with path.open() as gate:
        fcntl.flock(gate, fcntl.LOCK_SH)


def save(folder: Path, rank: int, status: int) -> None:
    """Save for as long as the disk takes, and end."""
    tell(folder, f"rank {rank} saves")
    pass_gate(folder / "disk")
    (folder / f"saved{rank}").touch()
    sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
