"""Scoring a detector on every image of a data set, once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gaudi_apps.scoring import find_order, pack_arrays, unpack_arrays
from gaudi_datasets.detection.scoring import CocoScores, score_detections
from gaudi_datasets.detection.sources import DetectionSource, ground_truth
from gaudi_datasets.sampling import PADDING_ID, InputOptions, deal_positions

Detection = dict[str, Any]
# Batches of so many images of a source, from the first, as `gaudi_datasets.detection.batches.eval_batches` has them.
ReadBatches: TypeAlias = Callable[[DetectionSource, InputOptions, int], Iterable[Mapping[str, Any]]]


class Detects(Protocol):
    """A detector, whatever computes it."""

    def detect(self, images: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Boxes [batch, n, 4] (y0, x0, y1, x1 in 0..1), labels [batch, n], 0 where there is none, and scores."""


@dataclass(frozen=True)
class Found:
    """What a detector finds in some images of a data set.

    Attributes:
        positions: int64 [images], of the images in the data set, rising.
        image_ids: int64 [images].
        detections: of all these images, by image, as records of a COCO results file.
    """

    positions: npt.NDArray[np.int64]
    image_ids: npt.NDArray[np.int64]
    detections: list[Detection]


def read_tensors(source: DetectionSource, options: InputOptions, num_images: int) -> Iterable[Mapping[str, Any]]:
    """Batches of TensorFlow's pipeline."""
    from gaudi_datasets.detection.pipeline import eval_dataset
    from gaudi_datasets.tf_input import read_batches

    return read_batches(eval_dataset(source, options, num_images=num_images), source)


def detect(
    detector: Detects,
    source: DetectionSource,
    options: InputOptions,
    *,
    num_images: int | None = None,
    report: Callable[[], None] = lambda: None,
    read: ReadBatches = read_tensors,
) -> Found:
    """Detect on every image of a data set that is dealt to this rank.

    Args:
        detector: the trained network.
        source: images and truth.
        options: batch size, threads, rank and number of ranks; figures do not depend on them.
        num_images: only so many images, from the first.
        report: called before each batch is used.
        read: gives the batches.
    """
    total = len(source) if num_images is None else min(num_images, len(source))
    category_ids = np.array([0] + [category.id for category in source.categories])
    detections: list[Detection] = []
    seen: list[int] = []
    for batch in read(source, options, total):
        report()
        arrays = {name: np.asarray(batch[name]) for name in ("image_ids", "sizes")}
        for image_id, found in _detect_batch(detector, batch["images"], arrays, category_ids):
            seen.append(image_id)
            detections += found
    positions = deal_positions(total, options)
    return Found(positions[positions < total], np.array(seen, np.int64), detections)


def join_found(parts: Sequence[Found]) -> Found:
    """What the ranks found, put together in the order of the data set.

    Raises:
        DataError: an image is missing, or was used twice.
    """
    order = find_order([part.positions for part in parts])
    image_ids = np.concatenate([part.image_ids for part in parts])[order]
    place = {image_id: number for number, image_id in enumerate(image_ids.tolist())}
    # Stable, so those of an image stay as they are, the best first.
    detections = sorted((one for part in parts for one in part.detections), key=lambda one: place[one["image_id"]])
    return Found(np.arange(len(order)), image_ids, detections)


def score(source: DetectionSource, found: Found) -> CocoScores:
    """The COCO figures of what was found."""
    return score_detections(ground_truth(source), found.detections, image_ids=found.image_ids.tolist())


def pack_found(found: Found) -> bytes:
    """A part as bytes."""
    columns = {
        "image_id": np.array([one["image_id"] for one in found.detections], np.int64),
        "category_id": np.array([one["category_id"] for one in found.detections], np.int64),
        "bbox": np.array([one["bbox"] for one in found.detections], np.float64).reshape(-1, 4),
        "score": np.array([one["score"] for one in found.detections], np.float64),
    }
    return pack_arrays({"positions": found.positions, "image_ids": found.image_ids, **columns})


def unpack_found(content: bytes) -> Found:
    """The part that `pack_found` made the bytes of."""
    arrays = unpack_arrays(content)
    names = ("image_id", "category_id", "bbox", "score")
    rows = zip(*(arrays[name].tolist() for name in names), strict=True)
    return Found(arrays["positions"], arrays["image_ids"], [dict(zip(names, row, strict=True)) for row in rows])


def _detect_batch(
    detector: Detects,
    images: Any,
    arrays: Mapping[str, npt.NDArray[Any]],
    category_ids: npt.NDArray[np.int64],
) -> Iterator[tuple[int, list[Detection]]]:
    """Image id and detections of every image of a batch that is not padding."""
    rows = zip(arrays["image_ids"].tolist(), arrays["sizes"], *detector.detect(images), strict=True)
    for image_id, size, boxes, labels, scores in rows:
        if image_id != PADDING_ID:
            found = labels > 0
            yield (
                image_id,
                to_records(image_id, size, boxes[found], category_ids[labels[found]], scores[found]),
            )


def to_records(
    image_id: int,
    size: npt.NDArray[np.int32],
    boxes_yxyx: npt.NDArray[np.float32],
    category_ids: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
) -> list[Detection]:
    """Detections of one image as COCO results: bbox is left, top, width, height in pixels.

    Args:
        image_id: of the image.
        size: [2], its height and width in pixels.
        boxes_yxyx: [n, 4], in 0..1.
        category_ids: [n].
        scores: [n].
    """
    y0, x0, y1, x1 = (boxes_yxyx.astype(np.float64) * np.tile(size, 2)).T
    bboxes = np.stack([x0, y0, x1 - x0, y1 - y0], axis=1)
    return [
        {"image_id": image_id, "category_id": int(category), "bbox": bbox.tolist(), "score": float(score)}
        for bbox, category, score in zip(bboxes, category_ids, scores, strict=True)
    ]
