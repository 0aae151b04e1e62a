"""Train the detector in MXNet, from weights drawn by NumPy."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt

from gaudi_apps.mxnet.losses import SSDLoss
from gaudi_apps.training.checkpoint import require_names, require_shape
from gaudi_models.mxnet.layers import Layout, Precision, ReduceStatistics
from gaudi_models.mxnet.ssd import SSD, build_ssd
from gaudi_models.mxnet.weights import assign_weights, name_parameters, read_tensors, to_mxnet, to_numpy
from gaudi_models.padding import PoolPadding
from gaudi_models.weights import LoadReport, WeightsFile

MOMENTUM_NAME = "momentum/"

Batch = Mapping[str, Any]
Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class ComputeConfig:
    """The device and the precision of the network.

    Attributes:
        device: an `mxnet.Context`.
        precision: of the convolutions; weights are float32.
        layout: of the images.
        loss_scale: factor of the loss in the backward pass, by which gradients are divided.
    """

    device: Any
    precision: Precision = "fp32"
    layout: Layout = "NCHW"
    loss_scale: float = 1.0


@dataclass(frozen=True)
class SGDConfig:
    """The optimizer, SGD with momentum.

    Attributes:
        momentum: share of the last update in the next one.
        weight_decay: factor of the weight in the gradient of every trainable variable.
        predivide: see `gaudi_distributed.comm.horovod_mxnet_engine.HorovodMXNetCommunicator.open_trainer`.
        groups: groups in which gradients travel, see there.
    """

    momentum: float = 0.9
    weight_decay: float = 5e-4
    predivide: float = 1.0
    groups: int = 1


class MXNetTask:
    """Train SSD-ResNet34 on batches of `gaudi_datasets.detection.batches.train_batches`.

    Args:
        num_classes: number of classes including the background.
        compute: device and precision.
        sgd: the optimizer.
        communicator: of the ranks that train together; of several, one of `horovod_mxnet_engine`.
        pool_padding: see `gaudi_models.mxnet.build_ssd`.
        reduce_statistics: see `gaudi_models.mxnet.build_ssd`.
        seed: of the new weights.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        compute: ComputeConfig,
        sgd: SGDConfig,
        communicator: Any,
        pool_padding: PoolPadding = "symmetric",
        reduce_statistics: ReduceStatistics | None = None,
        seed: int = 0,
    ) -> None:
        self._compute, self._communicator = compute, communicator
        self.model = build_ssd(
            num_classes,
            pool_padding=pool_padding,
            layout=compute.layout,
            precision=compute.precision,
            reduce_statistics=reduce_statistics,
        )
        self.model.initialize(ctx=compute.device)
        assign_weights(self.model, draw_weights(self.model, seed))
        self.model.hybridize(static_alloc=True, static_shape=True)
        named = name_parameters(self.model)
        self._weights = {name: parameter.data() for name, parameter in named.items()}
        self._statistics = [one.data() for one in named.values() if one.grad_req == "null"]
        self._trained = {name: one for name, one in sorted(named.items()) if one.grad_req != "null"}
        self._gradients = [one.grad() for one in self._trained.values()]
        self._compute_loss = SSDLoss(compute.loss_scale)
        self._trainer, self._velocities = self._open_trainer(sgd)
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
        device = self._compute.device
        images, classes, offsets = (mx.nd.array(batch[name], ctx=device) for name in ("images", "classes", "offsets"))
        with mx.autograd.record():
            logits, boxes = self.model(images)
        losses, gradients = self._compute_loss(logits, boxes, classes, offsets, batch["num_matched"])
        mx.autograd.backward([logits, boxes], gradients)
        return mx.nd.concat(*losses, dim=0)

    def read_gradients(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the gradients of `compute_gradients` by the names of their variables, unscaled."""
        scale, layout = self._compute.loss_scale, self._compute.layout
        return {name: to_numpy(one.grad(), layout) / scale for name, one in self._trained.items()}

    def update(self, learning_rate: float) -> None:
        """Update the weights by the gradients in the parameters."""
        self._trainer.set_learning_rate(learning_rate)
        self._trainer.update(1)

    def train_steps(self, batches: Sequence[Batch], learning_rates: Sequence[float]) -> list[Mapping[str, Any]]:
        """Train one step after the other: MXNet has no call for several."""
        return [self.train_step(*given) for given in zip(batches, learning_rates, strict=True)]

    def vote(self, *, stop: bool, save: bool) -> None:
        """Send this rank's vote with the steps to come, see `gaudi_apps.training.trainer.StopSaveVote`."""
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
        return {name: to_numpy(array, self._compute.layout) for name, array in self._weights.items()}

    def read_state(self) -> dict[str, npt.NDArray[Any]]:
        """Return copies of weights and momentum by name, kernels in TensorFlow's order of axes."""
        return {name: to_numpy(array, self._compute.layout) for name, array in self._state().items()}

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
        values = {name: to_mxnet(tensors[name], self._compute.layout) for name in arrays}
        for name, array in arrays.items():
            require_shape(name, values[name].shape, array.shape)
        for name, array in arrays.items():
            array[:] = values[name].as_in_context(array.context)

    def _open_trainer(self, sgd: SGDConfig) -> tuple[Any, dict[str, Any]]:
        """Return the trainer, and the velocities of the trained parameters by name."""
        optimizer = mx.optimizer.SGD(
            momentum=sgd.momentum, wd=sgd.weight_decay, rescale_grad=1 / self._compute.loss_scale
        )
        if self._communicator.size > 1:
            trainer = self._communicator.open_trainer(
                self._trained, optimizer, predivide=sgd.predivide, groups=sgd.groups
            )
        else:
            trainer = mx.gluon.Trainer(self._trained, optimizer, kvstore=None)
        # Gluon makes velocities at the first step, numbered in the order of the names. Here they are part of the state
        # from the beginning.
        velocities = {name: mx.nd.zeros(one.shape, ctx=self._compute.device) for name, one in self._trained.items()}
        (updater,) = trainer._updaters
        updater.states = dict(enumerate(velocities.values()))
        updater.states_synced = dict.fromkeys(updater.states, True)
        return trainer, velocities

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
    neural networks", 2010.

    Args:
        net: an initialised network.
        seed: of the draws, which are independent for each kernel.
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
