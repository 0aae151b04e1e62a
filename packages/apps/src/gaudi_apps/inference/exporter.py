"""Export in several formats: each is compared with the network before any is left in the folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gaudi_apps.errors import ExportError
from gaudi_apps.inference.converters import require_onnx
from gaudi_apps.inference.media import VIDEO_ENDINGS, find_files
from gaudi_datasets.errors import FlagError, MissingInputError, UnsafeError
from gaudi_datasets.image_files import read_image
from gaudi_datasets.output_files import staging_folder, write_json
from gaudi_models.weights import assign_weights, read_weights
from gaudi_ops.tf.keras_api import keras

FORMAT = "gaudi-apps export"
VERSION = 1
MANIFEST = "export.json"
CHECKED_IMAGES = 8
TOLERANCE = 1e-3


class Agreement(Protocol):
    """How far an export and the network are apart: a dataclass, whose fields the manifest notes."""

    @property
    def is_close(self) -> bool:
        """Whether they agree within 1e-3."""

    def describe(self, images: int) -> str:
        """What was compared on so many images, and how close it is."""

    def describe_difference(self) -> str:
        """How far they are apart."""


class Encoded(Protocol):
    """An image of a data set."""

    @property
    def encoded(self) -> bytes:
        """The bytes of its file."""


class ImageSource(Protocol):
    """Images of a data set."""

    def __len__(self) -> int:
        """How many there are."""

    def read(self, index: int, /) -> Encoded:
        """One of them."""


@dataclass(frozen=True)
class ExportReport:
    """One export: its format, its folder, on how many images it was checked, and with what result."""

    format: str
    path: Path
    images: int
    agreement: Any

    def describe(self) -> str:
        """A line for people."""
        return f"{self.path}: {self.agreement.describe(self.images)}"


# Writes an export into the first folder, and compares; the second one is for temporary files.
Exporter = Callable[[Path, Path], Agreement]


def choose_images(inference: Sequence[str], source: ImageSource | None) -> list[bytes]:
    """Up to eight encoded images to check an export on, evenly over what there is.

    Args:
        inference: paths, folders or patterns of images (`--inference`); videos among them are left out.
        source: where they come from when `inference` is empty.

    Raises:
        FlagError: there is neither.
        MissingInputError: there is no image.
        DataError: an image or a record is damaged.
    """
    if inference:
        files = [path for path in find_files(inference) if path.suffix.lower() not in VIDEO_ENDINGS]
        if not files:
            raise MissingInputError("--inference: gives videos only; an export is checked on images, so add one")
        return [read_image(files[place]).encoded for place in _spread(len(files))]
    if source is None:
        raise FlagError("--mode export: needs images to check the export on; give --inference or --data_dir")
    return [source.read(place).encoded for place in _spread(len(source))]


def require_possible(output_dir: Path, formats: Sequence[str]) -> None:
    """See, before a network is run, which takes a while, that exports of it can be written.

    Raises:
        MissingExtraError: a converter is not installed.
        UnsafeError: a folder to be replaced holds files that no export wrote.
    """
    if "onnx" in formats:
        require_onnx()
    for name in formats:
        refuse_foreign(output_dir / name)


def write_exports(
    output_dir: Path, exporters: Mapping[str, Exporter], notes: Mapping[str, Any], images: int
) -> list[ExportReport]:
    """Write each export into a folder of its name, all or nothing: an earlier one is replaced only when all are right.

    Each folder has an ``export.json`` with the notes, what was compared, and the SHA-256 of the files.

    Args:
        output_dir: made when it is not there.
        exporters: what writes and compares, by the name of the format.
        notes: JSON values by name.
        images: on how many it is compared.

    Raises:
        UnsafeError: a folder to be replaced holds files that no export wrote.
        ExportError: an export cannot be run, or differs from the network by more than 1e-3.
        OSError: it cannot be written.
    """
    for name in exporters:
        refuse_foreign(output_dir / name)
    reports = []
    with staging_folder(output_dir) as staging:
        scratch = staging / "scratch"
        scratch.mkdir()
        for name, export in exporters.items():
            folder = staging / name
            folder.mkdir()
            agreement = export(folder, scratch)
            _require_close(name, agreement)
            _write_manifest(folder, name, notes, images, agreement)
            reports.append(ExportReport(name, output_dir / name, images, agreement))
        for report in reports:
            if report.path.exists():
                os.replace(report.path, scratch / report.format)
            os.replace(staging / report.format, report.path)
    return reports


def _spread(count: int) -> list[int]:
    """At most eight places in a list of so many, evenly over it."""
    return np.unique(np.linspace(0, count - 1, CHECKED_IMAGES).astype(int)).tolist()


def _require_close(name: str, agreement: Agreement) -> None:
    if not agreement.is_close:
        raise ExportError(
            f"--export_format {name}: differs from the network by {agreement.describe_difference()},"
            f" at most {TOLERANCE:g} is right; nothing is exported"
        )


def _write_manifest(folder: Path, name: str, notes: Mapping[str, Any], images: int, agreement: Any) -> None:
    files = {_relative(path, folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in _list_files(folder)}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "kind": name,
        **notes,
        "check": {"pictures": images, **asdict(agreement)},
        "sha256": files,
    }
    write_json(folder / MANIFEST, document)


def refuse_foreign(folder: Path) -> None:
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


def to_float32(model: Any) -> Any:
    """A copy of a Keras model whose layers compute in float32, whatever the precision it was trained in."""

    def rebuild(layer: Any) -> Any:
        return type(layer).from_config({**layer.get_config(), "dtype": "float32"})

    copy = keras.models.clone_model(model, clone_function=rebuild)
    weights = {variable.name: variable for variable in model.variables}
    for variable in copy.variables:
        variable.assign(weights[variable.name])
    return copy


def reload_float32(model: Any, path: Path) -> Any:
    """The same with the weights of a file, and zero where the file has none."""
    copy = to_float32(model)
    for variable in copy.variables:
        variable.assign(np.zeros(variable.shape, np.float32))
    assign_weights(copy, read_weights(path))
    return copy
