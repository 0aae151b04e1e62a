"""What a file of weights holds, before and after its names are translated to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from gaudi_models.padding import Padding, PoolPadding, find_rule

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class WeightsMetadata:
    """What has to be known about a model to use its weights.

    Attributes:
        padding: see `gaudi_models.padding`.
        classes: without the background, in the order of their labels; each a mapping of JSON values with at least a
            name.
        image_size: height and width in pixels that the model was trained at; 0 if that is not known.
        model: name of the network; empty if that is not known.
    """

    padding: Padding
    classes: Sequence[Mapping[str, Any]] = ()
    image_size: int = 0
    model: str = ""


@dataclass(frozen=True)
class RawWeights:
    """Tensors as a file names them.

    Attributes:
        kind: what sort of file it is, for a person.
        tensors: functions that each read one tensor, by the name in the file.
        skipped: what in the file is no tensor, with the reason, by name.
        metadata: what one of our own files says about its model.
    """

    kind: str
    tensors: Mapping[str, Callable[[], Array]]
    skipped: Mapping[str, str] = field(default_factory=dict)
    metadata: WeightsMetadata | None = None


@dataclass(frozen=True)
class WeightsFile:
    """Weights by our names.

    Attributes:
        source: file, kind of file and whose names it had, for a person.
        tensors: float32, by the names of Keras variables without their ``:0``, convolutions as [height, width,
            channels in, channels out].
        padding: what the weights were trained with; build the model with it. None if that is not known.
        skipped: why what is not among the tensors was left out, by the name in the file.
        metadata: what one of our own files says about its model; None for the files of other programs.
    """

    source: str
    tensors: Mapping[str, Array]
    padding: Padding | None
    skipped: Mapping[str, str]
    metadata: WeightsMetadata | None = None

    @property
    def pool_padding(self) -> PoolPadding:
        """How the pooling padded, which is all of it that a detector leaves open; if not known, as TensorFlow."""
        return find_rule(self.padding).pool if self.padding else "same"
