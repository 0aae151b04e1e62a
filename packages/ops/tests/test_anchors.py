from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_ops import SSD300, SSD512, DefaultBoxSpec, default_boxes, default_boxes_cyxhw

GOLDEN = np.load(Path(__file__).parent / "golden" / "default_boxes.npz")


def order_as_model(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows in the order level, box, row, column brought into level, row, column, box."""
    levels, start = [], 0
    for size, boxes in zip(SSD300.feature_sizes, SSD300.boxes_per_cell, strict=True):
        level = rows[start : start + size * size * boxes].reshape(boxes, size, size, 4)
        levels.append(level.transpose(1, 2, 0, 3).reshape(-1, 4))
        start += size * size * boxes
    return np.concatenate(levels)


def test_ssd300_has_the_originals_default_boxes() -> None:
    np.testing.assert_allclose(default_boxes(), order_as_model(GOLDEN["yxyx"]), rtol=0, atol=1e-6)
    np.testing.assert_allclose(default_boxes_cyxhw(), order_as_model(GOLDEN["cyxhw"]), rtol=0, atol=1e-6)


def test_ssd300_counts() -> None:
    assert SSD300.boxes_per_cell == (4, 6, 6, 6, 4, 4)
    assert SSD300.num_boxes == 8732 == len(default_boxes())
    assert default_boxes().dtype == default_boxes_cyxhw().dtype == np.float32


def list_published_boxes_of_512() -> list[tuple[float, float, float, float]]:
    """Default boxes of SSD512 by the formulas of the paper, box by box: centre, height and width in 0..1.

    Section 2.2, with s_min .1 and s_max .9 of the levels after the first, and .04 for that (footnote of section 3.4).
    """
    levels, after_first = 7, 6
    step = math.floor((0.9 - 0.1) * 100 / (levels - 2)) / 100  # the published configuration rounds it to percent
    scales = [0.04, *(0.1 + step * k for k in range(after_first + 1))]
    ratios = {0: (2,), 5: (2,), 6: (2,)}
    boxes = []
    for level, stride in enumerate((8, 16, 32, 64, 128, 256, 512)):
        cells = 512 // stride
        sizes = [(scales[level],) * 2, (math.sqrt(scales[level] * scales[level + 1]),) * 2]
        for ratio in ratios.get(level, (2, 3)):
            for one in (ratio, 1 / ratio):  # width over height
                sizes.append((scales[level] / math.sqrt(one), scales[level] * math.sqrt(one)))
        for row, column, (height, width) in itertools.product(range(cells), range(cells), sizes):
            boxes.append(((row + 0.5) / cells, (column + 0.5) / cells, min(height, 1.0), min(width, 1.0)))
    return boxes


def test_ssd512_has_the_published_default_boxes() -> None:
    expected = list_published_boxes_of_512()
    assert len(expected) == 24564
    np.testing.assert_allclose(default_boxes_cyxhw(SSD512), expected, rtol=0, atol=1e-6)


def test_ssd512_counts() -> None:
    counts = [size * size * boxes for size, boxes in zip(SSD512.feature_sizes, SSD512.boxes_per_cell, strict=True)]
    assert SSD512.feature_sizes == (64, 32, 16, 8, 4, 2, 1)
    assert SSD512.boxes_per_cell == (4, 6, 6, 6, 6, 4, 4)
    assert counts == [16384, 6144, 1536, 384, 96, 16, 4]
    assert SSD512.num_boxes == sum(counts) == 24564 == len(default_boxes(SSD512))


def test_a_small_spec_by_hand() -> None:
    spec = DefaultBoxSpec(100, (2,), (50,), (16, 25), ((4,),))
    squares = [(0.16, 0.16), (0.2, 0.2), (0.08, 0.32), (0.32, 0.08)]  # side, geometric mean, wide, tall
    expected = [(y, x, *size) for y in (0.25, 0.75) for x in (0.25, 0.75) for size in squares]
    np.testing.assert_allclose(default_boxes_cyxhw(spec), expected, atol=1e-7)


def test_boxes_are_clipped_in_centre_form() -> None:
    spec = DefaultBoxSpec(100, (1,), (100,), (150, 150), ((),))
    np.testing.assert_array_equal(default_boxes(spec), [[0, 0, 1, 1]] * 2)


def test_results_are_shared_and_so_read_only() -> None:
    for boxes in (default_boxes(), default_boxes_cyxhw()):
        with pytest.raises(ValueError, match="read-only"):
            boxes[0, 0] = 1.0


def test_levels_must_agree() -> None:
    with pytest.raises(ValueError, match="2 feature_sizes, 1 steps"):
        DefaultBoxSpec(100, (2, 1), (50,), (16, 25), ((4,),))
