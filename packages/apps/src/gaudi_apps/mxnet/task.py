"""The detector in MXNet: train it, from weights drawn by NumPy, and detect objects with it.

`replay_steps` trains for `--mode parity`, tensor by tensor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt

from gaudi_apps.mxnet.losses import SSDLoss
from gaudi_apps.training.checkpoint import require_names, require_shape
from gaudi_apps.training.recording import (
    Array,
    Reference,
    StepTensor,
    list_outputs,
    make_tensor,
    require_same_shape,
    without_reference,
    wrapped,
)
from gaudi_models.mxnet.layers import BatchNorm, Convolution, Layout, Precision, ReduceStatistics
from gaudi_models.mxnet.ssd import SSD, build_ssd
from gaudi_models.mxnet.weights import assign_weights, name_parameters, read_tensors, to_mxnet, to_numpy
from gaudi_models.padding import PoolPadding
from gaudi_models.weights import LoadReport, WeightsFile
from gaudi_ops import SSD300, DefaultBoxSpec, decode_boxes, non_max_suppression

MOMENTUM_NAME = "momentum/"

SCORE_THRESHOLD = 0.05
IOU_THRESHOLD = 0.5
DETECTIONS_PER_IMAGE = 200

Batch = Mapping[str, Any]
Tensors = Mapping[str, npt.NDArray[Any]]
Detections = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]


class MXNetTask:
    """Train SSD-ResNet34 on batches of `gaudi_datasets.detection.batches.train_batches`.

    Args:
        num_classes: number of classes including the background.
        device: an `mxnet.Context`.
        communicator: of the ranks that train together; of several, one of `horovod_mxnet_engine`.
        precision: of the convolutions; weights are float32.
        layout: of the images.
        loss_scale: factor of the loss in the backward pass, by which gradients are divided.
        momentum: share of the last update in the next one.
        weight_decay: factor of the weight in the gradient of every trainable variable.
        predivide: see `gaudi_distributed.comm.horovod_mxnet_engine.HorovodMXNetCommunicator.open_trainer`.
        groups: groups in which gradients travel, see there.
        pool_padding: see `gaudi_models.mxnet.build_ssd`.
        reduce_statistics: see `gaudi_models.mxnet.build_ssd`.
        seed: of the new weights.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        device: Any,
        communicator: Any,
        precision: Precision = "fp32",
        layout: Layout = "NCHW",
        loss_scale: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        predivide: float = 1.0,
        groups: int = 1,
        pool_padding: PoolPadding = "symmetric",
        reduce_statistics: ReduceStatistics | None = None,
        seed: int = 0,
    ) -> None:
        self._device, self._layout, self._loss_scale, self._communicator = device, layout, loss_scale, communicator
        self.model = build_ssd(
            num_classes,
            pool_padding=pool_padding,
            layout=layout,
            precision=precision,
            reduce_statistics=reduce_statistics,
        )
        self.model.initialize(ctx=device)
        assign_weights(self.model, draw_weights(self.model, seed))
        self.model.hybridize(static_alloc=True, static_shape=True)
        named = name_parameters(self.model)
        self._weights = {name: parameter.data() for name, parameter in named.items()}
        self._statistics = [one.data() for one in named.values() if one.grad_req == "null"]
        self._trained = {name: one for name, one in sorted(named.items()) if one.grad_req != "null"}
        self._gradients = [one.grad() for one in self._trained.values()]
        self._compute_loss = SSDLoss(loss_scale)
        optimizer = mx.optimizer.SGD(momentum=momentum, wd=weight_decay, rescale_grad=1 / loss_scale)
        if communicator.size > 1:
            self._trainer = communicator.open_trainer(self._trained, optimizer, predivide=predivide, groups=groups)
        else:
            self._trainer = mx.gluon.Trainer(self._trained, optimizer, kvstore=None)
        # Gluon makes velocities at the first step, numbered in the order of the names. Here they are part of the state
        # from the beginning.
        self._velocities = {name: mx.nd.zeros(one.shape, ctx=device) for name, one in self._trained.items()}
        (updater,) = self._trainer._updaters
        updater.states = dict(enumerate(self._velocities.values()))
        updater.states_synced = dict.fromkeys(updater.states, True)
        self._votes = [0.0, 0.0]

    def train_step(self, batch: Batch, learning_rate: float) -> Mapping[str, Any]:
        """Learn from a batch; see `gaudi_apps.training.trainer.TrainableTask`."""
        losses = self.compute_gradients(batch)
        finite = self._find_finite(losses)
        scalars: dict[str, Any] = {}
        if self._communicator.size > 1:
            own_finite = finite
            self._trainer.allreduce_grads()
            losses, scalars["votes"] = self._average(losses)
            finite = self._find_finite(losses)
            scalars["own_finite"] = bool(own_finite.asscalar())
        scalars |= dict(zip(("loss", "class_loss", "box_loss"), losses.asnumpy().tolist(), strict=True))
        scalars["finite"] = bool(finite.asscalar()) and math.isfinite(learning_rate)
        if scalars["finite"]:
            self.update(learning_rate)
        return scalars

    def compute_gradients(self, batch: Batch) -> Any:
        """Compute gradients into the parameters; return the loss and its two parts, float32 [3]."""
        names = ("images", "classes", "offsets")
        images, classes, offsets = (mx.nd.array(batch[name], ctx=self._device) for name in names)
        with mx.autograd.record():
            logits, boxes = self.model(images)
        losses, gradients = self._compute_loss(logits, boxes, classes, offsets, batch["num_matched"])
        mx.autograd.backward([logits, boxes], gradients)
        return mx.nd.concat(*losses, dim=0)

    def read_gradients(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the gradients of `compute_gradients` by the names of their variables, unscaled."""
        return {name: to_numpy(one.grad(), self._layout) / self._loss_scale for name, one in self._trained.items()}

    def update(self, learning_rate: float) -> None:
        """Update the weights by the gradients in the parameters."""
        self._trainer.set_learning_rate(learning_rate)
        self._trainer.update(1)

    def train_steps(self, batches: Sequence[Batch], learning_rates: Sequence[float]) -> list[Mapping[str, Any]]:
        """Train one step after the other: MXNet has no call for several."""
        return [self.train_step(*given) for given in zip(batches, learning_rates, strict=True)]

    def vote(self, *, stop: bool, save: bool) -> None:
        """Send this rank's vote with the steps to come, see `gaudi_apps.training.trainer.count_votes`."""
        self._votes = [float(stop), float(save)]

    def guard_shapes(self) -> None:
        """Do nothing: the network's graph is built once, for the shapes of the first batch."""

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Use the weights as they are; no average of them is kept."""
        return contextlib.nullcontext()

    def load_weights(self, weights: WeightsFile) -> LoadReport:
        """Set the weights that a file has, see `gaudi_models.mxnet.assign_weights`."""
        return assign_weights(self.model, weights)

    def read_weights(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of weights and moving statistics by name."""
        return {name: to_numpy(array, self._layout) for name, array in self._weights.items()}

    def read_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of weights and momentum by name, kernels in TensorFlow's order of axes."""
        return {name: to_numpy(array, self._layout) for name, array in self._state().items()}

    def write_state(self, tensors: Tensors) -> None:
        """Set weights and momentum.

        Raises:
            DataError: a tensor is missing, unknown, or of another shape; nothing is changed then.
        """
        self._write(tensors, self._state())

    def write_weights(self, tensors: Tensors) -> None:
        """Set the weights, and ignore the momentum among the tensors.

        Raises:
            DataError: a weight is missing, or of another shape; nothing is changed then.
        """
        self._write({name: one for name, one in tensors.items() if name in self._weights}, self._weights)

    def _state(self) -> dict[str, Any]:
        """Return every array by its name in a checkpoint."""
        return self._weights | {f"{MOMENTUM_NAME}{name}": one for name, one in self._velocities.items()}

    def _write(self, tensors: Tensors, arrays: Mapping[str, Any]) -> None:
        require_names(tensors, arrays)
        values = {name: to_mxnet(tensors[name], self._layout) for name in arrays}
        for name, array in arrays.items():
            require_shape(name, values[name].shape, array.shape)
        for name, array in arrays.items():
            array[:] = values[name].as_in_context(array.context)

    def _find_finite(self, losses: Any) -> Any:
        """Return 1 if losses and gradients are finite, else 0, float32 [1], which may still be being computed."""
        arrays = [losses, *self._gradients]
        return mx.nd.multi_all_finite(*arrays, num_arrays=len(arrays))

    def _average(self, losses: Any) -> tuple[Any, npt.NDArray[np.float32]]:
        """Average moving statistics over the ranks; return the mean losses and the mean vote.

        All that follows is computed from means, so after the step all ranks have the same state, bit for bit, and agree
        on whether its numbers are finite.
        """
        votes = mx.nd.array(self._votes, ctx=losses.context)
        (means,) = self._communicator.allreduce([mx.nd.concat(losses, votes, *self._statistics, dim=0)])
        ends = np.cumsum([3, 2, *(len(one) for one in self._statistics)]).tolist()
        for statistic, begin, end in zip(self._statistics, ends[1:-1], ends[2:], strict=True):
            statistic[:] = means[begin:end]
        return means[:3], means[3:5].asnumpy()


def draw_weights(net: SSD, seed: int) -> WeightsFile:
    """Draw the kernels of a detector: by He's normal distribution, and by Glorot's uniform one in layers with a bias.

    The TensorFlow program draws from the same distributions, but truncates He's. He et al.,
    https://arxiv.org/abs/1502.01852; Glorot and Bengio, "Understanding the difficulty of training deep feedforward
    neural networks", 2010. Draws are independent for each kernel.
    """
    shapes = {name: tensor.shape for name, tensor in read_tensors(net).items()}
    kernels = [name for name in shapes if name.endswith("/kernel")]
    drawn = {}
    for number, name in enumerate(kernels):
        generator = np.random.default_rng([seed, number])
        height, width, channels_in, channels_out = shapes[name]
        fan_in, fan_out = height * width * channels_in, height * width * channels_out
        if f"{name.removesuffix('kernel')}bias" in shapes:
            bound = math.sqrt(6 / (fan_in + fan_out))
            values = generator.uniform(-bound, bound, shapes[name])
        else:
            values = generator.normal(0, math.sqrt(2 / fan_in), shapes[name])
        drawn[name] = values.astype(np.float32)
    return WeightsFile("new weights", drawn, net.padding, {})


class Detector:
    """A trained network with decoding and suppression.

    Suppression is that of gaudi-ops in NumPy: on CPUs it takes a quarter of the time of MXNet's box_nms.

    Args:
        net: from `gaudi_models.mxnet.build_ssd`, or a function with the same inputs and outputs.
        device: the `mxnet.Context` of its parameters.
        spec: the default boxes.
        score_threshold: only scores above it count.
        iou_threshold: a box that overlaps a better one of its class by this IoU or more is dropped.
        max_per_class: best scores of a class that are considered.
        max_detections: detections of an image at most.
    """

    def __init__(
        self,
        net: Callable[[Any], tuple[Any, Any]],
        device: Any,
        *,
        spec: DefaultBoxSpec = SSD300,
        score_threshold: float = SCORE_THRESHOLD,
        iou_threshold: float = IOU_THRESHOLD,
        max_per_class: int = DETECTIONS_PER_IMAGE,
        max_detections: int = DETECTIONS_PER_IMAGE,
    ) -> None:
        self._net, self._device, self._spec, self._max_detections = net, device, spec, max_detections
        self._rules: dict[str, Any] = {
            "score_threshold": score_threshold,
            "iou_threshold": iou_threshold,
            "max_per_class": max_per_class,
            "max_detections": max_detections,
        }

    def detect(self, images: npt.ArrayLike) -> Detections:
        """Return the detections of a batch, best first.

        Args:
            images: float32 [batch, 3, 300, 300], or [batch, 300, 300, 3] where the network takes that, normalised.

        Returns:
            boxes float32 [batch, max_detections, 4], y0, x0, y1, x1 in 0..1; labels int32 [batch, max_detections], 0
            where there is no detection; scores float32 [batch, max_detections].
        """
        logits, offsets = self._net(mx.nd.array(images, ctx=self._device, dtype="float32"))
        scores = mx.nd.softmax(logits).asnumpy()
        boxes = decode_boxes(offsets.asnumpy(), self._spec)
        shape = len(scores), self._max_detections
        detections = np.zeros((*shape, 4), np.float32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, image in enumerate(zip(boxes, scores, strict=True)):
            for array, found in zip(detections, non_max_suppression(*image, **self._rules), strict=True):
                array[row, : len(found)] = found
        np.clip(detections[0], 0.0, 1.0, out=detections[0])
        return detections


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
    reference: Reference = without_reference,
) -> Iterator[list[StepTensor]]:
    """Train as `MXNetTask.train_step` does, and yield all tensors of each step in the order of computation.

    Arguments and errors are those of `gaudi_apps.training.keras_task.replay_steps`. Outputs are those of
    convolutions and batch norms.
    """
    task.model.hybridize(active=False)  # so that each layer is called
    to_nhwc, from_nhwc = _TRANSPOSITIONS[task.model.layout]
    before: Mapping[str, Array] = task.read_weights()
    for number in range(1, steps + 1):
        batch = next(batches)
        given, updates = reference(number, "batch"), reference(number, "update")
        own = {**batch, "images": to_nhwc(batch["images"])}
        used = {name: _take(name, values, given.get(name)) for name, values in own.items()}
        used["images"] = from_nhwc(used["images"])
        with _recording_outputs(task.model, reference(number, "output")) as outputs:
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
        before = _follow(task, before, updates) if updates else after


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
    require_same_shape(name, own.shape, given.shape)
    return given.astype(own.dtype)
