"""Opening the records of a data set of ImageNet's size: by their index, and by the header of each record.

The records are small, for no content is read. Each opening is in a process of its own, in turns, as each rank opens
them; the files are in memory, so what a network or a disk adds for each read is not in the figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import Figure, Timing, compare, main
from gaudi_datasets.records.conversion import write_shards
from gaudi_datasets.records.manifests import index_path
from gaudi_datasets.records.record_sets import RecordSet

RECORDS, SHARDS = 1_281_167, 1024
ROUNDS = 3
MOST_SECONDS = 2.0


def encode(index: int) -> tuple[bytes, str]:
    """Return a record of a few bytes, other ones for each."""
    return b"record %d" % index, ""


def run(budget_seconds: float) -> Iterator[Figure]:
    """Write records, then open them; it takes about a minute whatever the budget is."""
    found: dict[str, list[dict[str, float]]] = {"index": [], "headers": []}
    with tempfile.TemporaryDirectory() as folder:
        told = {"kind": "classification"}
        write_shards(encode, RECORDS, folder, "train", manifest=told, fingerprint="", shards=SHARDS, processes=1)
        index = index_path(Path(folder), "train")
        size = index.stat().st_size
        for _ in range(ROUNDS):
            found["index"].append(open_in_process(folder))
            index.rename(index.with_suffix(".away"))
            found["headers"].append(open_in_process(folder))
            index.with_suffix(".away").rename(index)
    timings = {name: Timing(tuple(one["seconds"] for one in each), (0.0,) * ROUNDS) for name, each in found.items()}
    reads = {name: each[0]["reads"] for name, each in found.items()}
    note = f"{RECORDS} records of {SHARDS} shards, an index of {size / 1e6:.1f} MB"
    yield Figure("opening records by their index", timings["index"].median, "s", most=MOST_SECONDS, note=note)
    yield Figure("opening records by their headers", timings["headers"].median, "s")
    yield compare("opening records: by the index over by headers", timings, "headers", "index")
    yield Figure("reads by the index", reads["index"], "reads", most=8 * SHARDS, note=f"{reads['headers']:.0f} without")


def open_in_process(folder: str) -> dict[str, float]:
    """Open the records in another process; return its seconds and its calls that read."""
    code = f"from benchmarks.record_index import measure; measure({folder!r})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def measure(folder: str) -> None:
    """Open records, and say how long that took and how often it read."""
    before, began = count_reads(), time.perf_counter()
    records = RecordSet(folder, "train", kind="classification")
    seconds, reads = time.perf_counter() - began, count_reads() - before
    last = records.read_record(RECORDS - 1)[1]
    if (len(records), last) != (RECORDS, encode(RECORDS - 1)[0]):
        raise RuntimeError(f"{len(records)} records, the last {last!r}")
    print(json.dumps({"seconds": seconds, "reads": reads}))


def count_reads() -> int:
    """Return how often this process has read so far."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("syscr:")).split()[1])


if __name__ == "__main__":
    main(run)
