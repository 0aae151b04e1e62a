from __future__ import annotations

from typing import Any

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


def test_smoothed_softmax_cross_entropy_by_hand() -> None:
    logits = np.log([[1.0, 2.0, 5.0]])
    expected = -(0.1 * np.log(1 / 8) + 0.1 * np.log(2 / 8) + 0.8 * np.log(5 / 8))
    np.testing.assert_allclose(
        reference.smoothed_softmax_cross_entropy(logits, [[0, 0, 1]], 0.3), [expected], rtol=1e-6
    )


def test_topk_hits_by_hand() -> None:
    logits = [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]
    np.testing.assert_array_equal(reference.topk_hits(logits, [1, 2], 1), [True, False])
    np.testing.assert_array_equal(reference.topk_hits(logits, [1, 2], 2), [True, True])


def test_magnitude_mask_by_hand() -> None:
    np.testing.assert_array_equal(reference.magnitude_mask([[1, -2], [-1, 0]], 0.5), [[True, True], [False, False]])


def test_lars_step_by_hand() -> None:
    """|w| 5, |g| 10: the ratio is .1 * 5 / (10 + .5 * 5), .04."""
    constants: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.5, "eeta": 0.1, "epsilon": 0.0}
    weights, velocity = reference.lars_step([3, 4], [1, 0], [6, 8], 0.5, **constants)
    np.testing.assert_allclose(velocity, [0.5 - 0.5 * 0.04 * 7.5, -0.5 * 0.04 * 10])
    np.testing.assert_allclose(weights, [3 + velocity[0], 4 + velocity[1]])
    weights, _ = reference.lars_step([3, 4], [1, 0], [6, 8], 0.5, skipped=True, **constants)
    np.testing.assert_allclose(weights, [3 + 0.5 - 3, 4 - 4])


def test_lars_step_without_a_norm_has_ratio_one() -> None:
    np.testing.assert_allclose(reference.lars_step([0.0], [0.0], [2.0], 0.5)[0], [-1.0])
    np.testing.assert_allclose(reference.lars_step([2.0], [0.0], [0.0], 0.5, weight_decay=0.5)[0], [1.5])


def test_grouped_conv2d_by_hand() -> None:
    """Two groups of one channel, a 1x2 kernel, stride 2 in the columns, a column of zeros on the right."""
    inputs = [[[[1, 10], [2, 20], [3, 30]]]]
    filters = [[[[1, 5]], [[2, 7]]]]
    found = reference.grouped_conv2d(inputs, filters, 2, (1, 2), ((0, 0), (0, 1)))
    np.testing.assert_array_equal(found, [[[[1 + 4, 50 + 140], [3, 150]]]])


def test_same_pads_by_hand() -> None:
    assert reference.same_pads((5, 6), (3, 3), (1, 1)) == ((1, 1), (1, 1))
    assert reference.same_pads((5, 6), (3, 3), (2, 2)) == ((1, 1), (0, 1))
    assert reference.same_pads((4, 7), (1, 2), (2, 1)) == ((0, 0), (0, 1))
