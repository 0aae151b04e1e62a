"""On what a model is trained, for the few layers that compute the same in another way there."""

from __future__ import annotations

import functools
from typing import Any


def trains_in_bfloat16_on_cpu(layer: Any) -> bool:
    """Whether a Keras layer computes in bfloat16, in a process that has no device but the CPU."""
    return layer.compute_dtype == "bfloat16" and _has_cpu_only()


@functools.cache
def _has_cpu_only() -> bool:
    import tensorflow as tf

    return {device.device_type for device in tf.config.list_logical_devices()} <= {"CPU"}
