"""Exports of a trained detector, each run and compared with the network before it is left where it was asked for."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gaudi_apps.coco_table import write_json
from gaudi_apps.ssd.agreement import (
    TOLERANCE,
    Agreement,
    Detections,
    compare_detections,
    compare_rows,
    find_worst,
)
from gaudi_apps.ssd.converters import export_onnx, export_tflite, require_onnx
from gaudi_apps.ssd.detector import Detector
from gaudi_apps.ssd.export_runs import ExportError, run_onnx, run_saved_model, run_tflite
from gaudi_apps.ssd.inputs import VIDEO_ENDINGS, find_files
from gaudi_apps.ssd.serving import export_saved_model, find_raw, list_classes, to_float32
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image
from gaudi_datasets.detection.sources import DetectionSource
from gaudi_datasets.errors import FlagError, MissingInputError, UnsafeError
from gaudi_datasets.image_files import read_image
from gaudi_datasets.staging import staging_folder
from gaudi_models.resnet import PoolPadding
from gaudi_models.weights import WeightsMetadata, assign_weights, read_weights, write_weights
from gaudi_ops import SSD300

ExportFormat = Literal["saved_model", "onnx", "tflite", "safetensors"]

FORMAT = "gaudi-apps export"
VERSION = 1
MANIFEST = "export.json"
CHECKED_PICTURES = 8


@dataclass(frozen=True)
class ExportReport:
    """One export: its format, its folder, on how many pictures it was checked, and with what result."""

    format: str
    path: Path
    pictures: int
    agreement: Agreement

    def describe(self) -> str:
        """A line for people."""
        agreement = self.agreement
        text = f"{self.path}: {agreement.compared} boxes on {self.pictures} pictures as the network finds them"
        text += f" (sides within {agreement.box_difference:.1g}, scores within {agreement.score_difference:.1g})"
        if not agreement.compared:
            text += "; with no detection to compare this says little, so check it on other pictures"
        return text


@dataclass(frozen=True)
class _Check:
    """What the checks of one run of the export share."""

    model: Any  # float32
    categories: Sequence[Category]
    pictures: Sequence[bytes]
    images: npt.NDArray[np.float32]
    reference: Detections
    step: int
    pool_padding: PoolPadding
    scratch: Path


def choose_pictures(inference: Sequence[str], source: DetectionSource | None) -> list[bytes]:
    """Up to eight encoded pictures to check an export on, evenly over what there is.

    Args:
        inference: paths, folders or patterns of pictures (`--inference`); videos among them are left out.
        source: where they come from when `inference` is empty.

    Raises:
        FlagError: there is neither.
        MissingInputError: there is no picture.
        DataError: a picture or a record is damaged.
    """
    if inference:
        files = [path for path in find_files(inference) if path.suffix.lower() not in VIDEO_ENDINGS]
        if not files:
            raise MissingInputError("--inference: gives videos only; an export is checked on pictures, so add one")
        return [read_image(files[place]).encoded for place in _spread(len(files))]
    if source is None:
        raise FlagError("--mode export: needs pictures to check the export on; give --inference or --data_dir")
    return [source.read(place).encoded for place in _spread(len(source))]


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

    All is written, or nothing: an earlier export is replaced only when every new one is found right. Each folder has
    an ``export.json`` with step, pool padding, classes, what was compared, and the SHA-256 of the files.

    Args:
        model: from `gaudi_models.ssd.build_ssd`; it is exported in float32 whatever its precision.
        categories: the classes, label 1 first.
        pictures: encoded, from `choose_pictures`.
        output_dir: made when it is not there.
        formats: see the functions of `gaudi_apps.ssd.serving` and `gaudi_apps.ssd.converters`.
        step: of the checkpoint that the model is from, to note.
        pool_padding: of the model, to note; see `gaudi_models.resnet.ResNetTrunk`.

    Raises:
        MissingExtraError: a converter is not installed.
        UnsafeError: a folder to be replaced holds files that no export wrote.
        ExportError: an export cannot be run, or differs from the network by more than 1e-3.
        OSError: it cannot be written.
    """
    if "onnx" in formats:
        require_onnx()
    for name in formats:
        _refuse_foreign(output_dir / name)
    network = to_float32(model)
    images = np.stack([prepare_image(picture).numpy() for picture in pictures])
    reference = Detections(*Detector(network).detect(images))
    reports = []
    with staging_folder(output_dir) as staging:
        scratch = staging / "scratch"
        scratch.mkdir()
        check = _Check(network, categories, pictures, images, reference, step, pool_padding, scratch)
        for name in dict.fromkeys(formats):
            folder = staging / name
            folder.mkdir()
            agreement = _EXPORTS[name](check, folder)
            _require_close(name, agreement)
            _write_manifest(folder, name, check, agreement)
            reports.append(ExportReport(name, output_dir / name, len(pictures), agreement))
        for report in reports:
            if report.path.exists():
                os.replace(report.path, scratch / report.format)
            os.replace(staging / report.format, report.path)
    return reports


def _spread(count: int) -> list[int]:
    """At most eight places in a list of so many, evenly over it."""
    return np.unique(np.linspace(0, count - 1, CHECKED_PICTURES).astype(int)).tolist()


def _export_saved_model(check: _Check, folder: Path) -> Agreement:
    export_saved_model(check.model, check.categories, folder)
    ways = run_saved_model(folder, check.pictures, check.scratch)
    return find_worst([compare_detections(check.reference, found) for found in ways])


def _export_onnx(check: _Check, folder: Path) -> Agreement:
    export_onnx(check.model, check.categories, folder / "model.onnx")
    return compare_detections(check.reference, run_onnx(folder / "model.onnx", check.pictures))


def _export_tflite(check: _Check, folder: Path) -> Agreement:
    export_tflite(check.model, folder / "model.tflite")
    expected = [output.numpy() for output in find_raw(check.model, check.images)]
    return compare_rows(expected, run_tflite(folder / "model.tflite", check.pictures))


def _export_safetensors(check: _Check, folder: Path) -> Agreement:
    path = folder / "weights.safetensors"
    classes = [asdict(category) for category in check.categories]
    write_weights(check.model, path, metadata=WeightsMetadata(check.pool_padding, classes, SSD300.image_size))
    restored = to_float32(check.model)
    for variable in restored.variables:
        variable.assign(np.zeros(variable.shape, np.float32))
    assign_weights(restored, read_weights(path))
    return compare_detections(check.reference, Detections(*Detector(restored).detect(check.images)))


_EXPORTS: dict[str, Callable[[_Check, Path], Agreement]] = {
    "saved_model": _export_saved_model,
    "onnx": _export_onnx,
    "tflite": _export_tflite,
    "safetensors": _export_safetensors,
}


def _require_close(name: str, agreement: Agreement) -> None:
    if not agreement.is_close:
        raise ExportError(
            f"--export_format {name}: differs from the network by {agreement.box_difference:.2g} in a box and"
            f" {agreement.score_difference:.2g} in a score, at most {TOLERANCE:g} is right; nothing is exported"
        )


def _write_manifest(folder: Path, name: str, check: _Check, agreement: Agreement) -> None:
    files = {_relative(path, folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in _list_files(folder)}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "kind": name,
        "step": check.step,
        "pool_padding": check.pool_padding,
        "classes": list_classes(check.categories),
        "check": {"pictures": len(check.pictures), **asdict(agreement)},
        "sha256": files,
    }
    write_json(folder / MANIFEST, document)


def _refuse_foreign(folder: Path) -> None:
    """Raise UnsafeError if there is something at the path that is not in the manifest of an export."""
    if not folder.exists():
        return
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        known = {MANIFEST, *manifest["sha256"]} if manifest["format"] == FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    present = [_relative(path, folder) for path in _list_files(folder)] if folder.is_dir() else ["it, a file,"]
    foreign = [name for name in present if name not in known]
    if foreign:
        raise UnsafeError(f"{folder}: {foreign[0]} is of no export, so it is not replaced; give another --output_dir")


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()
