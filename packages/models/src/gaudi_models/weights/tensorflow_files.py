"""TensorFlow's checkpoints and Keras' HDF5 files. Only the checkpoints need TensorFlow to be read."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_models.errors import UnsafeWeightsError, WeightsError
from gaudi_models.weights.contents import Array, RawWeights, hold_arrays
from gaudi_ops.files import read_text

_PART = re.compile(r"(.+)\.(index|meta|data-\d{5}-of-\d{5})")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_NEWEST = re.compile(r'^model_checkpoint_path:\s*"([^"]+)"', re.MULTILINE)


def find_checkpoint(path: Path) -> Path | None:
    """Find the prefix of a checkpoint from that prefix, one of its files or its folder; None if it is none of these.

    Raises:
        WeightsError: a folder has several checkpoints and no file that names the newest.
    """
    if not path.is_dir():
        match = _PART.fullmatch(path.name)
        places = [path, path.with_name(match[1])] if match else [path]
        return next((place for place in places if place.with_name(f"{place.name}.index").is_file()), None)
    prefixes = sorted(file.with_name(file.name.removesuffix(".index")) for file in path.glob("*.index"))
    if (path / "checkpoint").is_file():
        # Often an absolute path of another machine, so only the name counts, and it has to be in this folder.
        newest = _NEWEST.search(read_text(path / "checkpoint", errors="replace"))
        named = [prefix for prefix in prefixes if newest and prefix.name == Path(newest[1]).name]
        prefixes = named or prefixes
    if len(prefixes) > 1:
        names = ", ".join(prefix.name for prefix in prefixes[:3])
        raise WeightsError(
            f"has {len(prefixes)} TensorFlow checkpoints ({names})", path=path, remedy="name one of them"
        )
    return prefixes[0] if prefixes else None


def read_tensorflow_checkpoint(prefix: Path) -> RawWeights:
    """Read a checkpoint; each tensor is read when its function is called.

    Raises:
        WeightsError: it is damaged.
        ImportError: there is no TensorFlow; the message names the extra.
    """
    from gaudi_ops.tf import keras_api  # noqa: F401 - says which extra is missing

    import tensorflow as tf  # isort: skip

    # What TensorFlow raises for a short file is an IndexError in some versions, and an OpError in others.
    damage = (tf.errors.OpError, ValueError, RuntimeError, IndexError)
    try:
        reader = tf.train.load_checkpoint(str(prefix))
    except damage as error:
        raise _damaged(prefix, error) from None

    def read(name: str) -> Array:
        try:
            return np.asarray(reader.get_tensor(name))
        except damage as error:
            raise _damaged(prefix, error) from None

    keys = sorted(reader.get_variable_to_shape_map())
    names = {key: key for key in keys}
    if _OBJECT_GRAPH in keys:
        names = _find_variable_names(read(_OBJECT_GRAPH).item())
    return RawWeights("TensorFlow checkpoint", {name: functools.partial(read, key) for key, name in names.items()})


def _find_variable_names(graph: bytes) -> dict[str, str]:
    """Map the keys of a checkpoint of objects to names of variables, which it has beside the path to each object.

    Raises:
        ValueError: it is damaged.
    """
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

    try:
        nodes = TrackableObjectGraph.FromString(graph).nodes
    except DecodeError:
        raise ValueError("its graph of objects cannot be read") from None
    variables = [each for node in nodes for each in node.attributes if each.name == "VARIABLE_VALUE"]
    names: dict[str, str] = {}
    for variable in variables:
        # Two variables may have one name; then each is known by its key.
        taken = variable.full_name in names.values() or not variable.full_name
        names[variable.checkpoint_key] = variable.checkpoint_key if taken else variable.full_name
    return names


def _damaged(prefix: Path, error: Exception) -> WeightsError:
    reason = " ".join(str(error).split())
    return WeightsError(f"is a damaged TensorFlow checkpoint: {reason}", path=prefix, remedy="get it again")


HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_LAYERS = "model_weights"  # in a file that holds a whole model
_STATE = "optimizer_weights"


def read_hdf5(path: Path) -> RawWeights:
    """Read the weights of a file that Keras wrote; a model's configuration in it is not looked at.

    A tensor is named by its innermost layer and its last name: ``conv1_conv/kernel``.

    Raises:
        UnsafeWeightsError: a part of it is in other files.
        ValueError: it is damaged, or names no layers.
        ImportError: there is no h5py; the message names the extra.
    """
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ImportError(f"{path}: needs h5py; pip install 'gaudi-models[hdf5]'") from error
    tensors: dict[str, Array] = {}
    skipped: dict[str, str] = {}
    left = path.stat().st_size
    try:
        with h5py.File(path, "r") as file:
            for place, dataset in _walk(file, h5py):
                outer, *_, inner, last = place[place[0] == _LAYERS :] * 3
                name = f"{inner if len(dataset.parent.parent) > 1 else outer}/{last.removesuffix(':0')}"
                if place[0] == _STATE:
                    skipped["/".join(place)] = "training state"
                elif "vars" in place:
                    raise ValueError("it is of Keras' format .weights.h5, which names no layers; save it as .h5")
                elif name in tensors:
                    raise ValueError(f"it has two tensors {name}")
                else:
                    tensors[name] = _read(dataset, name)
                    left -= dataset.nbytes
                    if left < 0:
                        raise ValueError("its names share their tensors")
    except (OSError, RuntimeError, KeyError) as error:  # h5py raises these for damaged bytes
        raise ValueError(" ".join(str(error).split())) from None
    return RawWeights("HDF5", hold_arrays(tensors), skipped)


def _walk(group: Any, h5py: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield all arrays with the names on the way to them. Links are refused: they may lead out of the file."""
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise UnsafeWeightsError("is a link", record="/".join((*place, name)))
        member = group[name]
        if len(place) > 8:
            raise ValueError("its groups are too deep")
        if isinstance(member, h5py.Group):
            yield from _walk(member, h5py, (*place, name))
        elif isinstance(member, h5py.Dataset):
            yield (*place, name), member


def _read(dataset: Any, name: str) -> Array:
    if dataset.external or dataset.is_virtual:
        raise UnsafeWeightsError("is kept in other files", record=f"tensor {name}")
    if dataset.dtype.kind not in "fiu":
        raise ValueError(f"tensor {name} is of {dataset.dtype}, which are no numbers")
    # Keras never compresses, and uncompressed data cannot swell when it is read.
    if dataset.id.get_storage_size() < dataset.nbytes:
        raise ValueError(f"tensor {name} needs {dataset.nbytes} bytes and has {dataset.id.get_storage_size()}")
    return np.asarray(dataset[()])
