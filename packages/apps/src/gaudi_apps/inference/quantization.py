"""Convert models to OpenVINO, and to 8 bits: by NNCF, ONNX Runtime, and TensorFlow for its own.

8 bits are for the convolutions and sums of the network. What comes before and after (normalization, decoding,
suppression), and the layers that predict offsets of boxes, stay in float: of 8 bits there, boxes lose what AP at high
IoU measures.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from gaudi_apps.inference.exported_models import ExportedModel, OpenVINOModel, Prepare, import_runtime
from gaudi_datasets.program import ProgressLine
from gaudi_ops.files import read_file, write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportPrecision
    from gaudi_apps.inference.converters import ExportedNetwork

QUANTIZED_TYPES = ("Conv", "Gemm", "MatMul", "Add", "MaxPool")  # of ONNX
LAYERS, KEPT_PRECISE = ("Convolution", "MatMul"), "precise_0"  # of OpenVINO; the mark of what keeps its precision
KEPT = "box_head"  # the layers that predict offsets, see gaudi_models.ssd
# Accuracy control measures each group of layers with and without 8 bits on RANKED images, and then puts back one group
# after the other, at most MOST_RESTORED of them, with an evaluation on all images after each.
RANKED, MOST_RESTORED = 16, 8
LITE_TYPES = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "MAX_POOL_2D", "PAD")  # of TensorFlow Lite


@dataclass(frozen=True)
class AccuracyBound:
    """Loss of a metric that a quantized model is kept within.

    Attributes:
        measure: returns the metric of a model on the images at some positions, in 0..1.
        most_lost: of the metric of the network, by quantization.
        images: number of all images.
        read: returns an image, JPEG or PNG, by its position.
    """

    measure: Callable[[ExportedModel, Sequence[int]], float]
    most_lost: float
    images: int
    read: Callable[[int], bytes]


def write_openvino(
    network: ExportedNetwork,
    folder: Path,
    precision: ExportPrecision,
    calibration: Sequence[bytes] = (),
    bound: AccuracyBound | None = None,
) -> list[str]:
    """Write ``model.xml`` and ``model.bin`` of ``images`` float32 [batch, side, side, 3], resized, RGB in 0..255.

    Classes (as JSON) and precision are among the file's rt_info, under ``gaudi_apps``.

    Args:
        network: to convert from ONNX; OpenVINO's own conversion of TensorFlow knows no combined suppression.
        folder: to write into.
        precision: fp16 and bf16 halve the weights in the file, int8 those that stay in float; bf16 is computed by the
            loaders' hint, but for the first layer, what is before it, and the last layers, which stay in float32.
        calibration: training images for the ranges of int8, JPEG or PNG.
        bound: of int8: the layers that cost the most get their precision back until it holds; None: all layers that
            may have 8 bits have them.

    Returns:
        the names of the operations that got their precision back.

    Raises:
        MissingExtraError: OpenVINO or NNCF is not installed.
    """
    openvino = import_runtime("openvino")
    restored: list[str] = []
    scratch = folder / "scratch.onnx"  # OpenVINO reads files
    write_file(scratch, network.normalized_onnx, durable=False)
    with contextlib.redirect_stdout(io.StringIO()):  # NNCF draws progress there
        model = openvino.convert_model(str(scratch))
        _normalize_input(model, network)
        if precision == "bf16":
            _keep_ends(model)
        if precision == "int8":
            if not calibration:
                raise ValueError("int8 needs calibration")
            model, restored = _quantize(model, network, calibration, bound)
            _shorten_filters(model, restored)
    model.set_rt_info(json.dumps(network.list_classes()), ["gaudi_apps", "classes"])
    model.set_rt_info(precision, ["gaudi_apps", "precision"])
    openvino.save_model(model, str(folder / "model.xml"), compress_to_fp16=precision in ("fp16", "bf16"))
    scratch.unlink()
    return restored


def _normalize_input(model: Any, network: ExportedNetwork) -> None:
    """Let a model of OpenVINO of normalized images take pixels in 0..255."""
    opset = import_runtime("openvino.opset13")
    (images,) = model.inputs
    readers = images.get_target_inputs()
    scaled = opset.multiply(images, opset.constant(network.scale.reshape(1, 1, 1, 3)))
    shifted = opset.add(scaled, opset.constant(network.shift.reshape(1, 1, 1, 3)))
    for reader in readers:
        reader.replace_source_output(shifted.output(0))
    model.validate_nodes_and_infer_types()


def _keep_ends(model: Any) -> None:
    """Mark what OpenVINO is to compute in float32, whatever the hint: up to the first layer, and the last layers.

    Bfloat16 has 8 bits, as pixels have, and half of a level of all pixels is most of what scores lose by it; what the
    first layer loses goes through all others; and a logit of 4 in bfloat16 is a multiple of 1/64. Pooling after the
    first layer is cheaper in float32 than a large image in another layout and precision.
    """
    ahead, layer = [reader.get_node() for one in model.inputs for reader in one.get_target_inputs()], None
    while ahead:
        operation = ahead.pop()
        operation.get_rt_info()[KEPT_PRECISE] = ""
        if operation.get_type_name() in LAYERS:
            layer = operation
        else:
            ahead += [reader.get_node() for one in operation.outputs() for reader in one.get_target_inputs()]
    while layer is not None:
        readers = [reader.get_node() for reader in layer.output(0).get_target_inputs()]
        layer = readers[0] if len(readers) == 1 and readers[0].get_type_name() in ("Add", "Relu", "MaxPool") else None
        if layer is not None and layer.get_type_name() == "MaxPool":
            layer = _replace_pool(layer)
        if layer is not None:
            layer.get_rt_info()[KEPT_PRECISE] = ""
    behind, seen = [*model.get_results()], set[str]()
    while behind:
        operation = behind.pop()
        for source in (one.get_source_output().get_node() for one in operation.inputs()):
            if source.get_type_name() in LAYERS:
                source.get_rt_info()[KEPT_PRECISE] = ""
            elif source.get_friendly_name() not in seen:
                seen.add(source.get_friendly_name())
                behind.append(source)


def _replace_pool(pool: Any) -> Any:
    """Replace a pooling by its first version: OpenVINO makes this of later ones, and forgets their marks."""
    told = pool.get_attributes()
    if told["rounding_type"] not in ("floor", "ceil") or {*told["dilations"]} != {1}:
        return pool
    shape = told["strides"], told["pads_begin"], told["pads_end"], told["kernel"]
    first = import_runtime("openvino.opset1").max_pool(
        pool.input_value(0), *shape, told["rounding_type"], told["auto_pad"]
    )
    first.set_friendly_name(pool.get_friendly_name())
    for reader in pool.output(0).get_target_inputs():
        reader.replace_source_output(first.output(0))
    return first


def _quantize(
    model: Any, network: ExportedNetwork, calibration: Sequence[bytes], bound: AccuracyBound | None
) -> tuple[Any, list[str]]:
    """Quantize a model of OpenVINO by NNCF, with the accuracy control where there is a bound; see `write_openvino`."""
    nncf = import_runtime("nncf")
    nncf.set_log_level(logging.ERROR)
    inputs = [network.prepare_resized(encoded)[np.newaxis] for encoded in calibration]
    names = [one.get_friendly_name() for one in model.get_ops() if one.get_type_name() not in ("Constant", "Result")]
    ignored = nncf.IgnoredScope(names=[name for name in names if not is_quantized(name, network)], validate=False)
    options: dict[str, Any] = {"ignored_scope": ignored, "preset": nncf.QuantizationPreset.MIXED}
    options |= {"subset_size": len(inputs)}
    quantized = nncf.quantize(model, nncf.Dataset(inputs), **options)
    if bound is None:
        return quantized, []
    layers = _list_quantized(quantized)
    # Both networks as a whole and image by image, each layer, and the whole after each that is put back; rarely, NNCF
    # measures the layers that are left once more.
    most = bound.images * (4 + MOST_RESTORED) + min(RANKED, bound.images) * len(layers)
    say(f"measuring {len(layers)} layers on about {most} images, to find those that cost the most", error=True)
    controlled = nncf.quantize_with_accuracy_control(
        model,
        nncf.Dataset(inputs),
        nncf.Dataset(range(bound.images), lambda place: network.prepare_resized(bound.read(place))[np.newaxis]),
        validation_fn=_Validation(bound, network.prepare_resized, most),
        max_drop=bound.most_lost,
        **options,
        advanced_accuracy_restorer_parameters=nncf.AdvancedAccuracyRestorerParameters(
            max_num_iterations=MOST_RESTORED, ranking_subset_size=RANKED
        ),
    )
    return controlled, sorted(layers - _list_quantized(controlled))


class _Validation:
    """Measure a compiled model on images by their positions, and show how many of about so many are measured."""

    def __init__(self, bound: AccuracyBound, prepare: Prepare, most: int) -> None:
        self._bound, self._prepare, self._most = bound, prepare, most
        self._show, self._done = ProgressLine("measuring layers of 8 bits"), 0

    def __call__(self, compiled: Any, positions: Iterable[int]) -> tuple[float, None]:
        """Return the metric, and None for the metric of each image, which AP has none of."""
        places = [*positions]
        value = self._bound.measure(OpenVINOModel(lambda size: compiled, self._prepare, 0, 0), places)
        self._done += len(places)
        self._show(self._done, max(self._most, self._done))
        return value, None


def _shorten_filters(model: Any, restored: Collection[str]) -> None:
    """Store the float32 filters that are left in 8 bits, with a scale for each, and those of restored layers in 16.

    OpenVINO multiplies them out once, as it loads the model, and computes these layers in float32.
    """
    opset = import_runtime("openvino.opset13")
    for layer in (one for one in model.get_ops() if one.get_type_name() in LAYERS):
        filters = layer.input_value(1).get_node()  # a Constant of float32, where the layer has not 8 bits
        if filters.get_type_name() != "Constant" or not np.isfinite(halved := filters.data.astype(np.float16)).all():
            continue
        if layer.get_type_name() == "Convolution" and layer.get_friendly_name() not in restored:
            most = np.abs(filters.data).max(axis=(1, 2, 3), keepdims=True)
            scales = np.where(most, most / 127, 1).astype(np.float32)
            whole = opset.constant(np.round(filters.data / scales).astype(np.int8))
            short = opset.multiply(opset.convert(whole, "f32"), opset.constant(scales))
        else:
            short = opset.convert(opset.constant(halved), "f32")
        layer.input(1).replace_source_output(short.output(0))


def _list_quantized(model: Any) -> set[str]:
    """List the operations of a model of OpenVINO, by their names, that take values of 8 bits."""
    names = set()
    for operation in model.get_ops():
        sources = [operation.input_value(place).get_node() for place in range(operation.get_input_size())]
        if any(source.get_type_name() == "FakeQuantize" for source in sources):
            names.add(operation.get_friendly_name())
    return names


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

    model = onnx.load_model_from_string(read_file(path))
    nodes = [node.name for node in model.graph.node if node.op_type in QUANTIZED_TYPES]
    with _quiet("onnxruntime"):
        quantization.quantize_static(
            str(path),
            str(path),
            Reader(),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            op_types_to_quantize=list(QUANTIZED_TYPES),
            nodes_to_exclude=[name for name in nodes if not is_quantized(name, network)],
        )


@contextlib.contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Drop within a context what the modules of a library, which has no logger of its own, log at the root."""
    root = logging.getLogger()
    handlers = [*root.handlers]

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or library not in Path(record.pathname).parts

    root.addFilter(is_of_others)
    try:
        yield
    finally:
        root.removeFilter(is_of_others)
        root.handlers[:] = handlers  # the first record at the root adds one


def quantize_tflite(make_converter: Callable[[], Any], network: ExportedNetwork, calibration: Sequence[bytes]) -> bytes:
    """Convert a network to TensorFlow Lite with convolutions and sums in 8 bits; inputs and outputs stay float32.

    Args:
        make_converter: returns a converter of TensorFlow Lite, of a function that takes resized images. TensorFlow 2.15
            cannot convert twice by one.
        network: that it is of.
        calibration: training images for the ranges, JPEG or PNG.
    """

    def read() -> Iterator[list[Any]]:
        for encoded in calibration:
            yield [network.prepare_resized(encoded)[np.newaxis].astype(np.float32)]

    kinds, kept = _list_float(tf.lite.Interpreter(model_content=make_converter().convert()), network)
    converter = make_converter()
    converter.optimizations, converter.representative_dataset = [tf.lite.Optimize.DEFAULT], read
    options = tf.lite.experimental.QuantizationDebugOptions(denylisted_ops=kinds, denylisted_nodes=kept)
    # The one public way to choose layers. What it says of differences is not asked for.
    debugger = tf.lite.experimental.QuantizationDebugger(converter=converter, debug_dataset=read, debug_options=options)
    content: bytes = debugger.get_nondebug_quantized_model()
    return content


def _list_float(interpreter: Any, network: ExportedNetwork) -> tuple[list[str], list[str]]:
    """List what stays in float in a model of TensorFlow Lite: kinds of operations, and operations of the others."""
    names = {tensor["index"]: tensor["name"] for tensor in interpreter.get_tensor_details()}
    operations = [(one["op_name"], names[int(one["outputs"][0])]) for one in interpreter._get_ops_details()]
    kinds = sorted({kind for kind, _ in operations if kind not in LITE_TYPES})
    return kinds, [name for kind, name in operations if kind in LITE_TYPES and not is_quantized(name, network)]
