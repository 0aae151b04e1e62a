"""Classes of the user's images and videos: listed, written above them, and as one JSON file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from gaudi_apps.classification.classifier import Classifier, make_preprocessor
from gaudi_apps.inference.media import InputImage
from gaudi_apps.inference.predictor import Counts, Results, predict_files
from gaudi_apps.inference.visualizer import add_title, enlarge
from gaudi_datasets.output_files import write_json

PREDICTIONS = "predictions.json"


def predict(
    classifier: Classifier,
    files: Sequence[Path],
    class_names: Sequence[str],
    output_dir: Path,
    *,
    image_size: int,
    batch_size: int,
    top: int,
    strict: bool,
    write_line: Callable[[str], None] = print,
) -> Counts:
    """Classify every image and every frame of the files.

    `output_dir` gets, all at the end or nothing: a PNG of each image and a video of each video under its likeliest
    class, and ``predictions.json``, whose ``images`` say the classes and probabilities of each, and whose
    ``bad_files`` say what was skipped. Files of the same names from an earlier run are replaced.

    Args:
        classifier: the trained network.
        files: from `gaudi_apps.inference.media.find_files`.
        class_names: in the order of the labels.
        output_dir: made when it is not there.
        image_size: that the network takes.
        batch_size: images at once, at most.
        top: classes to list of an image, 5 at most.
        strict: end with the first file that cannot be used, instead of naming and skipping it.
        write_line: gets a line for each image: file, then classes with their probabilities.

    Raises:
        DataError: no file can be used, or one cannot and it is strict.
        OSError: the results cannot be written.
    """
    _, counts = predict_files(
        classifier.classify,
        files,
        make_preprocessor(image_size),
        lambda folder: ClassResults(folder, class_names, top),
        output_dir,
        batch_size=batch_size,
        strict=strict,
        write_line=write_line,
    )
    return counts


class ClassResults(Results):
    """Collect the likeliest classes of each image, and write the first one above it."""

    def __init__(self, folder: Path, class_names: Sequence[str], top: int) -> None:
        super().__init__(folder)
        self._names, self._top = class_names, top

    def add(self, image: InputImage, *outputs: npt.NDArray[Any]) -> list[str]:
        """Keep the classes of an image, the likeliest first, and write the first one above it."""
        pairs = zip(outputs[1][: self._top].tolist(), outputs[0][: self._top].tolist(), strict=True)
        classes = [
            {"class": self._names[label], "label": label, "probability": round(share, 6)} for label, share in pairs
        ]
        texts = [f"{one['class']} {one['probability']:.3f}" for one in classes]
        row = self.add_image(image, add_title(enlarge(image.pixels), texts[0]))
        row["classes"] = classes
        return [f"{image.name}: {', '.join(texts)}"]

    def count(self) -> str:
        """Nothing beyond the images."""
        return f"{len(self.bad_files)} files skipped"

    def write_tables(self) -> None:
        """Write the JSON file."""
        write_json(self.folder / PREDICTIONS, {"images": self.images, "bad_files": self.list_bad_files()})
