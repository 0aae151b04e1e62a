"""Conventions of padding in the strided layers of a ResNet.

Programs differ in this, and weights that are used with another convention load, run, and are quietly worse. So the
convention is an argument of every network, is kept with its weights, and is checked when weights are assigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Sides = Literal["same", "symmetric"]
PoolPadding = Sides
Padding = Literal["same", "symmetric", "symmetric_stem", "same_pool"]


@dataclass(frozen=True)
class PaddingRule:
    """The padding of each kind of strided layer.

    ``"same"`` is TensorFlow's SAME, which at stride 2 pads an even size after its end only; ``"symmetric"`` pads as
    much before as after, as PyTorch and MXNet do.

    Attributes:
        stem: the 7x7 convolution.
        convolution: the 3x3 convolutions with stride 2 of the blocks.
        pool: the pooling after the stem, and the 3x3 convolutions with stride 2 of the levels that a detector adds.
    """

    stem: Sides
    convolution: Sides
    pool: Sides


PADDING_RULES: Mapping[Padding, PaddingRule] = {
    "same": PaddingRule("same", "same", "same"),  # the original ResNeXt
    "symmetric": PaddingRule("symmetric", "symmetric", "symmetric"),  # torchvision, MXNet, keras.applications
    "symmetric_stem": PaddingRule("symmetric", "same", "same"),  # the original ResNet-50
    "same_pool": PaddingRule("symmetric", "symmetric", "same"),  # the original SSD
}

# Of a detector, by how the pooling pads; its backbone's convolutions pad on both sides in all programs.
SSD_PADDINGS: Mapping[PoolPadding, Padding] = {"same": "same_pool", "symmetric": "symmetric"}


def find_rule(padding: Padding) -> PaddingRule:
    """Return the rule of a convention.

    Raises:
        ValueError: the name is unknown.
    """
    if padding not in PADDING_RULES:
        raise ValueError(f"padding is {padding!r}; use one of {', '.join(PADDING_RULES)}")
    return PADDING_RULES[padding]
