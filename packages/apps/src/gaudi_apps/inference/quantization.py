"""Convert models to OpenVINO, and to 8 bits: by NNCF for OpenVINO, and by ONNX Runtime for ONNX.

8 bits are for the convolutions and sums of the network. What comes before and after (normalization, decoding,
suppression), and the layers that predict offsets of boxes, stay in float: of 8 bits there, boxes lose what AP at high
IoU measures.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gaudi_apps.inference.exported_models import ExportedModel, OpenVINOModel, import_runtime
from gaudi_ops.files import read_file, write_file

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportPrecision
    from gaudi_apps.inference.converters import ExportedNetwork

OPENVINO_FILES = ("model.xml", "model.bin")
QUANTIZED_TYPES = ("Conv", "Gemm", "MatMul", "Add", "MaxPool")  # of ONNX
KEPT = "box_head"  # the layers that predict offsets, see gaudi_models.ssd
MOST_RESTORED = 8  # layers, each of which costs an evaluation


@dataclass(frozen=True)
class Calibration:
    """Training images that ranges of 8 bits are measured on.

    Attributes:
        encoded: JPEG or PNG files.
        seed: that they were drawn by.
    """

    encoded: Sequence[bytes]
    seed: int


@dataclass(frozen=True)
class AccuracyBound:
    """Loss of a metric that a quantized model is kept within.

    Attributes:
        measure: returns the metric of a model, in 0..1.
        most_lost: of the metric of the network, by quantization.
    """

    measure: Callable[[ExportedModel], float]
    most_lost: float


def write_openvino(
    converted: Any,
    network: ExportedNetwork,
    folder: Path,
    precision: ExportPrecision,
    calibration: Calibration | None = None,
    bound: AccuracyBound | None = None,
) -> None:
    """Write ``model.xml`` and ``model.bin`` of ``images`` float32 [batch, side, side, 3], resized, RGB in 0..255.

    Classes (as JSON) and precision are among the file's rt_info, under ``gaudi_apps``.

    Args:
        converted: the ONNX model of the network, which takes the same; OpenVINO's own conversion of TensorFlow knows no
            combined suppression.
        network: that it is of.
        folder: to write into.
        precision: fp16 and bf16 halve the weights in the file; bf16 is computed by the hint that loaders give.
        calibration: of int8, which needs it.
        bound: of int8: the layers that cost the most get their precision back until it holds; None: all layers that
            may have 8 bits have them.

    Raises:
        MissingExtraError: OpenVINO or NNCF is not installed.
    """
    openvino = import_runtime("openvino")
    scratch = folder / "scratch.onnx"  # OpenVINO reads files
    write_file(scratch, converted.SerializeToString(), durable=False)
    with contextlib.redirect_stdout(io.StringIO()):  # NNCF draws progress there
        model = openvino.convert_model(str(scratch))
        if precision == "int8":
            if calibration is None:
                raise ValueError("int8 needs calibration")
            model = _quantize(model, network, calibration, bound)
    model.set_rt_info(json.dumps(network.list_classes()), ["gaudi_apps", "classes"])
    model.set_rt_info(precision, ["gaudi_apps", "precision"])
    openvino.save_model(model, str(folder / "model.xml"), compress_to_fp16=precision in ("fp16", "bf16"))
    scratch.unlink()


def _quantize(model: Any, network: ExportedNetwork, calibration: Calibration, bound: AccuracyBound | None) -> Any:
    """Quantize a model of OpenVINO by NNCF, with the accuracy control where there is a bound."""
    nncf = import_runtime("nncf")
    nncf.set_log_level(logging.ERROR)
    inputs = [network.prepare_resized(encoded)[np.newaxis] for encoded in calibration.encoded]
    names = [one.get_friendly_name() for one in model.get_ops() if one.get_type_name() not in ("Constant", "Result")]
    ignored = nncf.IgnoredScope(names=[name for name in names if not is_quantized(name, network)], validate=False)
    options: dict[str, Any] = {"ignored_scope": ignored, "preset": nncf.QuantizationPreset.MIXED}
    options |= {"subset_size": len(inputs)}
    if bound is None:
        return nncf.quantize(model, nncf.Dataset(inputs), **options)
    prepare, measure = network.prepare_resized, bound.measure
    return nncf.quantize_with_accuracy_control(
        model,
        nncf.Dataset(inputs),
        nncf.Dataset(inputs[:1]),  # the images to measure on are those of the bound
        validation_fn=lambda compiled, _: measure(OpenVINOModel(compiled, prepare)),
        max_drop=bound.most_lost,
        **options,
        advanced_accuracy_restorer_parameters=nncf.AdvancedAccuracyRestorerParameters(max_num_iterations=MOST_RESTORED),
    )


def is_quantized(name: str, network: ExportedNetwork) -> bool:
    """Return whether an operation, by its name, is of a layer of the network that may have 8 bits."""
    return name.startswith(f"{network.model.name}/") and KEPT not in name


def quantize_onnx(path: Path, network: ExportedNetwork, images: Iterator[Any]) -> None:
    """Quantize an ONNX model in its place, by ONNX Runtime's static quantization, a scale for each channel.

    Args:
        path: of the model.
        network: that it is of.
        images: to calibrate on, uint8 [height, width, 3], RGB.

    Raises:
        MissingExtraError: ONNX Runtime is not installed.
    """
    onnx, quantization = import_runtime("onnx"), import_runtime("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):  # type: ignore[name-defined]
        """Feed the calibration images one by one."""

        def get_next(self) -> dict[str, Any] | None:
            """Return the next image; None after the last."""
            pixels = next(images, None)
            return None if pixels is None else {"images": pixels[np.newaxis]}

    logging.getLogger("root").setLevel(logging.ERROR)
    model = onnx.load_model_from_string(read_file(path))
    nodes = [node.name for node in model.graph.node if node.op_type in QUANTIZED_TYPES]
    quantization.quantize_static(
        model,
        str(path),
        Reader(),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        op_types_to_quantize=list(QUANTIZED_TYPES),
        nodes_to_exclude=[name for name in nodes if not is_quantized(name, network)],
    )
