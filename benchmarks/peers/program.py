"""The command line of another program, and COCO results of what it detects, with nothing that this project needs."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BEGINS = "training begins"  # a line before the first step


def parse(description: str | None, recipes: Sequence[str] = (), dtypes: Sequence[str] = ()) -> argparse.Namespace:
    """Read the command line, with one of `recipes` and `dtypes` where there are some, and make the output's folder."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("mode", choices=("train", "detect", "classify"))
    for flag, values in (("--recipe", recipes), ("--dtype", dtypes)):
        if values:
            parser.add_argument(flag, choices=values, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.data = options.data.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    return options


MOST_DETECTIONS = 100  # of a class in an image that count by COCO's rules


def to_records(
    image_id: int, boxes_xyxy: Iterable[Sequence[float]], category_ids: Iterable[int], scores: Iterable[float]
) -> list[dict[str, Any]]:
    """Return the detections of an image as COCO results, the best of each class, best first.

    Args:
        image_id: of the image.
        boxes_xyxy: left, top, right, bottom in pixels of the image.
        category_ids: of each box.
        scores: of each box, in 0..1.
    """
    rows = sorted(zip(boxes_xyxy, category_ids, scores, strict=True), key=lambda row: -row[2])
    seen = Counter[int]()
    places = []
    for _, category_id, _ in rows:
        seen[category_id] += 1
        places.append(seen[category_id])
    return [
        {
            "image_id": image_id,
            "category_id": category_id,
            "bbox": [left, top, right - left, bottom - top],
            "score": score,
        }
        for ((left, top, right, bottom), category_id, score), place in zip(rows, places, strict=True)
        if place <= MOST_DETECTIONS
    ]


def read_images(data: Path, split: str) -> list[tuple[dict[str, Any], Path]]:
    """Return the record of each image of a split and its file, in the order of the annotations."""
    document = json.loads((data / f"{split}.json").read_text(encoding="utf-8"))
    return [(image, data / "images" / split / image["file_name"]) for image in document["images"]]


def read_category_ids(data: Path) -> list[int]:
    """Return the ids of the classes, in the order in which other programs count them."""
    document = json.loads((data / "train.json").read_text(encoding="utf-8"))
    return [category["id"] for category in document["categories"]]


def write_detections(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write COCO results as JSON."""
    path.write_text(json.dumps(records), encoding="utf-8")
