"""Weight decay as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gaudi_ops.tf.optimizers import is_named

NORMALIZATIONS = ("batch_normalization", "bn")


def l2_loss(variables: Sequence[Any], skip: Sequence[str] = NORMALIZATIONS) -> Any:
    """Half the sum of squares of all variables, by one operation over their concatenation.

    One large operation in place of one for each variable: for devices where starting an operation is what costs. On a
    CPU the weight decay of the optimizer is cheaper.

    Args:
        variables: such as a model's trainable ones.
        skip: variables with one of these in their name don't count; by default those of batch norm.

    Returns:
        float32 scalar; the caller multiplies it by the weight decay. 0 without variables.
    """
    counted = [
        tf.reshape(tf.cast(variable, tf.float32), [-1]) for variable in variables if not is_named(variable, skip)
    ]
    return tf.nn.l2_loss(tf.concat([*counted, tf.zeros([0])], axis=0))
