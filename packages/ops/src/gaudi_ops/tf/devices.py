"""What device the operations are made for, where they have a form of their own for it."""

from __future__ import annotations

import tensorflow as tf


def has_hpu() -> bool:
    """Whether TensorFlow has a device of type HPU: a Gaudi, made known by its vendor's module."""
    return bool(tf.config.list_logical_devices("HPU"))
