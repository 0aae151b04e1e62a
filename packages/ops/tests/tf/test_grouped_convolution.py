from __future__ import annotations

import functools
import os
import subprocess
import sys
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_ops import reference
from gaudi_ops.tf import GroupedConv2D, grouped_conv2d
from gaudi_ops.tf.convolution import _find_bundle, _gather, _has_kernels, _spread
from gaudi_ops.tf.keras_api import keras

FORMS: tuple[Literal["auto", "native", "split", "block_diagonal"], ...] = ("auto", "native", "split", "block_diagonal")
Form = Literal["auto", "native", "split", "block_diagonal"]
Padding = Literal["SAME", "VALID"] | tuple[tuple[int, int], tuple[int, int]]
Array = npt.NDArray[Any]

needs_grouped_kernels = pytest.mark.skipif(
    not _has_kernels(tf.float32, groups=2), reason="TensorFlow has no grouped kernels for this processor"
)


def make_arrays(groups: int, size: tuple[int, int], channels: int = 2, kernel: int = 3) -> tuple[Array, Array]:
    generator = np.random.default_rng(groups)
    inputs = generator.normal(size=[2, *size, groups * channels]).astype(np.float32)
    filters = generator.normal(size=[kernel, kernel, channels, groups * 3]) / kernel
    return inputs, filters.astype(np.float32)


def expect(
    inputs: Array, filters: Array, groups: int, strides: tuple[int, int], padding: Padding
) -> tuple[Array, Array, Array, Array]:
    """Return the reference's result, a gradient of it, and the gradients by inputs and filters that follow.

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
    # Views with an axis of the groups, into which is added.
    by_group, padded = (array.reshape(*array.shape[:3], groups, channels) for array in (by_inputs, padded))
    by_filter, weights = (array.reshape(*array.shape[:3], groups, outputs) for array in (by_filters, filters))
    for row, column in np.ndindex(result.shape[1], result.shape[2]):
        y, x = row * strides[0], column * strides[1]
        window = np.s_[:, y : y + kernel[0], x : x + kernel[1]]
        slope = upstream[:, row, column].reshape(-1, groups, outputs)
        by_group[window] += np.einsum("ngo,hwigo->nhwgi", slope, weights)
        by_filter += np.einsum("ngo,nhwgi->hwigo", slope, padded[window])
    (top, bottom), (left, right) = pads
    by_inputs = by_inputs[:, top : by_inputs.shape[1] - bottom, left : by_inputs.shape[2] - right]
    return result, upstream, by_inputs, by_filters


@functools.cache
def expect_of_groups(
    groups: int, strides: tuple[int, int], padding: Padding
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array, Array]]:
    """Return what is convolved, and `expect` of it, once for all implementations."""
    arrays = make_arrays(groups, (7, 5))
    return arrays, expect(*arrays, groups, strides, padding)


def compute(arrays: tuple[Array, Array], upstream: Array, dtype: Any = tf.float32, **arguments: Any) -> list[Array]:
    """Return result and both gradients, float32, of one traced call with an unknown batch size."""
    inputs, filters = (tf.cast(array, dtype) for array in arrays)
    unknown = tf.TensorSpec([None, *inputs.shape[1:]], dtype)

    @tf.function(input_signature=[unknown, tf.TensorSpec(filters.shape, dtype), tf.TensorSpec(None, dtype)])
    def differentiate(inputs: Any, filters: Any, upstream: Any) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            tape.watch([inputs, filters])
            result = grouped_conv2d(inputs, filters, **arguments)
        return (result, *tape.gradient(result, [inputs, filters], upstream))

    return [np.array(tf.cast(each, tf.float32)) for each in differentiate(inputs, filters, tf.cast(upstream, dtype))]


@pytest.mark.costly
@needs_grouped_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strides", [(1, 1), (2, 2), (1, 2)])
@pytest.mark.parametrize("groups", [1, 2, 8, 32])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 1), (1, 1)), ((0, 2), (1, 0))])
def test_values_and_gradients_are_the_references(
    groups: int, strides: tuple[int, int], padding: Padding, form: Form
) -> None:
    arrays, (result, upstream, by_inputs, by_filters) = expect_of_groups(groups, strides, padding)
    found = compute(arrays, upstream, groups=groups, strides=strides, padding=padding, implementation=form)
    for one, other in zip(found, (result, by_inputs, by_filters), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kernel", "size"), [(1, (4, 4)), (2, (5, 4)), (5, (6, 7))])
def test_other_kernels_and_even_sizes(kernel: int, size: tuple[int, int], form: Form) -> None:
    arrays = make_arrays(4, size, channels=3, kernel=kernel)
    expected = expect(*arrays, 4, (2, 2), "SAME")[0]
    np.testing.assert_allclose(grouped_conv2d(*arrays, 4, 2, "SAME", form), expected, rtol=1e-5, atol=1e-5)


def expect_dilated(
    arrays: tuple[Array, Array], strides: tuple[int, int], padding: Padding, dilations: tuple[int, int]
) -> tuple[Array, Array, Array, Array]:
    """`expect` of filters in 4 groups with zeros between their rows and columns."""
    inputs, filters = arrays
    height, width = ((size - 1) * rate + 1 for size, rate in zip(filters.shape[:2], dilations, strict=True))
    spread = np.zeros([height, width, *filters.shape[2:]])
    spread[:: dilations[0], :: dilations[1]] = filters
    result, upstream, by_inputs, by_filters = expect(inputs, spread, 4, strides, padding)
    return result, upstream, by_inputs, by_filters[:: dilations[0], :: dilations[1]]


@needs_grouped_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 2), (0, 3))])
@pytest.mark.parametrize(
    ("dilations", "strides"), [((2, 2), (1, 1)), ((1, 3), (1, 1)), ((2, 2), (2, 2)), ((3, 1), (1, 2))]
)
def test_dilations(dilations: tuple[int, int], strides: tuple[int, int], padding: Padding, form: Form) -> None:
    arrays = make_arrays(4, (8, 7))
    result, upstream, by_inputs, by_filters = expect_dilated(arrays, strides, padding, dilations)
    options: dict[str, Any] = {"strides": strides, "padding": padding, "dilations": dilations}
    found = compute(arrays, upstream, groups=4, implementation=form, **options)
    for one, other in zip(found, (result, by_inputs, by_filters), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["auto", "split", "block_diagonal"])
def test_dilations_where_tensorflow_has_no_gradient_of_them(form: Form) -> None:
    arrays = make_arrays(4, (8, 7))
    result, upstream, by_inputs, by_filters = expect_dilated(arrays, (2, 1), "SAME", (2, 3))
    options: dict[str, Any] = {"strides": (2, 1), "dilations": (2, 3), "implementation": form}
    found = compute(arrays, upstream, tf.float64, groups=4, **options)
    for one, other in zip(found, (result, by_inputs, by_filters), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_the_reference_dilates() -> None:
    arrays = make_arrays(4, (8, 7))
    found = reference.grouped_conv2d(*arrays, 4, (1, 2), ((0, 0), (0, 0)), (2, 3))
    np.testing.assert_allclose(found, expect_dilated(arrays, (1, 2), "VALID", (2, 3))[0], rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_channels_first(form: Form) -> None:
    inputs, filters = make_arrays(4, (6, 5))
    result, upstream, by_inputs, by_filters = expect(inputs, filters, 4, (2, 1), ((1, 0), (2, 2)))
    order = [0, 3, 1, 2]
    options: dict[str, Any] = {"strides": (2, 1), "padding": ((1, 0), (2, 2)), "data_format": "NCHW"}
    found = compute(
        (inputs.transpose(order), filters), upstream.transpose(order), groups=4, implementation=form, **options
    )
    expected = (result.transpose(order), by_inputs.transpose(order), by_filters)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", ["same", "Same", "SAME", "valid", "Valid"])
def test_padding_in_any_case(padding: str) -> None:
    arrays = make_arrays(4, (6, 5))
    expected = grouped_conv2d(*arrays, 4, 2, padding.upper())
    np.testing.assert_array_equal(grouped_conv2d(*arrays, 4, 2, padding), expected)


@needs_grouped_kernels
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("strides", "dilations"), [(2, 1), (1, 2)])
def test_compiled_by_xla(strides: int, dilations: int, form: Form) -> None:
    inputs, filters = make_arrays(8, (5, 6))

    def differentiate(inputs: Any, filters: Any) -> tuple[Any, ...]:
        with tf.GradientTape() as tape:
            tape.watch([inputs, filters])
            result = grouped_conv2d(inputs, filters, 8, strides, implementation=form, dilations=dilations)
            loss = tf.reduce_sum(result**2)
        return (result, *tape.gradient(loss, [inputs, filters]))

    given = tf.constant(inputs), tf.constant(filters)
    found = tf.function(differentiate, jit_compile=True)(*given)
    for one, other in zip(found, differentiate(*given), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@needs_grouped_kernels
@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form: Form) -> None:
    if form == "native" and not _has_kernels(tf.bfloat16, groups=2):
        pytest.skip("TensorFlow has no grouped kernels in bfloat16 for this processor")
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
    monkeypatch.setattr("gaudi_ops.tf.convolution._has_kernels", lambda dtype, **_: kernels)
    assert count_convolutions("auto") == convolutions


@pytest.mark.costly
def test_auto_has_gradients_without_grouped_kernels() -> None:
    code = """
import tensorflow as tf
from gaudi_ops.tf.convolution import _has_dilated_kernels, _has_kernels, grouped_conv2d
print(_has_kernels(tf.float32, groups=2), _has_dilated_kernels(tf.float32))
for size, dilations in ((1, 1), (2, 2)):
    filters = tf.Variable(tf.ones([size, 1, 2, 4]))
    with tf.GradientTape() as tape:
        result = tf.function(grouped_conv2d)(tf.ones([1, 2, 3, 4]), filters, 2, dilations=dilations)
    print(tape.gradient(result, filters).numpy().ravel().tolist())
"""
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert done.stdout.splitlines() == ["False False", str([6.0] * 8), str([3.0] * 16)], done.stderr


@pytest.mark.parametrize(("groups", "channels", "limit", "bundle"), [(32, 4, 16, 4), (32, 16, 8, 1), (6, 4, 16, 3)])
def test_bundles(groups: int, channels: int, limit: int, bundle: int) -> None:
    assert _find_bundle(groups, channels, limit) == bundle
    filters = tf.random.stateless_normal([3, 1, channels, groups * 2], [0, 1])
    dense = _spread(filters, groups, bundle)
    assert dense.shape == [3, 1, channels * bundle, groups * 2]
    assert np.count_nonzero(dense) == np.size(filters)
    np.testing.assert_array_equal(_gather(dense, groups, bundle), filters)


def test_integers_of_numpy_are_taken() -> None:
    images, filters = tf.ones([2, 9, 9, 8]), tf.ones([3, 3, 2, 8])
    groups, strides, dilations = np.array([4, 2, 1])
    found = grouped_conv2d(images, filters, groups, strides=strides, dilations=(dilations, 1))
    np.testing.assert_array_equal(found, grouped_conv2d(images, filters, 4, strides=2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": 3}, "groups is 3"),
        ({"groups": 0}, "groups is 0"),
        ({"groups": 2}, "c_in / groups"),
        ({"groups": 4, "strides": 0}, "strides is 0"),
        ({"groups": 4, "strides": (1, 2, 1)}, r"strides is \(1, 2, 1\)"),
        ({"groups": 4, "padding": "full"}, "padding is 'full'"),
        ({"groups": 4, "padding": None}, "padding is None"),
        ({"groups": 4, "dilations": 0}, "dilations is 0"),
        ({"groups": 4, "strides": 2.0}, "strides is 2.0"),
        ({"groups": 4, "strides": (2, 1.5)}, r"strides is \(2, 1.5\)"),
        ({"groups": 4, "data_format": None}, "data_format is None"),
        ({"groups": 4.0}, "groups is 4.0"),
        ({"groups": 4, "dilations": (1, 2, 2, 1)}, r"dilations is \(1, 2, 2, 1\)"),
        ({"groups": 4, "data_format": "NHCW"}, "data_format is 'NHCW'"),
        ({"groups": 4, "padding": ((1, 1),)}, r"padding is \(\(1, 1\),\)"),
        (
            {"groups": 4, "implementation": "fast"},
            "implementation is 'fast'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_conv2d(*make_arrays(4, (3, 3)), **arguments)


@pytest.mark.parametrize("shape", [[None, 4, 4, None], [4, 4, 8], None])
def test_unknown_channels_and_ranks_are_refused(shape: Any) -> None:
    traced = tf.function(lambda inputs: grouped_conv2d(inputs, tf.ones([3, 3, 2, 8]), 4), autograph=False)
    with pytest.raises(ValueError, match=r"^inputs are "):
        traced.get_concrete_function(tf.TensorSpec(shape))


class TestLayer:
    @pytest.mark.parametrize("form", FORMS)
    def test_values_and_weights_are_keras(self, form: Form) -> None:
        arguments: dict[str, Any] = {"padding": "same", "groups": 4, "activation": "relu", "dilation_rate": (1, 2)}
        plain = keras.layers.Conv2D(8, 3, bias_initializer="ones", **arguments)
        layer = GroupedConv2D(8, 3, bias_initializer="ones", implementation=form, **arguments)
        inputs = tf.constant(make_arrays(4, (6, 5))[0])
        expected = plain(inputs)
        layer.build(inputs.shape)
        layer.set_weights(plain.get_weights())
        np.testing.assert_allclose(layer(inputs), expected, rtol=1e-5, atol=1e-5)
        assert {**plain.get_config(), "name": layer.name, "implementation": form} == layer.get_config()

    @pytest.mark.parametrize("groups", [1, 4])
    def test_several_dimensions_of_a_batch(self, groups: int) -> None:
        layer = GroupedConv2D(8, 3, groups=groups)
        inputs = tf.reshape(make_arrays(4, (6, 5))[0], [2, 1, 6, 5, 8])
        outputs = tf.function(layer)(inputs)
        assert outputs.shape == (2, 1, 4, 3, 8)
        np.testing.assert_allclose(outputs[:, 0], layer(inputs[:, 0]), rtol=1e-5, atol=1e-6)

    def test_mixed_precision(self) -> None:
        layer = GroupedConv2D(8, 3, groups=4, dtype="mixed_bfloat16")
        assert layer(make_arrays(4, (6, 5))[0]).dtype == tf.bfloat16
        assert [weight.dtype for weight in layer.trainable_weights] == [tf.float32] * 2

    @pytest.mark.parametrize(
        "arguments",
        [
            {"implementation": "fast"},
            {"groups": 3},
            {"strides": 2, "dilation_rate": 2},
            {"padding": "causal"},
            {"padding": [[0, 0], [1, 1], [1, 1], [0, 0]]},
            {"data_format": "channels"},
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            GroupedConv2D(8, 3, **arguments)


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize("groups", [1, 4])
def test_an_empty_batch_has_the_shape_of_any_other(groups: int, padding: str) -> None:
    filters = tf.Variable(tf.ones([3, 3, 8 // groups, 16]))
    shapes = []
    for batch in (0, 2):
        with tf.GradientTape() as tape:
            outputs = grouped_conv2d(tf.ones([batch, 9, 8, 8]), filters, groups, strides=2, padding=padding)
        shapes.append(outputs.shape[1:])
        assert tape.gradient(outputs, filters).shape == filters.shape
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize(("taps", "dilations"), [(9, 1), (4, 3)])
def test_a_filter_larger_than_the_image_is_refused(taps: int, dilations: int) -> None:
    filters = tf.ones([taps, 3, 2, 16])
    with pytest.raises(ValueError, match="larger than"):
        grouped_conv2d(tf.ones([2, 8, 8, 8]), filters, 4, padding="valid", dilations=dilations)
