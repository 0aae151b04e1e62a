"""Running the programs on a GPU, each in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from gaudi_distributed.errors import MissingProgramError

RECORDS = "GPU_RECORDS"  # variable with the folder of records, see the session gpu_folder
FULL_PRECISION = {"NVIDIA_TF32_OVERRIDE": "0"}  # NVIDIA's own switch: no library uses TF32


def find_records() -> Path:
    """Return the folder of records to train on.

    Raises:
        MissingProgramError: none is named, or it has no records.
    """
    folder = Path(os.environ.get(RECORDS, ""))
    if RECORDS not in os.environ or not (folder / "train.json").is_file():
        raise MissingProgramError(
            f"{RECORDS}={os.environ.get(RECORDS)!r}: no folder with train.json",
            field=RECORDS,
            remedy="set it to the folder records that nox -s gpu_folder makes",
        )
    return folder


def run_program(module: str, *arguments: str | Path | int | float, variables: Mapping[str, str] | None = None) -> str:
    """Run a module with arguments and return all that it printed.

    Raises:
        RuntimeError: it failed; the message ends with its last line.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, check=False
    )
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:])
        last = (done.stdout.strip().splitlines() or ["nothing printed"])[-1]
        raise RuntimeError(f"{module} ended with status {done.returncode}: {last}")
    return done.stdout
