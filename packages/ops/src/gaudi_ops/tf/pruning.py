"""Pruning by magnitude: the smallest weights of each layer become 0 and stay so, more of them as training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gaudi_ops import schedules
from gaudi_ops.tf.masks import topk_mask
from gaudi_ops.tf.optimizers import TENSORS, name_variables

NAME = "pruning"
POWER = 3.0


def magnitude_mask(weights: Any, sparsity: Any) -> Any:
    """Mask the weights that are kept.

    Args:
        weights: float32 or bfloat16, of any shape; of a static one if they may be more than 2^24.
        sparsity: share of the weights that are dropped, scalar from 0 to 1; their number is rounded, halves to even.

    Returns:
        bool of the shape of the weights, False for exactly that many of the smallest absolute values; of equal ones
        those of the higher index are dropped.
    """
    weights = tf.convert_to_tensor(weights)
    size = tf.size(weights)
    dropped = tf.cast(tf.round(tf.cast(sparsity, tf.float64) * tf.cast(size, tf.float64)), tf.int32)
    return tf.reshape(topk_mask(tf.reshape(tf.abs(weights), [-1]), size - dropped), tf.shape(weights))


class MagnitudePruning:
    """Prune variables on the polynomial schedule of Zhu and Gupta, https://arxiv.org/abs/1710.01878, equation 1.

    From ``begin_step`` on, every ``frequency`` steps, and last at ``end_step``, the dropped weights are chosen anew: of
    each variable the share ``final + (initial - final) (1 - (step - begin) / (end - begin)) ** 3``.

    Args:
        variables: kernels, of names that differ; biases and batch norm had better be left out.
        initial_sparsity: share that is dropped at ``begin_step``.
        final_sparsity: share that is dropped from ``end_step`` on.
        begin_step: the first step that drops.
        end_step: the last step that does, whatever the frequency.
        frequency: steps from one choice to the next.

    Raises:
        ValueError: a sparsity is not from 0 to below 1, the steps don't rise, the frequency is below 1, or two
            variables have one name.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        *,
        initial_sparsity: float = 0.0,
        final_sparsity: float = 0.5,
        begin_step: int = 0,
        end_step: int = 100000,
        frequency: int = 100,
    ) -> None:
        for name, value in (("initial_sparsity", initial_sparsity), ("final_sparsity", final_sparsity)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 0 and below 1")
        if not 0 <= begin_step < end_step or frequency < 1:
            raise ValueError(
                f"begin_step is {begin_step}, end_step {end_step}, frequency {frequency}; the steps must rise from 0 "
                f"on, and the frequency be 1 or more"
            )
        self._variables = name_variables(variables)
        self._begin_step, self._end_step, self._frequency = begin_step, end_step, frequency
        self._schedule = schedules.polynomial(
            initial_sparsity, end_step - begin_step, final_sparsity, power=POWER, first_step=begin_step
        )
        self._masks = {
            name: tf.Variable(tf.ones(variable.shape, tf.bool), trainable=False)
            for name, variable in self._variables.items()
        }

    def sparsity(self, step: int) -> float:
        """Return the share that is dropped after a step."""
        if step < self._begin_step:
            return 0.0
        chosen = step - (step - self._begin_step) % self._frequency
        sparsity: float = self._schedule(chosen if step < self._end_step else self._end_step)
        return sparsity

    def update(self, step: Any) -> None:
        """Choose the dropped weights if the step is one that does, and set dropped weights to 0.

        Call it after the optimizer, each step, eagerly or in a tf.function.

        Args:
            step: integer scalar, from 0, the number of the step that was just taken.
        """
        step = tf.cast(step, tf.int64)
        since = step - self._begin_step
        regular = (since >= 0) & (step < self._end_step) & tf.equal(since % self._frequency, 0)
        due = regular | tf.equal(step, self._end_step)
        tf.cond(due, lambda: self._choose(step), lambda: None)
        for name, variable in self._variables.items():
            variable.assign(tf.where(self._masks[name], variable, tf.zeros_like(variable)))

    def state(self) -> dict[str, Any]:
        """Return the variables for a checkpoint by name: ``pruning/<variable>``, bool, True where kept."""
        return {f"{NAME}/{name}": mask for name, mask in self._masks.items()}

    def _choose(self, step: Any) -> None:
        # Not rounded to float32, so that the count is that of `sparsity`.
        sparsity = self._schedule(tf.cast(step, tf.float64), TENSORS)
        for name, variable in self._variables.items():
            self._masks[name].assign(magnitude_mask(variable, sparsity))
