"""Small images with annotations that tests write as people have them, and the file names of what is read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from gaudi_datasets.layouts.recognition import read_boxes


def draw(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.effect_noise((60, 40), 50).convert("RGB").save(path)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def annotate(path: Path, stated: str = "") -> None:
    size = "<size><width>60</width><height>40</height></size>"
    box = "<bndbox><xmin>3</xmin><ymin>4</ymin><xmax>20</xmax><ymax>30</ymax></bndbox>"
    write(path, f"<annotation><filename>{stated}</filename>{size}<object><name>ant</name>{box}</object></annotation>")


def write_coco(path: Path, names: Sequence[str]) -> None:
    images = [{"id": row, "file_name": name, "height": 40, "width": 60} for row, name in enumerate(names)]
    boxes = [{"id": row, "image_id": row, "category_id": 1, "bbox": [3, 4, 20, 10]} for row in range(len(names))]
    write(path, json.dumps({"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "ant"}]}))


def names_of(path: Path) -> dict[str, list[str]]:
    sets = read_boxes(path).sets
    return {
        split: sorted((folder / name).relative_to(path).as_posix() for name in coco.file_names)
        for split, (coco, folder) in sets.items()
    }
