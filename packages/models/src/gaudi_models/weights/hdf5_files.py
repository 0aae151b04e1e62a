"""Keras' HDF5 files: arrays and their names, and nothing else of what HDF5 can hold."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_models.errors import UnsafeWeightsError
from gaudi_models.weights.contents import Array, RawWeights

HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_LAYERS = "model_weights"  # in a file that holds a whole model
_STATE = "optimizer_weights"


def read_hdf5(path: Path) -> RawWeights:
    """Read the weights of a file that Keras wrote; a model's configuration in it is not looked at.

    A tensor is named by its layer and its last name: ``conv1_conv/kernel``.

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
    try:
        with h5py.File(path, "r") as file:
            for place, dataset in _walk(file, h5py):
                layer, *_, last = place[place[0] == _LAYERS :] * 2
                name = f"{layer}/{last.removesuffix(':0')}"
                if place[0] == _STATE:
                    skipped["/".join(place)] = "state of the training"
                elif "vars" in place:
                    raise ValueError("it is of Keras' format .weights.h5, which names no layers; save it as .h5")
                elif name in tensors:
                    raise ValueError(f"it has two tensors {name}")
                else:
                    tensors[name] = _read(dataset, name)
    except (OSError, RuntimeError, KeyError) as error:  # what h5py raises for bytes that are not as they should be
        raise ValueError(" ".join(str(error).split())) from None
    return RawWeights("HDF5", {name: functools.partial(np.asarray, array) for name, array in tensors.items()}, skipped)


def _walk(group: Any, h5py: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All arrays with the names on the way to them. Links are not followed: they may lead out of the file."""
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise UnsafeWeightsError(f"{'/'.join((*place, name))} in it is a link")
        member = group[name]
        if len(place) > 8:
            raise ValueError("its groups are too deep")
        if isinstance(member, h5py.Group):
            yield from _walk(member, h5py, (*place, name))
        elif isinstance(member, h5py.Dataset):
            yield (*place, name), member


def _read(dataset: Any, name: str) -> Array:
    if dataset.external or dataset.is_virtual:
        raise UnsafeWeightsError(f"tensor {name} in it is kept in other files")
    if dataset.dtype.kind not in "fiu":
        raise ValueError(f"tensor {name} is of {dataset.dtype}, which are no numbers")
    # Keras never compresses, and what is not compressed cannot swell when it is read.
    if dataset.id.get_storage_size() < dataset.nbytes:
        raise ValueError(f"tensor {name} needs {dataset.nbytes} bytes and has {dataset.id.get_storage_size()}")
    return np.asarray(dataset[()])
