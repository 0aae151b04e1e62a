"""Memory of the detector's loader: with more data than the machine has memory, and over ten epochs."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measurement import Figure, data_folder, main
from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.memory import decide_cache
from gaudi_datasets.sampling import InputOptions

BATCH = 16
EPOCHS = 10
MIB, GIB = 2**20, 2**30


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure with the photographs in REAL_DATA; about as many seconds as they need, whatever the budget."""
    coco = data_folder() / "coco_ccby"
    annotations = read_coco(coco / "annotations" / "instances_train2017.json")
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records"
        write_records(annotations, coco / "train2017", records, "train", keep_empty=False, shards=1)
        (shard,) = records.glob("train-*")
        size = shard.stat().st_size
        many = repeat_shard(shard, Path(folder) / "many", 2 * psutil.virtual_memory().total // size)
        yield from measure("a data set twice as large as memory", many, steps=60)
        few = repeat_shard(shard, Path(folder) / "few", 4)
        yield from measure("a small data set", few, steps=len(RecordSource(few, "train")) // BATCH)


def repeat_shard(shard: Path, folder: Path, count: int) -> Path:
    """Write records whose shards are all the same file, so that they take no disk."""
    folder.mkdir()
    for number in range(count):
        os.link(shard, folder / f"train-{number:05d}-of-{count:05d}")
    return folder


def measure(name: str, records: Path, *, steps: int) -> Iterable[Figure]:
    """Train on nothing: read so many steps ten times, and look at the memory of this process after each time."""
    from gaudi_datasets.detection.pipeline import train_dataset

    source = RecordSource(records, "train")
    decision = decide_cache(source.num_bytes)
    options = replace(InputOptions(BATCH, dtype="bfloat16"), cache_encoded=decision.keeps)
    batches: Iterator[Any] = iter(train_dataset(source, options))
    process, used = psutil.Process(), []
    for _ in range(EPOCHS):
        for _ in itertools.islice(batches, steps):
            pass
        used.append(process.memory_info().rss)
    details = {
        "records": len(source),
        "gib": source.num_bytes / GIB,
        "cached": decision.keeps,
        "mib": [round(one / MIB) for one in used],
    }
    title, note = f"loader memory, {name}", f"{len(source)} images, {source.num_bytes / GIB:.3g} GiB"
    yield Figure(f"{title}: most", max(used) / GIB, "GiB", most=1.5, note=note, details=details)
    yield Figure(f"{title}: after {EPOCHS} turns, of that after 3", used[-1] / used[2], most=1.05, details=details)


if __name__ == "__main__":
    main(run)
