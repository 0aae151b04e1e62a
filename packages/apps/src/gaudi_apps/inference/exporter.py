"""Export networks in several formats, and compare each export with the network before any is kept."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from gaudi_apps.inference.converters import (
    TOLERANCE,
    Agreement,
    Arrays,
    ExportedNetwork,
    decode_pixels,
    find_worst,
    require_onnx,
    run_onnx,
    run_saved_model,
    run_tflite,
    to_float32,
    write_onnx,
    write_saved_model,
    write_tflite,
)
from gaudi_apps.inference.media import find_files, is_video, read_encoded
from gaudi_apps.runtime.errors import ExportError
from gaudi_datasets.errors import FlagError, MissingInputError, UnsafeError
from gaudi_datasets.output_files import write_json
from gaudi_datasets.program import count_things
from gaudi_models.weights import assign_weights, read_weights, write_weights
from gaudi_ops.files import read_file, read_text, staging_folder
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat

FORMAT = "gaudi-apps export"
VERSION = 1
MANIFEST = "export.json"
CHECKED_IMAGES = 8


def choose_images(inference: Sequence[str], source: Any | None) -> list[bytes]:
    """Choose up to eight encoded images to check an export on, evenly spaced.

    Args:
        inference: paths, folders or patterns of images (`--inference`); videos are left out.
        source: a data set to take them from if `inference` is empty.

    Raises:
        FlagError: neither is given.
        MissingInputError: there is no image.
        DataError: an image or a record is damaged.
    """
    if inference:
        files = [path for path in find_files(inference) if not is_video(path)]
        if not files:
            raise MissingInputError("--inference: names videos only; an export is checked on images, so add one")
        return [read_encoded(files[index]) for index in _spread(len(files))]
    if source is None:
        raise FlagError(
            "--mode export: needs images to check the export on", flag="--mode", remedy="give --inference or --data_dir"
        )
    return [source.read(index).encoded for index in _spread(len(source))]


def describe_export(path: Path, images: int, agreement: Agreement) -> str:
    """Describe the comparison of an export on a number of images in one line."""
    checked = count_things(images, "image")
    if not agreement.compared:
        return f"{path}: nothing was detected on {checked} to compare; check it on other images"
    return f"{path}: {agreement.compared} outputs on {checked} agree with the network ({agreement})"


def require_possible(output_dir: Path, formats: Sequence[str], suffixes: Sequence[str] = ("",)) -> None:
    """Check, before networks are run, that their exports can be written; suffixes are those of `write_exports`.

    Raises:
        MissingExtraError: a converter is not installed.
        UnsafeError: a folder to replace holds files that are not of an export.
    """
    if "onnx" in formats:
        require_onnx()
    for suffix in suffixes:
        for name in formats:
            refuse_foreign(output_dir / f"{name}{suffix}")


def write_exports(
    networks: Mapping[str, ExportedNetwork],
    encoded_images: Sequence[bytes],
    output_dir: Path,
    formats: Sequence[ExportFormat],
    metadata: Mapping[str, Any],
) -> dict[Path, Agreement]:
    """Write each network in each format, all or nothing: an earlier export is replaced only if all agree.

    Each folder has an ``export.json`` with the metadata, the result of the comparison, and the SHA-256 of the files.

    Args:
        networks: in float32, by the suffix of their folders: ``<format><suffix>``.
        encoded_images: JPEG or PNG, to compare on.
        output_dir: made when it is not there; what is to be replaced there has passed `require_possible`.
        formats: to write.
        metadata: JSON values by name.

    Returns:
        the comparison of each export, by its folder.

    Raises:
        ExportError: an export cannot be run, or differs from the network by more than 1e-3.
        OSError: an export cannot be written.
    """
    agreements: dict[Path, Agreement] = {}
    with staging_folder(output_dir) as staging:
        scratch = staging / "scratch"
        scratch.mkdir()
        for suffix, network in networks.items():
            for name in formats:
                folder = staging / f"{name}{suffix}"
                folder.mkdir()
                done = f"{len(agreements) + 1} of {len(networks) * len(formats)}"
                say(f"exporting {folder.name} ({done})", error=True)
                agreement = export_format(name, network, encoded_images, folder, scratch)
                if not agreement.is_close:
                    raise ExportError(
                        f"--export_format {folder.name}: differs from the network by more than {TOLERANCE:g} "
                        f"({agreement}); nothing is exported"
                    )
                _write_manifest(folder, metadata, len(encoded_images), agreement)
                agreements[output_dir / folder.name] = agreement
        for path in agreements:
            if path.exists():
                os.replace(path, scratch / path.name)
            os.replace(staging / path.name, path)
    return agreements


def export_format(
    name: ExportFormat, network: ExportedNetwork, encoded_images: Sequence[bytes], folder: Path, scratch: Path
) -> Agreement:
    """Write a network in one format into a folder, and compare the export with the network on encoded images.

    Raises:
        ValueError: a format of another name.
    """
    pixels = [decode_pixels(encoded) for encoded in encoded_images]
    from_pixels = np.stack([network.prepare_pixels(one) for one in pixels])
    if name == "onnx":
        write_onnx(network, folder / "model.onnx")
        return network.compare(_compute(network.compute, from_pixels), run_onnx(folder / "model.onnx", encoded_images))
    if name == "tflite":
        write_tflite(network, folder / "model.tflite")
        found = run_tflite(folder / "model.tflite", np.stack([network.resize(one) for one in pixels]))
        return network.compare(_compute(network.compute_tflite, from_pixels), found)
    from_encoded = np.stack([network.prepare_encoded(encoded) for encoded in encoded_images])
    reference = _compute(network.compute, from_encoded)
    if name == "safetensors":
        write_weights(network.model, folder / "weights.safetensors", metadata=network.metadata)
        restored = copy.copy(network)
        restored.model = to_float32(network.model)
        for variable in restored.model.variables:  # zeros where the file has no weights
            variable.assign(np.zeros(variable.shape, np.float32))
        assign_weights(restored.model, read_weights(folder / "weights.safetensors"))
        return network.compare(reference, _compute(restored.compute, from_encoded))
    if name != "saved_model":
        raise ValueError(f"{name!r} is no format of an export")
    write_saved_model(network, folder)
    of_encoded, of_pixels = run_saved_model(folder, encoded_images, scratch)
    others = network.compare(_compute(network.compute, from_pixels), of_pixels)
    return find_worst([network.compare(reference, of_encoded), others])


def _compute(function: Any, images: Any) -> Arrays:
    return {name: values.numpy() for name, values in tf.function(function, autograph=False)(images).items()}


def _spread(count: int) -> list[int]:
    """Choose at most eight indices below a count, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, CHECKED_IMAGES).astype(int)).tolist()


def _write_manifest(folder: Path, metadata: Mapping[str, Any], images: int, agreement: Agreement) -> None:
    files = {name: hashlib.sha256(read_file(folder / name)).hexdigest() for name in _list_files(folder)}
    document = {
        "format": FORMAT,
        "version": VERSION,
        "kind": folder.name,
        **metadata,
        "check": {"pictures": images, **agreement.differences, "compared": agreement.compared},
        "sha256": files,
    }
    write_json(folder / MANIFEST, document)


def refuse_foreign(folder: Path) -> None:
    """Raise UnsafeError if there is something at the path that is not in the manifest of an export."""
    if not folder.exists():
        return
    try:
        manifest = json.loads(read_text(folder / MANIFEST))
        known = {MANIFEST, *manifest["sha256"]} if manifest["format"] == FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError):
        known = set()
    present = _list_files(folder) if folder.is_dir() else [folder.name]
    foreign = [name for name in present if name not in known]
    if foreign:
        raise UnsafeError(
            "is not of an export, so it is not replaced",
            path=folder,
            record=foreign[0],
            remedy="give another --output_dir",
        )


def _list_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
