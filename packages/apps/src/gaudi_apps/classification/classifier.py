"""Classify images: from images to classes and probabilities, in Python and by the mode predict."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.classification.flags import LISTED
from gaudi_apps.inference.media import InputImage, Preprocessor
from gaudi_apps.inference.predictor import (
    ImageInput,
    Results,
    assign_all,
    prepare_batches,
    read_trained,
)
from gaudi_apps.inference.visualizer import add_title, enlarge
from gaudi_datasets.classification.pipeline import prepare_image, prepare_pixels
from gaudi_datasets.errors import DataError
from gaudi_datasets.output_files import write_json
from gaudi_models.architectures import CLASSIFIERS
from gaudi_models.classifiers import build_classifier


def make_preprocessor(image_size: int) -> Preprocessor:
    """Return the preparation of images as evaluation does it."""
    return Preprocessor(
        partial(prepare_image, image_size=image_size),
        partial(prepare_pixels, image_size=image_size),
        (tf.errors.InvalidArgumentError,),
    )


@dataclass(frozen=True, eq=False)
class Classification:
    """The likeliest classes of an image, best first.

    Attributes:
        names: of the classes, [k].
        labels: int32 [k], from 0.
        probabilities: float32 [k].
    """

    names: tuple[str, ...]
    labels: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float32]


class Classifier:
    """Classify images by a trained network.

    Args:
        model: from `gaudi_models.build_classifier`.
        class_names: in the order of the labels; needed by `predict`.
    """

    def __init__(self, model: Any, class_names: Sequence[str] = ()) -> None:
        self.class_names = tuple(class_names)
        self._model = model
        self._listed = min(LISTED, model.output_shape[-1])
        self._answer = tf.function(self._compute, autograph=False, reduce_retracing=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Classifier:
        """Load a classifier in float32 from a run, a checkpoint, or an export as safetensors.

        Raises:
            GaudiError: see `gaudi_apps.inference.predictor.read_trained`, or it is not a classifier.
            WeightsError: the file is damaged, or of another model.
        """
        weights, metadata = read_trained(path)
        if metadata.model not in CLASSIFIERS:
            raise DataError(
                "names no classifier as its model", path=path, remedy="use a run or an export of a classifier"
            )
        names = [one["name"] for one in metadata.classes]
        model = build_classifier(
            metadata.model, len(names), padding=metadata.padding, image_size=metadata.image_size or 224
        )
        assign_all(model, weights)
        return cls(model, names)

    def predict(self, images: Sequence[ImageInput], *, top: int = LISTED, batch_size: int = 16) -> list[Classification]:
        """Find the likeliest classes of images, prepared as evaluation prepares them.

        Args:
            images: paths, encoded bytes (JPEG or PNG), or pixels uint8 [height, width, 3] in RGB.
            top: largest number of classes of an image, 5 at most.
            batch_size: largest number of images at once.

        Raises:
            MissingInputError: a file is not there.
            DataError: an image cannot be decoded.
        """
        found = []
        for batch in prepare_batches(images, make_preprocessor(self._model.input_shape[1]), batch_size):
            for probabilities, labels in zip(*self.classify(batch), strict=True):
                names = tuple(self.class_names[label] for label in labels[:top])
                found.append(Classification(names, labels[:top], probabilities[:top]))
        return found

    def classify(self, images: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Return probabilities float32 [batch, k] and labels int32 [batch, k] of the k likeliest classes, best first.

        Args:
            images: [batch, side, side, 3], normalised as `gaudi_datasets.classification.pipeline` does.
        """
        probabilities, classes, _ = self._answer(images, tf.zeros([len(images)], tf.int32))
        return probabilities.numpy(), classes.numpy()

    def answer(self, images: Any, labels: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return what `classify` does, and the cross entropy float32 [batch] with the true labels."""
        probabilities, classes, losses = self._answer(images, labels)
        return probabilities.numpy(), classes.numpy(), losses.numpy()

    def _compute(self, images: Any, labels: Any) -> tuple[Any, Any, Any]:
        logits = self._model(images, training=False)
        probabilities, classes = tf.math.top_k(tf.nn.softmax(logits), self._listed)
        return probabilities, classes, tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


PREDICTIONS = "predictions.json"


class ClassResults(Results):
    """Collect the most likely classes of each image, and write the first one above it.

    The folder gets a PNG of each image, a video of each video, and ``predictions.json``, whose ``images`` say the
    classes and probabilities of each, and whose ``bad_files`` say what was skipped.

    Args:
        folder: to write into.
        class_names: in the order of the labels.
        top: classes to list of an image, 5 at most.
    """

    tables = (PREDICTIONS,)

    def __init__(self, folder: Path, class_names: Sequence[str], top: int) -> None:
        super().__init__(folder)
        self._names, self._top = class_names, top

    def add(self, image: InputImage, *outputs: npt.NDArray[Any]) -> list[str]:
        """Keep the classes of an image, the most likely first, and write the first one above it."""
        pairs = zip(outputs[1][: self._top].tolist(), outputs[0][: self._top].tolist(), strict=True)
        classes = [
            {"class": self._names[label], "label": label, "probability": round(share, 6)} for label, share in pairs
        ]
        texts = [f"{one['class']} {one['probability']:.3f}" for one in classes]
        row = self.add_image(image, add_title(enlarge(image.pixels), texts[0]))
        row["classes"] = classes
        return [f"{image.name}: {', '.join(texts)}"]

    def count(self) -> str:
        """Count the files that were skipped."""
        return f"{len(self.bad_files)} files skipped"

    def write_tables(self) -> None:
        """Write the JSON file."""
        write_json(self.folder / PREDICTIONS, {"images": self.images, "bad_files": self.bad_files})
