"""Train a detector."""

from __future__ import annotations

from typing import Any

from gaudi_apps.training.application import ReduceStatistics
from gaudi_apps.training.keras_task import Batch, KerasTask
from gaudi_distributed import Communicator
from gaudi_models.padding import PoolPadding
from gaudi_models.ssd import build_ssd
from gaudi_ops.tf import MomentumSGD, ssd_loss
from gaudi_ops.tf.losses import Implementation

MOMENTUM = 0.9


class SSDTask(KerasTask):
    """Train SSD-ResNet34 on batches of `gaudi_datasets.detection.pipeline.train_dataset`.

    Args:
        num_classes: with the background.
        keras_policy: precision of the layers, ``"float32"`` or ``"mixed_bfloat16"``.
        weight_decay: see `gaudi_ops.tf.MomentumSGD`.
        communicator: of the processes that train together.
        pool_padding: see `gaudi_models.ssd.build_ssd`.
        ema_decay: of the average of the weights, see `gaudi_ops.tf.ExponentialMovingAverage`; 0: there is none.
        reduce_statistics: of batch norm, see `gaudi_models.ssd.build_ssd`.
        cross_entropy: its implementation, see `gaudi_ops.tf.ssd_loss`.
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
        reduce_statistics: ReduceStatistics | None = None,
        cross_entropy: Implementation = "auto",
    ) -> None:
        self._cross_entropy = cross_entropy
        model = build_ssd(
            num_classes, dtype=keras_policy, pool_padding=pool_padding, reduce_statistics=reduce_statistics
        )
        optimizer = MomentumSGD(model.trainable_variables, MOMENTUM, weight_decay)
        super().__init__(model, optimizer, communicator=communicator, ema_decay=ema_decay)

    def compute_loss(self, batch: Batch) -> dict[str, Any]:
        """Compute the loss and its two parts."""
        logits, offsets = self.model(batch["images"], training=True)
        targets = (batch["classes"], batch["offsets"], batch["num_matched"])
        loss, class_loss, box_loss = ssd_loss(logits, offsets, *targets, implementation=self._cross_entropy)
        return {"loss": loss, "class_loss": class_loss, "box_loss": box_loss}
