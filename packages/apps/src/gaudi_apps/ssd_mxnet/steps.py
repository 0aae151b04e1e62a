"""The first training steps of the detector in MXNet with everything in them laid open; see `gaudi_apps.parity`.

Tensors have the names, and their axes the order, that they have in the TensorFlow programs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mxnet as mx
import numpy as np

from gaudi_apps.parity.tensors import Array, Lead, LedStep, StepTensor, note_tensor
from gaudi_apps.ssd_mxnet.task import MXNetTask
from gaudi_distributed.errors import ConfigurationError
from gaudi_models.mxnet.layers import BatchNorm, Convolution

_TRANSPOSITIONS: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "NHWC": (np.ascontiguousarray, np.ascontiguousarray),
    "NCHW": (
        lambda values: np.ascontiguousarray(values.transpose(0, 2, 3, 1)),
        lambda values: np.ascontiguousarray(values.transpose(0, 3, 1, 2)),
    ),
}
LOSSES = ("loss", "class_loss", "box_loss")


def replay_steps(
    task: MXNetTask,
    batches: Iterator[Mapping[str, Any]],
    learning_rate: Callable[[int], float],
    steps: int,
    lead: Lead | None = None,
) -> Iterator[list[StepTensor]]:
    """Train, as `MXNetTask.train_step` does, and give all tensors of each step in the order of computation.

    Arguments and exceptions are those of `gaudi_apps.parity.keras_steps.replay_steps`. Outputs are those of
    convolutions and batch norms.
    """
    task.model.hybridize(active=False)  # so that each layer is called
    to_nhwc, from_nhwc = _TRANSPOSITIONS[task.model.layout]
    before = task.read_weights()
    for number in range(1, steps + 1):
        batch = next(batches)
        led = lead(number) if lead else LedStep({}, {})
        own = {**batch, "images": to_nhwc(batch["images"])}
        used = {name: _take(name, values, led.batch.get(name)) for name, values in own.items()}
        used["images"] = from_nhwc(used["images"])
        with _noting_outputs(task.model, led.outputs) as outputs:
            losses = task.compute_gradients(used)
        gradients = task.read_gradients()
        task.update(learning_rate(number - 1))
        after = task.read_weights()
        order = {layer: place for place, layer in enumerate(outputs)}
        backwards = sorted(gradients, key=lambda name: order[_layer_of(name)], reverse=True)
        scalars = dict(zip(LOSSES, losses.asnumpy(), strict=True))
        yield [
            *(note_tensor(number, "batch", name, np.array(values)) for name, values in sorted(own.items())),
            *_list_outputs(number, outputs, before if number == 1 else {}),
            *(note_tensor(number, "loss", name, np.asarray(scalars[name])) for name in (*LOSSES[1:], LOSSES[0])),
            *(note_tensor(number, "gradient", name, gradients[name], _layer_of(name)) for name in backwards),
            *(
                note_tensor(number, "update", name, after[name] - before[name], _layer_of(name))
                for layer in outputs
                for name in sorted(after)
                if _layer_of(name) == layer
            ),
        ]
        before = after


@contextlib.contextmanager
def _noting_outputs(model: Any, lead: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Within, what layers give is noted by their names, in the order of their calls, and replaced by the lead."""
    noted: dict[str, Array] = {}
    to_nhwc, from_nhwc = _TRANSPOSITIONS[model.layout]
    layers: list[Any] = [one for one in _list_blocks(model) if isinstance(one, (Convolution, BatchNorm))]

    def call(layer: Any, own_forward: Callable[..., Any], *arguments: Any) -> Any:
        output, name = own_forward(*arguments), layer.prefix.removesuffix("_")
        noted[name] = to_nhwc(mx.nd.amp_cast(output, dtype="float32").asnumpy())
        if name not in lead:
            return output
        given = mx.nd.array(from_nhwc(_take(name, noted[name], lead[name])), ctx=output.context)
        return _Replacement(mx.nd.amp_cast(given, dtype=output.dtype))(output)

    for layer in layers:
        vars(layer)["forward"] = functools.partial(call, layer, layer.forward)
    try:
        yield noted
    finally:
        for layer in layers:
            del vars(layer)["forward"]


class _Replacement(mx.autograd.Function):
    """Other values in place of an output, whose gradient stays that of the output."""

    def __init__(self, values: Any) -> None:
        super().__init__()
        self._values = values

    def forward(self, output: Any) -> Any:
        return self._values

    def backward(self, upstream: Any) -> Any:
        return upstream


def _list_blocks(block: Any) -> Iterator[Any]:
    yield block
    for child in block._children.values():
        yield from _list_blocks(child)


def _list_outputs(number: int, outputs: Mapping[str, Array], weights: Mapping[str, Array]) -> Iterator[StepTensor]:
    """Before what a layer gives, the weights that it begins with, if they are to be noted."""
    for layer, values in outputs.items():
        for name in sorted(weights):
            if _layer_of(name) == layer:
                yield note_tensor(number, "weight", name, weights[name], layer)
        yield note_tensor(number, "output", layer, values, layer)


def _layer_of(name: str) -> str:
    return name.partition("/")[0]


def _take(name: str, own: Array, given: Array | None) -> Array:
    """The other side's values in the type of this side's; this side's where there are no others."""
    if given is None:
        return own
    if own.shape != given.shape:
        raise ConfigurationError(
            f"recording: {name} has shape {list(given.shape)} there and {list(own.shape)} here; record it anew"
        )
    return given.astype(own.dtype)
