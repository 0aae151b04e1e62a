"""Train a classifier, by SGD, LARS or Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gaudi_apps.classification.flags import LearningConfig
from gaudi_apps.training.keras_task import MOMENTUM_NAME, Batch, KerasTask, Optimizer
from gaudi_distributed import Communicator
from gaudi_models.classifiers import LOGITS, feature_extractor, freeze_backbone
from gaudi_ops.tf import LarsSGD, MagnitudePruning, MomentumSGD, l2_loss, mixup, smoothed_softmax_cross_entropy
from gaudi_ops.tf.optimizers import NORMALIZATIONS


class ClassificationTask(KerasTask):
    """Train a classifier on batches of `gaudi_datasets.classification.pipeline.train_dataset`.

    Args:
        model: from `gaudi_models.classifiers.build_classifier`.
        config: loss and optimizer.
        seed: of mixup and dropout, with the place of a batch in the sequence of all images.
        head_only: train the head only.
        communicator: of the processes that train together.
        averages: keep an average of the weights, if the configuration has one.
    """

    def __init__(
        self,
        model: Any,
        config: LearningConfig,
        *,
        seed: int,
        head_only: bool,
        communicator: Communicator,
        averages: bool,
    ) -> None:
        if head_only:
            freeze_backbone(model)
        self._config, self._seed = config, seed
        self._counter = tf.Variable(0, trainable=False, dtype=tf.int64, name="steps")
        self._features = feature_extractor(model) if config.dropout else None
        variables = model.trainable_variables
        self._pruning: MagnitudePruning | None = None
        if (pruning := config.pruning) is not None:
            self._pruning = MagnitudePruning(
                [one for one in variables if "kernel" in one.name],  # of convolutions and of the head
                initial_sparsity=pruning.pruning_initial_sparsity,
                final_sparsity=pruning.pruning_final_sparsity,
                begin_step=pruning.pruning_begin_step,
                end_step=pruning.pruning_end_step,
                frequency=pruning.pruning_frequency,
            )
        optimizer = _make_optimizer(variables, config, head_only=head_only)
        self._adam = optimizer if isinstance(optimizer, Adam) else None
        super().__init__(model, optimizer, communicator=communicator, ema_decay=config.ema_decay if averages else 0.0)

    def compute_loss(self, batch: Batch) -> dict[str, Any]:
        """Compute the mean cross entropy, with the weight decay if it is a term of the loss, and top-1 accuracy."""
        config, images, targets = self._config, batch["images"], batch["labels"]
        if config.mixup_alpha:
            drawn_by = {"seed": self._seed, "step": self._find_first(images)}
            classes = self.model.output_shape[-1]
            images, targets = mixup(images, targets, num_classes=classes, alpha=config.mixup_alpha, **drawn_by)
        logits = self._compute_logits(images)
        loss = tf.reduce_mean(smoothed_softmax_cross_entropy(logits, targets, config.label_smoothing))
        if config.single_l2 and config.optimizer != "LARS":
            loss += config.weight_decay * l2_loss(self.model.trainable_variables)
        right = tf.cast(tf.argmax(logits, axis=1, output_type=tf.int32) == batch["labels"], tf.float32)
        return {"loss": loss, "accuracy": tf.reduce_mean(right)}

    def _compute_logits(self, images: Any) -> Any:
        if self._features is None:
            return self.model(images, training=True)
        # Drawn by the step, and not by a layer: what a layer of Keras 2 draws does not go on where a run goes on.
        seed = tf.random.fold_in(tf.stack([tf.constant(self._seed, tf.int64), self._counter]), 1)
        features = self._features(images, training=True)
        dropped = drop_out(
            features, self._config.dropout, seed, rank=self._communicator.rank, size=self._communicator.size
        )
        return self.model.get_layer(LOGITS)(dropped)

    def _find_first(self, images: Any) -> Any:
        """Find the place of this rank's first image in the sequence of all images, so that no two batches draw alike.

        That holds when a run is resumed with another number of ranks, too.
        """
        batch = self._counter * self._communicator.size + self._communicator.rank
        return batch * images.shape[0]

    def after_update(self) -> None:
        """Count the step, and set to zero what is pruned."""
        if self._pruning is not None:
            self._pruning.update(self._counter)
        self._counter.assign_add(1)

    def training_state(self) -> dict[str, Any]:
        """Return the variables of optimizer and pruning and the number of steps, by name."""
        state = {**super().training_state(), "steps": self._counter}
        if self._pruning is not None:
            state |= self._pruning.state()
        if self._adam is not None:
            names = [name.removeprefix(MOMENTUM_NAME) for name in super().training_state()]
            squares = zip(names, self._adam.squares, strict=True)
            state |= {f"square/{name}": slot for name, slot in squares} | {"adam_updates": self._adam.updates}
        return state


def drop_out(features: Any, rate: float, seed: Any, *, rank: int, size: int) -> Any:
    """Drop features of an image by draws that do not depend on the number of ranks.

    Args:
        features: floating [batch, features], of this rank's part; all parts are equal in size.
        rate: share of the features that become 0; the others become larger by ``1 / (1 - rate)``.
        seed: int64 [2], the same on all ranks, and another one for each step.
        rank: of this process.
        size: number of ranks.

    Returns:
        like the features.
    """
    count = features.shape[0]
    draws = tf.random.stateless_uniform([size * count, features.shape[1]], seed)[rank * count : (rank + 1) * count]
    return tf.where(draws >= rate, features * (1 / (1 - rate)), tf.zeros_like(features))


def _make_optimizer(variables: list[Any], config: LearningConfig, *, head_only: bool) -> Optimizer:
    if config.optimizer == "LARS":
        return LarsSGD(variables, config.momentum, config.weight_decay, epsilon=config.lars_epsilon)
    decays = [find_decay(variable.name, config, head_only=head_only) for variable in variables]
    if config.optimizer == "Adam":
        return Adam(variables, decays)
    return MomentumSGD(variables, config.momentum, decays, rate_inside=config.momentum_form == "keras")


def find_decay(name: str, config: LearningConfig, *, head_only: bool) -> float:
    """Find the weight decay of a variable in the update, as a coefficient of half its squares.

    Args:
        name: of the variable.
        config: with the form of the decay.
        head_only: only the head is trained. The original that trains a new head decays its kernel alone; the one
            that trains all decays the head's bias, too.
    """
    if config.single_l2 or any(part in name for part in NORMALIZATIONS):
        return 0.0
    if config.decay_form == "half_squares":
        return config.weight_decay
    is_l2 = "kernel" in name or (name.startswith(f"{LOGITS}/") and not head_only)
    return 2 * config.weight_decay if is_l2 else 0.0


BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7


class Adam(tf.Module):
    """Update variables by Adam (Kingma and Ba, https://arxiv.org/abs/1412.6980, algorithm 1), with L2 in the gradient.

    Args:
        variables: to train, float32.
        weight_decay: coefficients of half the squares, one for each variable.

    Attributes:
        velocities: averages of the gradients, one a variable.
        squares: averages of their squares.
        updates: number of updates, int64.
    """

    def __init__(self, variables: Sequence[Any], weight_decay: Sequence[float]) -> None:
        super().__init__(name="adam")
        self._variables = list(variables)
        self._decays = list(weight_decay)
        self.velocities, self.squares = (
            [tf.Variable(tf.zeros(one.shape), trainable=False) for one in variables] for _ in range(2)
        )
        self.updates = tf.Variable(0, trainable=False, dtype=tf.int64)

    def apply(self, gradients: Sequence[Any], rate: Any) -> None:
        """Update every variable once.

        Args:
            gradients: float32, one for each variable, in their order, without the weight decay.
            rate: learning rate, float32 scalar.
        """
        updates = tf.cast(self.updates.assign_add(1), tf.float32)
        powers = {"beta1_power": BETA_1**updates, "beta2_power": BETA_2**updates}
        constants = {"beta1": BETA_1, "beta2": BETA_2, "epsilon": EPSILON, "lr": rate}
        rows = zip(self._variables, self.velocities, self.squares, gradients, self._decays, strict=True)
        for variable, velocity, square, gradient, decay in rows:
            if decay:
                gradient = gradient + decay * variable
            slots = {"var": variable.handle, "m": velocity.handle, "v": square.handle}
            tf.raw_ops.ResourceApplyAdam(**slots, **powers, **constants, grad=gradient)
