"""The networks and their layers as plain numbers, which need no TensorFlow.

Sources: He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385, table 1;
Xie et al., "Aggregated Residual Transformations for Deep Neural Networks", https://arxiv.org/abs/1611.05431, table 1.
The stride of a bottleneck is in its 3x3 convolution, which is called version 1.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeAlias

from gaudi_models.padding import Padding
from gaudi_ops import SSD300, SSD512, SSD_SPECS, DefaultBoxSpec
from gaudi_ops.errors import require_choice

STAGE_BLOCKS: Mapping[int, tuple[int, ...]] = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
STAGE_FILTERS = (64, 128, 256, 512)
STEM_FILTERS = 64
BOTTLENECK_DEPTH = 50  # and deeper
BOTTLENECK_EXPANSION = 4

# The detector's backbone ends after the third stage. Levels after it: filters of the 1x1, filters of the 3x3, stride of
# the 3x3, and whether the 3x3 pads.
ExtraLevels: TypeAlias = tuple[tuple[int, int, int, bool], ...]
SSD_STAGE_STRIDES = (1, 2, 1)
SSD_EXTRA_LEVELS: ExtraLevels = (
    (256, 512, 2, True),
    (256, 512, 2, True),
    (128, 256, 2, True),
    (128, 256, 1, False),
    (128, 256, 1, False),
)
# Down to a cell of 512 pixels; the published last level has a 4x4 filter, with the same cell.
SSD512_EXTRA_LEVELS: ExtraLevels = (*SSD_EXTRA_LEVELS[:3], *3 * ((128, 256, 2, True),))


@dataclass(frozen=True)
class Architecture:
    """A network by its name.

    Attributes:
        depth: layers with weights.
        cardinality: groups of the 3x3 convolutions; above 1 it is a ResNeXt.
        padding: of the original program.
        width: share of the published filters that each layer has, above 0 and up to 1: the width multiplier of Howard
            et al., https://arxiv.org/abs/1704.04861, section 3.3.
    """

    depth: int
    cardinality: int = 1
    padding: Padding = "symmetric_stem"
    width: float = 1.0


SSD_BACKBONES: Mapping[str, Architecture] = {
    **{f"resnet{depth}": Architecture(depth) for depth in (18, 34, 50)},
    "resnet18_half": Architecture(18, width=1 / 2),
    "resnet18_quarter": Architecture(18, width=1 / 4),
}
"""The backbones of `gaudi_models.build_ssd` by their names; the levels after a narrow one are as narrow."""


@dataclass(frozen=True)
class SSDArchitecture:
    """The network of a detector by its names, as its checkpoints and exports have them.

    Attributes:
        backbone: of `SSD_BACKBONES`.
        image_size: side of the images in pixels, 300 or 512.

    Raises:
        ValueError: one of them does not exist.
    """

    backbone: str = "resnet34"
    image_size: int = SSD300.image_size

    def __post_init__(self) -> None:
        require_choice("backbone", self.backbone, SSD_BACKBONES)
        require_choice("image_size", self.image_size, SSD_SPECS)

    @property
    def name(self) -> str:
        """Return the name of the network, which tells it from a classifier."""
        return f"{_SSD_PREFIX}{self.backbone}"

    @property
    def depth(self) -> int:
        """Return the depth of the backbone."""
        return SSD_BACKBONES[self.backbone].depth

    @property
    def width(self) -> float:
        """Return the share of the published filters that each layer has but the heads."""
        return SSD_BACKBONES[self.backbone].width

    @property
    def spec(self) -> DefaultBoxSpec:
        """Return the default boxes."""
        return SSD_SPECS[self.image_size]

    @classmethod
    def from_name(cls, name: str, image_size: int) -> SSDArchitecture:
        """Read `name` and `image_size`; where a file has none, it is of the first network, ResNet-34 at 300 pixels.

        Raises:
            ValueError: it is no detector of ours.
        """
        if name and not name.startswith(_SSD_PREFIX):
            raise ValueError(
                f"network is {name!r}; a detector's is {_SSD_PREFIX} and one of {', '.join(SSD_BACKBONES)}"
            )
        return cls(name.removeprefix(_SSD_PREFIX) or "resnet34", image_size or SSD300.image_size)


_SSD_PREFIX = "ssd_"


@dataclass(frozen=True)
class Unit:
    """A convolution, with the batch norm that follows it in a backbone."""

    filters: int
    kernel: int
    stride: int = 1
    groups: int = 1

    def count_weights(self, channels: int) -> int:
        """Count the numbers in its kernel, for a number of channels before it."""
        return self.kernel * self.kernel * channels // self.groups * self.filters


RESNETS: Mapping[str, Architecture] = {
    **{f"resnet{depth}": Architecture(depth) for depth in STAGE_BLOCKS},
    **{f"resnext{depth}": Architecture(depth, 32, "same") for depth in (50, 101, 152)},
}
# Names of ours to names in keras.applications.
APPLICATIONS: Mapping[str, str] = {
    f"resnet{depth}{version.lower()}_keras": f"ResNet{depth}{version}"
    for version in ("", "V2")
    for depth in (50, 101, 152)
}
CLASSIFIERS = (*RESNETS, *APPLICATIONS)
"""The names of the classifiers that `gaudi_models.build_classifier` builds."""


_Convolutions: TypeAlias = Sequence[tuple[Unit, int, int]]


def scale_filters(filters: int, width: float) -> int:
    """Return the filters of a layer of a network of some width, see `Architecture`; at least one."""
    return max(1, round(filters * width))


def list_units(depth: int, filters: int, stride: int, cardinality: int = 1) -> tuple[Unit, ...]:
    """List the convolutions of a block on its main path, in their order."""
    if depth < BOTTLENECK_DEPTH:
        return Unit(filters, 3, stride), Unit(filters, 3)
    # A ResNeXt of 32 groups of 4 filters is twice as wide inside as the ResNet.
    width = filters * (2 if cardinality > 1 else 1)
    return Unit(width, 1), Unit(width, 3, stride, cardinality), Unit(filters * BOTTLENECK_EXPANSION, 1)


def list_convolutions(
    architecture: Architecture, image_size: int = 224, stage_strides: Sequence[int] = (1, 2, 2, 2)
) -> Iterator[tuple[Unit, int, int]]:
    """Yield every convolution of a backbone, its number of input channels, and the side of its square output."""
    return chain.from_iterable(_list_blocks(architecture, image_size, stage_strides))


def _list_blocks(
    architecture: Architecture, image_size: int, stage_strides: Sequence[int] = (1, 2, 2, 2)
) -> Iterator[_Convolutions]:
    """Yield the convolutions of the stem, then of each block, as `list_convolutions` does."""
    side, channels = -(-image_size // 2), scale_filters(STEM_FILTERS, architecture.width)
    yield [(Unit(channels, 7, 2), 3, side)]
    side = -(-side // 2)
    stages = zip(STAGE_BLOCKS[architecture.depth], STAGE_FILTERS, stage_strides, strict=False)
    for blocks, filters, stage_stride in stages:
        for block in range(blocks):
            stride = stage_stride if block == 0 else 1
            scaled = scale_filters(filters, architecture.width)
            units = list_units(architecture.depth, scaled, stride, architecture.cardinality)
            out, convolutions = units[-1].filters, []
            if stride > 1 or channels != out:
                convolutions.append((Unit(out, 1, stride), channels, -(-side // stride)))
            for unit in units:
                side = -(-side // unit.stride)
                convolutions.append((unit, channels, side))
                channels = unit.filters
            yield convolutions


class Tensors(NamedTuple):
    """The tensors of a network that ranks exchange, in the order of its layers.

    Attributes:
        trainable: numbers of each, and multiplications of the forward pass of an image by them.
        channels: of each batch norm.
    """

    trainable: tuple[tuple[int, int], ...]
    channels: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """Return the number of trainable parameters."""
        return sum(values for values, _ in self.trainable)


def _list_tensors(backbone: _Convolutions, others: _Convolutions) -> Tensors:
    """List the tensors of convolutions, each with batch norm, and of others, each with a bias."""
    trainable: list[tuple[int, int]] = []
    channels: list[int] = []
    for (unit, before, side), vectors in (*((one, 2) for one in backbone), *((one, 1) for one in others)):
        weights = unit.count_weights(before)
        trainable += ((weights, weights * side**2), *vectors * ((unit.filters, 0),))
        channels += (unit.filters,) * (vectors - 1)
    return Tensors(tuple(trainable), tuple(channels))


def list_classifier_tensors(architecture: Architecture, num_classes: int, image_size: int = 224) -> Tensors:
    """List the tensors of a classifier."""
    convolutions = list(list_convolutions(architecture, image_size))
    return _list_tensors(convolutions, [(Unit(num_classes, 1), convolutions[-1][0].filters, 1)])


def count_state_bytes(every: Tensors, trained: Tensors, *, slots: int = 1, averages: bool = False) -> int:
    """Count the bytes of a training's state: weights, moving statistics, what the optimizer keeps, and averages.

    Args:
        every: the network's tensors.
        trained: those of them that the optimizer updates, each with `slots` tensors of its own.
        slots: 1 for a velocity, 2 for Adam.
        averages: an average of weights and statistics is kept, with a count of 8 bytes.
    """
    values = every.parameters + 2 * sum(every.channels)
    return 4 * ((2 if averages else 1) * values + slots * trained.parameters) + 8 * averages


def count_parameters(architecture: Architecture, num_classes: int) -> int:
    """Count the trainable parameters of a classifier."""
    return list_classifier_tensors(architecture, num_classes).parameters


def measure_classifier(
    architecture: Architecture, num_classes: int, image_size: int, *, recompute: bool = False
) -> tuple[int, int]:
    """Compute the size of a classifier, to estimate disk and memory.

    Args:
        architecture: of the classifier.
        num_classes: of its head.
        image_size: side of the images in pixels.
        recompute: blocks are computed again for their gradients, see `gaudi_models.layers.Network.recompute`.

    Returns:
        the trainable parameters; and the values of the forward pass of one image that the backward pass needs: two for
        each output of a convolution, the output itself and what batch norm or ReLU make of it. With `recompute`, those
        of the largest block, and what each block begins with.
    """
    blocks = list(_list_blocks(architecture, image_size))
    return count_parameters(architecture, num_classes), _count_kept(blocks, recompute=recompute)


def _count_kept(blocks: Sequence[_Convolutions], *, recompute: bool) -> int:
    kept = [sum(2 * unit.filters * side**2 for unit, _, side in block) for block in blocks]
    if not recompute:
        return sum(kept)
    begins = ((channels, unit.stride * side) for (unit, channels, side), *_ in blocks[1:])
    return max(kept) + sum(channels * side**2 for channels, side in begins)


def list_extra_levels(spec: DefaultBoxSpec, width: float = 1.0) -> ExtraLevels:
    """List the levels after the backbone for default boxes: filters of the 1x1 and the 3x3, its stride, if it pads."""
    levels = SSD512_EXTRA_LEVELS if spec.image_size == SSD512.image_size else SSD_EXTRA_LEVELS
    return tuple(
        (scale_filters(narrow, width), scale_filters(wide, width), stride, pads)
        for narrow, wide, stride, pads in levels
    )


def measure_ssd(
    num_classes: int, architecture: SSDArchitecture | None = None, *, recompute: bool = False
) -> tuple[int, int]:
    """Compute the size of a detector, by default of ResNet-34 at 300x300, for some classes besides the background.

    Returns:
        as `measure_classifier`; all that follows the backbone is a block.
    """
    architecture = architecture or SSDArchitecture()
    backbone, others = _list_ssd_convolutions(num_classes, architecture)
    blocks = _list_blocks(SSD_BACKBONES[architecture.backbone], architecture.spec.image_size, SSD_STAGE_STRIDES)
    return _list_tensors(backbone, others).parameters, _count_kept([*blocks, others], recompute=recompute)


def list_ssd_tensors(
    num_classes: int, architecture: SSDArchitecture | None = None, *, is_frozen: bool = False
) -> Tensors:
    """List the tensors of a detector, see `measure_ssd`; without those of the backbone, where that `is_frozen`."""
    backbone, others = _list_ssd_convolutions(num_classes, architecture or SSDArchitecture())
    return _list_tensors([] if is_frozen else backbone, others)


def _list_ssd_convolutions(num_classes: int, architecture: SSDArchitecture) -> tuple[_Convolutions, _Convolutions]:
    """Return the convolutions of a detector's backbone, and the others, as `list_convolutions` does."""
    spec = architecture.spec
    backbone = list(list_convolutions(SSD_BACKBONES[architecture.backbone], spec.image_size, SSD_STAGE_STRIDES))
    others: list[tuple[Unit, int, int]] = []
    last, _, side = backbone[-1]
    channels = last.filters
    levels = [(channels, side)]
    for reduced, filters, stride, pads in list_extra_levels(spec, architecture.width):
        others.append((Unit(reduced, 1), channels, side))
        side, channels = -(-side // stride) if pads else side - 2, filters
        others.append((Unit(filters, 3, stride), reduced, side))
        levels.append((channels, side))
    for values in (num_classes + 1, 4):
        for (channels, side), boxes in zip(levels, spec.boxes_per_cell, strict=True):
            others.append((Unit(boxes * values, 3), channels, side))
    return backbone, others
