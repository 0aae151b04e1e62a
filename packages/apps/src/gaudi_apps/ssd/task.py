"""The detector as something that learns: network, loss, optimizer, and their state by name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.errors import DataError
from gaudi_distributed import Communicator
from gaudi_models.resnet import PoolPadding
from gaudi_models.ssd import build_ssd
from gaudi_ops.tf import MomentumSGD, MovingAverages, ssd_loss

MOMENTUM = 0.9


class SSDTask:
    """Trains SSD-ResNet34.

    Args:
        num_classes: with the background.
        keras_policy: precision of the layers, ``"float32"`` or ``"mixed_bfloat16"``.
        weight_decay: see `gaudi_ops.tf.MomentumSGD`.
        communicator: averages gradients over the ranks.
        pool_padding: see `gaudi_models.resnet.ResNetTrunk`.
        ema_decay: of the average of the weights, see `gaudi_ops.tf.MovingAverages`; 0: there is none.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        keras_policy: str,
        weight_decay: float,
        communicator: Communicator,
        pool_padding: PoolPadding = "same",
        ema_decay: float = 0.0,
    ) -> None:
        self.model = build_ssd(num_classes, dtype=keras_policy, pool_padding=pool_padding)
        self._optimizer = MomentumSGD(self.model.trainable_variables, MOMENTUM, weight_decay)
        self._averages = MovingAverages(self.model.variables, ema_decay) if ema_decay else None
        self._communicator = communicator
        self._step = tf.function(self._train_step, reduce_retracing=True)

    def train_step(self, batch: Mapping[str, Any], learning_rate: float) -> Mapping[str, Any]:
        """Learn from a batch of `gaudi_datasets.detection.pipeline.train_dataset`; see `gaudi_apps.loop.Task`."""
        scalars: Mapping[str, Any] = self._step(batch, tf.constant(learning_rate, tf.float32))
        return scalars

    def _train_step(self, batch: Mapping[str, Any], learning_rate: Any) -> Mapping[str, Any]:
        with tf.GradientTape() as tape:
            logits, offsets = self.model(batch["images"], training=True)
            loss, class_loss, box_loss = ssd_loss(
                logits, offsets, batch["classes"], batch["offsets"], batch["num_matched"]
            )
        gradients = self._communicator.allreduce(tape.gradient(loss, self.model.trainable_variables))
        # One sum over all gradients: it is finite only where each of them is.
        size = tf.linalg.global_norm(gradients)
        finite = tf.math.is_finite(loss) & tf.math.is_finite(size) & tf.math.is_finite(learning_rate)
        tf.cond(finite, lambda: self._update(gradients, learning_rate), lambda: None)
        return {"loss": loss, "class_loss": class_loss, "box_loss": box_loss, "finite": finite}

    def _update(self, gradients: Sequence[Any], learning_rate: Any) -> None:
        self._optimizer.apply(gradients, learning_rate)
        if self._averages is not None:
            self._averages.update()

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Within, the model has the average of its weights, if one is kept."""
        return contextlib.nullcontext() if self._averages is None else self._averages.swapped()

    def reset_averages(self) -> None:
        """Begin the average anew, after weights were loaded."""
        if self._averages is not None:
            self._averages.reset()

    def _state(self) -> dict[str, Any]:
        """Every variable by the name it has in a checkpoint."""
        state = {variable.name.removesuffix(":0"): variable for variable in self.model.variables}
        trained = (variable.name.removesuffix(":0") for variable in self.model.trainable_variables)
        momentum = {f"momentum/{name}": slot for name, slot in zip(trained, self._optimizer.velocities, strict=True)}
        return state | momentum | (self._averages.state() if self._averages is not None else {})

    def read_state(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all variables, weights, optimizer and average, by name."""
        return {name: np.array(variable.numpy()) for name, variable in self._state().items()}

    def write_weights(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set the weights to use the model with: their average where the checkpoint has one.

        Raises:
            DataError: a weight is missing, or of another shape; nothing is changed then.
        """
        weights = {name: variable for name, variable in self._state().items() if not name.startswith("momentum/")}
        chosen = {name: tensors.get(f"average/{name}", tensors.get(name)) for name in weights}
        _require_fit({name: tensor for name, tensor in chosen.items() if tensor is not None}, weights)
        for name, variable in weights.items():
            variable.assign(chosen[name])

    def write_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set all variables.

        Raises:
            DataError: a tensor is missing, superfluous, or of another shape; nothing is changed then.
        """
        state = self._state()
        _require_fit(tensors, state)
        for name, variable in state.items():
            variable.assign(tensors[name])


def _require_fit(tensors: Mapping[str, npt.NDArray[Any]], variables: Mapping[str, Any]) -> None:
    if unlike := sorted(variables.keys() ^ tensors.keys()):
        raise DataError(
            f"checkpoint: {len(unlike)} tensors are missing or unknown, the first is {unlike[0]}; use another"
        )
    for name, variable in variables.items():
        found, expected = list(tensors[name].shape), list(variable.shape)
        if found != expected:
            raise DataError(
                f"checkpoint: tensor {name} has shape {found} and the model {expected}; it is of a model with "
                f"other classes, so use another --model_dir"
            )
