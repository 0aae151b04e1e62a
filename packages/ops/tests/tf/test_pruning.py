from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from gaudi_ops import reference
from gaudi_ops.tf import MagnitudePruning, magnitude_mask

traced_mask = tf.function(magnitude_mask, input_signature=[tf.TensorSpec([None]), tf.TensorSpec([], tf.float64)])


def make_variables() -> list[tf.Variable]:
    generator = np.random.default_rng(0)
    return [
        tf.Variable(generator.normal(size=shape).astype(np.float32), name=name)
        for name, shape in (("conv/kernel", [3, 3, 2, 5]), ("dense/kernel", [7, 11]))
    ]


def share_of_zeros(variable: Any) -> float:
    return float(np.mean(variable.numpy() == 0))


def test_mask_by_hand() -> None:
    weights = [[-3.0, 0.5], [0.5, -0.5], [1.0, 0.0]]
    expected = {0.0: [1, 1, 1, 1, 1, 1], 0.5: [1, 1, 0, 0, 1, 0], 0.67: [1, 0, 0, 0, 1, 0], 1.0: [0] * 6}
    for sparsity, kept in expected.items():
        np.testing.assert_array_equal(magnitude_mask(weights, sparsity), np.reshape(kept, [3, 2]).astype(bool))


@pytest.mark.costly
def test_more_weights_than_float32_counts_are_pruned_exactly() -> None:
    weights = np.zeros(2**24 + 64, np.float32)
    weights[-3:] = -1
    mask = magnitude_mask(weights, 7 / weights.size).numpy()
    assert np.flatnonzero(~mask).tolist() == list(range(2**24 + 54, 2**24 + 61))


@pytest.mark.costly
@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.floats(0, 1))
def test_exactly_as_many_are_dropped_as_the_share_says(weights: list[int], sparsity: float) -> None:
    array = np.array(weights, np.float32)
    mask = traced_mask(array, tf.constant(sparsity, tf.float64)).numpy()
    assert mask.sum() == len(weights) - np.round(sparsity * len(weights))
    assert np.abs(array[mask]).min(initial=9) >= np.abs(array[~mask]).max(initial=0)
    np.testing.assert_array_equal(mask, reference.magnitude_mask(array, sparsity))


def test_sparsity_follows_the_polynomial() -> None:
    """From step 10 every 20 steps, last at 100: 1 - (1 - x) ** 3 of the way from .2 to .8."""
    pruning = MagnitudePruning(
        make_variables(), initial_sparsity=0.2, final_sparsity=0.8, begin_step=10, end_step=100, frequency=20
    )
    expected = {
        9: 0.0,
        10: 0.2,
        29: 0.2,
        30: 0.8 - 0.6 * (7 / 9) ** 3,
        99: 0.8 - 0.6 * (1 / 9) ** 3,
        100: 0.8,
        999: 0.8,
    }
    assert {step: pruning.sparsity(step) for step in expected} == pytest.approx(expected)


@pytest.mark.costly
@pytest.mark.parametrize("traced", [False, True])
def test_each_layer_has_the_share_of_zeros_and_keeps_it(traced: bool) -> None:
    variables = make_variables()
    pruning = MagnitudePruning(variables, final_sparsity=0.5, begin_step=3, end_step=12, frequency=4)
    update = tf.function(pruning.update) if traced else pruning.update
    for step in range(16):
        for variable in variables:
            variable.assign_add(tf.fill(variable.shape, 1e-4))  # what an optimizer does: nothing stays 0 by itself
        update(tf.constant(step))
        for variable in variables:
            size = int(tf.size(variable))
            assert share_of_zeros(variable) * size == pytest.approx(np.round(pruning.sparsity(step) * size))
    assert pruning.sparsity(15) == 0.5


def test_the_small_weights_go() -> None:
    variables = make_variables()
    before = [variable.numpy() for variable in variables]
    MagnitudePruning(variables, initial_sparsity=0.3).update(0)
    for variable, value in zip(variables, before, strict=True):
        mask = reference.magnitude_mask(value, 0.3)
        np.testing.assert_array_equal(variable, np.where(mask, value, 0))


def test_a_continued_training_prunes_as_one_that_was_not_stopped() -> None:
    whole, stopped = make_variables(), make_variables()
    first, second = (MagnitudePruning(each, end_step=8, frequency=4) for each in (whole, stopped))
    for step in range(7):
        first.update(step)
        second.update(step)
    third = MagnitudePruning(stopped, end_step=8, frequency=4)
    assert list(third.state()) == ["pruning/conv/kernel", "pruning/dense/kernel"]
    for name, mask in third.state().items():
        mask.assign(second.state()[name])
    for variable in (*whole, *stopped):
        variable.assign_add(tf.ones(variable.shape))
    first.update(7)
    third.update(7)
    for one, other in zip(whole, stopped, strict=True):
        np.testing.assert_array_equal(one, other)
        assert 0 < share_of_zeros(other) < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"final_sparsity": 1.0}, "final_sparsity is 1.0"),
        ({"initial_sparsity": -0.1}, "initial_sparsity is -0.1"),
        ({"begin_step": 5, "end_step": 5}, "begin_step is 5"),
        ({"frequency": 0}, "frequency 0"),
    ],
)
def test_what_makes_no_schedule_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MagnitudePruning(make_variables(), **arguments)


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="1 different names"):
        MagnitudePruning([tf.Variable([1.0], name="kernel")] * 2)
