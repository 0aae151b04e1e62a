from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gaudi_ops import DefaultBoxSpec, decode_boxes, default_boxes, encode_boxes

GOLDEN = np.load(Path(__file__).parent / "golden" / "box_decode.npz")
# Rows of the original's order (level, box, row, column) in the model's (level, row, column, box).
ORDER = np.concatenate(
    [
        start + np.arange(boxes * size * size).reshape(boxes, size, size).transpose(1, 2, 0).ravel()
        for start, size, boxes in [
            (0, 38, 4),
            (5776, 19, 6),
            (7942, 10, 6),
            (8542, 5, 6),
            (8692, 3, 4),
            (8728, 1, 4),
        ]
    ]
)
ONE = DefaultBoxSpec(300, (1,), (300,), (100, 100), ((),))
coordinate = st.floats(0.0, 0.875, width=32)
side = st.floats(0.0625, 1.0, width=32)


def test_decoding_is_the_originals() -> None:
    decoded = decode_boxes(GOLDEN["encoded"][ORDER])
    np.testing.assert_allclose(decoded, GOLDEN["decoded_yxyx"][ORDER], rtol=0, atol=1e-6)


def test_no_offset_is_the_default_box() -> None:
    np.testing.assert_allclose(decode_boxes(np.zeros((2, 8732, 4)))[1], default_boxes(), atol=1e-7)
    np.testing.assert_allclose(encode_boxes(default_boxes()), 0, atol=1e-5)


def test_offsets_by_hand() -> None:
    """One default box of 1/3 in the middle; twice as high, half as wide, and a tenth of its side further down."""
    box = [0.5 + 1 / 30 - 1 / 3, 0.5 - 1 / 12, 0.5 + 1 / 30 + 1 / 3, 0.5 + 1 / 12]
    expected = [1.0, 0.0, 5 * np.log(2), -5 * np.log(2)]
    np.testing.assert_allclose(encode_boxes([box, box], ONE), [expected] * 2, atol=1e-5)


@given(coordinate, coordinate, side, side)
def test_decoding_inverts_encoding(y: float, x: float, height: float, width: float) -> None:
    boxes = np.broadcast_to(np.array([y, x, y + height, x + width], np.float32), (2, 8732, 4))
    np.testing.assert_allclose(decode_boxes(encode_boxes(boxes)), boxes, atol=3e-6)
