"""A process that measures one choice of TensorFlow's threads: `python -m gaudi_apps.thread_trial INTRA INTER DTYPE`.

TensorFlow takes the numbers once in a process, so each choice has a process of its own. It prints seconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

# A layer of a residual network at the size that both the detector and the classifiers have.
BATCH, SIDE, CHANNELS = 8, 56, 64
LAYERS, WARM_UPS, REPEATS = 4, 2, 7


def measure(intra: int, inter: int, dtype: str) -> float:
    """The median of the seconds that convolutions with batch norm take, forward and backward."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    images = tf.random.stateless_normal([BATCH, SIDE, SIDE, CHANNELS], [0, 0])
    filters = [
        tf.Variable(tf.random.stateless_normal([3, 3, CHANNELS, CHANNELS], [0, i]) / 24) for i in range(2 * LAYERS)
    ]

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            branches = [_stack_layers(tf.cast(images, dtype), part) for part in (filters[:LAYERS], filters[LAYERS:])]
            loss = tf.reduce_mean(tf.add_n([tf.cast(each, tf.float32) for each in branches]))
        for variable, gradient in zip(filters, tape.gradient(loss, filters), strict=True):
            variable.assign_sub(0.0 * gradient)
        return loss

    return statistics.median([_time(step) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:])


def _stack_layers(x: Any, filters: list[Any]) -> Any:
    import tensorflow as tf

    ones, zeros = tf.ones([CHANNELS]), tf.zeros([CHANNELS])
    for each in filters:
        x = tf.nn.conv2d(x, tf.cast(each, x.dtype), 1, "SAME")
        x = tf.nn.relu(tf.compat.v1.nn.fused_batch_norm(x, ones, zeros)[0])
    return x


def _time(step: Any) -> float:
    begun = time.perf_counter()
    step().numpy()
    return time.perf_counter() - begun


if __name__ == "__main__":
    print(measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
