"""Weights of other programs as the format that all of ours read, without running anything that a file asks for."""

from __future__ import annotations

import os
from pathlib import Path

from gaudi_models.errors import WeightsError
from gaudi_models.padding import PADDING_RULES, Padding
from gaudi_models.weights.contents import WeightsFile, WeightsMetadata
from gaudi_models.weights.reading import read_weights
from gaudi_models.weights.writing import write_tensors


def convert_weights(
    source: str | os.PathLike[str], target: str | os.PathLike[str], *, padding: Padding | None = None
) -> WeightsFile:
    """Read any file of weights and write it as safetensors, by our names, for TensorFlow and MXNet.

    Args:
        source: as `read_weights` takes it.
        target: the file to write; one that is there is replaced.
        padding: what the network was trained with, where the file does not tell.

    Returns:
        What was read.

    Raises:
        WeightsError: the file is damaged or of no known format, its padding is not known, or another one was given.
        MissingWeightsError: there is no such file.
        UnsafeWeightsError: it asks for more than numbers; nothing that it asks for was done.
        OSError: the target cannot be written.
    """
    if Path(source).resolve() == Path(target).resolve():
        raise WeightsError(f"{target}: would replace what it is made of; name another file")
    weights = read_weights(source)
    if weights.padding is None and padding is None:
        raise WeightsError(f"{source}: does not tell its network's padding; give it, {', '.join(PADDING_RULES)}")
    if padding not in (None, weights.padding) and weights.padding is not None:
        raise WeightsError(f"{source}: was trained with padding {weights.padding!r}, not {padding!r}; leave that out")
    known = weights.padding or padding
    metadata = weights.metadata or WeightsMetadata(known or "same")
    write_tensors(weights.tensors, target, metadata=metadata)
    return weights
