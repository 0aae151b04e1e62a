"""Exponential moving averages of the weights, to be evaluated and deployed in place of the last weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

NAME = "average"
UPDATES = f"{NAME}/updates"


class ExponentialMovingAverage:
    """Exponential moving averages of variables.

    ``average += (1 - d) (variable - average)`` with ``d = min(decay, (1 + n) / (10 + n))`` after n updates: the first
    averages forget the initial values quickly, whatever the decay.
    Source: ``num_updates`` of tf.train.ExponentialMovingAverage.

    Give it all variables of a model, so that statistics of batch norm are averaged with the weights that they are of.

    Args:
        variables: of any floating dtype, with names that differ.
        decay: share of the average that is kept in an update, above 0 and below 1, such as 0.9998.

    Raises:
        ValueError: the decay is out of range, or two variables have one name.
    """

    def __init__(self, variables: Sequence[Any], decay: float) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay is {decay}; it must be above 0 and below 1")
        self._variables = {variable.name.removesuffix(":0"): variable for variable in variables}
        if len(self._variables) < len(variables):
            raise ValueError(
                f"variables: {len(variables)} with {len(self._variables)} different names; give each its own"
            )
        self._decay = decay
        self._updates = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._averages = {
            name: tf.Variable(tf.identity(variable), trainable=False) for name, variable in self._variables.items()
        }

    def update(self) -> None:
        """Move the averages towards the variables: once a step, after the optimizer; eagerly or in a tf.function."""
        count = tf.cast(self._updates, tf.float32)
        share = 1 - tf.minimum(self._decay, (1 + count) / (10 + count))
        for name, variable in self._variables.items():
            average = self._averages[name]
            average.assign_add(tf.cast(share, average.dtype) * (variable - average))
        self._updates.assign_add(1)

    def reset(self) -> None:
        """Begin anew from the present variables, after weights were loaded."""
        for name, average in self._averages.items():
            average.assign(self._variables[name])
        self._updates.assign(0)

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the variables hold the averages within the context; then restore them, bit for bit."""
        kept = {name: tf.identity(variable) for name, variable in self._variables.items()}
        try:
            for name, variable in self._variables.items():
                variable.assign(self._averages[name])
            yield
        finally:
            for name, variable in self._variables.items():
                variable.assign(kept[name])

    def state(self) -> dict[str, Any]:
        """Return the variables for a checkpoint by name: ``average/<variable>``, and ``average/updates``."""
        return {UPDATES: self._updates} | {f"{NAME}/{name}": average for name, average in self._averages.items()}
