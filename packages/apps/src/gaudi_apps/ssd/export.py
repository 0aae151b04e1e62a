"""Exports of a trained detector, each run and compared with the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gaudi_apps.exporting import Exporter, ExportReport, require_possible, write_exports
from gaudi_apps.precision import reload_float32, to_float32
from gaudi_apps.ssd.agreement import Agreement, Detections, compare_detections, compare_rows, find_worst
from gaudi_apps.ssd.converters import export_onnx, export_tflite
from gaudi_apps.ssd.detector import Detector
from gaudi_apps.ssd.export_runs import run_onnx, run_saved_model, run_tflite
from gaudi_apps.ssd.serving import export_saved_model, find_raw, list_classes
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image
from gaudi_models.padding import SSD_PADDINGS, PoolPadding
from gaudi_models.weights import WeightsMetadata, write_weights
from gaudi_ops import SSD300

ExportFormat = Literal["saved_model", "onnx", "tflite", "safetensors"]


@dataclass(frozen=True)
class _Check:
    """What the checks of one run of the export share."""

    model: Any  # float32
    categories: Sequence[Category]
    pictures: Sequence[bytes]
    images: npt.NDArray[np.float32]
    reference: Detections
    pool_padding: PoolPadding


def run_export(
    model: Any,
    categories: Sequence[Category],
    pictures: Sequence[bytes],
    output_dir: Path,
    formats: Sequence[ExportFormat],
    *,
    step: int,
    pool_padding: PoolPadding,
) -> list[ExportReport]:
    """Export a detector in some formats, each into a folder of its name, and compare each with the network.

    See `gaudi_apps.exporting.write_exports`; ``export.json`` notes step, pool padding and classes.

    Args:
        model: from `gaudi_models.ssd.build_ssd`; it is exported in float32 whatever its precision.
        categories: the classes, label 1 first.
        pictures: encoded, from `gaudi_apps.exporting.choose_pictures`.
        output_dir: made when it is not there.
        formats: see the functions of `gaudi_apps.ssd.serving` and `gaudi_apps.ssd.converters`.
        step: of the checkpoint that the model is from, to note.
        pool_padding: of the model, to note; see `gaudi_models.ssd.build_ssd`.

    Raises:
        MissingExtraError: a converter is not installed.
        UnsafeError: a folder to be replaced holds files that no export wrote.
        ExportError: an export cannot be run, or differs from the network by more than 1e-3.
        OSError: it cannot be written.
    """
    require_possible(output_dir, formats)
    network = to_float32(model)
    images = np.stack([prepare_image(picture).numpy() for picture in pictures])
    reference = Detections(*Detector(network).detect(images))
    check = _Check(network, categories, pictures, images, reference, pool_padding)
    exporters: dict[str, Exporter] = {name: partial(_EXPORTS[name], check) for name in formats}
    notes = {"step": step, "pool_padding": pool_padding, "classes": list_classes(categories)}
    return write_exports(output_dir, exporters, notes, len(pictures))


def _export_saved_model(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_saved_model(check.model, check.categories, folder)
    ways = run_saved_model(folder, check.pictures, scratch)
    return find_worst([compare_detections(check.reference, found) for found in ways])


def _export_onnx(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_onnx(check.model, check.categories, folder / "model.onnx")
    return compare_detections(check.reference, run_onnx(folder / "model.onnx", check.pictures))


def _export_tflite(check: _Check, folder: Path, scratch: Path) -> Agreement:
    export_tflite(check.model, folder / "model.tflite")
    expected = [output.numpy() for output in find_raw(check.model, check.images)]
    return compare_rows(expected, run_tflite(folder / "model.tflite", check.pictures))


def _export_safetensors(check: _Check, folder: Path, scratch: Path) -> Agreement:
    path = folder / "weights.safetensors"
    classes = [asdict(category) for category in check.categories]
    metadata = WeightsMetadata(SSD_PADDINGS[check.pool_padding], classes, SSD300.image_size)
    write_weights(check.model, path, metadata=metadata)
    restored = reload_float32(check.model, path)
    return compare_detections(check.reference, Detections(*Detector(restored).detect(check.images)))


_EXPORTS: dict[str, Callable[[_Check, Path, Path], Agreement]] = {
    "saved_model": _export_saved_model,
    "onnx": _export_onnx,
    "tflite": _export_tflite,
    "safetensors": _export_safetensors,
}
