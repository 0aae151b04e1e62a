"""Detect by an export of a run, without TensorFlow: the fastest of those that were checked for its checkpoint."""

from __future__ import annotations

import hashlib
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gaudi_apps.inference.export_table import FOLDER, list_manifests
from gaudi_apps.inference.exported_models import import_runtime, open_exported, resize_pixels
from gaudi_apps.inference.media import Preprocessor
from gaudi_apps.inference.visualizer import decode_like_tensorflow
from gaudi_apps.training.checkpoint import BEST, find_run_checkpoint, load_checkpoint
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_ops.files import read_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.detection.config import RuntimeFlag
    from gaudi_apps.detection.detections import Detect

FORMATS = {"openvino": "openvino", "onnxruntime": "onnx"}
NEEDED = {"openvino": ("openvino", "simplejpeg"), "onnxruntime": ("onnx", "onnxruntime", "simplejpeg")}


class CheckedExport(NamedTuple):
    """An export that was evaluated, of a checkpoint that is used.

    Attributes:
        folder: of the export.
        runtime: that runs it.
        manifest: its ``export.json``.
    """

    folder: Path
    runtime: str
    manifest: dict[str, Any]

    @property
    def rate(self) -> float:
        """Return the images a second, one by one, where it was exported."""
        return float(self.manifest["speed"]["images_per_second"]["1"])

    def __str__(self) -> str:
        evaluation = self.manifest["evaluation"]
        scores = f"AP {evaluation['AP']:.4f}, of the network {evaluation['of_network']:.4f}"
        return f"{self.folder}: detects by {self.runtime}, {self.manifest['precision']} ({scores})"


class OpenedDetector(NamedTuple):
    """A function that detects on a batch of prepared images, the classes, and the preparation."""

    detect: Detect
    categories: tuple[Category, ...]
    prepare: Preprocessor


def choose_export(model_dir: Path, sha256: str, runtime: RuntimeFlag, which: str = "newest") -> CheckedExport | None:
    """Choose the fastest export in the folder of a run that was evaluated for a checkpoint, and say which.

    Args:
        model_dir: folder of the run.
        sha256: of the weights of the checkpoint.
        runtime: that is to run it; auto: any that is installed.
        which: the value of --checkpoint that names the checkpoint.

    Returns:
        None: the network itself is used, because runtime is tensorflow, or auto and nothing is faster.

    Raises:
        MissingInputError: there is no such export.
        MissingExtraError: the runtime is not installed.
    """
    if runtime == "tensorflow":
        return None
    if runtime != "auto":
        for name in NEEDED[runtime]:
            import_runtime(name)
    usable = [name for name in FORMATS if runtime in ("auto", name) and all(map(util.find_spec, NEEDED[name]))]
    found = [one for one in _list_checked(model_dir, sha256) if one.runtime in usable]
    best = max(found, key=lambda one: one.rate, default=None)
    if runtime == "auto" and (best is None or best.rate < float(best.manifest["speed"].get("of_network", 0))):
        reason = (
            "nothing that is installed runs an export of this checkpoint" if best is None else "no export is faster"
        )
        say(f"{model_dir}: detects by tensorflow ({reason})", error=True)
        return None
    if best is None:
        raise MissingInputError(
            f"--runtime {runtime}: no export for it was evaluated for this checkpoint",
            flag="--runtime",
            path=model_dir / FOLDER,
            remedy=f"run --mode export --checkpoint {which} --export_format {FORMATS[runtime]}",
        )
    say(best, error=True)
    return best


def find_export(path: Path, runtime: RuntimeFlag) -> CheckedExport | None:
    """Choose an export for the checkpoint of a run that is used, see `choose_export`; None: the network is used.

    Raises:
        MissingInputError: there is no such export, or the path is not the folder of a run.
    """
    checkpoint = None if runtime == "tensorflow" else find_run_checkpoint(path)
    if checkpoint is not None:
        loaded = load_checkpoint(checkpoint)
        return choose_export(path, loaded.sha256, runtime, BEST if checkpoint.parent.name == BEST else str(loaded.step))
    if runtime in ("tensorflow", "auto"):
        return None
    raise MissingInputError(f"runtime {runtime}: is for the folder of a run", path=path)


def _list_checked(model_dir: Path, sha256: str) -> list[CheckedExport]:
    runtimes = {name: runtime for runtime, name in FORMATS.items()}
    found = []
    for manifest in list_manifests(model_dir):
        name = str(manifest.get("kind", "")).partition("-")[0]
        is_checked = {"evaluation", "speed", "image_size", "classes"} <= manifest.keys()
        if name in runtimes and is_checked and sha256 and manifest.get("checkpoint") == sha256:
            found.append(CheckedExport(model_dir / FOLDER / manifest["kind"], runtimes[name], manifest))
    return found


def open_detector(export: CheckedExport) -> OpenedDetector:
    """Open an export, and what prepares images for it.

    Raises:
        DataError: a file is not as it was exported.
        MissingExtraError: the runtime is not installed.
    """
    manifest = export.manifest
    for file, sha256 in manifest["sha256"].items():
        if hashlib.sha256(read_file(export.folder / file)).hexdigest() != sha256:
            raise DataError("is not as it was exported", path=export.folder / file, remedy="export it again")
    side = int(manifest["image_size"])

    def prepare(encoded: bytes) -> Any:
        return resize_pixels(decode_like_tensorflow(encoded), side)

    name: Any = FORMATS[export.runtime]
    model = open_exported(export.folder, name, manifest["precision"], prepare)

    def detect(images: Any) -> Any:
        found = model.compute(list(np.asarray(images)))
        return found["boxes_yxyx"], found["labels"], found["scores"]

    categories = tuple(Category(one["id"], one["name"]) for one in manifest["classes"])
    return OpenedDetector(detect, categories, Preprocessor(prepare, lambda pixels: resize_pixels(pixels, side)))
