"""COCO figures of 5000 images with 100 detections each: ours against pycocotools, from records in memory to figures.

Where the processor has no bf16, it is 1250 images.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.measurement import Figure, choose_amount, compare, interleave, main

IMAGES, DETECTIONS, CLASSES = choose_amount(5000), 100, 80
OBJECTS = 7.3  # of an image on average, as in COCO's validation set
WIDTH, HEIGHT = 640, 480
LEAST = 3.0
MOST_DIFFERENCE = 1e-6
LONG = 300.0  # seconds in which there are three rounds, in place of one: pycocotools takes a minute or two


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure the ratio of both, and the difference of their figures."""
    from gaudi_datasets.detection.scoring import score_detections

    document = make_truth()
    detections = make_detections(document)
    results: dict[str, list[float]] = {}

    def ours() -> None:
        figures = score_detections(document, detections).figures
        results["ours"] = [-1.0 if value is None else value for value in figures.values()]

    def pycocotools() -> None:
        results["pycocotools"] = score_by_pycocotools(document, detections)

    ours()
    candidates = {"ours": ours, "pycocotools": pycocotools}
    timings = interleave(candidates, 3 if budget_seconds > LONG else 1, warm_up=False)
    note = ", ".join(f"{name} {timing.median:.3g}" for name, timing in timings.items()) + " s"
    name = f"COCO scoring, {IMAGES} images with {DETECTIONS} detections"
    yield compare(f"{name}: ours over pycocotools", timings, "pycocotools", "ours", least=LEAST, note=note)
    difference = max(abs(one - other) for one, other in zip(*results.values(), strict=True))
    yield Figure(f"{name}: largest difference of a figure", difference, "of 1", most=MOST_DIFFERENCE)


def make_truth() -> dict[str, Any]:
    """Make a document of images with some objects each."""
    generator = np.random.default_rng(0)
    image_ids = np.repeat(np.arange(IMAGES), generator.poisson(OBJECTS, IMAGES))
    boxes = draw_boxes(generator, len(image_ids))
    columns = zip(
        image_ids.tolist(),
        generator.integers(1, CLASSES + 1, len(boxes)).tolist(),
        boxes.tolist(),
        (0.6 * boxes[:, 2] * boxes[:, 3]).tolist(),
        (generator.random(len(boxes)) < 0.01).astype(int).tolist(),
        strict=True,
    )
    names = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")
    return {
        "images": [{"id": one, "file_name": f"{one}.jpg", "height": HEIGHT, "width": WIDTH} for one in range(IMAGES)],
        "categories": [{"id": one, "name": f"class {one}"} for one in range(1, CLASSES + 1)],
        "annotations": [dict(zip(names, (number, *row), strict=True)) for number, row in enumerate(columns, 1)],
    }


def make_detections(truth: dict[str, Any]) -> list[dict[str, Any]]:
    """As many detections of every image, two fifths of them near an object, with its class."""
    generator = np.random.default_rng(1)
    annotations = truth["annotations"]
    count = IMAGES * DETECTIONS
    image_ids = np.repeat(np.arange(IMAGES), DETECTIONS)
    boxes, labels = draw_boxes(generator, count), generator.integers(1, CLASSES + 1, count)
    object_images = np.array([one["image_id"] for one in annotations])
    starts, ends = (np.searchsorted(object_images, image_ids, side) for side in ("left", "right"))
    near = (ends > starts) & (generator.random(count) < 0.4)
    chosen = (starts + (ends - starts) * generator.random(count)).astype(int)[near]
    found = np.array([one["bbox"] for one in annotations])[chosen]
    moved = found + generator.normal(0, 0.12, found.shape) * np.tile(found[:, 2:], 2)
    boxes[near] = np.concatenate([moved[:, :2], np.maximum(moved[:, 2:], 1)], axis=1)
    labels[near] = np.array([one["category_id"] for one in annotations])[chosen]
    scores = np.where(near, generator.beta(3, 2, count), generator.beta(1, 4, count)).round(3)
    names = ("image_id", "category_id", "bbox", "score")
    columns = (image_ids.tolist(), labels.tolist(), boxes.tolist(), scores.tolist())
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def draw_boxes(generator: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Left, top, width and height: [count, 4]."""
    sizes = np.exp(generator.uniform(np.log(8), np.log(400), (count, 2)))
    corners = generator.random((count, 2)) * (np.array([WIDTH, HEIGHT]) - sizes)
    return np.concatenate([corners, sizes], axis=1).round(2)


def score_by_pycocotools(document: dict[str, Any], detections: list[dict[str, Any]]) -> list[float]:
    """Compute the twelve figures."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = document
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes([copy.copy(one) for one in detections]), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    figures: list[float] = evaluation.stats.tolist()
    return figures


if __name__ == "__main__":
    main(run)
