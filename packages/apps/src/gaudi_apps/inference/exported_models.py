"""Run exported models, each by the library that its format is for; only TensorFlow's own formats import TensorFlow."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import cv2
import numpy as np
import numpy.typing as npt

from gaudi_datasets.errors import DataError, MissingExtraError
from gaudi_ops.files import read_file

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat, ExportPrecision

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Prepare: TypeAlias = Callable[[bytes], Any]

EXPORT_PRECISIONS: Mapping[ExportFormat, Sequence[ExportPrecision]] = {
    "saved_model": ("fp32",),
    "onnx": ("fp32", "int8"),
    "tflite": ("fp32", "fp16"),
    "openvino": ("fp32", "fp16", "bf16", "int8"),
    "safetensors": ("fp32",),
}
# The file in the folder of an export that is run; a SavedModel is its folder.
MODEL_FILES: Mapping[str, str] = {
    "saved_model": ".",
    "onnx": "model.onnx",
    "tflite": "model.tflite",
    "openvino": "model.xml",
}
# What OpenVINO computes in, by the precision of an export. It is no part of a file: without a hint, OpenVINO chooses by
# the processor. 16 bits of fp16 are those of the weights in the file; a CPU computes with them in float32.
OPENVINO_HINTS: Mapping[str, str] = {"fp32": "f32", "fp16": "f32", "bf16": "bf16", "int8": "f32"}


class ExportedModel(ABC):
    """A model that was exported, or the network itself, which takes encoded images.

    Args:
        prepare: makes an input of the bytes of a JPEG or PNG file.
    """

    def __init__(self, prepare: Prepare) -> None:
        self.prepare = prepare

    @abstractmethod
    def compute(self, inputs: Sequence[Any]) -> Arrays:
        """Return the outputs of a batch of inputs by name."""


class OpenVINOModel(ExportedModel):
    """Run a model that OpenVINO has compiled; an input is a resized image float32 [side, side, 3], RGB in 0..255."""

    def __init__(self, compiled: Any, prepare: Prepare) -> None:
        super().__init__(prepare)
        self._compiled = compiled

    @classmethod
    def open(cls, path: Path, prepare: Prepare, precision: ExportPrecision) -> OpenVINOModel:
        """Compile ``model.xml`` for the CPU.

        Raises:
            MissingExtraError: OpenVINO is not installed.
            DataError: the file is damaged.
        """
        openvino = import_runtime("openvino")
        options = {"INFERENCE_PRECISION_HINT": OPENVINO_HINTS[precision], "PERFORMANCE_HINT": "LATENCY"}
        try:
            return cls(openvino.Core().compile_model(str(path), "CPU", options), prepare)
        except RuntimeError as error:
            raise refuse_file(path, error) from None

    def compute(self, inputs: Sequence[Any]) -> Arrays:
        """Compute a batch at once."""
        found = self._compiled(np.stack(inputs).astype(np.float32, copy=False))
        return {output.any_name: np.asarray(values) for output, values in found.items()}


class OnnxModel(ExportedModel):
    """Run ``model.onnx`` by ONNX Runtime; an input is an image [height, width, 3], RGB in 0..255, of any type.

    The model takes uint8 and makes floats of it first, so floats are as good for it once that is written into its
    input: a resized image keeps the digits that rounding would take.

    Raises:
        MissingExtraError: ONNX or its runtime is not installed.
        DataError: the file is damaged.
    """

    def __init__(self, path: Path, prepare: Prepare) -> None:
        super().__init__(prepare)
        onnx, onnxruntime = import_runtime("onnx"), import_runtime("onnxruntime")
        onnxruntime.set_default_logger_severity(3)
        try:
            model = onnx.load_model_from_string(read_file(path))
            model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
            self._session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception as error:  # of the parser of protobuf, and of ONNX Runtime, which have no common base
            raise refuse_file(path, error) from None
        self._names = [output.name for output in self._session.get_outputs()]

    def compute(self, inputs: Sequence[Any]) -> Arrays:
        """Compute images of one size at once, and others one by one."""
        is_even = len({one.shape for one in inputs}) == 1
        batches = [np.stack(inputs)] if is_even else [one[np.newaxis] for one in inputs]
        parts = [self._session.run(self._names, {"images": batch.astype(np.float32)}) for batch in batches]
        return {name: np.concatenate(values) for name, *values in zip(self._names, *parts, strict=True)}


class TFLiteModel(ExportedModel):
    """Run ``model.tflite``; an input is a resized image float32 [side, side, 3], RGB in 0..255."""

    def __init__(self, path: Path, prepare: Prepare) -> None:
        super().__init__(prepare)
        import tensorflow as tf

        self._run = tf.lite.Interpreter(model_path=str(path)).get_signature_runner()

    def compute(self, inputs: Sequence[Any]) -> Arrays:
        """Compute a batch at once."""
        found: Arrays = self._run(images=np.stack(inputs))
        return found


class SavedModel(ExportedModel):
    """Run a SavedModel by its ``serving_default``; an input is the bytes of a JPEG or PNG file."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda encoded: encoded)
        import tensorflow as tf

        self._loaded = tf.saved_model.load(str(path))  # owns the variables
        self._run = self._loaded.signatures["serving_default"]

    def compute(self, inputs: Sequence[Any]) -> Arrays:
        """Decode and compute a batch at once."""
        import tensorflow as tf

        return {name: values.numpy() for name, values in self._run(encoded=tf.constant(list(inputs))).items()}


def open_exported(folder: Path, name: ExportFormat, precision: ExportPrecision, prepare: Prepare) -> ExportedModel:
    """Open the model in the folder of an export.

    Args:
        folder: of the export.
        name: its format.
        precision: that it was exported in.
        prepare: makes inputs; a SavedModel prepares images itself.

    Raises:
        MissingExtraError: the library of the format is not installed.
        DataError: the model is damaged.
        ValueError: the format is none that computes.
    """
    if name not in MODEL_FILES:
        raise ValueError(f"{name!r} is no format that computes")
    path = folder / MODEL_FILES[name]
    if name == "saved_model":
        return SavedModel(path)
    if name == "openvino":
        return OpenVINOModel.open(path, prepare, precision)
    return OnnxModel(path, prepare) if name == "onnx" else TFLiteModel(path, prepare)


EXTRA_OF = {"openvino": "openvino", "nncf": "openvino", "simplejpeg": "openvino"}


def import_runtime(name: str) -> Any:
    """Import a library of an extra.

    Raises:
        MissingExtraError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        extra = f"gaudi-apps[{EXTRA_OF.get(name, 'export')}]"
        raise MissingExtraError(f"{name} cannot be imported ({error}); pip install '{extra}'") from error


def refuse_file(path: Path, error: Exception) -> DataError:
    """Return the error for a model that a library cannot read."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return DataError(f"cannot be read ({reason})", path=path, remedy="export it again")


def resize_pixels(pixels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.float32]:
    """Resize pixels [height, width, 3] bilinearly without antialiasing, as TensorFlow does, to float32 [side, side, 3].

    Values stay in 0..255; they differ from TensorFlow's by less than .02.
    """
    resized = cv2.resize(pixels.astype(np.float32), (side, side), interpolation=cv2.INTER_LINEAR)
    return np.asarray(resized, np.float32)
