"""Write a network as a SavedModel, ONNX or TensorFlow Lite model, and run what was written."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from gaudi_apps.runtime.errors import ExportError
from gaudi_datasets.errors import BadImageError, import_extra
from gaudi_datasets.output_files import write_json
from gaudi_models.weights import WeightsMetadata
from gaudi_ops.files import write_file
from gaudi_ops.tf.keras_api import keras

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportPrecision
    from gaudi_apps.inference.exported_models import Arrays, ExportedModel

ONNX_OPSET = 17
CLASSES_FILE = "classes.json"
ENCODED = tf.TensorSpec([None], tf.string, name="encoded")
PIXELS = tf.TensorSpec([None, None, None, 3], tf.uint8, name="images")
SECONDS = 600  # to run a SavedModel
TOLERANCE = 1e-3
_DECODE = functools.partial(tf.io.decode_image, channels=3, expand_animations=False)


@dataclass(frozen=True)
class Agreement:
    """The largest differences between the outputs of an export and of the network.

    Attributes:
        differences: by what differs, such as ``box_difference``; infinite where an output has no counterpart.
        compared: number of values or boxes.
        tolerances: by what differs, where it is not 1e-3.
    """

    differences: Mapping[str, float]
    compared: int
    tolerances: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_close(self) -> bool:
        """Tell whether all differences are within their tolerances."""
        return all(difference <= self.tolerances.get(name, TOLERANCE) for name, difference in self.differences.items())

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value:.2g}" for name, value in self.differences.items())


@contextlib.contextmanager
def hold_stderr() -> Iterator[None]:
    """Keep from standard error what libraries write there within a context, in C++, too, unless it raises an error."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as held:
            os.dup2(held.fileno(), 2)
            try:
                yield
            except BaseException:
                held.seek(0)
                with open(kept, "wb", closefd=False) as shown:
                    shutil.copyfileobj(held, shown)
                raise
            finally:
                sys.stderr.flush()
                os.dup2(kept, 2)
    finally:
        os.close(kept)


def find_worst(agreements: Sequence[Agreement]) -> Agreement:
    """Return the largest differences of several comparisons, and the sum of what was compared."""
    # By NumPy, whose maximum with NaN is NaN.
    worst = {name: float(np.max([one.differences[name] for one in agreements])) for name in agreements[0].differences}
    return Agreement(worst, sum(one.compared for one in agreements), agreements[0].tolerances)


class ExportedNetwork(ABC):
    """Define the inputs and outputs of a network as its exports have them.

    Args:
        model: Keras model of normalized images [batch, side, side, 3]; exported in float32 whatever its precision.
        image_size: side of the images in pixels.
        metadata: to write beside the weights.

    Attributes:
        is_scored: its outputs are what an evaluation has a metric for.
        scale: float32 [3], what pixels in 0..255 are multiplied by to normalize them, by channel.
        shift: float32 [3], what is added then.
    """

    is_scored: bool = True
    scale: Any
    shift: Any

    def __init__(self, model: Any, image_size: int, metadata: WeightsMetadata) -> None:
        self.model = model
        self.image_size = image_size
        self.metadata = metadata

    @functools.cached_property
    def traced(self) -> Any:
        """Return `compute` as a function that TensorFlow traces once, and not anew for each export."""
        return tf.function(self.compute, autograph=False, reduce_retracing=True)

    @functools.cached_property
    def normalized_onnx(self) -> bytes:
        """Return the ONNX model of normalized images, which is converted once for all precisions; see `make_onnx`."""
        content: bytes = make_onnx(self, normalized=True).SerializeToString()
        return content

    def replace_model(self, model: Any) -> ExportedNetwork:
        """Return the same network with another model."""
        other = copy.copy(self)
        for name in ("traced", "normalized_onnx"):
            other.__dict__.pop(name, None)
        other.model = model
        return other

    @abstractmethod
    def prepare_encoded(self, encoded: Any) -> Any:
        """Turn the bytes of a JPEG or PNG file into a normalized image float32 [side, side, 3]."""

    @abstractmethod
    def prepare_pixels(self, pixels: Any) -> Any:
        """Turn pixels [batch, height, width, 3] in 0..255 into normalized images float32 [batch, side, side, 3]."""

    @abstractmethod
    def resize(self, pixels: Any) -> Any:
        """Resize pixels uint8 [height, width, 3] to the input of a TensorFlow Lite model, float32 [side, side, 3]."""

    def decode(self, encoded: bytes) -> Any:
        """Decode an image for `prepare_resized`, uint8 [height, width, 3]."""
        return decode_pixels(encoded)

    def prepare_resized(self, encoded: bytes) -> Any:
        """Decode and resize an image to the input of TensorFlow Lite and OpenVINO, float32 [side, side, 3]."""
        return self.resize(self.decode(encoded))

    def prepare_onnx(self, encoded: bytes) -> Any:
        """Decode an image and resize it to what an ONNX model, which resizes as well, leaves as it is."""
        return self.prepare_resized(encoded)

    def normalize(self, pixels: Any) -> Any:
        """Normalize resized pixels [batch, side, side, 3] in 0..255."""
        return pixels * self.scale + self.shift

    @abstractmethod
    def compute(self, images: Any) -> dict[str, Any]:
        """Return the outputs of a SavedModel by name, of normalized images."""

    def compute_onnx(self, images: Any) -> dict[str, Any]:
        """Return the same of operations that ONNX has."""
        return self.compute(images)

    def compute_tflite(self, images: Any) -> dict[str, Any]:
        """Return what TensorFlow Lite's built-in operations can compute of them."""
        return self.compute(images)

    @abstractmethod
    def list_classes(self) -> list[dict[str, Any]]:
        """List label and name of each class, as JSON values."""

    @abstractmethod
    def class_tensors(self) -> dict[str, Any]:
        """Return the outputs of the signature ``class_names``."""

    @abstractmethod
    def compare(self, reference: Arrays, found: Arrays) -> Agreement:
        """Compare outputs with those of the network on the same images."""

    def compare_rounded(self, images: Any, reference: Arrays, found: Arrays) -> Agreement:
        """Compare outputs of less precision on normalized images, where rounding may decide otherwise what is kept."""
        return self.compare(reference, found)


def write_saved_model(network: ExportedNetwork, path: Path) -> None:
    """Write a SavedModel that needs TensorFlow only, for any batch size, with the classes as JSON among its assets.

    Its signatures: ``serving_default`` takes ``encoded`` string [batch], the bytes of JPEG or PNG files; ``images``
    takes ``images`` uint8 [batch, height, width, 3], RGB; ``class_names`` takes nothing.

    Args:
        network: to export.
        path: of the folder to write, which must not hold a SavedModel.

    Raises:
        OSError: it cannot be written.
    """
    path.mkdir(parents=True, exist_ok=True)
    classes_file = path / CLASSES_FILE
    write_json(classes_file, network.list_classes())
    tensors = network.class_tensors()
    prepared = tf.TensorSpec([network.image_size, network.image_size, 3], tf.float32)

    def compute_encoded(encoded: Any) -> dict[str, Any]:
        return network.compute(tf.map_fn(network.prepare_encoded, encoded, fn_output_signature=prepared))

    def compute_pixels(images: Any) -> dict[str, Any]:
        return network.compute(network.prepare_pixels(images))

    owner = _own_variables(network.model)
    owner.classes_file = tf.saved_model.Asset(str(classes_file))
    signatures = {
        "serving_default": tf.function(compute_encoded, input_signature=[ENCODED], autograph=False),
        "images": tf.function(compute_pixels, input_signature=[PIXELS], autograph=False),
        "class_names": tf.function(lambda: tensors, input_signature=[], autograph=False),
    }
    for name, function in signatures.items():
        setattr(owner, name, function)
    try:
        tf.saved_model.save(owner, str(path), signatures=signatures)
    except tf.errors.OpError as error:  # such as a full disk, of which TensorFlow makes errors of its own
        raise OSError(None, f"TensorFlow cannot write there ({error.message.splitlines()[0]})", str(path)) from None
    classes_file.unlink()  # a copy is in assets/


def write_onnx(network: ExportedNetwork, path: Path) -> None:
    """Write an ONNX model of ``images`` uint8 [batch, height, width, 3], RGB, for any batch size and image size.

    Its metadata has ``classes``, the classes as JSON.

    Raises:
        MissingExtraError: the converter is not installed.
    """
    write_file(path, make_onnx(network).SerializeToString())


def make_onnx(network: ExportedNetwork, *, normalized: bool = False) -> Any:
    """Convert a network to ONNX.

    Args:
        network: to convert.
        normalized: take ``images`` float32 [batch, side, side, 3], which are resized and normalized already.

    Raises:
        MissingExtraError: the converter is not installed.
    """
    require_onnx()
    import onnx

    def compute(images: Any) -> dict[str, Any]:
        if normalized:
            return network.compute_onnx(images)
        return network.compute_onnx(network.prepare_pixels(tf.cast(images, tf.float32)))

    side = network.image_size
    signature = tf.TensorSpec([None, side, side, 3], tf.float32, name="images") if normalized else PIXELS
    logging.getLogger("tf2onnx").setLevel(logging.ERROR)
    traced = tf.function(compute, input_signature=[signature], autograph=False)
    with hold_stderr():
        converted = _convert_traced(traced, signature)
    onnx.helper.set_model_props(converted, {"classes": json.dumps(network.list_classes())})
    onnx.checker.check_model(converted)
    return converted


def _convert_traced(traced: Any, signature: Any) -> Any:
    """Convert a traced function to ONNX; an optimizer of tf2onnx that fails is left out."""
    from tf2onnx import constants, convert

    name = constants.ENV_TF2ONNX_CATCH_ERRORS
    kept = os.environ.get(name)
    # tf2onnx copies the graph, with all weights, before each of its optimizers in case that fails, which takes a third
    # of the conversion. Where the variable is set, it does not, and a failure ends the conversion.
    os.environ[name] = "FALSE" if kept is None else kept
    try:
        return convert.from_function(traced, input_signature=[signature], opset=ONNX_OPSET)[0]
    except Exception:
        if kept is not None:
            raise
        del os.environ[name]
        return convert.from_function(traced, input_signature=[signature], opset=ONNX_OPSET)[0]
    finally:
        if kept is None:
            os.environ.pop(name, None)


def require_onnx(wanted: str = "onnx") -> None:
    """Raise MissingExtraError unless the converter to ONNX and the runtime of ONNX are installed, for a format."""
    for name in ("onnx", "onnxruntime", "tf2onnx"):
        import_extra(name, "gaudi-apps[export]", f"--export_format {wanted}")


def write_tflite(
    network: ExportedNetwork,
    path: Path,
    precision: ExportPrecision = "fp32",
    quantize: Callable[[Callable[[], Any]], bytes] | None = None,
) -> None:
    """Write a TensorFlow Lite model of built-in operations.

    Input ``images`` float32 [batch, side, side, 3], RGB in 0..255; the batch size is 1 unless the interpreter resizes
    it.

    Args:
        network: to export.
        path: of the file.
        precision: fp16 stores the weights in 16 bits; without a delegate for them they are computed with in float32.
            int8 computes convolutions and sums in 8 bits.
        quantize: of int8, which needs it: takes what makes a converter of TensorFlow Lite, and returns the bytes of a
            model.

    Raises:
        ValueError: int8 without it.
    """

    def compute(images: Any) -> dict[str, Any]:
        return network.compute_tflite(network.normalize(images))

    side = network.image_size
    signature = tf.TensorSpec([None, side, side, 3], tf.float32, name="images")
    traced = tf.function(compute, input_signature=[signature], autograph=False)
    owner = _own_variables(network.model)

    def make_converter() -> Any:
        return tf.lite.TFLiteConverter.from_concrete_functions([traced.get_concrete_function()], owner)

    with hold_stderr():
        if precision == "int8":
            if quantize is None:
                raise ValueError("int8 needs calibration")
            content = quantize(make_converter)
        else:
            converter = make_converter()
            if precision == "fp16":
                converter.optimizations = [tf.lite.Optimize.DEFAULT]
                converter.target_spec.supported_types = [tf.float16]
            content = converter.convert()
    write_file(path, content)


def _own_variables(model: Any) -> Any:
    """Make a module of the variables alone: of a Keras model, every layer's own functions would be exported."""
    owner = tf.Module()
    owner.weights = list(model.variables)
    return owner


def run_saved_model(path: Path, encoded_images: Sequence[bytes], folder: Path) -> tuple[Arrays, Arrays]:
    """Run a SavedModel in a process that imports TensorFlow only.

    Returns:
        the outputs of ``serving_default`` on the encoded images, and those of ``images`` on their pixels.

    Raises:
        ExportError: the process failed.
    """
    files = [folder / f"image-{number}" for number in range(len(encoded_images))]
    for file, encoded in zip(files, encoded_images, strict=True):
        write_file(file, encoded, durable=False)
    result = folder / "outputs.npz"
    # Given as text: Python would put the folder of a script, which has modules of ours, first in its search path.
    script = f"{inspect.getsource(run_signatures)}\nimport sys\nrun_signatures(*sys.argv[1:])"
    command = [sys.executable, "-c", script, *(str(one.resolve()) for one in (path, result, *files))]
    # On the CPU: the accelerator's memory belongs to this process.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ExportError(f"the SavedModel cannot be run by TensorFlow alone: {reason}; nothing is exported")
    with np.load(result, allow_pickle=False) as arrays:
        encoded_outputs, pixel_outputs = (
            {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}
            for prefix in ("encoded_", "images_")
        )
    return encoded_outputs, pixel_outputs


def run_signatures(saved_model: str, result: str, *files: str) -> None:
    """Write the outputs of a SavedModel: all images in one batch as `encoded_*`, one after the other as `images_*`.

    `run_saved_model` runs the text of this function in another process, so it uses nothing from around it.
    """
    import sys
    from pathlib import Path

    import numpy as np
    import tensorflow as tf

    signatures = tf.saved_model.load(saved_model).signatures
    encoded = [Path(file).read_bytes() for file in files]
    outputs = {f"encoded_{name}": value for name, value in signatures["serving_default"](tf.constant(encoded)).items()}
    pixels = [tf.io.decode_image(one, channels=3, expand_animations=False)[tf.newaxis] for one in encoded]
    singles = [signatures["images"](images=one) for one in pixels]
    outputs |= {f"images_{name}": tf.concat([single[name] for single in singles], axis=0) for name in singles[0]}
    np.savez(result, **{name: value.numpy() for name, value in outputs.items()})
    ours = sorted(name for name in sys.modules if name.startswith("gaudi_"))
    if ours:
        sys.exit(f"imported {', '.join(ours)}")


def run_exported(model: ExportedModel, encoded_images: Sequence[bytes]) -> Arrays:
    """Run an exported model on encoded images, in one batch."""
    return model.compute([model.prepare(encoded) for encoded in encoded_images])


@contextlib.contextmanager
def whole_float32() -> Iterator[None]:
    """Compute in float32 as the processor does, also on a GPU, whose TF32 keeps 10 of 23 bits of a factor.

    An export is run on the processor, and a bit of a score can decide which of two boxes is kept.
    """
    shortens = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(shortens)


def decode_pixels(encoded: bytes, place: str | None = None, decode: Callable[[bytes], Any] = _DECODE) -> Any:
    """Decode an image as TensorFlow does, or by `decode`, to uint8 [height, width, 3]; messages call it `place`.

    Raises:
        BadImageError: TensorFlow refuses it, as some PNGs that Pillow reads.
    """
    try:
        return decode(encoded).numpy()
    except tf.errors.InvalidArgumentError as error:
        reason = (error.message.splitlines() or ["no reason is told"])[0]
        raise BadImageError(
            f"an image cannot be decoded by TensorFlow: {reason}", record=place, remedy="save it anew, or leave it out"
        ) from None


def to_float32(model: Any) -> Any:
    """Copy a Keras model to layers that compute in float32, whatever the precision it was trained in."""

    def rebuild(layer: Any) -> Any:
        return type(layer).from_config({**layer.get_config(), "dtype": "float32"})

    found = keras.models.clone_model(model, clone_function=rebuild)
    weights = {variable.name: variable for variable in model.variables}
    for variable in found.variables:
        variable.assign(weights[variable.name])
    return found
