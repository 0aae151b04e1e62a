from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

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


def test_images_of_a_batch_have_losses_of_their_own() -> None:
    logits = np.log([[1.0, 2.0, 5.0], [6.0, 1.0, 1.0], [1.0, 1.0, 2.0]])
    labels = np.array([[0, 0, 1], [0.5, 0.5, 0], [1, 0, 0]])
    alone = [
        reference.smoothed_softmax_cross_entropy([row], [one], 0.1).item()
        for row, one in zip(logits, labels, strict=True)
    ]
    np.testing.assert_allclose(reference.smoothed_softmax_cross_entropy(logits, labels, 0.1), alone)
    np.testing.assert_allclose(alone[1], -(0.45 + 0.1 / 3) * np.log(6 / 8 * 1 / 8) - 0.1 / 3 * np.log(1 / 8), rtol=1e-6)


def test_topk_hits_by_hand() -> None:
    logits = [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]
    np.testing.assert_array_equal(reference.in_top_k(logits, [1, 2], 1), [True, False])
    np.testing.assert_array_equal(reference.in_top_k(logits, [1, 2], 2), [True, True])


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


def test_lars_step_has_the_constants_of_the_recipe() -> None:
    ratio = 0.001 * 5 / (10 + 1e-4 * 5 + 1e-7)
    _, velocity = reference.lars_step([3, 4], [1, 0], [6, 8], 0.5)
    np.testing.assert_allclose(velocity, [0.9 - 0.5 * ratio * (6 + 3e-4), -0.5 * ratio * (8 + 4e-4)], rtol=1e-12)


def test_lars_step_without_a_norm_has_ratio_one() -> None:
    np.testing.assert_allclose(reference.lars_step([0.0], [0.0], [2.0], 0.5)[0], [-1.0])
    np.testing.assert_allclose(reference.lars_step([2.0], [0.0], [0.0], 0.5, weight_decay=0.5)[0], [1.5])


def test_grouped_conv2d_by_hand() -> None:
    """Two groups of one channel, a 1x2 kernel, stride 2 in the columns, a column of zeros on the right."""
    inputs = [[[[1, 10], [2, 20], [3, 30]]]]
    filters = [[[[1, 5]], [[2, 7]]]]
    found = reference.grouped_conv2d(inputs, filters, 2, (1, 2), ((0, 0), (0, 1)))
    np.testing.assert_array_equal(found, [[[[1 + 4, 50 + 140], [3, 150]]]])


@pytest.mark.parametrize("dilations", [(1, 1), (2, 3)])
def test_grouped_conv2d_is_the_sum_over_its_windows(dilations: tuple[int, int]) -> None:
    """Each output is written out, with strides that differ and windows that end before the image does."""
    generator = np.random.default_rng(0)
    inputs, filters = generator.normal(size=(2, 9, 10, 4)), generator.normal(size=(3, 2, 2, 6))
    found = reference.grouped_conv2d(inputs, filters, 2, (3, 2), ((1, 0), (0, 1)), dilations)
    padded = np.pad(inputs, [(0, 0), (1, 0), (0, 1), (0, 0)])
    down, right = dilations
    assert found.shape == (2, (10 - 2 * down - 1) // 3 + 1, (11 - right - 1) // 2 + 1, 6)
    for image, row, column, output in np.ndindex(found.shape):
        group = slice(0, 2) if output < 3 else slice(2, 4)
        window = padded[image, 3 * row :: down, 2 * column :: right, group][:3, :2]
        np.testing.assert_allclose(found[image, row, column, output], (window * filters[..., output]).sum())


def test_labels_of_no_class_have_no_loss() -> None:
    losses = reference.softmax_cross_entropy(np.zeros((4, 3)), [-1, 0, 2, 3])
    np.testing.assert_allclose(losses, [np.nan, np.log(3), np.log(3), np.nan], rtol=1e-6)


def test_topk_mask_takes_integers_and_counts_nan_as_the_largest() -> None:
    lowest = np.iinfo(np.int64).min  # which has no negative as an integer
    np.testing.assert_array_equal(reference.topk_mask(np.array([[lowest, 3, 2]]), 2), [[False, True, True]])
    np.testing.assert_array_equal(reference.topk_mask(np.array([[False, True, True]]), 1), [[False, True, False]])
    np.testing.assert_array_equal(reference.topk_mask([[5.0, np.nan, 7.0]], 2), [[False, True, True]])


def test_same_pads_by_hand() -> None:
    assert reference.same_pads((5, 6), (3, 3), (1, 1)) == ((1, 1), (1, 1))
    assert reference.same_pads((5, 6), (3, 3), (2, 2)) == ((1, 1), (0, 1))
    assert reference.same_pads((4, 7), (1, 2), (2, 1)) == ((0, 0), (0, 1))


def test_batch_norm_by_hand() -> None:
    """One channel is 1, 3, 5, 7: mean 4, variance 5; the moving one is of the sample, 20 / 3. The other is constant."""
    inputs = np.array([[[[1, 2]], [[3, 2]]], [[[5, 2]], [[7, 2]]]])
    outputs, mean, variance = reference.batch_norm(inputs, [2.0, 3.0], [0.5, 0.25], epsilon=4.0)
    np.testing.assert_allclose(mean, [4, 2])
    np.testing.assert_allclose(variance, [20 / 3, 0])
    np.testing.assert_allclose(outputs[..., 0].ravel(), 2 * np.array([-3, -1, 1, 3]) / 3 + 0.5)
    np.testing.assert_allclose(outputs[..., 1], 0.25)


def test_batch_norm_of_one_value_has_no_sample_to_correct_for() -> None:
    outputs, mean, variance = reference.batch_norm([[3.0]], [2.0], [1.0], epsilon=1e-3)
    np.testing.assert_array_equal([outputs.item(), mean.item(), variance.item()], [1, 3, 0])


def test_batch_norm_gradient_is_that_of_differences() -> None:
    generator = np.random.default_rng(0)
    inputs, upstream = generator.normal(1, 2, (2, 2, 2, 3)), generator.normal(size=(2, 2, 2, 3))
    gamma, epsilon = np.array([0.5, 1.0, 2.0]), 0.3

    def loss(values: npt.NDArray[np.float64]) -> float:
        return float((upstream * reference.batch_norm(values, gamma, np.zeros(3), epsilon)[0]).sum())

    steps = 1e-5 * np.eye(inputs.size).reshape(-1, *inputs.shape)
    expected = [(loss(inputs + step) - loss(inputs - step)) / 2e-5 for step in steps]
    found = reference.batch_norm_gradient(inputs, gamma, upstream, epsilon)
    np.testing.assert_allclose(found, np.reshape(expected, inputs.shape), atol=1e-8)
