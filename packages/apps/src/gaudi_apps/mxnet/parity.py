"""Replay training steps in MXNet for `--mode parity`, tensor by tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import mxnet as mx
import numpy as np

from gaudi_apps.mxnet.task import MXNetTask
from gaudi_apps.training.parity.record import (
    Array,
    Reference,
    ReferenceStep,
    StepTensor,
    list_outputs,
    make_tensor,
    require_shape,
    wrapped,
)
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
    reference: Reference | None = None,
) -> Iterator[list[StepTensor]]:
    """Train as `MXNetTask.train_step` does, and yield all tensors of each step in the order of computation.

    Arguments and errors are those of `gaudi_apps.training.parity.keras_steps.replay_steps`. Outputs are those of
    convolutions and batch norms.
    """
    task.model.hybridize(active=False)  # so that each layer is called
    to_nhwc, from_nhwc = _TRANSPOSITIONS[task.model.layout]
    before: Mapping[str, Array] = task.read_weights()
    for number in range(1, steps + 1):
        batch = next(batches)
        reference_step = reference(number) if reference else ReferenceStep({}, {}, {})
        own = {**batch, "images": to_nhwc(batch["images"])}
        used = {name: _take(name, values, reference_step.batch.get(name)) for name, values in own.items()}
        used["images"] = from_nhwc(used["images"])
        with _recording_outputs(task.model, reference_step.outputs) as outputs:
            losses = task.compute_gradients(used)
        gradients = task.read_gradients()
        task.update(learning_rate(number - 1))
        after = task.read_weights()
        order = {layer: place for place, layer in enumerate(outputs)}
        backwards = sorted(gradients, key=lambda name: order[_find_layer(name)], reverse=True)
        scalars = dict(zip(LOSSES, losses.asnumpy(), strict=True))
        yield [
            *(make_tensor(number, "batch", name, np.array(values)) for name, values in sorted(own.items())),
            *list_outputs(number, outputs.items(), _by_layers(before) if number == 1 else {}),
            *(make_tensor(number, "loss", name, np.asarray(scalars[name])) for name in (*LOSSES[1:], LOSSES[0])),
            *(make_tensor(number, "gradient", name, gradients[name], _find_layer(name)) for name in backwards),
            *(
                make_tensor(number, "update", name, values - before[name], layer)
                for layer, variables in sorted(_by_layers(after).items(), key=lambda item: order[item[0]])
                for name, values in variables
            ),
        ]
        before = _follow(task, before, reference_step.updates) if reference_step.updates else after


def _follow(task: MXNetTask, before: Mapping[str, Array], updates: Mapping[str, Array]) -> Mapping[str, Array]:
    """Replace this side's step by that of the other side; return the weights after it."""
    task.write_weights({name: old + _take(name, old, updates[name]) for name, old in before.items()})
    return task.read_weights()


@contextlib.contextmanager
def _recording_outputs(model: Any, reference: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Record the outputs of layers by name, in the order of their calls, and replace them by the reference."""
    recorded: dict[str, Array] = {}
    to_nhwc, from_nhwc = _TRANSPOSITIONS[model.layout]
    layers: list[Any] = [one for one in _list_blocks(model) if isinstance(one, (Convolution, BatchNorm))]

    def call(layer: Any, own_forward: Callable[..., Any], *arguments: Any) -> Any:
        output, name = own_forward(*arguments), layer.prefix.removesuffix("_")
        exact = mx.nd.amp_cast(output, dtype="float32")
        recorded[name] = to_nhwc(exact.asnumpy())
        if name not in reference:
            return output
        given = mx.nd.array(from_nhwc(_take(name, recorded[name], reference[name])), ctx=output.context)
        # Other values, whose gradient is that of the output; in float32, which all operations know.
        return mx.nd.amp_cast(given + (exact - mx.nd.stop_gradient(exact)), dtype=output.dtype)

    with wrapped(layers, "forward", call):
        yield recorded


def _list_blocks(block: Any) -> Iterator[Any]:
    yield block
    for child in block._children.values():
        yield from _list_blocks(child)


def _by_layers(weights: Mapping[str, Array]) -> dict[str, list[tuple[str, Array]]]:
    layers: dict[str, list[tuple[str, Array]]] = {}
    for name in sorted(weights):
        layers.setdefault(_find_layer(name), []).append((name, weights[name]))
    return layers


def _find_layer(name: str) -> str:
    return name.partition("/")[0]


def _take(name: str, own: Array, given: Array | None) -> Array:
    """Return the other side's values in the dtype of this side's; this side's where the other one has none."""
    if given is None:
        return own
    require_shape(name, own.shape, given.shape)
    return given.astype(own.dtype)
