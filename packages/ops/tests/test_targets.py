from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_ops import SSD300, SSD512, DefaultBoxSpec, decode_boxes, default_boxes, encode_targets

GOLDEN = np.load(Path(__file__).parent / "golden" / "targets.npz")


@pytest.mark.parametrize("case", range(5))
def test_targets_are_the_originals(case: int) -> None:
    classes, offsets, num_matched = encode_targets(GOLDEN[f"gt_boxes_yxyx_{case}"], GOLDEN[f"gt_classes_{case}"])
    np.testing.assert_array_equal(classes, GOLDEN[f"classes_{case}"])
    np.testing.assert_allclose(offsets, GOLDEN[f"boxes_{case}"], rtol=0, atol=1e-5)
    assert num_matched == GOLDEN[f"num_matched_{case}"]
    assert [str(part.dtype) for part in (classes, offsets, num_matched)] == ["int32", "float32", "int32"]


@pytest.mark.parametrize("spec", [SSD300, SSD512])
def test_matched_rows_decode_to_their_object(spec: DefaultBoxSpec) -> None:
    boxes = np.array([[0.1, 0.1, 0.5, 0.6], [0.4, 0.5, 0.9, 0.8]], np.float32)
    classes, offsets, num_matched = encode_targets(boxes, [3, 7], spec)
    assert classes.shape == (spec.num_boxes,)
    assert set(classes) == {0, 3, 7}
    assert num_matched == np.count_nonzero(classes)
    decoded = decode_boxes(offsets, spec)
    for label, box in zip([3, 7], boxes, strict=True):
        np.testing.assert_allclose(decoded[classes == label], [box] * (classes == label).sum(), atol=1e-6)
    np.testing.assert_array_equal(offsets[classes == 0], 0)


@pytest.mark.parametrize("boxes", [np.zeros((0, 4)), np.zeros((2, 4))])
def test_without_objects_all_is_background(boxes: npt.NDArray[Any]) -> None:
    classes, offsets, num_matched = encode_targets(boxes, np.ones(len(boxes)))
    assert not classes.any()
    assert not offsets.any()
    assert num_matched == 0


def test_a_default_box_as_object_has_no_offset() -> None:
    classes, offsets, _ = encode_targets(default_boxes()[5000:5001], [4])
    assert classes[5000] == 4
    np.testing.assert_allclose(offsets[5000], 0, atol=1e-5)


@pytest.mark.parametrize("labels", [[1, 2], []])
def test_each_box_needs_a_label(labels: list[int]) -> None:
    with pytest.raises(ValueError, match=f"and {len(labels)} labels"):
        encode_targets([[0, 0, 1, 1]], labels)
