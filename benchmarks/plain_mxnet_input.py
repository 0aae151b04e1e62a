"""The detector's training input as gluon's DataLoader with Python transforms for each image, to be compared with.

Decoded by OpenCV, float in 0..1, SSD's crop by trying windows one by one, colours in NumPy and OpenCV, targets by
matching all boxes to all default boxes.
"""

from __future__ import annotations

import random
from typing import Any

import cv2
import numpy as np
from mxnet.gluon.data import DataLoader, Dataset

from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.sources import DetectionSource
from gaudi_ops import default_boxes, encode_boxes, iou

SIDE = 300


class PlainDataset(Dataset):
    """Image [3, 300, 300], classes [8732], offsets [8732, 4] and number of matches of an index."""

    def __init__(self, source: DetectionSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        example = self._source.read(index)
        pixels = cv2.imdecode(np.frombuffer(example.encoded, np.uint8), cv2.IMREAD_COLOR)
        image = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB).astype(np.float32) / 255
        boxes, labels = example.boxes_yxyx[~example.is_crowd], example.labels[~example.is_crowd]
        image, boxes, labels = crop(image, boxes, labels)
        image = cv2.resize(image, (SIDE, SIDE))
        if random.random() < 0.5:
            image, boxes = image[:, ::-1], np.stack([boxes[:, 0], 1 - boxes[:, 3], boxes[:, 2], 1 - boxes[:, 1]], 1)
        image = (np.clip(jitter(np.ascontiguousarray(image)), 0, 1) - MEAN_RGB) / STDDEV_RGB
        return image.transpose(2, 0, 1), *encode_targets(boxes, labels)


def plain_loader(source: DetectionSource, batch_size: int, processes: int) -> Any:
    """Shuffled batches of one epoch, made in processes of their own."""
    return DataLoader(PlainDataset(source), batch_size, shuffle=True, last_batch="discard", num_workers=processes)


def crop(image: Any, boxes: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Crop as in the paper: draw one window after the other until one is valid."""
    while True:
        minimum = random.choice([None, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9])
        if minimum is None:
            return image, boxes, labels
        for _ in range(50):
            height, width = random.uniform(0.3, 1), random.uniform(0.3, 1)
            top, left = random.uniform(0, 1 - height), random.uniform(0, 1 - width)
            window = np.array([top, left, top + height, left + width], np.float32)
            if not 0.5 < height / width < 2 or iou(window[None], boxes).min() <= minimum:
                continue
            centers = (boxes[:, :2] + boxes[:, 2:]) / 2
            kept = ((centers > window[:2]) & (centers < window[2:])).all(axis=1)
            if kept.any():
                y0, x0, y1, x1 = (window * np.tile(image.shape[:2], 2)).astype(int)
                size = np.tile(window[2:] - window[:2], 2)
                moved = np.clip((boxes[kept] - np.tile(window[:2], 2)) / size, 0, 1)
                return image[y0 : y1 + 1, x0 : x1 + 1], moved, labels[kept]


def jitter(image: Any) -> Any:
    """Brightness, contrast, saturation and hue."""
    image = image * random.uniform(0.875, 1.125)
    mean = image.mean(axis=(0, 1))
    image = (image - mean) * random.uniform(0.5, 1.5) + mean
    hsv = cv2.cvtColor(image.astype(np.float32), cv2.COLOR_RGB2HSV)
    hsv[..., 0] = (hsv[..., 0] + random.uniform(-18, 18)) % 360
    hsv[..., 1] = np.clip(hsv[..., 1] * random.uniform(0.5, 1.5), 0, 1)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB)


def encode_targets(boxes: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Classes, offsets and number of matches, by the overlap of everything with everything."""
    anchors = default_boxes()
    overlaps = iou(boxes, anchors)
    overlaps[np.arange(len(boxes)), overlaps.argmax(axis=1)] = 2
    matches, matched = overlaps.argmax(axis=0), overlaps.max(axis=0) >= 0.5
    classes = np.where(matched, labels[matches], 0)
    offsets = np.where(matched[:, None], encode_boxes(np.where(matched[:, None], boxes[matches], anchors)), 0)
    return classes.astype(np.float32), offsets.astype(np.float32), np.float32(matched.sum())
