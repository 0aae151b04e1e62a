"""Grouped and pointwise convolution in the form that suits the device, with gradients that suit it too."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from gaudi_ops.errors import require_choice
from gaudi_ops.tf import hpu
from gaudi_ops.tf.keras_api import keras
from gaudi_ops.tf.keras_tensors import accepts_keras_tensors

Implementation = Literal["auto", "native", "split", "block_diagonal"]
Padding = str | Sequence[Sequence[int]]

# Channels that groups are put together to, for a dense convolution of each bundle: 32 fill the vector lanes.
BUNDLE_CHANNELS = 32
# The same for the gradient by the filters alone, where groups of 4 and 8 channels were measured to be slower.
FILTER_GRADIENT_CHANNELS = 16
# Positions of an image up to which products in bfloat16 were measured to be faster on a CPU: all of them, and the
# gradient by the filters, which takes a sixth less at 14x14, as much at 28x28 and a quarter more at 56x56.
ALL_POSITIONS = 7 * 7
FILTER_GRADIENT_POSITIONS = 14 * 14


@accepts_keras_tensors("inputs", "filters")
def grouped_conv2d(
    inputs: Any,
    filters: Any,
    groups: int,
    strides: int | Sequence[int] = 1,
    padding: Padding = "SAME",
    implementation: Implementation = "auto",
    dilations: int | Sequence[int] = 1,
    data_format: str = "NHWC",
) -> Any:
    """Convolve each group of channels with filters of its own.

    Group g of the result, channels ``g c_out / groups`` and on, is made of group g of the inputs, channels
    ``g c_in / groups`` and on. Krizhevsky et al., 2012; as in Xie et al., https://arxiv.org/abs/1611.05431, figure 3c.

    Args:
        inputs: float32 or bfloat16 [batch, height, width, c_in], or [batch, c_in, height, width] with ``"NCHW"``. A
            Keras tensor makes a layer of a functional model, which trains the filters if they are a ``tf.Variable``.
        filters: [kernel height, kernel width, c_in / groups, c_out]; used in the dtype of the inputs.
        groups: divides c_in and c_out.
        strides: of rows and columns, or one number for both.
        padding: ``"SAME"`` or ``"VALID"``, in upper or lower case, or zeros around the image,
            ``((top, bottom), (left, right))``.
        implementation: ``"native"`` is TensorFlow's own kernel and gradient; ``"split"`` a convolution for each group;
            ``"block_diagonal"`` dense convolutions of bundles of groups, with zeros between the groups. Values and
            gradients are the same. ``"auto"`` is native where its kernels are, on CPUs with neighbouring groups put
            together for the gradient by narrow filters; block_diagonal on CPUs without them, and where TensorFlow has
            a device of type HPU, which is not tested on hardware. Compiled by XLA for a CPU, native is hundreds of
            times slower: choose another there.
        dilations: distance in pixels between the rows and columns of a filter, or one number for both; with strides,
            too. Where the device has no dilated kernels with gradients (float64 on CPUs, HPU), the filters are spread
            with zeros.
        data_format: ``"NHWC"``, or ``"NCHW"`` for channels first, which is transposed to NHWC and back.

    Returns:
        [batch, rows, columns, c_out] in the dtype of the inputs; [batch, c_out, rows, columns] with ``"NCHW"``.

    Raises:
        ValueError: an argument is none of those, or the channels don't fit the groups.
    """
    require_choice("implementation", implementation, get_args(Implementation))
    channels_first = _is_channels_first(data_format)
    inputs = tf.convert_to_tensor(inputs)
    filters = tf.cast(filters, inputs.dtype)
    if inputs.shape.rank != 4 or filters.shape.rank != 4:
        raise ValueError(f"inputs are {inputs.shape} and filters {filters.shape}; both must have 4 dimensions")
    if channels_first:
        inputs = tf.transpose(inputs, [0, 2, 3, 1])
    _require_groups(inputs.shape, filters.shape, groups)
    inputs, scheme = _pad(inputs, padding)
    spacing = _read_pair("dilations", dilations)
    if max(spacing) > 1 and not _has_dilated_kernels(inputs.dtype):
        filters, spacing = _dilate(filters, spacing), (1, 1)
    pair = _read_pair("strides", strides)
    _require_room(inputs.shape, filters.shape, scheme, spacing)
    outputs = _convolve(inputs, filters, groups, implementation, strides=pair, padding=scheme, dilations=spacing)
    return tf.transpose(outputs, [0, 3, 1, 2]) if channels_first else outputs


def _convolve(inputs: Any, filters: Any, groups: int, implementation: Implementation, **options: Any) -> Any:
    """Convolve in the given form, or in the one that suits the device, with options of `tf.nn.conv2d`."""
    if inputs.shape[0] == 0 and inputs.shape.is_fully_defined():
        return _convolve_nothing(inputs, filters, **options)
    if implementation == "auto" and groups > 1:
        if hpu.has_hpu():
            implementation = "block_diagonal"
        elif tf.config.list_logical_devices("GPU"):
            implementation = "native"
        elif _has_kernels(inputs.dtype, groups=2):
            return _convolve_tuned(inputs, filters, groups, **options)
        else:
            implementation = "block_diagonal"
    if groups == 1 or implementation == "native":
        return tf.nn.conv2d(inputs, filters, **options)
    # Each bundle of groups is a dense convolution.
    bundle = 1 if implementation == "split" else _find_bundle(groups, filters.shape[2], BUNDLE_CHANNELS)
    images = tf.split(inputs, groups // bundle, axis=-1)
    kernels = tf.split(_spread(filters, groups, bundle), groups // bundle, axis=-1)
    results = [tf.nn.conv2d(image, kernel, **options) for image, kernel in zip(images, kernels, strict=True)]
    return tf.concat(results, axis=-1)


def _convolve_nothing(
    inputs: Any, filters: Any, strides: tuple[int, int], padding: str, dilations: tuple[int, int]
) -> Any:
    """Convolve an empty batch, for which CPU kernels return a wrong number of channels; gradients are zeros."""
    sides = []
    for side, taps, stride, gap in zip(inputs.shape[1:3], filters.shape, strides, dilations, strict=False):
        spare = side - 1 if padding == "SAME" else side - 1 - (taps - 1) * gap
        sides.append(spare // stride + 1)
    nothing = tf.zeros([0, *sides, filters.shape[-1]], inputs.dtype)
    return nothing + 0 * tf.reduce_sum(filters) + 0 * tf.reduce_sum(inputs)


def _convolve_tuned(
    inputs: Any, filters: Any, groups: int, strides: tuple[int, int], padding: str, dilations: tuple[int, int]
) -> Any:
    """Use TensorFlow's kernels; compute the gradient by narrow filters in fewer, larger groups, which is faster."""
    height, width, channels, outputs = filters.shape
    bundle = _find_bundle(groups, channels, FILTER_GRADIENT_CHANNELS)
    if bundle == 1:
        return tf.nn.conv2d(inputs, filters, strides, padding, dilations=dilations)
    attributes = {"strides": [1, *strides, 1], "padding": padding, "dilations": [1, *dilations, 1]}

    @tf.custom_gradient
    def convolve(inputs: Any, filters: Any) -> Any:
        def gradient(upstream: Any) -> tuple[Any, Any]:
            by_inputs = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(inputs), filter=filters, out_backprop=upstream, **attributes
            )
            dense_sizes = [height, width, channels * bundle, outputs]
            by_dense = tf.raw_ops.Conv2DBackpropFilter(
                input=inputs, filter_sizes=dense_sizes, out_backprop=upstream, **attributes
            )
            return by_inputs, _gather(by_dense, groups, bundle)

        return tf.nn.conv2d(inputs, filters, strides, padding, dilations=dilations), gradient

    return convolve(inputs, filters)


def _find_bundle(groups: int, channels: int, max_channels: int) -> int:
    """Find the most groups, a divisor of their number and at least one, that have at most `max_channels` together."""
    return max((n for n in range(1, groups + 1) if groups % n == 0 and n * channels <= max_channels), default=1)


def _spread(filters: Any, groups: int, bundle: int) -> Any:
    """Turn filters [h, w, i, o] of groups into those of bundles [h, w, bundle i, o], with zeros between the groups."""
    if bundle == 1:
        return filters
    height, width, inputs, outputs = filters.shape
    blocks = tf.reshape(filters, [height, width, 1, inputs, groups // bundle, bundle, outputs // groups])
    return tf.reshape(blocks * _diagonal(bundle, filters.dtype), [height, width, bundle * inputs, outputs])


def _gather(filters: Any, groups: int, bundle: int) -> Any:
    """Invert `_spread`: drop the values between the groups."""
    if bundle == 1:
        return filters
    height, width, inputs, outputs = filters.shape
    shape = [height, width, bundle, inputs // bundle, groups // bundle, bundle, outputs // groups]
    blocks = tf.where(_diagonal(bundle, tf.bool), tf.reshape(filters, shape), 0)
    return tf.reshape(tf.reduce_sum(blocks, axis=2), [height, width, inputs // bundle, outputs])


def _diagonal(bundle: int, dtype: Any) -> Any:
    """Make ones where the group of the inputs is that of the outputs: [bundle, 1, 1, bundle, 1]."""
    return tf.constant(np.eye(bundle).reshape([bundle, 1, 1, bundle, 1]), dtype)


def _has_dilated_kernels(dtype: Any) -> bool:
    """Tell if TensorFlow's dilated convolution has gradients on this device."""
    if hpu.has_hpu():
        return False
    return bool(tf.config.list_logical_devices("GPU")) or _has_kernels(dtype, dilation=2)


@functools.cache
def _has_kernels(dtype: Any, groups: int = 1, dilation: int = 1) -> bool:
    """Tell if this processor has kernels of such a convolution and its gradients; without oneDNN it has not."""
    with tf.init_scope(), tf.device("CPU:0"):
        images, filters = tf.ones([1, 3, 3, 4], dtype), tf.ones([3, 3, 4 // groups, 4], dtype)
        attributes = {"strides": [1] * 4, "padding": "SAME", "dilations": [1, dilation, dilation, 1]}
        try:
            tf.raw_ops.Conv2D(input=images, filter=filters, **attributes)
            attributes["out_backprop"] = images
            tf.raw_ops.Conv2DBackpropInput(input_sizes=images.shape, filter=filters, **attributes)
            tf.raw_ops.Conv2DBackpropFilter(input=images, filter_sizes=filters.shape, **attributes)
        except tf.errors.OpError:
            return False
    return True


def _dilate(filters: Any, dilations: tuple[int, int]) -> Any:
    """Put zeros between rows and columns of filters [h, w, i, o]: [(h - 1) dilation + 1, ..., i, o]."""
    height, width, inputs, outputs = filters.shape
    down, across = dilations
    spread = tf.pad(filters[:, None, :, None], [[0, 0], [0, down - 1], [0, 0], [0, across - 1], [0, 0], [0, 0]])
    spread = tf.reshape(spread, [height * down, width * across, inputs, outputs])
    return spread[: (height - 1) * down + 1, : (width - 1) * across + 1]


def _read_pair(name: str, given: int | Sequence[int]) -> tuple[int, int]:
    """Read numbers for rows and columns from one for both or from a pair."""
    pair = tuple(given) if isinstance(given, Sequence) else (given, given)
    if len(pair) != 2 or not all(isinstance(one, Integral) and one >= 1 for one in pair):
        raise ValueError(f"{name} is {given!r}; use an integer from 1 on, or a pair of them for rows and columns")
    return int(pair[0]), int(pair[1])


def _is_channels_first(data_format: str) -> bool:
    name = str(data_format).upper()
    if name not in ("NHWC", "NCHW"):
        raise ValueError(f"data_format is {data_format!r}; use NHWC or NCHW")
    return name == "NCHW"


def _pad(inputs: Any, padding: Padding) -> tuple[Any, str]:
    """Pad the inputs as far as TensorFlow's kernels do not; return them and TensorFlow's name for the rest.

    Explicit padding is done here, because TensorFlow's gradient kernels know it only without groups.
    """
    if isinstance(padding, str):
        if padding.upper() in ("SAME", "VALID"):
            return inputs, padding.upper()
    elif isinstance(padding, Sequence) and [len(pads) for pads in padding] == [2, 2]:
        return tf.pad(inputs, [[0, 0], *(list(pads) for pads in padding), [0, 0]]), "VALID"
    raise ValueError(f"padding is {padding!r}; use SAME, VALID or ((top, bottom), (left, right))")


def _require_room(inputs: Any, filters: Any, padding: str, dilations: tuple[int, int]) -> None:
    """Raise where a filter is larger than the image: eagerly, kernels of CPUs return memory that nothing was put in."""
    for side, taps, gap in zip(inputs[1:3], filters[:2], dilations, strict=True):
        if padding == "VALID" and side is not None and side < (taps - 1) * gap + 1:
            raise ValueError(
                f"filters of {filters[0]} x {filters[1]} with dilations {dilations} are larger than the images, "
                f"{inputs[1]} x {inputs[2]} with their padding; use padding SAME, or larger images"
            )


def _require_groups(inputs: Any, filters: Any, groups: int) -> None:
    if inputs[-1] is None or not filters.is_fully_defined():
        raise ValueError(f"inputs are {inputs} and filters {filters}; channels and filters must have static sizes")
    if (
        not isinstance(groups, Integral)
        or groups < 1
        or inputs[-1] % groups
        or filters[-1] % groups
        or filters[2] * groups != inputs[-1]
    ):
        raise ValueError(
            f"groups is {groups} with inputs {inputs} and filters {filters}; it must be an integer that divides the "
            f"channels of both, and the filters must have c_in / groups inputs"
        )


@keras.saving.register_keras_serializable("gaudi_ops")
class GroupedConv2D(keras.layers.Conv2D):
    """`keras.layers.Conv2D` by `grouped_conv2d`: same arguments, same weights, same values; Keras' own without groups.

    Args:
        implementation: see `grouped_conv2d`.
        arguments: those of `keras.layers.Conv2D`, ``groups`` among them.

    Raises:
        ValueError: for an implementation that does not exist, and where `keras.layers.Conv2D` raises it.
    """

    def __init__(self, *arguments: Any, implementation: Implementation = "auto", **keywords: Any) -> None:
        require_choice("implementation", implementation, get_args(Implementation))
        super().__init__(*arguments, **keywords)
        if not isinstance(self.padding, str):
            raise ValueError(
                f"padding is {self.padding!r}; use 'same' or 'valid', and keras.layers.ZeroPadding2D before"
            )
        self.implementation = implementation

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        """Convolve images [..., height, width, channels], or [..., channels, height, width] with channels first."""
        if self.groups == 1:
            return super().convolution_op(inputs, kernel)
        # Keras allows several dimensions of a batch.
        images = inputs if inputs.shape.rank == 4 else tf.reshape(inputs, [-1, *inputs.shape[-3:]])
        outputs = grouped_conv2d(
            images,
            kernel,
            self.groups,
            strides=self.strides,
            padding=self.padding,
            implementation=self.implementation,
            dilations=self.dilation_rate,
            data_format="NCHW" if self.data_format == "channels_first" else "NHWC",
        )
        if inputs.shape.rank == 4:
            return outputs
        return tf.reshape(outputs, tf.concat([tf.shape(inputs)[:-3], tf.shape(outputs)[1:]], axis=0))

    def call(self, inputs: Any) -> Any:
        """Convolve, add the bias if any, and activate; `keras.layers.Conv2D` would compile groups with XLA."""
        if self.groups == 1:
            return super().call(inputs)
        outputs = self.convolution_op(inputs, self.kernel)
        if self.use_bias and self.data_format == "channels_first":
            outputs += tf.reshape(self.bias, [-1, 1, 1])
        elif self.use_bias:
            outputs = tf.nn.bias_add(outputs, self.bias)
        outputs.set_shape(self.compute_output_shape(inputs.shape))
        return outputs if self.activation is None else self.activation(outputs)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, for Keras to make the layer again."""
        return {**super().get_config(), "implementation": self.implementation}


def pointwise_conv2d(inputs: Any, filters: Any) -> Any:
    """Convolve with filters of 1x1 and stride 1.

    In bfloat16 on a CPU, small images are multiplied as matrices: each product, or the gradient by the filters alone.
    Anything else is TensorFlow's convolution. Sums are in float32 in both, so values differ by the order of summands.

    Args:
        inputs: floats [batch, height, width, c_in].
        filters: [1, 1, c_in, c_out]; used in the dtype of the inputs.

    Returns:
        [batch, height, width, c_out] in the dtype of the inputs. There is no second derivative where matrices are used.
    """
    filters = tf.cast(filters, inputs.dtype)
    height, width = inputs.shape[1:3]
    positions = height * width if height and width else FILTER_GRADIENT_POSITIONS + 1
    on_cpu = not (hpu.has_hpu() or tf.config.list_logical_devices("GPU"))
    if not on_cpu or inputs.dtype != tf.bfloat16 or positions > FILTER_GRADIENT_POSITIONS:
        return tf.nn.conv2d(inputs, filters, 1, "SAME")
    return _multiply(inputs, filters, positions <= ALL_POSITIONS)


def _multiply(inputs: Any, filters: Any, all_products: bool) -> Any:
    into, out = filters.shape[2:]

    @tf.custom_gradient
    def convolve(inputs: Any, filters: Any) -> Any:
        rows, matrix = tf.reshape(inputs, [-1, into]), tf.reshape(filters, [into, out])

        def gradient(upstream: Any) -> tuple[Any, Any]:
            incoming = tf.reshape(upstream, [-1, out])
            if all_products:
                by_inputs = tf.reshape(tf.matmul(incoming, matrix, transpose_b=True), tf.shape(inputs))
            else:
                by_inputs = tf.raw_ops.Conv2DBackpropInput(
                    input_sizes=tf.shape(inputs),
                    filter=filters,
                    out_backprop=upstream,
                    strides=[1, 1, 1, 1],
                    padding="SAME",
                )
            return by_inputs, tf.reshape(tf.matmul(rows, incoming, transpose_a=True), filters.shape)

        if not all_products:
            return tf.nn.conv2d(inputs, filters, 1, "SAME"), gradient
        return tf.reshape(tf.matmul(rows, matrix), [-1, *inputs.shape[1:3], out]), gradient

    return convolve(inputs, filters)
