"""Targets and outputs of a detector as training and evaluation have them, from random numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from gaudi_ops import SSD300, encode_targets, iou
from gaudi_ops.anchors import default_boxes

CLASSES = 81
OBJECTS = 8  # about as many as an image of COCO has


def make_targets(batch: int) -> tuple[Any, Any, Any]:
    """Classes int32 [batch, 8732], offsets float32 [batch, 8732, 4] and number of matches int32 [batch]."""
    generator = np.random.default_rng(0)
    rows = [encode_targets(_draw_boxes(generator), _draw_labels(generator)) for _ in range(batch)]
    classes, offsets, num_matched = (np.stack(part) for part in zip(*rows, strict=True))
    return classes, offsets, num_matched.astype(np.int32)


def make_logits(batch: int) -> Any:
    """Logits float32 [batch, 8732, 81] of a trained detector: sure of the background, but for boxes near objects."""
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 1, (batch, SSD300.num_boxes, CLASSES)).astype(np.float32)
    logits[..., 0] += 8
    for image in logits:
        for box, label in zip(_draw_boxes(generator), _draw_labels(generator), strict=True):
            near = iou(box[None], default_boxes())[0]
            image[:, label] += 12 * np.sqrt(near) * (near > 0.2)
    return logits


def _draw_boxes(generator: np.random.Generator) -> Any:
    sizes = np.exp(generator.uniform(np.log(0.06), np.log(0.8), (OBJECTS, 2)))
    corners = generator.random((OBJECTS, 2)) * (1 - sizes)
    return np.concatenate([corners, corners + sizes], axis=1).astype(np.float32)


def _draw_labels(generator: np.random.Generator) -> Any:
    return generator.integers(1, CLASSES, OBJECTS, dtype=np.int32)
