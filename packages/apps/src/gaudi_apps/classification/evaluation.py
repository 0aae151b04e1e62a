"""Classifying every image of a data set, once, and counting how often that was right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.classification.recipe import LISTED
from gaudi_apps.scoring import find_order, pack_arrays, unpack_arrays
from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.classification.pipeline import eval_dataset
from gaudi_datasets.sampling import PADDING_ID, InputOptions, deal_positions
from gaudi_datasets.tf_input import read_batches

_COLUMNS = ("positions", "labels", "classes", "probabilities", "losses")


@dataclass(frozen=True, eq=False)
class Answers:
    """What a classifier says of images.

    Attributes:
        positions: int64 [images], of the images in their data set, rising.
        labels: int32 [images], the truth.
        classes: int32 [images, k], the k likeliest, best first; of equal ones the lower label.
        probabilities: float32 [images, k], of these.
        losses: float32 [images], cross entropy.
        images_total: of the data set.
    """

    positions: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32]
    classes: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float32]
    losses: npt.NDArray[np.float32]
    images_total: int

    @property
    def are_right(self) -> npt.NDArray[np.bool_]:
        """Whether the likeliest class is the truth, [images]."""
        return np.asarray(self.classes[:, 0] == self.labels)

    @property
    def figures(self) -> dict[str, float]:
        """Top-1 and top-5 accuracy in 0..1, and the mean loss."""
        among = (self.classes == self.labels[:, None]).any(axis=1)
        return {
            "top_1": float(self.are_right.mean()),
            "top_5": float(among.mean()),
            "loss": float(self.losses.astype(np.float64).mean()),
        }

    def confusion(self, num_classes: int) -> npt.NDArray[np.int64]:
        """How many images of a class (row) were taken for a class (column), [num_classes, num_classes]."""
        pairs = self.labels.astype(np.int64) * num_classes + self.classes[:, 0]
        return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)

    def find_mistakes(self, count: int) -> npt.NDArray[np.int64]:
        """Places of wrong answers in the data set, the most confident first."""
        wrong = np.flatnonzero(~self.are_right)
        return wrong[np.argsort(-self.probabilities[wrong, 0], kind="stable")][:count]


class Classifier:
    """A trained network in use.

    Args:
        model: from `gaudi_models.classifiers.build_classifier`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._listed = min(LISTED, model.output_shape[-1])
        self._answer = tf.function(self._compute, reduce_retracing=True)

    def classify(self, images: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Probabilities float32 [batch, k] and labels int32 [batch, k] of the k likeliest classes, best first."""
        probabilities, classes, _ = self._answer(images, tf.zeros([len(images)], tf.int32))
        return probabilities.numpy(), classes.numpy()

    def answer(self, images: Any, labels: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """The same, and the cross entropy float32 [batch] with the truth."""
        probabilities, classes, losses = self._answer(images, labels)
        return probabilities.numpy(), classes.numpy(), losses.numpy()

    def nothing(self) -> tuple[npt.NDArray[Any], ...]:
        """Labels, probabilities, classes and losses of no image, as `answer` gives the last three."""
        labels, losses = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return labels, np.zeros([0, self._listed], np.float32), np.zeros([0, self._listed], np.int32), losses

    def _compute(self, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        logits = self._model(images, training=False)
        probabilities, classes = tf.math.top_k(tf.nn.softmax(logits), self._listed)
        return probabilities, classes, tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def evaluate(
    classifier: Classifier,
    source: ClassificationSource,
    options: InputOptions,
    *,
    num_images: int | None = None,
    report: Callable[[], None] = lambda: None,
) -> Answers:
    """Classify every image of a data set that is dealt to this rank.

    Args:
        classifier: the trained network.
        source: images and truth.
        options: batch size, threads, rank and number of ranks; figures do not depend on them.
        num_images: only so many images, from the first.
        report: called before each batch is used.
    """
    total = len(source) if num_images is None else min(num_images, len(source))
    columns: list[tuple[npt.NDArray[Any], ...]] = [classifier.nothing()]
    for batch in read_batches(eval_dataset(source, options, num_images=total), source):
        report()
        real = batch["image_ids"].numpy() != PADDING_ID
        answers = classifier.answer(batch["images"], batch["labels"])
        columns.append(tuple(values[real] for values in (batch["labels"].numpy(), *answers)))
    labels, probabilities, classes, losses = (np.concatenate(values) for values in zip(*columns, strict=True))
    positions = deal_positions(total, options)
    return Answers(positions[positions < total], labels, classes, probabilities, losses, len(source))


def join_answers(parts: Sequence[Answers]) -> Answers:
    """The answers of all ranks, in the order of the data set.

    Raises:
        DataError: an image is missing, or was classified twice.
    """
    order = find_order([part.positions for part in parts])
    columns = {name: np.concatenate([getattr(part, name) for part in parts])[order] for name in _COLUMNS}
    return Answers(**columns, images_total=parts[0].images_total)


def pack_answers(answers: Answers) -> bytes:
    """A part as bytes."""
    columns = {name: getattr(answers, name) for name in _COLUMNS}
    return pack_arrays({**columns, "images_total": np.array(answers.images_total)})


def unpack_answers(content: bytes) -> Answers:
    """The part that `pack_answers` made the bytes of."""
    arrays = unpack_arrays(content)
    return Answers(**{name: arrays[name] for name in _COLUMNS}, images_total=int(arrays["images_total"]))
