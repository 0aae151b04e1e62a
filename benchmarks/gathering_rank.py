"""One rank of gathering.py; each writes the bytes that it received, by name. Arguments: FOLDER MEGABYTES."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.collectives_rank import open_horovod
from gaudi_distributed import CommunicationOptions


def main(folder: Path, megabytes: int) -> None:
    """Gather in both ways, and check what came."""
    communicator = open_horovod(CommunicationOptions("horovod"))
    content = bytes([communicator.rank]) * (megabytes * 10**6)
    found: dict[str, int] = {}
    for name in ("gather", "gather_at_root"):
        communicator.barrier()
        before = count_received()
        gathered = getattr(communicator, name)(content)
        found[name] = count_received() - before
        wanted = communicator.size if name == "gather" or communicator.rank == 0 else 0
        if [one[:1] for one in gathered] != [bytes([rank]) for rank in range(wanted)]:
            raise RuntimeError(f"{name} gave other than the contents of {wanted} ranks")
        communicator.barrier()
    Path(folder, f"{communicator.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    communicator.barrier()
    communicator.close()


def count_received() -> int:
    """Return the bytes that the connections of this process have received, as the kernel counts them."""
    lines = subprocess.run(["ss", "-tiHnpO"], check=True, capture_output=True, text=True).stdout.splitlines()
    own = [line for line in lines if f"pid={os.getpid()}," in line]
    return sum(int(number) for line in own for number in re.findall(r"\bbytes_received:(\d+)", line))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
