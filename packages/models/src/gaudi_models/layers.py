"""Keras layers of the networks, and the network that they make.

Convolution has the form that suits the device, batch norm is over several devices, and a network can forget in training
what is inside of its blocks, and compute it again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from gaudi_ops.tf import GroupedConv2D, pointwise_conv2d, synchronized_batch_norm
from gaudi_ops.tf.batch_norm import ReduceStatistics
from gaudi_ops.tf.keras_api import keras

import tensorflow as tf  # isort: skip - after gaudi_ops.tf, which names the extra where it is missing


@keras.saving.register_keras_serializable("gaudi_models")
class Convolution2D(GroupedConv2D):
    """`keras.layers.Conv2D`, by default without bias; same arguments, same weights, same values.

    Groups are convolved by `gaudi_ops.tf.grouped_conv2d`, 1x1 filters by `gaudi_ops.tf.pointwise_conv2d`.

    Args:
        arguments: those of `keras.layers.Conv2D`, of which `use_bias` is the ninth.
        keywords: the same, and ``implementation`` of the groups, see `gaudi_ops.tf.GroupedConv2D`. ``use_bias`` is
            False in place of Keras' True, because a batch norm follows most often.

    Raises:
        TypeError: for an argument that `keras.layers.Conv2D` does not have.
        ValueError: for a value that it refuses.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        if len(arguments) < 9:
            keywords.setdefault("use_bias", False)
        super().__init__(*arguments, **keywords)

    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        """Convolve images [..., height, width, channels], or [..., channels, height, width] with channels first."""
        is_pointwise = self.groups == 1 and self.kernel_size == self.strides == (1, 1)
        if is_pointwise and self.data_format == "channels_last" and inputs.shape.rank == 4:
            return pointwise_conv2d(inputs, kernel)
        return super().convolution_op(inputs, kernel)


@keras.saving.register_keras_serializable("gaudi_models")
class Network(keras.Model):
    """`keras.Model` of layers, whose ``.keras`` file names this module.

    Keras imports the module of the outermost class of a file, and takes the layers inside by their names from what is
    registered, or else from its own: it has another ``Convolution2D``. So this class registers ours before they are
    looked for, and a file loads in a process that has not imported this package.
    """

    def recompute(self) -> int:
        """From now on, keep in training only what each block begins with, and compute a block again for its gradient.

        A step takes a forward pass more, and less memory; weights and moving statistics are the same but for rounding,
        for TensorFlow may fuse other operations (on processors 2.21 does, and 2.15 does not). A block begins at a
        tensor that alone connects what is before and after, and that several layers read. What follows the last such
        tensor is kept, because its gradient comes first.

        Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174.

        Returns:
            the number of blocks that are computed again.

        Raises:
            ValueError: a layer draws random numbers, or sends statistics to other devices, before the last block.
        """
        self._blocks = _Blocks(self)
        return len(self._blocks)

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Compute as `keras.Model` does, or block by block where `training` is True after `recompute`."""
        blocks: _Blocks | None = getattr(self, "_blocks", None)
        if blocks is None or training is not True:
            return super().call(inputs, training=training, mask=mask)
        return blocks(inputs)


class _Call(NamedTuple):
    """A call of a layer: identities of the Keras tensors that it reads and makes."""

    layer: Any
    reads: tuple[int, ...]
    makes: int
    takes_list: bool
    takes_training: bool


class _Blocks:
    """Compute a network in training block by block; all but the last are computed again for their gradients."""

    def __init__(self, network: Any) -> None:
        calls = [_describe_call(layer) for layer in network.layers if not isinstance(layer, keras.layers.InputLayer)]
        self._outputs, self._input = network.output, id(network.input)
        self._blocks = list(_split(calls, [id(one) for one in tf.nest.flatten(network.output)]))
        for layer in (call.layer for block in self._blocks[:-1] for call in block):
            if isinstance(layer, keras.layers.Dropout):
                raise ValueError(f"layer {layer.name} draws random numbers, and would draw others the second time")
            if getattr(layer, "_reduce_statistics", None) is not None:
                raise ValueError(f"layer {layer.name} would send its statistics to other devices twice")

    def __len__(self) -> int:
        return len(self._blocks) - 1

    def __call__(self, images: Any) -> Any:
        """Compute the outputs in training."""
        place, value = self._input, images
        for block in self._blocks[:-1]:
            value = _compute_twice(block, place, value)
            place = block[-1].makes
        values = _compute(self._blocks[-1], {place: value})
        return tf.nest.map_structure(lambda tensor: values[id(tensor)], self._outputs)


def _describe_call(layer: Any) -> _Call:
    reads = tuple(id(tensor) for tensor in tf.nest.flatten(layer.input))
    takes_training = "training" in inspect.signature(layer.call).parameters
    return _Call(layer, reads, id(layer.output), isinstance(layer.input, (list, tuple)), takes_training)


def _split(calls: Sequence[_Call], outputs: Sequence[int]) -> Iterator[list[_Call]]:
    """Cut calls, in an order in which they can be made, where several read the one tensor that is needed afterwards."""
    readers: dict[int, list[int]] = {}
    for place, call in enumerate(calls):
        for tensor in call.reads:
            readers.setdefault(tensor, []).append(place)
    last = {tensor: len(calls) if tensor in outputs else places[-1] for tensor, places in readers.items()}
    begin, needed = 0, set[int]()
    for place, call in enumerate(calls):
        needed = {tensor for tensor in needed | {call.makes} if last.get(tensor, len(calls)) > place}
        if needed == {call.makes} and len(readers.get(call.makes, ())) > 1:
            yield list(calls[begin : place + 1])
            begin = place + 1
    yield list(calls[begin:])


def _compute(block: Sequence[_Call], values: dict[int, Any]) -> dict[int, Any]:
    """Make the calls of a block in training; return all values, those given among them."""
    for call in block:
        read = [values[tensor] for tensor in call.reads]
        options = {"training": True} if call.takes_training else {}
        values[call.makes] = call.layer(read if call.takes_list else read[0], **options)
    return values


def _compute_twice(block: Sequence[_Call], place: int, value: Any) -> Any:
    """Compute the last value of a block from its first one, and keep only the first one for the gradient."""
    is_again = False

    def compute(first: Any) -> Any:
        nonlocal is_again
        with _still_statistics(block) if is_again else contextlib.nullcontext():
            is_again = True
            return _compute(block, {place: first})[block[-1].makes]

    return tf.recompute_grad(compute)(value)


@contextlib.contextmanager
def _still_statistics(block: Sequence[_Call]) -> Iterator[None]:
    """Keep the moving statistics of batch norms as they are, within a context: the first computation moved them."""
    norms = [call.layer for call in block if isinstance(call.layer, keras.layers.BatchNormalization)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


@keras.saving.register_keras_serializable("gaudi_models")
class SynchronizedBatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` over the last axis; same arguments, same weights, same values for one device.

    Args:
        reduce_statistics: sums over the devices, see `gaudi_ops.tf.synchronized_batch_norm`; a layer that is saved and
            read again has none, and is one device's.
        arguments: those of `keras.layers.BatchNormalization`.
    """

    def __init__(self, *, reduce_statistics: ReduceStatistics | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._reduce_statistics = reduce_statistics

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Normalize [batch, ..., channels]; with the devices' statistics where `training` is True."""
        # Anything else is inference, or Keras laying out the network: there are no other devices in either.
        if training is not True or not self.trainable or self._reduce_statistics is None:
            return super().call(inputs, training=training)
        outputs, mean, variance = synchronized_batch_norm(
            inputs, self.gamma, self.beta, self.epsilon, self._reduce_statistics
        )
        for moving, current in ((self.moving_mean, mean), (self.moving_variance, variance)):
            moving.assign_sub((moving - current) * (1 - self.momentum))
        return outputs


def make_batch_norm(reduce_statistics: ReduceStatistics | None, **arguments: Any) -> Any:
    """Make Keras' own layer, or with `reduce_statistics` the one over several devices."""
    if reduce_statistics is None:
        return keras.layers.BatchNormalization(**arguments)
    return SynchronizedBatchNormalization(reduce_statistics=reduce_statistics, **arguments)


def synchronize(model: Any, reduce_statistics: ReduceStatistics) -> Any:
    """Return a copy of the Keras model, weights and all, whose batch norms are over several devices."""

    def copy(layer: Any) -> Any:
        if isinstance(layer, keras.layers.BatchNormalization):
            return make_batch_norm(reduce_statistics, **layer.get_config())
        return layer.__class__.from_config(layer.get_config())

    copied = keras.models.clone_model(model, clone_function=copy)
    copied.set_weights(model.get_weights())
    return copied
