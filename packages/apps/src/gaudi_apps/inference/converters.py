"""Convert TensorFlow functions to ONNX and TensorFlow Lite, and run exported models to compare them."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.errors import ExportError
from gaudi_datasets.errors import MissingExtraError

ONNX_OPSET = 17


def require_onnx() -> None:
    """Raise MissingExtraError unless the converter to ONNX, and what runs its result, are installed."""
    for name in ("onnx", "onnxruntime", "tf2onnx"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"--export_format onnx: {name} cannot be imported ({error}); pip install 'gaudi-apps[export]'"
            ) from error


def convert_onnx(function: Callable[..., Any], signature: Any, classes: Sequence[Any], path: Path) -> None:
    """Write a function of one tensor as an ONNX model, with ``classes`` in its metadata, as JSON.

    Raises:
        MissingExtraError: the converter is not installed.
    """
    require_onnx()
    import onnx
    import tf2onnx

    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    traced = tf.function(function, input_signature=[signature])
    converted, _ = tf2onnx.convert.from_function(traced, input_signature=[signature], opset=ONNX_OPSET)
    onnx.helper.set_model_props(converted, {"classes": json.dumps(classes)})
    onnx.checker.check_model(converted)
    path.write_bytes(converted.SerializeToString())


def convert_tflite(function: Callable[..., Any], signature: Any, network: Any, path: Path) -> None:
    """Write a function of one tensor, which uses a network, as a TensorFlow Lite model of built-in operations."""
    traced = tf.function(function, input_signature=[signature])
    owner = tf.Module()  # of the variables alone: of a Keras model, every layer's own functions would be converted
    owner.weights = list(network.variables)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced.get_concrete_function()], owner)
    path.write_bytes(converter.convert())


SCRIPT = Path(__file__).with_name("saved_model_script.py")
SECONDS = 600

Arrays = dict[str, npt.NDArray[Any]]


def run_saved_model(path: Path, encoded_images: Sequence[bytes], folder: Path) -> tuple[Arrays, Arrays]:
    """Outputs of a SavedModel in a process that imports TensorFlow only: by encoded images, and by pixels.

    Args:
        path: the SavedModel, with the signatures ``serving_default`` and ``images``.
        encoded_images: JPEG or PNG.
        folder: for temporary files.

    Raises:
        ExportError: the process failed.
    """
    files = [folder / f"image-{number}" for number in range(len(encoded_images))]
    for file, encoded_image in zip(files, encoded_images, strict=True):
        file.write_bytes(encoded_image)
    result = folder / "outputs.npz"
    # Given as text: Python would put the folder of a script, which has modules of ours, first in its search path.
    command = [
        sys.executable,
        "-c",
        SCRIPT.read_text(encoding="utf-8"),
        *(str(one.resolve()) for one in (path, result, *files)),
    ]
    # On the CPU: the accelerator's memory belongs to this process.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ExportError(f"the SavedModel cannot be run by TensorFlow alone: {reason}; nothing is exported")
    with np.load(result, allow_pickle=False) as arrays:
        encoded, images = (
            {name.removeprefix(way): arrays[name] for name in arrays.files if name.startswith(way)}
            for way in ("encoded_", "images_")
        )
    return encoded, images


def run_onnx(path: Path, encoded_images: Sequence[bytes], names: Sequence[str]) -> list[npt.NDArray[Any]]:
    """The named outputs of an ONNX model of pixels, by onnxruntime, on one image after the other."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs = [
        session.run(list(names), {"images": decode_pixels(encoded_image)[np.newaxis]})
        for encoded_image in encoded_images
    ]
    return [np.concatenate(one) for one in zip(*outputs, strict=True)]


def run_tflite(path: Path, images: npt.NDArray[np.float32]) -> Arrays:
    """The outputs of a TensorFlow Lite model on a batch of pixels."""
    outputs: Arrays = tf.lite.Interpreter(model_path=str(path)).get_signature_runner()(images=images)
    return outputs


def decode_pixels(encoded_image: bytes) -> Any:
    """Pixels uint8 [height, width, 3] as TensorFlow decodes them."""
    return tf.io.decode_image(encoded_image, channels=3, expand_animations=False).numpy()
