"""Export networks in several formats, and compare each export with the network before any is kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from gaudi_apps.inference.addresses import is_video, read_encoded
from gaudi_apps.inference.converters import (
    TOLERANCE,
    Agreement,
    ExportedNetwork,
    decode_pixels,
    find_worst,
    hold_stderr,
    require_onnx,
    run_exported,
    run_saved_model,
    to_float32,
    whole_float32,
    write_onnx,
    write_saved_model,
    write_tflite,
)
from gaudi_apps.inference.exported_models import (
    EXPORT_PRECISIONS,
    FORMAT,
    MANIFEST,
    MODEL_FILES,
    Arrays,
    ExportedModel,
    Inputs,
    OnnxModel,
    SavedModel,
    find_obstacle,
    import_runtime,
    open_exported,
)
from gaudi_apps.inference.media import find_files
from gaudi_apps.inference.quantization import AccuracyBound, quantize_onnx, quantize_tflite, write_openvino
from gaudi_apps.runtime.errors import ExportError, flag_error
from gaudi_apps.training.run_dir import RunFolder
from gaudi_datasets.errors import MissingInputError, UnsafeError
from gaudi_datasets.output_files import write_json
from gaudi_datasets.program import count_things
from gaudi_distributed import SingleProcess
from gaudi_distributed.devices.machine import count_processors
from gaudi_models.weights import assign_weights, read_weights, write_weights
from gaudi_ops.files import read_file, read_text, staging_folder
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat, ExportPrecision
    from gaudi_apps.inference.evaluator import Evaluator, ExportScore
    from gaudi_apps.training.application import Application, Restored

VERSION = 1
CHECKED_IMAGES = 8


class ExportKind(NamedTuple):
    """Format and precision of an export; its text is the name of the folder."""

    format: ExportFormat
    precision: ExportPrecision

    def __str__(self) -> str:
        return self.format if self.precision == "fp32" else f"{self.format}-{self.precision}"


@dataclass(frozen=True)
class ExportRequest:
    """Precisions of exports, and the images that tell what they cost.

    Attributes:
        precisions: each format is written in those of them that it has.
        evaluator: scores the network and each export on all images of validation; None: they are compared alone.
        calibration: training images for the ranges of int8, JPEG or PNG.
        max_drop: of the metric of the network, that an export may lose.
        checkpoint: SHA-256 of the weights in the checkpoint that is exported.
        calibration_seed: that the training images were drawn by.
    """

    precisions: Sequence[ExportPrecision] = ("fp32",)
    evaluator: Evaluator[Any] | None = None
    calibration: Sequence[bytes] = ()
    max_drop: float = 0.01
    checkpoint: str = ""
    calibration_seed: int = 0


class Export(NamedTuple):
    """Differences of an export from the network on some images, and the scores of both on all of validation, if any.

    Attributes:
        agreement: what differs.
        score: of the export.
        reference: of the network.
        restored: names of the operations that got their precision back from int8.
        obstacle: why nobody can tell here what the export is worth; empty: it is measured.
    """

    agreement: Agreement
    score: ExportScore | None = None
    reference: ExportScore | None = None
    restored: Sequence[str] = ()
    obstacle: str = ""


class NetworkModel(ExportedModel):
    """The network that is exported, as one of its exports."""

    def __init__(self, network: ExportedNetwork) -> None:
        super().__init__(lambda encoded: network.prepare_encoded(_require_decodable(encoded)), find_threads())
        self.device = find_device()
        self._network = network

    def compute(self, inputs: Inputs) -> Arrays:
        """Compute a batch at once."""
        return _compute(self._network, np.asarray(inputs))


def find_device() -> str:
    """Return where TensorFlow computes, ``"CPU"`` or another, such as ``"GPU"``."""
    return next((one.device_type for one in tf.config.list_logical_devices() if one.device_type != "CPU"), "CPU")


def find_threads() -> int:
    """Return the threads within an operation of TensorFlow, which exports are measured with, too."""
    return int(tf.config.threading.get_intra_op_parallelism_threads()) or count_processors()


def list_kinds(formats: Sequence[ExportFormat], precisions: Sequence[ExportPrecision]) -> list[ExportKind]:
    """List the exports of some formats, each in those of the precisions that it has, and once.

    Raises:
        FlagError: a format has none of them.
    """
    for name in formats:
        if not set(precisions) & set(EXPORT_PRECISIONS[name]):
            raise flag_error(
                f"--export_precision {' '.join(precisions)}: {name} has none of these",
                f"add {' or '.join(EXPORT_PRECISIONS[name])}, or leave out --export_format {name}",
            )
    return [*dict.fromkeys(ExportKind(n, one) for n in formats for one in precisions if one in EXPORT_PRECISIONS[n])]


def choose_calibration(source: Any, count: int, seed: int) -> list[bytes]:
    """Choose training images to measure the ranges of 8 bits on.

    Raises:
        DataError: an image or a record is damaged.
    """
    order = np.random.default_rng(seed).permutation(len(source))[:count]
    return [_require_decodable(source.read(at).encoded, f"{source.name}: record {at}") for at in order.tolist()]


def make_request(
    app: Application, restored: Restored, open_train: Callable[[], Any], *, has_images: bool
) -> ExportRequest:
    """Return what --export_precision and other flags ask of exports.

    Args:
        app: with a `TensorFlowRunFlags`.
        restored: the network.
        open_train: opens the training images, which int8 is calibrated on.
        has_images: flags name a data set with a truth.

    Raises:
        FlagError: exports in less than fp32 cannot be scored without one.
    """
    run: Any = app.resolved_config.run
    reduced = [one for one in run.export_precision if one != "fp32"]
    if not has_images:
        if reduced:
            raise flag_error(
                f"--export_precision {reduced[0]}: needs images with a truth, to tell what it costs",
                "give --data or --data_dir",
            )
        return ExportRequest(checkpoint=restored.sha256)
    evaluator = app.open_evaluator(RunFolder(app.settings.model_dir), restored.model_config, SingleProcess())
    evaluator.compare_with_run(restored.model_config)
    calibration, seed = list[bytes](), app.settings.device.seed
    if "int8" in reduced:
        calibration = choose_calibration(open_train(), run.calibration_images, seed)
    return ExportRequest(run.export_precision, evaluator, calibration, run.max_ap_drop, restored.sha256, seed)


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
        if not (files := [path for path in find_files(inference) if not is_video(path)]):
            raise MissingInputError("--inference: names videos only; an export is checked on images, so add one")
        return [_require_decodable(read_encoded(files[at]), str(files[at])) for at in _spread(len(files))]
    if source is None:
        raise flag_error("--mode export: needs images to check the export on", "give --inference or --data_dir")
    return [_require_decodable(source.read(at).encoded, f"{source.name}: record {at}") for at in _spread(len(source))]


def _require_decodable(encoded: bytes, place: str | None = None) -> bytes:
    decode_pixels(encoded, place)
    return encoded


def require_possible(output_dir: Path, kinds: Sequence[ExportKind], suffixes: Sequence[str] = ("",)) -> None:
    """Check, before networks are run, that their exports can be written; suffixes are those of `write_exports`.

    Raises:
        MissingExtraError: a converter is not installed.
        UnsafeError: a folder to replace holds files that are not of an export.
    """
    for kind in kinds:
        if kind.format in ("onnx", "openvino"):
            require_onnx(kind.format)
    if any(kind.format == "openvino" for kind in kinds):
        import_runtime("openvino")
    if ("openvino", "int8") in kinds:
        import_runtime("nncf")
    for suffix in suffixes:
        for kind in kinds:
            refuse_foreign(output_dir / f"{kind}{suffix}")


def write_exports(
    networks: Mapping[str, ExportedNetwork],
    encoded_images: Sequence[bytes],
    output_dir: Path,
    kinds: Sequence[ExportKind],
    metadata: Mapping[str, Any],
    request: ExportRequest,
) -> dict[Path, Export]:
    """Write each network in each kind, all or nothing: an earlier export is replaced only if all are good enough.

    Each folder has an ``export.json`` with the metadata, the results of comparison and evaluation, and the SHA-256 of
    the files. What has no metric, such as features, is exported in fp32 alone.

    Args:
        networks: in float32, by the suffix of their folders: ``<kind><suffix>``.
        encoded_images: JPEG or PNG, to compare on.
        output_dir: made when it is not there; what is to be replaced there has passed `require_possible`.
        kinds: to write.
        metadata: JSON values by name.
        request: what they have to be.

    Returns:
        what is known of each export, by its folder.

    Raises:
        ExportError: an export cannot be run; in fp32, it differs from the network by more than 1e-3; or it loses more
            of the metric than it may.
        OSError: an export cannot be written.
    """
    wanted = [
        (suffix, kind)
        for suffix, network in networks.items()
        for kind in kinds
        if kind.precision == "fp32" or network.is_scored
    ]
    references: dict[str, ExportScore] = {}
    if request.evaluator is not None:
        for suffix, network in networks.items():
            if network.is_scored:
                say(f"evaluating the network on {request.evaluator.num_images} images", error=True)
                references[suffix] = request.evaluator.score_exported(NetworkModel(network))
    exports: dict[Path, Export] = {}
    with staging_folder(output_dir) as staging:
        scratch = staging / "scratch"
        scratch.mkdir()
        for suffix, kind in wanted:
            folder = staging / f"{kind}{suffix}"
            folder.mkdir()
            say(f"exporting {folder.name} ({len(exports) + 1} of {len(wanted)})", error=True)
            arguments = networks[suffix], encoded_images, folder, scratch, request, references.get(suffix)
            export = write_kind(kind, *arguments)
            _require_good(folder.name, kind, export, request)
            _write_manifest(folder, kind, metadata, len(encoded_images), export, request)
            exports[output_dir / folder.name] = export
        for path in exports:
            if path.exists():
                os.replace(path, scratch / path.name)
            os.replace(staging / path.name, path)
    return exports


def write_kind(
    kind: ExportKind,
    network: ExportedNetwork,
    encoded_images: Sequence[bytes],
    folder: Path,
    scratch: Path,
    request: ExportRequest,
    reference: ExportScore | None,
) -> Export:
    """Write a network in one kind into a folder, compare it on encoded images, and evaluate it.

    Where int8 of OpenVINO loses more than it may, the layers that cost the most get their precision back.
    """
    agreement = export_format(kind, network, encoded_images, folder, scratch, request.calibration)
    evaluator, restored = request.evaluator, list[str]()
    if evaluator is None or reference is None or kind.format not in MODEL_FILES:
        return Export(agreement)
    undefined = f"the {reference.split} images define no {reference.metric}" if math.isnan(reference.value) else ""
    if obstacle := undefined or find_obstacle(*kind):
        if undefined and kind.precision != "fp32":
            raise ExportError(f"{folder.name}: {undefined}, so --max_ap_drop cannot be checked; nothing is exported")
        say(f"{folder.name}: {obstacle}, so it is compared only", error=True)
        return Export(agreement, obstacle=obstacle)
    score = evaluator.score_exported(_open(kind, network, folder))
    if kind == ("openvino", "int8") and reference.value - score.value > request.max_drop:
        lost = reference.value - score.value
        say(f"{folder.name}: loses {lost:.4f}; looking for the layers that cost it", error=True)
        restored = _restore_layers(network, folder, request, evaluator)
        model = _open(kind, network, folder)
        score = evaluator.score_exported(model)
        reference_outputs = run_exported(NetworkModel(network), encoded_images)
        agreement = network.compare(reference_outputs, run_exported(model, encoded_images))
    return Export(agreement, score, reference, restored)


def _open(kind: ExportKind, network: ExportedNetwork, folder: Path) -> ExportedModel:
    """Open an export with the threads that TensorFlow has."""
    if kind.format == "saved_model":
        return SavedModel(folder, find_device(), find_threads())
    prepare = network.prepare_onnx if kind.format == "onnx" else network.prepare_resized
    return open_exported(folder, *kind, prepare, find_threads())


def _restore_layers(
    network: ExportedNetwork, folder: Path, request: ExportRequest, evaluator: Evaluator[Any]
) -> list[str]:
    """Quantize a network for OpenVINO once more, and give layers their precision back; return their names."""
    images = evaluator.num_images, evaluator.read_encoded
    bound = AccuracyBound(evaluator.measure_exported, request.max_drop, *images)
    # Not within `hold_stderr`: it takes minutes, and tells how far it is.
    restored = write_openvino(network, folder, "int8", request.calibration, bound)
    names = f" ({', '.join(restored)})" if restored else ""
    say(f"{folder.name}: {count_things(len(restored), 'layer')} in float again{names}", error=True)
    return restored


def export_format(
    kind: ExportKind,
    network: ExportedNetwork,
    encoded_images: Sequence[bytes],
    folder: Path,
    scratch: Path,
    calibration: Sequence[bytes] = (),
) -> Agreement:
    """Write a network in one kind into a folder, and compare the export with the network on encoded images.

    Raises:
        ValueError: a format of another name, or int8 without calibration.
    """
    name, precision = kind
    if precision == "int8" and not calibration:
        raise ValueError("int8 needs calibration")
    from_pixels = np.stack([network.prepare_pixels(decode_pixels(encoded)) for encoded in encoded_images])
    if name == "onnx":
        write_onnx(network, folder / "model.onnx")
        if precision == "int8":
            with hold_stderr():
                quantize_onnx(folder / "model.onnx", network, map(decode_pixels, calibration))
        found = run_exported(OnnxModel(folder / "model.onnx", decode_pixels, takes_floats=False), encoded_images)
        return network.compare(_compute(network, from_pixels), found)
    if name == "openvino":
        with hold_stderr():
            write_openvino(network, folder, precision, calibration)
        found = run_exported(open_exported(folder, name, precision, network.prepare_resized), encoded_images)
        decoded = _prepare_decoded(network, encoded_images)
        reference = _compute(network, decoded)
        if precision == "bf16":
            return network.compare_rounded(decoded, reference, found)
        return network.compare(reference, found)
    if name == "tflite":
        quantize = partial(quantize_tflite, network=network, calibration=calibration) if calibration else None
        write_tflite(network, folder / "model.tflite", precision, quantize)
        found = run_exported(open_exported(folder, name, precision, network.prepare_resized), encoded_images)
        return network.compare(_compute(network, _prepare_decoded(network, encoded_images)), found)
    from_encoded = np.stack([network.prepare_encoded(encoded) for encoded in encoded_images])
    reference = _compute(network, from_encoded)
    if name == "safetensors":
        write_weights(network.model, folder / "weights.safetensors", metadata=network.metadata)
        restored = network.replace_model(to_float32(network.model))
        for variable in restored.model.variables:  # zeros where the file has no weights
            variable.assign(np.zeros(variable.shape, np.float32))
        assign_weights(restored.model, read_weights(folder / "weights.safetensors"))
        return network.compare(reference, _compute(restored, from_encoded))
    if name != "saved_model":
        raise ValueError(f"{name!r} is no format of an export")
    write_saved_model(network, folder)
    of_encoded, of_pixels = run_saved_model(folder, encoded_images, scratch)
    others = network.compare(_compute(network, from_pixels), of_pixels)
    return find_worst([network.compare(reference, of_encoded), others])


def _require_good(name: str, kind: ExportKind, export: Export, request: ExportRequest) -> None:
    """Raise ExportError for an export that may not be left."""
    if kind.precision == "fp32" and not export.agreement.is_close:
        raise ExportError(
            f"--export_format {name}: differs from the network by more than {TOLERANCE:g} "
            f"({export.agreement}); nothing is exported"
        )
    if export.score is None or export.reference is None:
        return
    lost = export.reference.value - export.score.value
    if not lost <= request.max_drop:
        raise ExportError(
            f"{name}: loses {lost:.4f} of {export.score.metric} {export.reference.value:.4f}, more than --max_ap_drop "
            f"{request.max_drop:g}; nothing is exported",
            remedy="give more --calibration_images, another precision, or a larger --max_ap_drop",
        )


def _prepare_decoded(network: ExportedNetwork, encoded_images: Sequence[bytes]) -> Any:
    return np.stack([network.prepare_pixels(network.decode(encoded)) for encoded in encoded_images])


def _compute(network: ExportedNetwork, images: Any) -> Arrays:
    with whole_float32():
        return {name: values.numpy() for name, values in network.traced(images).items()}


def _spread(count: int) -> list[int]:
    """Choose at most eight indices below a count, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, CHECKED_IMAGES).astype(int)).tolist()


def _write_manifest(
    folder: Path, kind: ExportKind, metadata: Mapping[str, Any], images: int, export: Export, request: ExportRequest
) -> None:
    names = _list_files(folder)
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "kind": folder.name,
        "precision": kind.precision,
        **metadata,
        "checkpoint": request.checkpoint,
        # JSON has no infinity, which is the difference of a detection that the other side does not have.
        "check": {
            "pictures": images,
            **{name: one if math.isfinite(one) else None for name, one in export.agreement.differences.items()},
            "compared": export.agreement.compared,
        },
        "bytes": sum((folder / name).stat().st_size for name in names),
    }
    if kind.precision == "int8":
        document["calibration"] = {"images": len(request.calibration), "seed": request.calibration_seed}
    if export.score is not None and export.reference is not None:
        document |= export.score.to_document(export.reference)
    if kind == ("openvino", "int8") and export.score is not None:
        document["restored_layers"] = list(export.restored)
    if export.obstacle:
        document["not_evaluated"] = export.obstacle
    document["sha256"] = {name: hashlib.sha256(read_file(folder / name)).hexdigest() for name in names}
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
