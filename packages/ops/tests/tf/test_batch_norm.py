from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_ops import reference
from gaudi_ops.tf import synchronized_batch_norm

EPSILON = 1e-3


class Devices:
    """Threads that play devices; `reduce` sums over them, as real ones do, and waits for all."""

    def __init__(self, count: int) -> None:
        self._barrier = Barrier(count, timeout=600)
        self._sent: list[list[Any]] = [[]] * count

    def reduce(self, device: int, tensors: Sequence[Any]) -> list[Any]:
        self._sent[device] = list(tensors)
        self._barrier.wait()
        sums = [tf.add_n(list(same)) for same in zip(*self._sent, strict=True)]
        self._barrier.wait()
        return sums


def make(seed: int, *shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0.5, 2.0, shape).astype(np.float32)


def normalize(
    parts: list[npt.NDArray[np.float32]], gamma: Any, beta: Any, upstreams: list[Any], dtype: Any = tf.float32
) -> list[Any]:
    """Return (outputs, mean, variance, gradients of inputs, gamma and beta) of each device."""
    devices = Devices(len(parts))

    def run(device: int) -> tuple[Any, ...]:
        sources = (tf.constant(parts[device], dtype), tf.constant(gamma), tf.constant(beta))
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs, mean, variance = synchronized_batch_norm(
                *sources, EPSILON, lambda tensors: devices.reduce(device, tensors)
            )
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32) * upstreams[device])
        return outputs, mean, variance, *tape.gradient(loss, sources)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


@pytest.mark.parametrize("rows", [(3,), (2, 2), (4, 1, 3)])
def test_values_and_gradients_are_those_of_all_images_together(rows: tuple[int, ...]) -> None:
    parts = [make(i, count, 5, 4, 3) for i, count in enumerate(rows)]
    upstreams = [make(10 + i, *part.shape) for i, part in enumerate(parts)]
    gamma, beta = make(20, 3), make(21, 3)
    found = normalize(parts, gamma, beta, upstreams)
    together, upstream = np.concatenate(parts), np.concatenate(upstreams)
    outputs, mean, variance = reference.batch_norm(together, gamma, beta, EPSILON)
    np.testing.assert_allclose(np.concatenate([each[0] for each in found]), outputs, rtol=1e-4, atol=1e-5)
    for each in found:
        np.testing.assert_allclose(each[1], mean, rtol=1e-5)
        np.testing.assert_allclose(each[2], variance, rtol=1e-5)
    inner = reference.batch_norm_gradient(together, gamma, upstream, EPSILON)
    np.testing.assert_allclose(np.concatenate([each[3] for each in found]), inner, rtol=1e-3, atol=1e-5)
    normalized = (outputs - beta) / gamma
    starts = np.cumsum((0, *rows))
    for start, end, each, mine in zip(starts, starts[1:], found, upstreams, strict=False):
        np.testing.assert_allclose(each[4], (mine * normalized[start:end]).sum((0, 1, 2)), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(each[5], mine.sum((0, 1, 2)), rtol=1e-4, atol=1e-5)


def test_reference_gradient_is_the_slope() -> None:
    inputs, upstream, gamma = (make(i, 2, 3, 2).astype(np.float64) for i in (1, 2, 3))
    gamma, step = gamma[0, 0], 1e-6
    slopes = np.zeros_like(inputs)
    for index in np.ndindex(inputs.shape):
        shift = np.zeros_like(inputs)
        shift[index] = step
        above, below = (reference.batch_norm(inputs + s * shift, gamma, 0.0, EPSILON)[0] for s in (1, -1))
        slopes[index] = (upstream * (above - below)).sum() / (2 * step)
    np.testing.assert_allclose(reference.batch_norm_gradient(inputs, gamma, upstream, EPSILON), slopes, rtol=1e-5)


def test_one_device_is_the_fused_kernel() -> None:
    inputs, gamma, beta = make(1, 2, 4, 4, 3), make(2, 3), make(3, 3)
    ours = synchronized_batch_norm(inputs, gamma, beta, EPSILON, list)
    fused = tf.compat.v1.nn.fused_batch_norm(inputs, gamma, beta, epsilon=EPSILON, is_training=True)
    for mine, theirs in zip(ours, fused, strict=False):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_bfloat16_inputs_have_float32_statistics() -> None:
    parts = [np.asarray(tf.cast(make(i, 4, 3, 3, 2), tf.bfloat16)).astype(np.float32) for i in (1, 2)]
    ones, zeros = np.ones(2, np.float32), np.zeros(2, np.float32)
    upstreams = [make(i, *parts[0].shape) for i in (3, 4)]
    found = normalize(parts, ones, zeros, upstreams, tf.bfloat16)
    _, mean, variance = reference.batch_norm(np.concatenate(parts), ones, zeros, EPSILON)
    assert [value.dtype for value in found[0]] == [tf.bfloat16, *[tf.float32] * 2, tf.bfloat16, *[tf.float32] * 2]
    np.testing.assert_allclose(found[0][1], mean, rtol=1e-5)
    np.testing.assert_allclose(found[0][2], variance, rtol=1e-5)


def test_a_channel_of_one_value_is_finite() -> None:
    inputs = np.full([2, 3, 3, 1], 1000.1, np.float32)
    ((outputs, _, variance, inner, _, _),) = normalize(
        [inputs], np.ones(1, "f4"), np.ones(1, "f4"), [np.ones_like(inputs)]
    )
    assert np.isfinite([*np.ravel(outputs), *np.ravel(inner)]).all()
    assert variance.numpy().tolist() == [pytest.approx(0.0, abs=1.0)]


def test_it_runs_in_a_graph_of_unknown_batch_size() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 4, 4, 3])])
    def loss(images: Any) -> Any:
        outputs, _, _ = synchronized_batch_norm(images, tf.ones(3), tf.zeros(3), EPSILON, list)
        return tf.gradients(tf.reduce_sum(outputs**3), [images])[0]

    images = make(1, 3, 4, 4, 3)
    outputs, _, _ = reference.batch_norm(images, np.ones(3), 0.0, EPSILON)
    expected = reference.batch_norm_gradient(images, np.ones(3), 3 * outputs**2, EPSILON)
    np.testing.assert_allclose(loss(images), expected, rtol=1e-3, atol=1e-4)
