"""Train a classifier, by SGD, LARS or Adam; export it and its features, and compare each export with the network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from gaudi_apps.classification.data import MODEL_CONFIG_NAMES, read_class_names
from gaudi_apps.classification.flags import PROBABILITIES, LearningConfig
from gaudi_apps.inference.converters import Agreement, ExportedNetwork, decode_pixels, to_float32
from gaudi_apps.inference.exported_models import Arrays
from gaudi_apps.inference.exporter import Export, ExportRequest, list_kinds, require_possible, write_exports
from gaudi_apps.training.checkpoint import ModelConfig
from gaudi_apps.training.keras_task import MOMENTUM_NAME, Batch, KerasTask, Optimizer
from gaudi_datasets.classification.pipeline import MEAN_RGB, cut_square, decode_reduced, prepare_image, prepare_pixels
from gaudi_distributed import Communicator
from gaudi_models.classifiers import LOGITS, feature_extractor, freeze_backbone
from gaudi_models.weights import WeightsMetadata
from gaudi_ops.tf import LarsSGD, MagnitudePruning, MomentumSGD, l2_loss, mixup, smoothed_softmax_cross_entropy
from gaudi_ops.tf.optimizers import NORMALIZATIONS

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat


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

    def recompute(self) -> None:
        """See `KerasTask.recompute`."""
        (self.model if self._features is None else self._features).recompute()

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


FEATURES = "features"


def run_export(
    model: Any,
    model_config: ModelConfig,
    encoded_images: Sequence[bytes],
    output_dir: Path,
    formats: Sequence[ExportFormat],
    *,
    step: int,
    with_features: bool,
    request: ExportRequest | None = None,
) -> dict[Path, Export]:
    """Export a classifier in some formats, each into a folder of its name, and compare each with the network.

    See `gaudi_apps.inference.exporter`, whose errors it raises. ``export.json`` has the step and
    the configuration of the model.

    Args:
        model: from `gaudi_models.classifiers.build_classifier`; it is exported in float32 whatever its precision.
        model_config: of the model, as a checkpoint has it.
        encoded_images: from `gaudi_apps.inference.exporter.choose_images`.
        output_dir: made when it is not there.
        formats: see `ClassifierExport`.
        step: of the checkpoint that the model is from.
        with_features: export the network up to its pooled features, too, into ``<format>-features``, in fp32.
        request: precisions, and what tells whether exports are good enough; None: fp32, compared alone.
    """
    request = request or ExportRequest()
    kinds = list_kinds(formats, request.precisions)
    require_possible(output_dir, kinds, ("", "-features") if with_features else ("",))
    classifier = to_float32(model)
    networks: dict[str, ExportedNetwork] = {"": ClassifierExport(classifier, PROBABILITIES, model_config)}
    if with_features:
        networks["-features"] = ClassifierExport(feature_extractor(classifier), FEATURES, model_config)
    fields = {name: value for name, value in model_config.items() if name in MODEL_CONFIG_NAMES}
    return write_exports(networks, encoded_images, output_dir, kinds, {"step": step, **fields}, request)


class ClassifierExport(ExportedNetwork):
    """Define the exports of a classifier: ``probabilities`` [batch, classes], or ``features`` [batch, features].

    The signature ``class_names`` of a SavedModel returns string [classes]. TensorFlow Lite takes the center of an image
    as evaluation does.

    Args:
        model: the network, in float32.
        output: name of the output; of ``"probabilities"`` the softmax is taken.
        model_config: as a checkpoint has it.
    """

    scale, shift = np.ones(3, np.float32), -MEAN_RGB

    def __init__(self, model: Any, output: str, model_config: ModelConfig) -> None:
        size = model_config["image_size"]
        metadata = WeightsMetadata(model_config["padding"], model_config["classes"], size, model_config["model"])
        super().__init__(model, size, metadata)
        self._output, self.is_scored = output, output == PROBABILITIES
        self._class_names = read_class_names(model_config)

    def prepare_encoded(self, encoded: Any) -> Any:
        """Prepare an image as evaluation does; it may be decoded at a reduced scale."""
        return prepare_image(encoded, self.image_size)

    def prepare_pixels(self, pixels: Any) -> Any:
        """Prepare pixels as evaluation does."""
        return prepare_pixels(pixels, self.image_size)

    def resize(self, pixels: Any) -> Any:
        """Resize and crop pixels as evaluation does."""
        return self.prepare_pixels(pixels).numpy() + MEAN_RGB

    def decode(self, encoded: bytes) -> Any:
        """Decode an image as evaluation does, a large JPEG at a reduced scale."""
        return decode_pixels(encoded, decode=partial(decode_reduced, image_size=self.image_size))

    def prepare_onnx(self, encoded: bytes) -> Any:
        """Decode as evaluation does, and cut the square out whose centre the model takes, float32 [side, side, 3]."""
        return cut_square(self.decode(encoded), self.image_size)

    def compute(self, images: Any) -> dict[str, Any]:
        """Return the output by its name."""
        values = self.model(images, training=False)
        return {self._output: tf.nn.softmax(values) if self._output == PROBABILITIES else values}

    def list_classes(self) -> list[dict[str, Any]]:
        """List label and name of each class."""
        return [{"label": label, "name": name} for label, name in enumerate(self._class_names)]

    def class_tensors(self) -> dict[str, Any]:
        """Return the names of the classes."""
        return {"class_names": tf.constant(list(self._class_names))}

    def compare(self, reference: Arrays, found: Arrays) -> Agreement:
        """Compare the output as a share of the largest one of the network, or of 1 if that is larger."""
        expected, values = reference[self._output], found[self._output]
        if values.shape != expected.shape:
            return Agreement({"difference": np.inf}, expected.size)
        scale = max(1.0, float(np.abs(expected).max()))
        return Agreement({"difference": float(np.abs(values - expected).max()) / scale}, expected.size)
