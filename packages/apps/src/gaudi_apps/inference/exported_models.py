"""Run exported models, each by the library that its format is for, and choose among those of a run.

Only a SavedModel imports TensorFlow.
"""

from __future__ import annotations

import importlib.util
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gaudi_datasets.errors import DataError, MissingInputError, import_extra
from gaudi_datasets.program import count_things
from gaudi_distributed.devices.machine import count_processors, name_processor
from gaudi_ops.files import hash_file, read_file, read_text
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat, ExportPrecision, RuntimeFlag

Inputs: TypeAlias = Sequence[Any] | npt.NDArray[Any]
Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Prepare: TypeAlias = Callable[[bytes], Any]

EXPORT_PRECISIONS: Mapping[ExportFormat, Sequence[ExportPrecision]] = {
    "saved_model": ("fp32",),
    "onnx": ("fp32", "int8"),
    "tflite": ("fp32", "fp16", "int8"),
    "openvino": ("fp32", "fp16", "bf16", "int8"),
    "safetensors": ("fp32",),
}
# The file in the folder of an export that is run; a SavedModel is its folder.
MODEL_FILES = {"saved_model": ".", "onnx": "model.onnx", "tflite": "model.tflite", "openvino": "model.xml"}
FOLDER, MANIFEST = "export", "export.json"  # in the folder of a run, and in that of an export
FORMAT, MAX_BYTES = "gaudi-apps export", 2**24
# What OpenVINO computes in, by the precision of an export. It is no part of a file: without a hint, OpenVINO chooses by
# the processor. 16 bits of fp16 are those of the weights in the file; a CPU computes with them in float32.
OPENVINO_HINTS: Mapping[str, str] = {"fp32": "f32", "fp16": "f32", "bf16": "bf16", "int8": "f32"}
MOST_SIZES = 3  # of batches that a model is compiled for, each with a copy of the weights: one, many, and another


class ExportedModel(ABC):
    """A model that was exported, or the network itself, which takes encoded images.

    Args:
        prepare: makes an input of the bytes of a JPEG or PNG file.

    Attributes:
        runtime: name of the library that runs it.
        device: that computes, ``"CPU"`` or ``"GPU"``.
        threads: of the CPU that it computes by.
        side_by_side: number of batches that threads may ask it to compute at once.
        included: what else than the network is computed, and timed.
    """

    runtime: str = "tensorflow"
    device: str = "CPU"
    included: Sequence[str] = ()

    def __init__(self, prepare: Prepare, threads: int = 0) -> None:
        self.prepare, self.side_by_side = prepare, 1
        self.threads = threads or count_processors()

    @abstractmethod
    def compute(self, inputs: Inputs) -> Arrays:
        """Return the outputs of a batch of inputs by name."""


class OpenVINOModel(ExportedModel):
    """Run a model by OpenVINO; an input is a resized image float32 [side, side, 3], RGB in 0..255.

    A size of batches that comes twice in a row gets a compiled model of its own, `MOST_SIZES` at most: where OpenVINO
    knows all shapes, it leaves out copies, for a sixth of a second once. The last bit of a box may differ between the
    two, and with 8 bits in the network now and then a level of it.

    Args:
        compile_model: compiles for batches of a size, or of any, for which it takes 0.
        prepare, threads: see `ExportedModel`.
        batch_size: that all batches have, but for smaller ones, which are filled up; 0: it is not known.
    """

    runtime = "openvino"

    def __init__(self, compile_model: Callable[[int], Any], prepare: Prepare, threads: int, batch_size: int) -> None:
        super().__init__(prepare, threads)
        self._compile, self._lock, self._last_size, self._usual = compile_model, Lock(), 0, batch_size
        self._compiled: dict[int, Any] = {}
        self._free: dict[int, SimpleQueue[Any]] = {}
        self.side_by_side = self._add_size(batch_size)

    @classmethod
    def open(
        cls, path: Path, prepare: Prepare, precision: ExportPrecision, threads: int = 0, batch_size: int = 0
    ) -> OpenVINOModel:
        """Compile ``model.xml`` for the CPU.

        Args:
            path: of the file.
            prepare: see `ExportedModel`.
            precision: of the export.
            threads: see `ExportedModel`.
            batch_size: of batches that are computed side by side, each by fewer threads, which then wait less for one
                another; smaller ones are filled up. 0: batches of any size are computed one after the other.

        Raises:
            MissingExtraError: OpenVINO is not installed.
            DataError: the file is damaged.
        """
        core, threads = import_runtime("openvino").Core(), threads or count_processors()
        batch_size = batch_size if threads > 1 else 0
        options = {"INFERENCE_PRECISION_HINT": OPENVINO_HINTS[precision], "INFERENCE_NUM_THREADS": str(threads)}
        options["PERFORMANCE_HINT"] = "THROUGHPUT" if batch_size else "LATENCY"

        def compile_model(size: int) -> Any:
            sized = model.clone()
            if size:
                sized.reshape([size, *model.inputs[0].partial_shape[1:]])
            return core.compile_model(sized, "CPU", options)

        try:
            model = core.read_model(str(path))
            return cls(compile_model, prepare, threads, batch_size)
        except RuntimeError as error:
            raise refuse_file(path, error) from None

    def compute(self, inputs: Inputs) -> Arrays:
        """Compute a batch at once."""
        batch = np.asarray(inputs, np.float32)
        count, size = len(batch), self._choose_size(len(batch))
        if size > count:
            batch = np.concatenate([batch, np.zeros([size - count, *batch.shape[1:]], np.float32)])
        request = self._free[size].get()
        try:
            found = request.infer(np.ascontiguousarray(batch), share_inputs=True)
            return {output.any_name: np.array(values[:count]) for output, values in found.items()}
        except Exception:
            request = self._compiled[size].create_infer_request()  # the former one may keep what it failed on
            raise
        finally:
            self._free[size].put(request)

    def _choose_size(self, size: int) -> int:
        """Return the size of batches whose model computes one of `size`, or 0 for that of any; compile it first."""
        with self._lock:
            is_again, self._last_size = size == self._last_size, size
            if size <= self._usual:
                size = self._usual
            elif size not in self._free and not (is_again and len(self._free) <= MOST_SIZES):
                size = 0
            if size not in self._free:
                self._add_size(size)
            return size

    def _add_size(self, size: int) -> int:
        self._compiled[size] = compiled = self._compile(size)
        self._free[size], number = SimpleQueue(), int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))
        for _ in range(number):
            self._free[size].put(compiled.create_infer_request())
        return number


class OnnxModel(ExportedModel):
    """Run ``model.onnx`` by ONNX Runtime; an input is an image [height, width, 3], RGB in 0..255.

    The model takes uint8 and makes floats of it first, so floats are as good for it once that is written into its
    input: a resized image keeps the digits that rounding would take.

    Args:
        path: of the file.
        prepare, threads: see `ExportedModel`.
        takes_floats: write float32 into the input; without it inputs are uint8, and the file is run as it is.

    Raises:
        MissingExtraError: ONNX or its runtime is not installed.
        DataError: the file is damaged.
    """

    runtime = "onnxruntime"

    def __init__(self, path: Path, prepare: Prepare, threads: int = 0, *, takes_floats: bool = True) -> None:
        super().__init__(prepare, threads)
        onnx, onnxruntime = import_runtime("onnx"), import_runtime("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, self.threads
        try:
            content = read_file(path)
            if takes_floats:
                model = onnx.load_model_from_string(content)
                model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
                content = model.SerializeToString()
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # of the parser of protobuf, and of ONNX Runtime, which have no common base
            raise refuse_file(path, error) from None
        self._names = [output.name for output in self._session.get_outputs()]
        self._dtype = np.float32 if takes_floats else np.uint8

    def compute(self, inputs: Inputs) -> Arrays:
        """Compute images of one size at once, and others one by one."""
        is_even = len({one.shape for one in inputs}) == 1
        batches = [np.asarray(inputs)] if is_even else [one[np.newaxis] for one in inputs]
        parts = [self._session.run(self._names, {"images": batch.astype(self._dtype, copy=False)}) for batch in batches]
        return {name: np.concatenate(values) for name, *values in zip(self._names, *parts, strict=True)}


class TFLiteModel(ExportedModel):
    """Run ``model.tflite`` by LiteRT, or without it by TensorFlow's interpreter; an input is as for `OpenVINOModel`.

    Raises:
        MissingExtraError: neither LiteRT nor TensorFlow is installed.
        DataError: the file is damaged.
    """

    def __init__(self, path: Path, prepare: Prepare, threads: int = 0) -> None:
        super().__init__(prepare, threads)
        try:
            self.runtime, library = "litert", importlib.import_module("ai_edge_litert.interpreter")
        except ModuleNotFoundError:
            self.runtime, library = "tensorflow lite", import_runtime("tensorflow").lite
        try:
            opened = library.Interpreter(model_content=read_file(path), num_threads=self.threads)
            self._run, self._lock = opened.get_signature_runner(), Lock()
        except (RuntimeError, ValueError) as error:
            raise refuse_file(path, error) from None

    def compute(self, inputs: Inputs) -> Arrays:
        """Compute a batch at once; other threads wait: the interpreter has one set of tensors."""
        with self._lock:
            return dict(self._run(images=np.asarray(inputs, np.float32)))


class SavedModel(ExportedModel):
    """Run a SavedModel by its ``serving_default``; an input is the bytes of a JPEG or PNG file."""

    included = ("decoding", "resizing")

    def __init__(self, path: Path, device: str = "CPU", threads: int = 0) -> None:
        super().__init__(lambda encoded: encoded, threads)
        import tensorflow as tf

        self.device = device
        self._loaded = tf.saved_model.load(str(path))  # owns the variables
        self.signature = self._loaded.signatures["serving_default"]

    def compute(self, inputs: Inputs) -> Arrays:
        """Decode and compute a batch at once."""
        import tensorflow as tf

        return {name: values.numpy() for name, values in self.signature(encoded=tf.constant(list(inputs))).items()}


def open_exported(
    path: Path, name: ExportFormat, precision: ExportPrecision, prepare: Prepare, threads: int = 0, batch_size: int = 0
) -> ExportedModel:
    """Open the model in the folder of an export.

    Args:
        path: of the folder.
        name: its format.
        precision: that it was exported in.
        prepare: makes inputs; a SavedModel prepares images itself.
        threads: to compute by; 0: as many as there are processors. A SavedModel takes those of TensorFlow.
        batch_size: see `OpenVINOModel.open`; others compute one batch after the other.

    Raises:
        MissingExtraError: the library of the format is not installed.
        DataError: the model is damaged.
        ValueError: the format is none that computes.
    """
    file = path / MODEL_FILES.get(name, "")
    if name == "saved_model":
        return SavedModel(file, threads=threads)
    if name == "openvino":
        return OpenVINOModel.open(file, prepare, precision, threads, batch_size)
    if name == "onnx":
        return OnnxModel(file, prepare, threads)
    if name == "tflite":
        return TFLiteModel(file, prepare, threads)
    raise ValueError(f"{name!r} is no format that computes")


def find_obstacle(name: ExportFormat, precision: ExportPrecision) -> str:
    """Tell why this processor does not compute in the precision of an export; an empty text: it does.

    OpenVINO takes the hint of bfloat16 on any processor, and computes in float32 where the processor has none.

    Raises:
        MissingExtraError: OpenVINO is not installed.
    """
    if (name, precision) != ("openvino", "bf16"):
        return ""
    capabilities = import_runtime("openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return "" if "BF16" in capabilities else "not on this processor, which has no bfloat16"


EXTRA_OF = {"openvino": "openvino", "nncf": "openvino", "ai_edge_litert": "litert", "tensorflow": "tensorflow"}


def import_runtime(name: str) -> Any:
    """Import a library of an extra; raise MissingExtraError where that fails."""
    if name.startswith(("openvino", "nncf")):  # they report conversions to their makers, but not where a service builds
        os.environ.update({"TF_BUILD": "1", "NNCF_CI": "1"})
    return import_extra(name, f"gaudi-apps[{EXTRA_OF.get(name, 'export')}]")


def refuse_file(path: Path, error: Exception) -> DataError:
    """Return the error for a model that a library cannot read."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return DataError(f"cannot be read ({reason})", path=path, remedy="export it again")


# What --runtime names: the format that it runs, and what it needs.
FORMATS: Mapping[str, ExportFormat] = {"openvino": "openvino", "onnxruntime": "onnx", "litert": "tflite"}
RUNTIMES: Mapping[str, str] = {name: runtime for runtime, name in FORMATS.items()}
NEEDED = {"openvino": ("openvino",), "onnxruntime": ("onnx", "onnxruntime"), "litert": ("ai_edge_litert",)}


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
    def format(self) -> ExportFormat:
        """Return the format."""
        return FORMATS[self.runtime]

    @property
    def rate(self) -> float:
        """Return the images a second, one by one, where it was exported."""
        return float(self.manifest["speed"]["images_per_second"]["1"])

    @property
    def machine(self) -> tuple[str, int]:
        """Return the processor that it was measured on, empty where an earlier release did not tell, and threads."""
        speed = self.manifest["speed"]
        return str(speed.get("processor", "")), int(speed.get("threads", speed.get("processors", 0)))

    @property
    def network_rate(self) -> float | None:
        """Return the images a second of the network; None where it was measured on another device, or unknown."""
        speed = self.manifest["speed"]
        is_alike = speed.get("network_device") == speed.get("device", "")
        return float(speed["of_network"]) if is_alike else None

    def __str__(self) -> str:
        evaluation = self.manifest["evaluation"]
        metric = evaluation.get("metric", "AP")
        scores = f"{metric} {evaluation[metric]:.4f}, of the network {evaluation['of_network']:.4f}"
        return f"{self.folder}: computes by {self.runtime}, {self.manifest['precision']} ({scores})"


def choose_export(model_dir: Path, sha256: str, runtime: RuntimeFlag, which: str = "newest") -> CheckedExport | None:
    """Choose the fastest export in the folder of a run that was evaluated for a checkpoint, and say which.

    Speeds are compared where the same processor with as many threads has measured them: by preference this one.

    Args:
        model_dir: folder of the run.
        sha256: of the weights of the checkpoint.
        runtime: that is to run it; auto: any that is installed.
        which: the value of --checkpoint that names the checkpoint.

    Returns:
        None: the network itself is used, because runtime is tensorflow, or auto and nothing is known to be faster.

    Raises:
        MissingInputError: there is no such export.
        MissingExtraError: the runtime is not installed.
    """
    if runtime == "tensorflow":
        return None
    for name in NEEDED.get(runtime, ()):
        import_runtime(name)
    best = _find_fastest(_list_usable(model_dir, sha256, runtime))
    if best is None and runtime != "auto":
        manifests = [one for one in read_manifests(model_dir).values() if one.get("checkpoint") == sha256]
        reasons = "".join(sorted({f" ({one['not_evaluated']})" for one in manifests if "not_evaluated" in one}))
        wrong = f"--runtime {runtime}: no export for it was evaluated for this checkpoint{reasons}"
        remedy = f"run --mode export --checkpoint {which} --export_format {FORMATS[runtime]}"
        raise MissingInputError(wrong, flag="--runtime", path=model_dir / FOLDER, remedy=remedy)
    reason = _prefer_network(best) if runtime == "auto" else ""
    if best is None or reason:
        say(f"{model_dir}: computes by tensorflow ({reason})", error=True)
        return None
    say(best, error=True)
    return best


def _prefer_network(best: CheckedExport | None) -> str:
    """Tell why the network is used in place of the fastest export; an empty text: it is not."""
    if best is None:
        return "nothing that is installed runs an export of this checkpoint"
    if best.network_rate is None:
        on = best.manifest["speed"].get("network_device", "an unknown device")
        return f"it was measured on {on}, and exports on the CPU; --runtime {best.runtime} takes {best.folder.name}"
    return "" if best.rate >= best.network_rate else "no export is faster"


def _find_fastest(found: Sequence[CheckedExport]) -> CheckedExport | None:
    """Find the fastest of those that were measured alike, here if any was; say which others are left out."""
    if not found:
        return None
    here, machines = name_processor(), [one.machine for one in found]
    machine = max(machines, key=lambda one: (one[0] == here, machines.count(one)))
    if machine[0] != here:
        say(f"speeds are those of {machine[0] or 'an unknown processor'}, which is not this one", error=True)
    for one in found:
        if one.machine != machine:
            other = f"{one.machine[0] or 'an unknown processor'} with {count_things(one.machine[1], 'thread')}"
            say(f"{one.folder.name}: left out, for its speed was measured on {other}", error=True)
    return max((one for one in found if one.machine == machine), key=lambda one: one.rate)


def _list_usable(model_dir: Path, sha256: str, runtime: RuntimeFlag) -> list[CheckedExport]:
    """List the evaluated exports of a checkpoint that a runtime can run here, and say why others are left out."""
    found = []
    for one in _list_checked(model_dir, sha256):
        if runtime not in ("auto", one.runtime):
            continue
        missing = next((name for name in NEEDED[one.runtime] if importlib.util.find_spec(name) is None), "")
        reason = f"{missing} is not installed" if missing else find_obstacle(one.format, one.manifest["precision"])
        if reason:
            say(f"{one.folder.name}: left out ({reason})", error=True)
        else:
            found.append(one)
    return found


def require_weights(path: Path) -> Path:
    """Return a path; raise DataError where it is the folder of an export that is run from the folder of its run."""
    for kind in (str(one.get("kind")) for one in read_manifests(path, MANIFEST).values()):
        if kind != "safetensors":
            runtime = RUNTIMES.get(kind.partition("-")[0])
            given = f", with --runtime {runtime}, in Python runtime={runtime!r}" if runtime else ""
            raise DataError(f"is an export of kind {kind}", path=path, remedy=f"load the folder of its run{given}")
    return path


def read_manifests(folder: Path, pattern: str = f"{FOLDER}/*/{MANIFEST}") -> dict[Path, dict[str, Any]]:
    """Read the export.json of each export in the folder of a run; those that cannot be read are told and left out."""
    found: dict[Path, dict[str, Any]] = {}
    for path in sorted(folder.glob(pattern)):
        try:
            manifest = read_manifest(path.parent)
        except (OSError, TypeError, ValueError, RecursionError):
            say(f"{path}: cannot be read, so this export is left out", error=True)
        else:
            found |= {path.parent: manifest} if manifest.get("format") == FORMAT else {}
    return found


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the export.json of an export."""
    return dict(json.loads(read_text(folder / MANIFEST, limit=MAX_BYTES)))


def _list_checked(model_dir: Path, sha256: str) -> list[CheckedExport]:
    found = []
    for folder, manifest in read_manifests(model_dir).items():  # a folder may have been renamed
        name = str(manifest.get("kind", "")).partition("-")[0]
        is_checked = {"evaluation", "speed", "image_size", "classes", "sha256"} <= manifest.keys()
        if name in RUNTIMES and is_checked and sha256 and manifest.get("checkpoint") == sha256:
            export = CheckedExport(folder, RUNTIMES[name], manifest)
            try:
                _ = export.rate, export.machine, export.network_rate, str(export), dict(manifest["sha256"])
                found.append(export)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                say(f"{export.folder / MANIFEST}: tells no speed or no score, so it is left out", error=True)
    return found


def open_model(export: CheckedExport, prepare: Prepare, threads: int = 0, batch_size: int = 0) -> ExportedModel:
    """Open an export, for encoded images that `prepare` makes inputs of; see `open_exported`.

    Raises:
        DataError: a file is not as it was exported.
        MissingExtraError: the runtime is not installed.
    """
    for file, sha256 in export.manifest["sha256"].items():
        path = export.folder / file
        if not path.is_file() or hash_file(path) != sha256:
            raise DataError("is not as it was exported", path=path, remedy="export it again")
    return open_exported(export.folder, export.format, export.manifest["precision"], prepare, threads, batch_size)
