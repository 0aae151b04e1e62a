"""Classify images: from images to classes and probabilities, in Python and by the mode predict."""

from __future__ import annotations

import html
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import tensorflow as tf

from gaudi_apps.classification.flags import LISTED, PROBABILITIES
from gaudi_apps.inference.exported_models import CheckedExport, open_model
from gaudi_apps.inference.media import ImageInput, Images, InputImage, Preprocessor, predict_images, read_given
from gaudi_apps.inference.predictor import Results, Trained, assign_all, name_model, read_model
from gaudi_apps.inference.visualizer import Image, add_title, enlarge
from gaudi_apps.runtime.errors import require_argument
from gaudi_datasets.classification.pipeline import MEAN_RGB, cut_square, decode_reduced, prepare_image, prepare_pixels
from gaudi_datasets.drawing import to_drawable
from gaudi_datasets.errors import DataError
from gaudi_datasets.output_files import write_csv, write_json
from gaudi_datasets.program import count_things
from gaudi_models.architectures import CLASSIFIERS
from gaudi_models.classifiers import build_classifier

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import RuntimeFlag


def make_preprocessor(image_size: int) -> Preprocessor:
    """Return the preparation of images as evaluation does it."""
    return Preprocessor(
        partial(prepare_pixels, image_size=image_size),
        from_file=partial(prepare_image, image_size=image_size),
        errors=(tf.errors.InvalidArgumentError,),
    )


@dataclass(frozen=True, eq=False, repr=False)
class Classification:
    """The likeliest classes of an image, best first; `len` counts them, a loop yields each with its probability.

    Attributes:
        names: of the classes, [k].
        labels: int32 [k], from 0.
        probabilities: float32 [k].
        file_name: of the image, as it was given, or its address; empty for bytes and pixels.
        height: of the image in pixels.
        width: likewise.
        frame: number of the frame in its video, from 0; None for an image.
        read_pixels: returns the image, uint8 [height, width, 3], RGB; a file is read again.
    """

    names: tuple[str, ...]
    labels: npt.NDArray[np.int32]
    probabilities: npt.NDArray[np.float32]
    file_name: str = ""
    height: int = 0
    width: int = 0
    frame: int | None = None
    read_pixels: Callable[[], Image] | None = field(default=None)

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return zip(self.names, self.probabilities.tolist(), strict=True)

    def __repr__(self) -> str:
        image = self.file_name + (f"#{self.frame}" if self.frame is not None else "")
        classes = ", ".join(f"{name} {share:.3f}" for name, share in self)
        return f"<Classification{' of ' if image else ''}{image}: {classes}>"

    def draw(self) -> PIL.Image.Image:
        """Draw the image under its likeliest class; a small one is enlarged first.

        Raises:
            DataError: the image is not known, or cannot be read any more.
        """
        if self.read_pixels is None:
            raise DataError("classes without their image cannot be drawn", remedy="take them from Classifier.predict")
        title = f"{to_drawable(self.names[0], int(self.labels[0]))} {self.probabilities[0]:.3f}"
        return PIL.Image.fromarray(add_title(enlarge(self.read_pixels()), title))

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{share:.3f}</td></tr>" for name, share in self)
        table = f"<table><tr><th>class</th><th>probability</th></tr>{rows}</table>"
        return f"<div><p>{html.escape(self.file_name)}</p>{table}</div>"


class Classifier:
    """Classify images by a trained network.

    Args:
        model: from `gaudi_models.build_classifier`.
        class_names: in the order of the labels; needed by `predict`.
    """

    def __init__(self, model: Any, class_names: Sequence[str] = ()) -> None:
        self.class_names = tuple(class_names)
        self._model = model
        self._prepare = make_preprocessor(model.input_shape[1])
        self._listed = min(LISTED, model.output_shape[-1])
        self._answer = tf.function(self._compute, autograph=False, reduce_retracing=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, runtime: RuntimeFlag = "tensorflow") -> Classifier:
        """Load a classifier in float32 from a run, a checkpoint, or an export as safetensors.

        Args:
            path: of these.
            runtime: ``"openvino"``, ``"onnxruntime"``, ``"litert"`` or ``"auto"`` take the fastest export of a run that
                was evaluated for its checkpoint, in the precision that it has, and say which.

        Raises:
            GaudiError: see `gaudi_apps.inference.predictor.read_trained`, or it is not a classifier.
            ValueError: there is no such runtime.
            WeightsError: the file is damaged, or of another model.
        """
        return cls.open(read_model(path, runtime), path)

    @classmethod
    def open(cls, found: CheckedExport | Trained, path: str | os.PathLike[str]) -> Classifier:
        """Open what `gaudi_apps.inference.predictor.read_model` found at a path; raises as `load` does."""
        if name_model(found) not in CLASSIFIERS:
            remedy = "use a run or an export of a classifier"
            raise DataError("names no classifier as its model", path=path, remedy=remedy)
        if isinstance(found, CheckedExport):
            return _ExportedClassifier(found)
        weights, metadata = found
        names = [one["name"] for one in metadata.classes]
        model = build_classifier(
            metadata.model, len(names), padding=metadata.padding, image_size=metadata.image_size or 224
        )
        assign_all(model, weights)
        return cls(model, names)

    def predict(self, images: Images, *, top: int = LISTED, batch_size: int = 16) -> Any:
        """Find the likeliest classes of images, prepared as evaluation prepares them, in the order of the images.

        Args:
            images: see `gaudi_apps.Detector.predict`.
            top: largest number of classes of an image, 1 to 5.
            batch_size: largest number of images at once.

        Returns:
            a `Classification` for one image, and a list or an iterator of them as `gaudi_apps.Detector.predict` does.

        Raises:
            MissingInputError: a file is not there.
            DataError: an image cannot be decoded.
            TransferError: a camera or an address does not answer.
            ValueError: a number is out of its bounds.
        """
        require_argument("top", top, bounds=(1, LISTED))
        return predict_images(images, self._prepare, batch_size, partial(self._predict_batch, top=top))

    def prepare(self, image: ImageInput) -> InputImage:
        """Decode and resize one image, in any thread; `predict` takes the result, and raises no error for it."""
        return next(read_given(image, self._prepare))

    def _predict_batch(self, batch: Sequence[InputImage], top: int) -> list[Classification]:
        outputs = self.classify(np.stack([image.network_input for image in batch]))
        results = []
        for image, probabilities, labels in zip(batch, *outputs, strict=True):
            names = tuple(self.class_names[label] for label in labels[:top])
            shape = image.file_name, image.height, image.width, image.frame
            results.append(Classification(names, labels[:top], probabilities[:top], *shape, image.read_pixels))
        return results

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


class _ExportedClassifier(Classifier):
    """A classifier that is an export."""

    def __init__(self, export: CheckedExport) -> None:
        size = int(export.manifest["image_size"])

        def from_pixels(pixels: Any) -> Any:
            if export.format == "onnx":  # whose model cuts the centre out itself
                return cut_square(pixels, size)
            return prepare_pixels(pixels, size).numpy() + MEAN_RGB

        self._prepare = Preprocessor(
            from_pixels,
            from_file=lambda encoded: from_pixels(decode_reduced(encoded, size)),
            errors=(tf.errors.InvalidArgumentError,),
        )
        self._export = open_model(export, self._prepare.from_encoded)
        self.class_names = tuple(one["name"] for one in export.manifest["classes"])

    def classify(self, images: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Classify by the export; images are as it takes them, RGB in 0..255."""
        probabilities = self._export.compute([*np.asarray(images)])[PROBABILITIES]
        classes = np.argsort(-probabilities, axis=1, kind="stable")[:, :LISTED]
        return np.take_along_axis(probabilities, classes, axis=1), classes.astype(np.int32)

    def answer(self, images: Any, labels: Any) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Return what `classify` does, and the cross entropy float32 [batch] with the true labels."""
        probabilities = self._export.compute([*np.asarray(images)])[PROBABILITIES]
        right = np.take_along_axis(probabilities, np.asarray(labels)[:, np.newaxis], axis=1)[:, 0]
        return *self.classify(images), -np.log(np.maximum(right, np.finfo(np.float32).tiny))


PREDICTIONS, TABLE = "predictions.json", "predictions.csv"


class ClassResults(Results):
    """Collect the most likely classes of each image, and write the first one above it.

    The folder gets a PNG of each image, a video of each video, and ``predictions.json``, whose ``images`` say the
    classes and probabilities of each, and whose ``bad_files`` say what was skipped; and ``predictions.csv``, with a row
    for each class of each.

    Args:
        folder: to write into.
        class_names: in the order of the labels.
        top: classes to list of an image, 5 at most.
        save: what to write of these: "images", "json" and "csv".
    """

    tables = (PREDICTIONS,)

    def __init__(
        self, folder: Path, class_names: Sequence[str], top: int, save: Sequence[str] = ("images", "json")
    ) -> None:
        super().__init__(folder, draws="images" in save)
        self._names, self._top, self._save = class_names, top, save
        self.files = [name for kind, name in (("json", PREDICTIONS), ("csv", TABLE)) if kind in save]

    def add(self, image: InputImage, *outputs: npt.NDArray[Any]) -> list[str]:
        """Keep the classes of an image, the most likely first, and write the first one above it."""
        pairs = zip(outputs[1][: self._top].tolist(), outputs[0][: self._top].tolist(), strict=True)
        classes = [
            {"class": self._names[label], "label": label, "probability": round(share, 6)} for label, share in pairs
        ]
        texts = [f"{one['class']} {one['probability']:.3f}" for one in classes]
        best = classes[0]
        title = f"{to_drawable(best['class'], best['label'])} {best['probability']:.3f}"
        row = self.add_image(image, add_title(enlarge(image.pixels), title) if self.draws else None)
        row["classes"] = classes
        return [f"{image.name}: {', '.join(texts)}"]

    def count(self) -> str:
        """Count the files that were skipped."""
        return f"{count_things(len(self.bad_files), 'file')} skipped"

    def write_tables(self) -> None:
        """Write the JSON file and the table."""
        if "json" in self._save:
            write_json(self.folder / PREDICTIONS, {"images": self.images, "bad_files": self.bad_files})
        if "csv" in self._save:
            rows = (
                (row["path"], row.get("frame", ""), place, one["label"], one["class"], one["probability"])
                for row in self.images
                for place, one in enumerate(row["classes"], 1)
            )
            write_csv(self.folder / TABLE, ("path", "frame", "place", "label", "class", "probability"), rows)
