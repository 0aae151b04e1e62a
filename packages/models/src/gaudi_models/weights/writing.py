"""Weights of a model as safetensors, which hold numbers only and are read by many programs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from gaudi_models.weights.contents import Array, WeightsMetadata

FORMAT = "gaudi-models weights"
VERSION = 1


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
        OSError: it cannot be written; what was there before stays.
    """
    target = Path(path)
    draft = target.with_name(f"{target.name}.tmp")
    notes = {
        "format": FORMAT,
        "version": str(VERSION),
        "padding": metadata.padding,
        "classes": json.dumps([dict(each) for each in metadata.classes]),
        "image_size": str(metadata.image_size),
        "model": metadata.model,
    }
    # In memory, for the library's own writing goes through a file of its own, which only its owner may read.
    # In order, for of an array that is a view in another one it writes the bytes as they lie.
    content = save({name: np.asarray(values, order="C") for name, values in tensors.items()}, notes)
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except OSError as error:  # of a full disk it does not name the file
        raise OSError(error.errno, error.strerror, str(target)) from None
    finally:
        draft.unlink(missing_ok=True)
