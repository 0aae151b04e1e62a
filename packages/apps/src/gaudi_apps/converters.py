"""TensorFlow functions as ONNX and TensorFlow Lite models, by the converters of those projects."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

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
