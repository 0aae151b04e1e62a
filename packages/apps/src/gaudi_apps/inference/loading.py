"""Load trained weights from a run, a checkpoint or an export, and prepare images, for predictions in Python."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.inference.media import Preprocessor
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.run_dir import RUN_FILE
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import read_image
from gaudi_models.weights import LoadReport, WeightsFile, WeightsMetadata, assign_weights, read_weights

ImageInput = str | os.PathLike[str] | bytes | npt.NDArray[np.uint8]


def read_trained(path: str | os.PathLike[str]) -> tuple[WeightsFile, WeightsMetadata]:
    """Read the weights of a trained network with its classes.

    Args:
        path: the folder of a run, whose newest checkpoint is read; a checkpoint; or an export as safetensors, its
            folder or its file.

    Raises:
        MissingInputError: the run has no checkpoint.
        DataError: the file does not name the classes.
        WeightsError: it is damaged or of another format, or a `gaudi_models.MissingWeightsError`: it is not there.
    """
    weights = read_weights(_find_weights(Path(path)))
    if weights.metadata is None or not weights.metadata.classes:
        raise DataError("does not name its classes", path=path, remedy="use a run, a checkpoint or an export of ours")
    return weights, weights.metadata


def assign_all(model: Any, weights: WeightsFile) -> LoadReport:
    """Set all variables of a model.

    Raises:
        DataError: the weights are of another model, or of a part of it.
    """
    report = assign_weights(model, weights)
    if missing := [*report.initial, *report.other_shape]:
        raise DataError(
            f"has no {missing[0]} for this model, and {len(missing) - 1} others are missing",
            path=weights.path,
            remedy="use a whole trained model of this kind",
        )
    return report


def prepare_batches(
    images: Sequence[ImageInput], prepare: Preprocessor, batch_size: int
) -> Iterator[npt.NDArray[np.float32]]:
    """Yield batches float32 [batch, side, side, 3] of images: paths, encoded bytes, or uint8 [height, width, 3] in RGB.

    Raises:
        MissingInputError: a file is not there.
        DataError: an image cannot be decoded.
    """
    for first in range(0, len(images), batch_size):
        yield np.stack([_prepare(image, prepare) for image in images[first : first + batch_size]])


def _find_weights(path: Path) -> Path:
    """Find the weights in the folder of a run or of an export; other paths are returned as they are."""
    if (path / RUN_FILE).is_file():
        checkpoints = CheckpointFolder(path / "checkpoints")
        if not checkpoints.steps():
            raise MissingInputError("has no checkpoint", path=path, remedy="train first, or give another run")
        return checkpoints.path(checkpoints.steps()[-1])
    exported = path / "weights.safetensors"
    return exported if exported.is_file() else path


def _prepare(image: ImageInput, prepare: Preprocessor) -> npt.NDArray[np.float32]:
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            raise DataError(f"an image is {image.dtype} {list(image.shape)}; give uint8 [height, width, 3] in RGB")
        return np.asarray(prepare.from_pixels(image))
    encoded = image if isinstance(image, bytes) else read_image(Path(image)).encoded
    try:
        return np.asarray(prepare.from_encoded(encoded))
    except prepare.errors as error:
        place = None if isinstance(image, bytes) else image
        raise DataError(f"cannot be decoded ({str(error).splitlines()[0]})", path=place) from None
