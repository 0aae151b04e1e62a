"""Detections on pictures of the user's, drawn and listed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gaudi_apps.pictures import draw_detections, write_picture
from gaudi_apps.ssd.detector import Detector
from gaudi_apps.ssd.report import DRAWN_PER_IMAGE, DRAWN_SCORE, decode_picture
from gaudi_datasets.coco import Category
from gaudi_datasets.detection_input import prepare_image
from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.image_files import read_image

SUFFIXES = (".jpg", ".jpeg", ".png")


def find_pictures(path: Path) -> list[Path]:
    """The picture itself, or the pictures in a folder, by name.

    Raises:
        MissingInputError: there is no such path, or no picture in the folder.
    """
    if path.is_file():
        return [path]
    pictures = sorted(p for p in path.glob("*") if p.suffix.lower() in SUFFIXES) if path.is_dir() else []
    if not pictures:
        what = f"holds no {', '.join(SUFFIXES)} file" if path.is_dir() else "is not there"
        raise MissingInputError(f"{path}: {what}; give --inference a picture or a folder of pictures")
    return pictures


def predict(
    detector: Detector, pictures: Sequence[Path], categories: Sequence[Category], output_dir: Path
) -> Iterator[str]:
    """Detect on pictures one by one; each is drawn with its boxes into a PNG of `output_dir`.

    Args:
        detector: the trained network.
        pictures: files.
        categories: the classes, label 1 first.
        output_dir: made when it is not there.

    Yields:
        A line for each detection, at most 10 a picture: file, score, class, and left, top, right, bottom in pixels.

    Raises:
        DataError: a file is no picture, or is cut short.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    names = [category.name for category in categories]
    for path in pictures:
        encoded = read_image(path).encoded
        boxes, labels, scores = (rows[0] for rows in detector.detect(prepare_image(encoded)[None]))
        shown = np.flatnonzero((labels > 0) & (scores >= DRAWN_SCORE))[:DRAWN_PER_IMAGE]
        pixels = decode_picture(encoded)
        drawn = draw_detections(pixels, boxes[shown], labels[shown], scores[shown], names)
        write_picture(output_dir / f"{path.name}.png", drawn)  # the whole name: a.jpg and a.png are two
        height, width = pixels.shape[:2]
        for row in shown:
            y0, x0, y1, x1 = boxes[row] * [height, width, height, width]
            yield f"{path}: {scores[row]:.3f} {names[labels[row] - 1]} {x0:.0f} {y0:.0f} {x1:.0f} {y1:.0f}"
