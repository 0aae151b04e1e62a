"""Conventions of padding in the strided layers of a ResNet.

Programs differ in this, and weights that are used with another convention load, run, and are quietly worse. So the
convention is an argument of every network, is kept with its weights, and is checked when weights are assigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gaudi_ops.errors import require_choice

Sides = Literal["same", "symmetric"]
PoolPadding = Sides
Padding = Literal["same", "symmetric", "symmetric_stem", "same_pool"]


# How each kind of strided layer pads. `stem` is the 7x7 convolution; `convolution` the 3x3 convolutions with stride 2
# of the blocks; `pool` the pooling after the stem, and the 3x3 convolutions with stride 2 of the levels that a detector
# adds. "same" is TensorFlow's SAME, which at stride 2 pads an even size after its end only; "symmetric" pads as much
# before as after, as PyTorch and MXNet do.
PADDING_RULES: Mapping[Padding, Mapping[str, Sides]] = {
    # the original ResNeXt
    "same": {"stem": "same", "convolution": "same", "pool": "same"},
    # torchvision, MXNet, keras.applications
    "symmetric": {"stem": "symmetric", "convolution": "symmetric", "pool": "symmetric"},
    # the original ResNet-50
    "symmetric_stem": {"stem": "symmetric", "convolution": "same", "pool": "same"},
    # the original SSD
    "same_pool": {"stem": "symmetric", "convolution": "symmetric", "pool": "same"},
}

# Of a detector, by how the pooling pads; its backbone's convolutions pad on both sides in all programs.
SSD_PADDINGS: Mapping[PoolPadding, Padding] = {"same": "same_pool", "symmetric": "symmetric"}


def find_rule(padding: Padding) -> Mapping[str, Sides]:
    """Return how each kind of strided layer pads by a convention.

    Raises:
        ValueError: the name is unknown.
    """
    require_choice("padding", padding, PADDING_RULES)
    return PADDING_RULES[padding]
