"""Default boxes (anchors) of the single-shot detector, in the row order of the model's outputs.

Source: Liu et al., "SSD: Single Shot MultiBox Detector", https://arxiv.org/abs/1512.02325, section 2.2,
with the constants of the MLPerf training reference for SSD-ResNet34 at 300 pixels, and of section 3.4 and its footnote
at 512. NumPy is imported where boxes are computed: plans of a training read the geometry alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from gaudi_ops.boxes import FloatArray


@dataclass(frozen=True)
class DefaultBoxSpec:
    """Geometry of a detector's default boxes and the variances of its box coding.

    Args:
        image_size: side of the square input, in pixels.
        feature_sizes: cells per side of each level, finest first.
        steps: pixels between cell centres of each level.
        scales: box side of each level in pixels, and one more for the last level's second box.
        aspect_ratios: per level, the ratios besides 1; each gives a wide and a tall box.
        center_variance: divisor of centre offsets.
        size_variance: divisor of log size offsets.

    Raises:
        ValueError: if the tuples do not describe the same number of levels.
    """

    image_size: int
    feature_sizes: tuple[int, ...]
    steps: tuple[int, ...]
    scales: tuple[float, ...]
    aspect_ratios: tuple[tuple[float, ...], ...]
    center_variance: float = 0.1
    size_variance: float = 0.2

    def __post_init__(self) -> None:
        levels = len(self.feature_sizes)
        lengths = (len(self.steps), len(self.scales) - 1, len(self.aspect_ratios))
        if any(length != levels for length in lengths):
            raise ValueError(
                f"DefaultBoxSpec has {levels} feature_sizes, {len(self.steps)} steps, {len(self.scales)} scales and "
                f"{len(self.aspect_ratios)} aspect_ratios; n levels need n, n, n + 1 and n"
            )

    @property
    def boxes_per_cell(self) -> tuple[int, ...]:
        """Number of default boxes in a cell of each level."""
        return tuple(2 + 2 * len(ratios) for ratios in self.aspect_ratios)

    @property
    def num_boxes(self) -> int:
        """Number of default boxes of all levels together."""
        return sum(size * size * boxes for size, boxes in zip(self.feature_sizes, self.boxes_per_cell, strict=True))


SSD300 = DefaultBoxSpec(
    image_size=300,
    feature_sizes=(38, 19, 10, 5, 3, 1),
    steps=(8, 16, 32, 64, 100, 300),
    scales=(21, 45, 99, 153, 207, 261, 315),
    aspect_ratios=((2,), (2, 3), (2, 3), (2, 3), (2,), (2,)),
)
"""The 8732 default boxes of the SSD for images of 300 pixels, on six levels."""

# Of the side: .04 on the first level, then .1 to .9 in equal steps, and one step more. The published network for COCO
# has these in its configuration, examples/ssd/ssd_coco.py of https://github.com/weiliu89/caffe.
SSD512 = DefaultBoxSpec(
    image_size=512,
    feature_sizes=(64, 32, 16, 8, 4, 2, 1),
    steps=(8, 16, 32, 64, 128, 256, 512),
    scales=(20.48, 51.2, 133.12, 215.04, 296.96, 378.88, 460.8, 542.72),
    aspect_ratios=((2,), (2, 3), (2, 3), (2, 3), (2, 3), (2,), (2,)),
)
"""The 24564 default boxes of the SSD for images of 512 pixels, on seven levels."""

SSD_SPECS: Mapping[int, DefaultBoxSpec] = {spec.image_size: spec for spec in (SSD300, SSD512)}
"""The default boxes by the side of the images in pixels."""


def _level_boxes(spec: DefaultBoxSpec, level: int) -> npt.NDArray[np.float64]:
    """Compute centre-form boxes [row, column, box in the cell, 4] of one level.

    In a cell come the two squares, then a wide and a tall box of each ratio.
    """
    import numpy as np

    small, large = (spec.scales[level + i] / spec.image_size for i in (0, 1))
    middle = math.sqrt(small * large)
    sizes = [(small, small), (middle, middle)]
    for ratio in spec.aspect_ratios[level]:
        long, short = small * math.sqrt(ratio), small / math.sqrt(ratio)
        sizes += [(short, long), (long, short)]
    cells = spec.feature_sizes[level]
    centers = (np.arange(cells) + 0.5) * spec.steps[level] / spec.image_size
    boxes = np.empty((cells, cells, len(sizes), 4))
    boxes[..., 0] = centers[:, None, None]
    boxes[..., 1] = centers[None, :, None]
    boxes[..., 2:] = sizes
    return boxes


@functools.lru_cache(maxsize=8)
def default_boxes(spec: DefaultBoxSpec = SSD300) -> FloatArray:
    """Return the default boxes as corners.

    Boxes are clipped to 0..1 in centre form, so that those at the border may reach outside 0..1 as corners.

    Returns:
        float32 [spec.num_boxes, 4], y0, x0, y1, x1 as fractions of the image, read-only; rows ordered by level, row,
        column, and box within the cell: 8732 of them for ``SSD300``, 24564 for ``SSD512``.
    """
    import numpy as np

    levels = [_level_boxes(spec, level).reshape(-1, 4) for level in range(len(spec.feature_sizes))]
    boxes = np.clip(np.concatenate(levels), 0.0, 1.0)
    # Rounded once, from float64, as the original does: matching compares overlaps that are equal but for rounding.
    half_sizes = 0.5 * boxes[:, 2:]
    corners = np.concatenate([boxes[:, :2] - half_sizes, boxes[:, :2] + half_sizes], axis=1).astype(np.float32)
    corners.setflags(write=False)
    return corners


@functools.lru_cache(maxsize=8)
def default_boxes_cyxhw(spec: DefaultBoxSpec = SSD300) -> FloatArray:
    """Return `default_boxes` in centre form, as box coding uses them.

    Returns:
        float32 [spec.num_boxes, 4], centre y, centre x, height, width as fractions of the image, read-only.
    """
    from gaudi_ops.boxes import yxyx_to_cyxhw

    boxes = yxyx_to_cyxhw(default_boxes(spec))
    boxes.setflags(write=False)
    return boxes
