"""Record the tensors of steps, in the order of computation, in a folder; read recordings, compare steps with them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gaudi_apps.runtime.settings import MAX_PARITY_STEPS
from gaudi_datasets.errors import DataError, FlagError, MissingInputError, UnsafeError
from gaudi_distributed.errors import ConfigurationError
from gaudi_ops.files import hash_file, read_file, staging_folder, write_file

FORMAT = "gaudi-apps parity"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
MAX_BYTES = 32 << 30
_TYPES = {"settings": dict, "side": dict, "steps": list, "tensors": list}


@dataclass(frozen=True)
class Recording:
    """A recording whose manifest and files were checked.

    Attributes:
        folder: of the files.
        settings: JSON values by name that both sides must have in common.
        side: JSON values by name that the sides may differ in.
        steps: number of steps.
        tensors: of all steps, in the order of computation.
    """

    folder: Path
    settings: Mapping[str, Any]
    side: Mapping[str, Any]
    steps: int
    tensors: tuple[TensorMetadata, ...]

    def list_step(self, step: int) -> list[TensorMetadata]:
        """List the tensors of a step, counted from 1."""
        return [tensor for tensor in self.tensors if tensor.step == step]

    def read_part(self, step: int, part: Part) -> dict[str, Array]:
        """Read the tensors of a part of a step, counted from 1, by their names; errors are those of `read`."""
        return {tensor.name: self.read(tensor) for tensor in self.list_step(step) if tensor.part == part}

    def read(self, tensor: TensorMetadata) -> Array:
        """Read the values of a tensor.

        Raises:
            DataError: they are missing, or have another shape or dtype than in the manifest.
        """
        path = self.folder / _name_file(tensor.step)
        try:
            with safe_open(path, framework="numpy") as file:
                shape = tuple(file.get_slice(tensor.key).get_shape())
                values: Array = file.get_tensor(tensor.key) if shape == tensor.shape else np.empty(shape, np.uint8)
        except (OSError, SafetensorError, TypeError) as error:
            raise DataError(f"{path}: {tensor.key}: cannot be read ({error}); record it again") from None
        if (values.shape, values.dtype.name) != (tensor.shape, tensor.dtype):
            raise DataError(f"{path}: {tensor.key}: is not of the shape and type of {MANIFEST}; record it again")
        return values


def require_new(folder: Path) -> None:
    """Raise UnsafeError if the folder of a new recording exists."""
    if os.path.lexists(folder):
        raise UnsafeError("exists already", flag="--parity_output", path=folder, remedy="give another folder")


def write_recording(
    folder: Path, settings: Mapping[str, Any], side: Mapping[str, Any], steps: Iterable[list[StepTensor]]
) -> None:
    """Write a recording, complete or not at all.

    Args:
        folder: must not be there yet.
        settings: see `Recording`.
        side: see `Recording`.
        steps: tensors of each step; one step at a time is in memory.

    Raises:
        UnsafeError: the folder exists.
        FlagError: the recording would be too large.
    """
    require_new(folder)
    files: list[dict[str, Any]] = []
    tensors: list[TensorMetadata] = []
    with staging_folder(folder.absolute().parent) as parent:
        draft = parent / "recording"
        draft.mkdir()
        for number, step in enumerate(steps, 1):
            path = draft / _name_file(number)
            total = sum(one["bytes"] for one in files) + sum(one.values.nbytes for one in step)
            if total > MAX_BYTES:
                limit = f"above {MAX_BYTES >> 30} GiB"
                raise FlagError(
                    f"--parity_output {folder}: is {limit} at step {number}",
                    flag="--parity_output",
                    remedy="give a smaller --batch_size",
                )
            _write_step(path, step)
            files.append({"bytes": path.stat().st_size, "sha256": hash_file(path)})
            tensors += [one.metadata for one in step]
        manifest = {"format": FORMAT, "version": VERSION, "settings": dict(settings), "side": dict(side)}
        document = {**manifest, "steps": files, "tensors": [asdict(tensor) for tensor in tensors]}
        write_file(draft / MANIFEST, json.dumps(document, indent=1) + "\n")
        for path in draft.iterdir():  # the library writes files that nobody else may read
            path.chmod((draft / MANIFEST).stat().st_mode)
        require_new(folder)
        draft.rename(folder)


def read_recording(folder: Path) -> Recording:
    """Open a recording, and check all of it.

    Raises:
        MissingInputError: the folder has no recording.
        DataError: the recording is damaged, or has another format or version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise MissingInputError(f"{path}: does not exist; give a folder that --parity_output made")
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise DataError(f"{path}: is larger than {MAX_MANIFEST_BYTES >> 20} MiB; record it again")
    try:
        document = json.loads(read_file(path))
        recording = _parse(folder, document)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: is not a recording of a parity ({error}); record it again") from None
    for number, entry in enumerate(document["steps"], 1):
        _check_file(folder / _name_file(number), entry)
    return recording


def _parse(folder: Path, document: Any) -> Recording:
    if document["format"] != FORMAT or document["version"] != VERSION:
        raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
    for name, kind in _TYPES.items():
        if not isinstance(document[name], kind):
            raise TypeError(f"{name} is of the wrong type")
    steps = len(document["steps"])
    if not 1 <= steps <= MAX_PARITY_STEPS:
        raise ValueError(f"{steps} steps")
    tensors = tuple(_parse_tensor(entry, steps) for entry in document["tensors"])
    if len({tensor.key for tensor in tensors}) != len(tensors):
        raise ValueError("a tensor stands in it twice")
    return Recording(folder, document["settings"], document["side"], steps, tensors)


def _parse_tensor(entry: Any, steps: int) -> TensorMetadata:
    tensor = TensorMetadata(**{**entry, "shape": tuple(entry["shape"])})
    texts = (tensor.part, tensor.name, tensor.layer, tensor.dtype)
    numbers = (tensor.step, *tensor.shape)
    if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
        raise TypeError(f"tensor {str(entry)[:80]}")
    if tensor.part not in get_args(Part) or not 1 <= tensor.step <= steps or min(tensor.shape, default=0) < 0:
        raise ValueError(f"tensor {str(entry)[:80]}")
    return tensor


def _check_file(path: Path, entry: Any) -> None:
    if not path.is_file():
        raise DataError(f"{path}: is missing; copy the whole recording, or record it again")
    size = path.stat().st_size
    known = isinstance(entry, dict) and entry.get("bytes") == size <= MAX_BYTES
    if not known or entry.get("sha256") != hash_file(path):
        raise DataError(f"{path}: is not what {MANIFEST} says; copy it again, or record it again")


def _write_step(path: Path, step: list[StepTensor]) -> None:
    try:
        save_file({one.metadata.key: np.asarray(one.values, order="C") for one in step}, path)
    except SafetensorError as error:  # also of a full disk
        raise OSError(f"{path.name}: cannot be written ({error})") from None


def _name_file(step: int) -> str:
    return f"step-{step:04d}.safetensors"


# In the order of a step: the batch, the weights of a layer (in the first step) and its output, the parts of the loss,
# gradients from the last layer to the first, and the update of each variable.
Part: TypeAlias = Literal["batch", "weight", "output", "loss", "gradient", "update"]
Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class TensorMetadata:
    """Describe a tensor, without its values.

    Attributes:
        step: from 1.
        part: of the step.
        name: of a variable, a layer, a part of the batch or of the loss.
        layer: that it belongs to; empty: none.
        shape: of its values.
        dtype: of its values, as NumPy names it.
    """

    step: int
    part: Part
    name: str
    layer: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def key(self) -> str:
        """Return the unique name of the tensor in a recording."""
        return f"step{self.step}/{self.part}/{self.name}"

    def describe(self) -> str:
        """Return step, part, name and layer in words."""
        place = f" of layer {self.layer}" if self.layer else ""
        return f"step {self.step}: {self.part} {self.name}{place}"


@dataclass(frozen=True, eq=False)
class StepTensor:
    """A tensor with its values, of a dtype of NumPy."""

    metadata: TensorMetadata
    values: Array


def make_tensor(step: int, part: Part, name: str, values: Array, layer: str = "") -> StepTensor:
    """Make a tensor of a step."""
    return StepTensor(TensorMetadata(step, part, name, layer, tuple(values.shape), values.dtype.name), values)


# Returns the tensors of a part of a step of the other side, by their names; steps are counted from 1.
Reference: TypeAlias = Callable[[int, Part], Mapping[str, Array]]

# Trains a task on batches, at a learning rate by step, for some steps, by a reference or alone; yields tensors by step.
ReplaySteps: TypeAlias = Callable[
    [Any, Iterator[Mapping[str, Any]], Callable[[int], float], int, Reference], Iterator[list[StepTensor]]
]


def without_reference(step: int, part: Part) -> Mapping[str, Array]:
    """Return no tensors, for a side that runs alone."""
    return {}


def list_outputs(
    step: int, outputs: Iterable[tuple[str, Array]], weights: Mapping[str, Sequence[tuple[str, Array]]]
) -> Iterator[StepTensor]:
    """Yield the outputs of layers, each after the weights of its layer.

    Args:
        step: from 1.
        outputs: names and values in the order of computation; a second output of a layer has ``#2`` after its name.
        weights: names and values by layer; empty: none.
    """
    left = dict(weights)
    for name, values in outputs:
        layer = name.partition("#")[0]
        for variable, content in left.pop(layer, ()):
            yield make_tensor(step, "weight", variable, content, layer)
        yield make_tensor(step, "output", name, values, layer)


def require_same_shape(name: str, own: Sequence[int], given: Sequence[int]) -> None:
    """Raise ConfigurationError if a tensor of the other side has another shape."""
    if tuple(own) != tuple(given):
        raise ConfigurationError(
            f"recording: {name} has shape {list(given)} there and {list(own)} here",
            field=name,
            remedy="record it again",
        )


@contextlib.contextmanager
def wrapped(layers: Iterable[Any], method: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of each layer by ``wrap(layer, method, *arguments)`` within a context."""
    kept = list(layers)
    for layer in kept:
        # Not by an assignment, which a framework would track.
        vars(layer)[method] = functools.partial(wrap, layer, getattr(layer, method))
    try:
        yield
    finally:
        for layer in kept:
            del vars(layer)[method]


_BLOCK = 1 << 20

# Of each part, a and r: two tensors may differ by a + r x their largest absolute value.
Tolerances: TypeAlias = Mapping[Part, tuple[float, float]]


@dataclass(frozen=True)
class Difference:
    """Hold the difference of a tensor between two sides.

    Attributes:
        tensor: that was compared.
        largest: absolute difference of two values; not finite where a value is not.
        norm: of the differences, divided by the larger norm of the two tensors.
        bound: tolerance of `largest`.
    """

    tensor: TensorMetadata
    largest: float
    norm: float
    bound: float

    @property
    def is_beyond(self) -> bool:
        """Tell whether the difference is above the tolerance."""
        return not (math.isfinite(self.largest) and self.largest <= self.bound)


def require_comparable(
    settings: Mapping[str, Any], recording: Recording, aliases: Mapping[str, str] | None = None
) -> None:
    """Check that a recording is of the same data and flags as this side.

    Args:
        settings: of this side.
        recording: of the other side, maybe by an earlier release.
        aliases: names that settings had in earlier releases, each with the name of today.

    Raises:
        ConfigurationError: a setting differs; the error names it, with both values.
    """
    here = json.loads(json.dumps(settings))  # where a tuple is a list
    there = {(aliases or {}).get(name, name): value for name, value in recording.settings.items()}
    for name in [*here, *there]:
        own, other = here.get(name), there.get(name)
        if own != other:
            raise ConfigurationError(
                f"{recording.folder}: {name} is {_shorten(other)} there and {_shorten(own)} here",
                path=recording.folder,
                field=name,
                remedy=f"compare with a recording of the same {name}",
            )


def compare_step(
    own: Sequence[StepTensor], recording: Recording, step: int, tolerances: Tolerances
) -> list[Difference]:
    """Compare the tensors of a step with the recorded ones.

    Raises:
        ConfigurationError: a tensor is on one side only, or has another shape on the other.
        DataError: the recording is damaged.
    """
    recorded = {tensor.key: tensor for tensor in recording.list_step(step)}
    for one in own:
        there = recorded.pop(one.metadata.key, None)
        if there is None or (there.shape, there.layer) != (one.metadata.shape, one.metadata.layer):
            shape = "and is missing there" if there is None else f"and {list(there.shape)}, layer {there.layer!r} there"
            raise ConfigurationError(
                f"{recording.folder}: {one.metadata.describe()}: has shape {list(one.metadata.shape)} here, {shape}",
                path=recording.folder,
                field=one.metadata.key,
                remedy="record it again",
            )
    if recorded:
        unknown = next(iter(recorded.values()))
        raise ConfigurationError(
            f"{recording.folder}: {unknown.describe()}: is missing here",
            path=recording.folder,
            field=unknown.key,
            remedy="record it again",
        )
    return [_compare(one.metadata, one.values, recording.read(one.metadata), tolerances) for one in own]


def find_first(differences: Sequence[Difference]) -> int | None:
    """Find the index of the first difference above its tolerance; None if all are within."""
    return next((place for place, one in enumerate(differences) if one.is_beyond), None)


def _compare(tensor: TensorMetadata, own: Array, other: Array, tolerances: Tolerances) -> Difference:
    apart = largest = own_squares = other_squares = squares = 0.0
    own, other = own.reshape(-1), other.reshape(-1)
    for start in range(0, own.size, _BLOCK):
        a, b = (side[start : start + _BLOCK].astype(np.float64) for side in (own, other))
        with np.errstate(invalid="ignore", over="ignore"):
            # Not max(), which may lose a NaN.
            apart = float(np.maximum(apart, np.abs(a - b).max()))
            largest = float(np.maximum(largest, np.maximum(np.abs(a), np.abs(b)).max()))
            own_squares, other_squares = own_squares + float(a @ a), other_squares + float(b @ b)
            squares += float((a - b) @ (a - b))
    norm = math.sqrt(max(own_squares, other_squares))
    absolute, relative = tolerances[tensor.part]
    bound = absolute + relative * largest
    return Difference(tensor, apart, math.sqrt(squares) / norm if norm else 0.0, bound)


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# Weights are float32 in every precision, and both sides begin with the same ones.
START = 1e-6
START_ABSOLUTE = 1e-8
ABSOLUTE = 1e-6


# Of outputs of a layer or a loss on equal inputs, and of gradients and updates, which depend on all layers. Measured on
# SSD-ResNet34 and ResNet-50, bfloat16 against float32: .007 and .15.
_FP32 = (1e-4, 1e-3)
_BF16 = (0.05, 0.3)
_BACKWARD: tuple[Part, ...] = ("gradient", "update")


def choose_tolerances(precisions: Collection[str], rtol: float | None = None, atol: float | None = None) -> Tolerances:
    """Choose the tolerances of each part of a step, absolute and relative, by the precisions of both sides.

    Args:
        precisions: of both sides, ``"fp32"``, ``"bf16"`` and so on; more may follow after a space.
        rtol: replaces the relative tolerance of all tensors.
        atol: replaces the absolute tolerance of all tensors.
    """
    exact = {precision.partition(" ")[0] for precision in precisions} == {"fp32"}
    forward, backward = _FP32 if exact else _BF16
    parts: tuple[Part, ...] = get_args(Part)
    defaults = {part: (ABSOLUTE, backward if part in _BACKWARD else forward) for part in parts}
    defaults["weight"] = (START_ABSOLUTE, START)
    return {
        part: (absolute if atol is None else atol, relative if rtol is None else rtol)
        for part, (absolute, relative) in defaults.items()
    }
