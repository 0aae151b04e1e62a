from __future__ import annotations

import numpy as np

from gaudi_ops import reference


def test_softmax_cross_entropy_by_hand() -> None:
    logits = np.log([[[1.0, 2.0, 5.0], [1.0, 1.0, 2.0]]])
    np.testing.assert_allclose(reference.softmax_cross_entropy(logits, [[2, 0]]), -np.log([[5 / 8, 1 / 4]]), rtol=1e-6)


def test_softmax_cross_entropy_of_large_logits_is_finite() -> None:
    np.testing.assert_allclose(reference.softmax_cross_entropy([[1e4, -1e4]], [1]), [2e4])


def test_topk_mask_by_hand() -> None:
    values = [[3.0, 5.0, 5.0, -0.0, 0.0], [1.0, 1.0, 1.0, 1.0, np.inf]]
    expected = [[0, 1, 1, 0, 0], [1, 1, 0, 0, 1]]
    np.testing.assert_array_equal(reference.topk_mask(values, [2, 3]), np.array(expected, np.bool_))
    np.testing.assert_array_equal(reference.topk_mask(values, 4)[0], [True, True, True, True, False])


def test_huber_by_hand() -> None:
    np.testing.assert_allclose(reference.huber([-3, -1, 0.5, 2], delta=1.0), [2.5, 0.5, 0.125, 1.5])
    np.testing.assert_allclose(reference.huber([-3.0, 2.0], delta=2.0), [4, 2])


def test_ssd_loss_by_hand() -> None:
    """One positive, so 3 negatives count, of 4; all cross entropies are log 2 but the easy negative's."""
    logits = np.zeros((1, 5, 2))
    logits[0, 1, 0] = 10
    offsets = np.zeros((1, 5, 4))
    offsets[0, 2] = [0.5, 0, 0, 3]
    loss, class_loss, box_loss = reference.ssd_loss(logits, offsets, [[0, 0, 1, 0, 0]], np.zeros((1, 5, 4)), [2])
    np.testing.assert_allclose(class_loss, 4 * np.log(2) / 2, rtol=1e-6)
    np.testing.assert_allclose(box_loss, (0.125 + 2.5) / 2, rtol=1e-6)
    np.testing.assert_allclose(loss, class_loss + box_loss, rtol=1e-6)


def test_ssd_loss_without_positives_is_zero() -> None:
    zeros = np.zeros((2, 5, 4))
    losses = reference.ssd_loss(zeros, zeros + 1, np.zeros((2, 5), int), zeros, [0, 0])
    np.testing.assert_array_equal(losses, 0)
