"""TensorFlow's checkpoints, found by prefix or folder; the only format whose reading needs TensorFlow."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np

from gaudi_models.errors import WeightsError
from gaudi_models.weights.contents import Array, RawWeights

_PART = re.compile(r"(.+)\.(index|meta|data-\d{5}-of-\d{5})")
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_NEWEST = re.compile(r'^model_checkpoint_path:\s*"([^"]+)"', re.MULTILINE)


def find_checkpoint(path: Path) -> Path | None:
    """The prefix of a checkpoint, from that prefix, one of its files or its folder; None if it is none of these.

    Raises:
        WeightsError: a folder has several checkpoints and no file that names the newest.
    """
    if path.is_dir():
        return _find_in_folder(path)
    match = _PART.fullmatch(path.name)
    for prefix in (path, *([path.with_name(match[1])] if match else [])):
        if prefix.with_name(f"{prefix.name}.index").is_file():
            return prefix
    return None


def _find_in_folder(folder: Path) -> Path | None:
    prefixes = sorted(path.with_name(path.name.removesuffix(".index")) for path in folder.glob("*.index"))
    if (folder / "checkpoint").is_file():
        # Often an absolute path of another machine; what counts is the name, and it has to be in this folder.
        newest = _NEWEST.search((folder / "checkpoint").read_text(encoding="utf-8", errors="replace"))
        named = [prefix for prefix in prefixes if newest and prefix.name == Path(newest[1]).name]
        prefixes = named or prefixes
    if len(prefixes) > 1:
        names = ", ".join(prefix.name for prefix in prefixes[:3])
        raise WeightsError(f"{folder}: has {len(prefixes)} TensorFlow checkpoints ({names}); name one of them")
    return prefixes[0] if prefixes else None


def read_tensorflow_checkpoint(prefix: Path) -> RawWeights:
    """Read a checkpoint; a tensor is read when it is asked for.

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
    """Names of variables by the keys of a checkpoint of objects, which says them beside the path to each object.

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
    return WeightsError(f"{prefix}: is a damaged TensorFlow checkpoint: {reason}; get it again")
