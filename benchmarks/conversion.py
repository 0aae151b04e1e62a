"""Converting COCO images to records, against copying the same files into one by one process; and the memory of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measurement import Figure, compare, data_folder, describe_rates, interleave, main
from gaudi_datasets.detection.coco import CocoAnnotations, parse_coco
from gaudi_datasets.detection.records import write_records

IMAGES = 16_000  # 2.6 GB: on the 19 of COCO, starting processes weighs even less
LEAST_SPEED = 0.8
MOST_MEMORY = 1.2  # each process holds the boxes: some 300 bytes an image, of whose pixels it holds one


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure with the photographs in REAL_DATA, repeated."""
    folder = data_folder() / "coco_ccby"
    images = folder / "train2017"
    document = json.loads((folder / "annotations" / "instances_train2017.json").read_bytes())
    annotations = parse_coco(repeat(document, IMAGES), Path("repeated.json"))
    with tempfile.TemporaryDirectory() as scratch:
        folder_of = {name: Path(scratch) / name for name in ("copy", "convert")}
        candidates = {
            "copy": lambda: copy(annotations, images, folder_of["copy"]),
            "convert": lambda: convert(annotations, images, folder_of["convert"]),
            "delete": lambda: delete(folder_of.values()),
        }
        timings = interleave(candidates, 5, budget_seconds=budget_seconds)
    size = sum((images / name).stat().st_size for name in annotations.file_names)
    del timings["delete"]
    note = describe_rates(timings, size / 1e6, "MB/s")
    yield compare("convert COCO: speed, of that of a copy", timings, "copy", "convert", least=LEAST_SPEED, note=note)

    peaks = {count: measure_memory(document, images, count) for count in (IMAGES // 4, IMAGES)}
    growth = peaks[IMAGES] / peaks[IMAGES // 4]
    details = {"megabytes_by_images": {count: round(peak / 1e6) for count, peak in peaks.items()}}
    yield Figure(
        "convert COCO: memory for 4 times the images, of that for 1", growth, most=MOST_MEMORY, details=details
    )


def measure_memory(document: dict[str, Any], images: Path, count: int) -> int:
    """Peak bytes of the processes that write records; the one that starts them holds the annotations besides."""
    annotations = parse_coco(repeat(document, count), Path("repeated.json"))
    this, peak, done = psutil.Process(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            with contextlib.suppress(psutil.Error):  # one has ended meanwhile
                peak = max(peak, sum(child.memory_info().rss for child in this.children(recursive=True)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with tempfile.TemporaryDirectory() as scratch:
        convert(annotations, images, Path(scratch) / "records")
    done.set()
    watcher.join()
    return peak


def repeat(document: dict[str, Any], count: int) -> dict[str, Any]:
    """Make a COCO document of `count` images, each file named again and again."""
    boxes: dict[int, list[dict[str, Any]]] = {}
    for one in document["annotations"]:
        boxes.setdefault(one["image_id"], []).append({**one, "segmentation": None})
    chosen = [document["images"][number % len(document["images"])] for number in range(count)]
    images = [{**image, "id": number} for number, image in enumerate(chosen)]
    annotations = [
        {**one, "image_id": number} for number, image in enumerate(chosen) for one in boxes.get(image["id"], [])
    ]
    numbered = [{**one, "id": number} for number, one in enumerate(annotations)]
    return {"images": images, "annotations": numbered, "categories": document["categories"]}


def copy(annotations: CocoAnnotations, images: Path, output_dir: Path) -> None:
    """Append each image file to one, and see that it is on the disk."""
    output_dir.mkdir()
    with (output_dir / "all").open("wb") as file:
        for name in annotations.file_names:
            file.write((images / name).read_bytes())
        file.flush()
        os.fsync(file.fileno())


def convert(annotations: CocoAnnotations, images: Path, output_dir: Path) -> None:
    """Write records, by as many processes as there are cores, and at least two."""
    processes = max(2, len(os.sched_getaffinity(0)))
    write_records(annotations, images, output_dir, "train", keep_empty=True, processes=processes)


def delete(folders: Iterable[Path]) -> None:
    """Make room for the next round."""
    for folder in folders:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main(run)
