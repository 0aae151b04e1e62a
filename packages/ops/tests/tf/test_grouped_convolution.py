from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_ops import reference
from gaudi_ops.tf import grouped_conv2d
from gaudi_ops.tf.grouped_convolution import _find_bundle, _gather, _has_grouped_kernels, _spread

FORMS: tuple[Literal["auto", "native", "split", "block_diagonal"], ...] = ("auto", "native", "split", "block_diagonal")
Form = Literal["auto", "native", "split", "block_diagonal"]
Padding = Literal["SAME", "VALID"] | tuple[tuple[int, int], tuple[int, int]]
Array = npt.NDArray[Any]

needs_grouped_kernels = pytest.mark.skipif(
    not _has_grouped_kernels(tf.float32), reason="TensorFlow has no grouped kernels for this processor"
)


def make_arrays(groups: int, size: tuple[int, int], channels: int = 2, kernel: int = 3) -> tuple[Array, Array]:
    generator = np.random.default_rng(groups)
    inputs = generator.normal(size=[2, *size, groups * channels]).astype(np.float32)
    filters = generator.normal(size=[kernel, kernel, channels, groups * 3]) / kernel
    return inputs, filters.astype(np.float32)


def expect(
    inputs: Array, filters: Array, groups: int, strides: tuple[int, int], padding: Padding
) -> tuple[Array, Array, Array, Array]:
    """Result, a gradient of it, and the gradients by inputs and by filters that follow, of the reference.

    The result is linear in each argument, so its gradient is that of a product with each unit, group by group.
    """
    size, kernel = inputs.shape[1:3], filters.shape[:2]
    pads: Any = {"SAME": reference.same_pads((size[0], size[1]), (kernel[0], kernel[1]), strides)}.get(
        str(padding), ((0, 0), (0, 0)) if padding == "VALID" else padding
    )
    result = reference.grouped_conv2d(inputs, filters, groups, strides, pads)
    upstream = np.random.default_rng(0).normal(size=result.shape)
    by_inputs = np.zeros_like(np.pad(inputs, [(0, 0), *pads, (0, 0)]), np.float64)
    by_filters = np.zeros_like(filters, np.float64)
    padded = np.pad(inputs, [(0, 0), *pads, (0, 0)])
    channels, outputs = filters.shape[2], filters.shape[3] // groups
    for row, column, group in np.ndindex(result.shape[1], result.shape[2], groups):
        y, x = row * strides[0], column * strides[1]
        window = np.s_[:, y : y + kernel[0], x : x + kernel[1], group * channels : (group + 1) * channels]
        of_group = np.s_[..., group * outputs : (group + 1) * outputs]
        slope = upstream[:, row, column][of_group]
        by_inputs[window] += np.einsum("no,hwio->nhwi", slope, filters[of_group])
        by_filters[of_group] += np.einsum("no,nhwi->hwio", slope, padded[window])
    (top, bottom), (left, right) = pads
    by_inputs = by_inputs[:, top : by_inputs.shape[1] - bottom, left : by_inputs.shape[2] - right]
    return result, upstream, by_inputs, by_filters


def compute(arrays: tuple[Array, Array], upstream: Array, dtype: Any = tf.float32, **arguments: Any) -> list[Array]:
    """Result and both gradients, as float32, of one traced call with an unknown batch size."""
    inputs, filters = (tf.cast(array, dtype) for array in arrays)
    unknown = tf.TensorSpec([None, *inputs.shape[1:]], dtype)

    @tf.function(input_signature=[unknown, tf.TensorSpec(filters.shape, dtype), tf.TensorSpec(None, dtype)])
    def differentiate(inputs: Any, filters: Any, upstream: Any) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            tape.watch([inputs, filters])
            result = grouped_conv2d(inputs, filters, **arguments)
        return (result, *tape.gradient(result, [inputs, filters], upstream))

    return [np.array(tf.cast(each, tf.float32)) for each in differentiate(inputs, filters, tf.cast(upstream, dtype))]


@needs_grouped_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("groups", [1, 2, 8, 32])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 1), (1, 1)), ((0, 2), (1, 0))])
def test_values_and_gradients_are_the_references(
    groups: int, strides: tuple[int, int], padding: Padding, form: Form
) -> None:
    arrays = make_arrays(groups, (7, 5))
    result, upstream, by_inputs, by_filters = expect(*arrays, groups, strides, padding)
    found = compute(arrays, upstream, groups=groups, strides=strides, padding=padding, implementation=form)
    for one, other in zip(found, (result, by_inputs, by_filters), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kernel", "size"), [(1, (4, 4)), (2, (5, 4)), (5, (6, 7))])
def test_other_kernels_and_even_sizes(kernel: int, size: tuple[int, int], form: Form) -> None:
    arrays = make_arrays(4, size, channels=3, kernel=kernel)
    expected = expect(*arrays, 4, (2, 2), "SAME")[0]
    np.testing.assert_allclose(grouped_conv2d(*arrays, 4, 2, "SAME", form), expected, rtol=1e-5, atol=1e-5)


@needs_grouped_kernels
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form: Form) -> None:
    inputs, filters = (np.array(tf.cast(tf.cast(a, tf.bfloat16), tf.float32)) for a in make_arrays(32, (5, 6)))
    result, upstream, by_inputs, by_filters = expect(inputs, filters, 32, (1, 1), "SAME")
    found = compute((inputs, filters), upstream, tf.bfloat16, groups=32, implementation=form)
    for one, other in zip(found, (result, by_inputs, by_filters), strict=True):
        np.testing.assert_allclose(one, other, atol=0.02 * np.abs(other).max())


def test_float32_filters_are_used_in_the_dtype_of_the_inputs() -> None:
    inputs, filters = make_arrays(4, (3, 3))
    filters_variable = tf.Variable(filters)
    with tf.GradientTape() as tape:
        result = grouped_conv2d(tf.cast(inputs, tf.bfloat16), filters_variable, 4)
    assert result.dtype == tf.bfloat16
    assert tape.gradient(result, filters_variable).dtype == tf.float32


@needs_grouped_kernels
def test_the_gradient_has_a_gradient() -> None:
    inputs, filters = (tf.constant(array) for array in make_arrays(8, (4, 5)))
    found = []
    for form in ("auto", "split"):
        with tf.GradientTape() as outer:
            outer.watch(filters)
            with tf.GradientTape() as inner:
                inner.watch(inputs)
                loss = tf.reduce_sum(grouped_conv2d(inputs, filters, 8, implementation=form) ** 2)
            size = tf.reduce_sum(inner.gradient(loss, inputs) ** 2)
        found.append(outer.gradient(size, filters))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-3)


def count_convolutions(form: Form, groups: int = 32, channels: int = 4) -> int:
    inputs, filters = make_arrays(groups, (3, 3), channels)
    graph = tf.function(lambda inputs, filters: grouped_conv2d(inputs, filters, groups, implementation=form))
    return [op.type for op in graph.get_concrete_function(inputs, filters).graph.get_operations()].count("Conv2D")


def test_forms_are_what_they_say() -> None:
    assert [count_convolutions(form) for form in ("native", "split", "block_diagonal")] == [1, 32, 4]
    assert count_convolutions("block_diagonal", groups=3, channels=24) == 3


@pytest.mark.parametrize(
    ("devices", "kernels", "convolutions"), [("CPU", True, 1), ("CPU", False, 4), ("GPU", True, 1), ("HPU", True, 4)]
)
def test_auto_chooses_by_device(
    devices: str, kernels: bool, convolutions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind] if kind == devices else [])
    monkeypatch.setattr("gaudi_ops.tf.grouped_convolution._has_grouped_kernels", lambda dtype: kernels)
    assert count_convolutions("auto") == convolutions


def test_auto_has_gradients_without_grouped_kernels() -> None:
    code = """
import tensorflow as tf
from gaudi_ops.tf.grouped_convolution import _has_grouped_kernels, grouped_conv2d
filters = tf.Variable(tf.ones([1, 1, 2, 4]))
with tf.GradientTape() as tape:
    result = tf.function(grouped_conv2d)(tf.ones([1, 2, 3, 4]), filters, 2)
print(_has_grouped_kernels(tf.float32), tape.gradient(result, filters).numpy().ravel().tolist())
"""
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert done.stdout.strip() == "False [6.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0]", done.stderr


@pytest.mark.parametrize(("groups", "channels", "limit", "bundle"), [(32, 4, 16, 4), (32, 16, 8, 1), (6, 4, 16, 3)])
def test_bundles(groups: int, channels: int, limit: int, bundle: int) -> None:
    assert _find_bundle(groups, channels, limit) == bundle
    filters = tf.random.stateless_normal([3, 1, channels, groups * 2], [0, 1])
    dense = _spread(filters, groups, bundle)
    assert dense.shape == [3, 1, channels * bundle, groups * 2]
    assert np.count_nonzero(dense) == np.size(filters)
    np.testing.assert_array_equal(_gather(dense, groups, bundle), filters)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "groups is 3 with inputs"),
        ({"groups": 0}, "groups is 0 with inputs"),
        ({"groups": 2}, r"filters must have c_in / groups inputs"),
        ({"groups": 4, "strides": 0}, "strides is 0"),
        ({"groups": 4, "strides": (1, 2, 1)}, r"strides is \(1, 2, 1\)"),
        ({"groups": 4, "padding": "same"}, "padding is 'same'; use SAME, VALID or"),
        ({"groups": 4, "padding": ((1, 1),)}, r"padding is \(\(1, 1\),\)"),
        (
            {"groups": 4, "implementation": "fast"},
            "implementation is 'fast'; use one of auto, native, split, ",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_conv2d(*make_arrays(4, (3, 3)), **arguments)
