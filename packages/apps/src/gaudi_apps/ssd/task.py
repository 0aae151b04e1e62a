"""The detector as something that learns: network, loss, optimizer, and their state by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.errors import DataError
from gaudi_distributed import Communicator
from gaudi_models.ssd import build_ssd
from gaudi_ops.tf import MomentumSGD, ssd_loss

MOMENTUM = 0.9


class SSDTask:
    """Trains SSD-ResNet34.

    Args:
        num_classes: with the background.
        keras_policy: precision of the layers, ``"float32"`` or ``"mixed_bfloat16"``.
        weight_decay: see `gaudi_ops.tf.MomentumSGD`.
        communicator: averages gradients over the ranks.
    """

    def __init__(self, num_classes: int, *, keras_policy: str, weight_decay: float, communicator: Communicator) -> None:
        self.model = build_ssd(num_classes, dtype=keras_policy)
        self._optimizer = MomentumSGD(self.model.trainable_variables, MOMENTUM, weight_decay)
        self._communicator = communicator
        self._step = tf.function(self._train_step, reduce_retracing=True)

    def train_step(self, batch: Mapping[str, Any], learning_rate: float) -> Mapping[str, Any]:
        """Learn from a batch of `gaudi_datasets.detection_input.train_dataset`."""
        scalars: Mapping[str, Any] = self._step(batch, tf.constant(learning_rate, tf.float32))
        return scalars

    def _train_step(self, batch: Mapping[str, Any], learning_rate: Any) -> Mapping[str, Any]:
        with tf.GradientTape() as tape:
            logits, offsets = self.model(batch["images"], training=True)
            loss, class_loss, box_loss = ssd_loss(
                logits, offsets, batch["classes"], batch["offsets"], batch["num_matched"]
            )
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self._optimizer.apply(self._communicator.allreduce(gradients), learning_rate)
        return {"loss": loss, "class_loss": class_loss, "box_loss": box_loss}

    def _state(self) -> dict[str, Any]:
        """Every variable by the name it has in a checkpoint."""
        state = {variable.name.removesuffix(":0"): variable for variable in self.model.variables}
        trained = (variable.name.removesuffix(":0") for variable in self.model.trainable_variables)
        return state | {
            f"momentum/{name}": slot for name, slot in zip(trained, self._optimizer.velocities, strict=True)
        }

    def read_state(self) -> dict[str, npt.NDArray[Any]]:
        """Copies of all variables, weights and optimizer, by name."""
        return {name: np.array(variable.numpy()) for name, variable in self._state().items()}

    def write_state(self, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """Set all variables.

        Raises:
            DataError: a tensor is missing, superfluous, or of another shape; nothing is changed then.
        """
        state = self._state()
        if unlike := sorted(state.keys() ^ tensors.keys()):
            raise DataError(
                f"checkpoint: {len(unlike)} tensors are missing or unknown, the first is {unlike[0]}; use another"
            )
        for name, variable in state.items():
            found, expected = list(tensors[name].shape), list(variable.shape)
            if found != expected:
                raise DataError(
                    f"checkpoint: tensor {name} has shape {found} and the model {expected}; it is of a model with "
                    f"other classes, so use another --model_dir"
                )
        for name, variable in state.items():
            variable.assign(tensors[name])
