"""A program for test_conversion.py: writes the records of a made-up job, and tells when it starts and what it used.

Its trouble may be "fault" or "death" at a record, or "marks": it writes one to standard output for each record and for
each file that it renames or removes, so that it can be killed at any of them.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gaudi_datasets.errors import DataError
from gaudi_datasets.records.conversion import write_shards


@dataclass(frozen=True)
class Job:
    records: int
    size: int
    trouble: str = ""

    def encode(self, index: int) -> tuple[bytes, str]:
        if index == 11 and self.trouble == "fault":
            raise DataError(f"record {index} is at fault")
        if index == 11 and self.trouble == "death":
            os._exit(9)
        if self.trouble == "marks":
            os.write(1, b".")
        head = hashlib.sha256(index.to_bytes(4, "big")).digest()
        return head * (self.size // 32 + index % 7), "made rounder" if index % 10 == 3 else ""


def convert(job: Job, output_dir: str, *, processes: int, shards: int = 23, overwrite: bool = False) -> None:
    write_shards(
        job.encode,
        job.records,
        output_dir,
        "train",
        manifest={"kind": "detection"},
        fingerprint="of the job",
        shards=shards,
        processes=processes,
        overwrite=overwrite,
    )


def mark(real: Callable[..., Any]) -> Callable[..., Any]:
    """Have a function write a mark before it does what it does."""

    def call(*args: Any, **kwargs: Any) -> Any:
        os.write(1, b".")
        return real(*args, **kwargs)

    return call


if __name__ == "__main__":
    output_dir, processes, records, size, trouble = sys.argv[1:]
    print("started", flush=True)
    if trouble == "marks":
        for name in ("unlink", "replace"):
            setattr(Path, name, mark(getattr(Path, name)))
    try:
        convert(Job(int(records), int(size), trouble), output_dir, processes=int(processes))
    except (DataError, ChildProcessError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
