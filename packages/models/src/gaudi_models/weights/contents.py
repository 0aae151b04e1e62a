"""The contents of a file of weights, before and after its names are translated, and writing them as safetensors."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from gaudi_models.padding import Padding, PoolPadding, find_rule
from gaudi_ops.files import write_file

Array = npt.NDArray[Any]
FORMAT = "gaudi-models weights"
_CLASS_HEAD = re.compile(r"(logits|class_head\d+)/\w+")
VERSION = 1


@dataclass(frozen=True)
class WeightsMetadata:
    """The properties of a model that its weights need to be used.

    Attributes:
        padding: see `gaudi_models.padding`.
        classes: without the background, in the order of their labels; each a mapping of JSON values with at least a
            name.
        image_size: height and width in pixels that the model was trained at; 0 if that is not known.
        model: name of the network; empty if that is not known.
        box_voting: whether boxes of its detections vote, see `gaudi_ops.non_max_suppression`.
    """

    padding: Padding
    classes: Sequence[Mapping[str, Any]] = ()
    image_size: int = 0
    model: str = ""
    box_voting: bool = False


@dataclass(frozen=True)
class RawWeights:
    """Tensors as a file names them.

    Attributes:
        kind: of file, for a person.
        tensors: functions that each read one tensor, by the name in the file.
        skipped: reasons by name, for entries that are no tensors.
        metadata: of the model, from files of our own.
    """

    kind: str
    tensors: Mapping[str, Callable[[], Array]]
    skipped: Mapping[str, str] = field(default_factory=dict)
    metadata: WeightsMetadata | None = None


def hold_arrays(arrays: Mapping[str, Array]) -> dict[str, Callable[[], Array]]:
    """Return the tensors of `RawWeights` for arrays that were read already."""
    return {name: functools.partial(np.asarray, array) for name, array in arrays.items()}


@dataclass(frozen=True)
class WeightsFile:
    """Weights by our names.

    Attributes:
        source: file, kind of file and whose names it had, for a person.
        tensors: float32, by the names of Keras variables without their ``:0``, convolutions as [height, width,
            channels in, channels out].
        padding: of the network that the weights are from; build the model with it. None if it is not known.
        skipped: reasons by the name in the file, for tensors that were left out.
        metadata: of the model, from files of our own; None for files of other programs.
        path: the file or folder; empty if there is none.
    """

    source: str
    tensors: Mapping[str, Array]
    padding: Padding | None
    skipped: Mapping[str, str]
    metadata: WeightsMetadata | None = None
    path: str = ""

    @property
    def pool_padding(self) -> PoolPadding:
        """Padding of the pooling, the one choice that a detector leaves open; TensorFlow's if it is not known."""
        return find_rule(self.padding)["pool"] if self.padding else "same"

    def for_classes(self, names: Sequence[str]) -> WeightsFile:
        """Return the weights for a model of these classes: without the heads where the file names other ones."""
        known = [str(each["name"]) for each in self.metadata.classes] if self.metadata else []
        if not known or known == list(names):
            return self
        heads = dict.fromkeys(filter(_CLASS_HEAD.fullmatch, self.tensors), "of other classes")
        tensors = {name: values for name, values in self.tensors.items() if name not in heads}
        return replace(self, tensors=tensors, skipped={**self.skipped, **heads})


def write_weights(model: Any, path: str | os.PathLike[str], *, metadata: WeightsMetadata) -> None:
    """Write all variables of a Keras model, as `write_tensors` does; anything with ``variables`` will do."""
    tensors = {variable.name.removesuffix(":0"): np.array(variable.numpy()) for variable in model.variables}
    write_tensors(tensors, path, metadata=metadata)


def write_tensors(tensors: Mapping[str, Array], path: str | os.PathLike[str], *, metadata: WeightsMetadata) -> None:
    """Write tensors by our names; the file is there as a whole or not at all.

    Args:
        tensors: convolutions as [height, width, channels in, channels out].
        path: of the file; one that is there is replaced. Its folder has to exist.
        metadata: noted in the file, for whoever reads it.

    Raises:
        OSError: it cannot be written; an earlier file stays.
    """
    notes = {
        "format": FORMAT,
        "version": str(VERSION),
        "padding": metadata.padding,
        "classes": json.dumps([dict(each) for each in metadata.classes]),
        "image_size": str(metadata.image_size),
        "model": metadata.model,
        **({"box_voting": "true"} if metadata.box_voting else {}),
    }
    # In memory, for the library's own writing goes through a file of its own, which only its owner may read.
    # In order, for of an array that is a view in another one it writes the bytes as they lie.
    content = save({name: np.asarray(values, order="C") for name, values in tensors.items()}, notes)
    write_file(path, sort_notes(content))


def sort_notes(content: bytes) -> bytes:
    """Sort the notes of a safetensors file by name, which the library writes in another order in each process."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[end:]
