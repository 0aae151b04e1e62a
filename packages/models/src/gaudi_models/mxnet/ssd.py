"""Build SSD300 with a ResNet backbone in Gluon; names of weights and rows are those of `gaudi_models.ssd`.

Sources: see `gaudi_models.ssd` and `gaudi_models.architectures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from mxnet.gluon import HybridBlock, nn

from gaudi_models.architectures import (
    SSD_EXTRA_LEVELS,
    SSD_STAGE_STRIDES,
    STAGE_BLOCKS,
    STAGE_FILTERS,
    STEM_FILTERS,
    Unit,
    list_units,
)
from gaudi_models.mxnet.layers import COMPUTE_DTYPES, BatchNorm, Convolution, Layout, Precision, ReduceStatistics, cast
from gaudi_models.padding import SSD_PADDINGS, Padding, PoolPadding
from gaudi_ops import SSD300, DefaultBoxSpec
from gaudi_ops.errors import require_choice

Ends = Literal["none", "both", "end"]


@dataclass(frozen=True)
class _LayerMaker:
    """Make layers with the options that all layers of a network share."""

    layout: Layout
    dtype: Any
    reduce_statistics: ReduceStatistics | None

    def convolve(self, unit: Unit, channels: int, name: str, **options: Any) -> Convolution:
        return Convolution(
            unit.filters,
            unit.kernel,
            unit.stride,
            channels=channels,
            layout=self.layout,
            dtype=self.dtype,
            prefix=f"{name}_",
            **options,
        )

    def normalize(self, channels: int, name: str, gamma: str = "ones") -> BatchNorm:
        return BatchNorm(
            channels,
            layout=self.layout,
            dtype=self.dtype,
            prefix=f"{name}_",
            gamma=gamma,
            reduce_statistics=self.reduce_statistics,
        )


class ResidualBlock(HybridBlock):
    """A block of a ResNet: the units of its main path, and a shortcut where the shape changes."""

    def __init__(self, make: _LayerMaker, units: Sequence[Unit], channels: int, name: str) -> None:
        super().__init__(prefix=f"{name}_")
        self.main, self.shortcut = nn.HybridSequential(prefix=""), nn.HybridSequential(prefix="")
        stride, filters = max(unit.stride for unit in units), units[-1].filters
        if stride > 1 or channels != filters:
            self.shortcut.add(make.convolve(Unit(filters, 1, stride), channels, f"{name}_shortcut"))
            self.shortcut.add(make.normalize(filters, f"{name}_shortcut_bn"))
        for number, unit in enumerate(units, 1):
            is_last = number == len(units)
            self.main.add(make.convolve(unit, channels, f"{name}_conv{number}"))
            # Each block starts as the identity.
            self.main.add(make.normalize(unit.filters, f"{name}_bn{number}", "zeros" if is_last else "ones"))
            if not is_last:
                self.main.add(nn.Activation("relu"))
            channels = unit.filters

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803 - Gluon's name
        """Return features [batch, filters, height / stride, width / stride], or the same in NHWC."""
        return F.relu(self.main(x) + self.shortcut(x))


class ExtraLevel(HybridBlock):
    """A level after the backbone: 1x1 and 3x3 convolutions, both with bias and ReLU.

    Args:
        make: makes its layers.
        widths: channels of the input, between the convolutions, and of the output.
        stride: of the 3x3 convolution.
        pad: sides of the 3x3 convolution's input that get zeros; TensorFlow's SAME pads the end alone where the stride
            is 2 and the size is even.
        name: prefix of the names of its layers.
    """

    def __init__(self, make: _LayerMaker, widths: tuple[int, int, int], stride: int, pad: Ends, name: str) -> None:
        super().__init__(prefix=f"{name}_")
        self._drops_first = pad == "end"
        channels, narrow, wide = widths
        # With two zeros on each side, the second output and those after it are what one zero at the end gives.
        pads = {"none": 0, "both": 1, "end": 2}[pad]
        self.narrow = make.convolve(Unit(narrow, 1), channels, f"{name}_conv1", use_bias=True)
        self.wide = make.convolve(Unit(wide, 3, stride), narrow, f"{name}_conv2", use_bias=True, pad=pads)
        self._axes = [make.layout.index(side) for side in "HW"]

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803 - Gluon's name
        """Return the features of the level."""
        x = self.wide(F.relu(self.narrow(x)))
        if self._drops_first:
            for axis in self._axes:
                x = F.slice_axis(x, axis=axis, begin=1, end=None)
        return F.relu(x)


class SSD(HybridBlock):
    """The detector, which `build_ssd` builds.

    Attributes:
        padding: padding of all its layers, see `gaudi_models.padding`.
        layout: ``"NCHW"`` or ``"NHWC"``, of images and features.
    """

    def __init__(
        self, make: _LayerMaker, num_classes: int, depth: int, spec: DefaultBoxSpec, padding: PoolPadding
    ) -> None:
        super().__init__(prefix="")
        self.padding: Padding = SSD_PADDINGS[padding]
        self.layout, self._dtype, self._num_classes = make.layout, make.dtype, num_classes
        self.levels = nn.HybridSequential(prefix="")
        backbone, channels = _build_backbone(make, depth, padding)
        self.levels.add(backbone)
        self.class_heads, self.box_heads = nn.HybridSequential(prefix=""), nn.HybridSequential(prefix="")
        for number, boxes in enumerate(spec.boxes_per_cell, 1):
            if number > 1:
                narrow, wide, stride, is_padded = SSD_EXTRA_LEVELS[number - 2]
                is_even = spec.feature_sizes[number - 2] % 2 == 0
                pad: Ends = "none" if not is_padded else "end" if padding == "same" and is_even else "both"
                self.levels.add(ExtraLevel(make, (channels, narrow, wide), stride, pad, f"extra{number - 1}"))
                channels = wide
            for heads, outputs, kind in ((self.class_heads, num_classes, "class"), (self.box_heads, 4, "box")):
                heads.add(make.convolve(Unit(boxes * outputs, 3), channels, f"{kind}_head{number}", use_bias=True))

    def hybrid_forward(self, F: Any, images: Any) -> tuple[Any, Any]:  # noqa: N803 - Gluon's name
        """Return raw logits and offsets, see `build_ssd`."""
        x, logits, offsets = cast(F, images, self._dtype), [], []
        for level, class_head, box_head in zip(self.levels, self.class_heads, self.box_heads, strict=True):
            x = level(x)
            logits.append(self._list_rows(F, class_head(x), self._num_classes))
            offsets.append(self._list_rows(F, box_head(x), 4))
        return F.concat(*logits, dim=1), F.concat(*offsets, dim=1)

    def _list_rows(self, F: Any, x: Any, channels: int) -> Any:  # noqa: N803 - Gluon's name
        """Return one row for each default box, float32 [batch, boxes, channels]."""
        x = cast(F, x, "float32", self._dtype)  # first: MXNet's transposition of bfloat16 crashes
        if self.layout == "NCHW":
            x = F.transpose(x, axes=(0, 2, 3, 1))
        return F.reshape(x, shape=(0, -1, channels))


def build_ssd(
    num_classes: int,
    *,
    depth: int = 34,
    spec: DefaultBoxSpec = SSD300,
    pool_padding: PoolPadding = "symmetric",
    layout: Layout = "NCHW",
    precision: Precision = "fp32",
    reduce_statistics: ReduceStatistics | None = None,
) -> SSD:
    """Build the detector.

    Initialise it and `assign_weights`, then hybridize it for speed.

    Args:
        num_classes: number of classes including the background, 81 for COCO.
        depth: of the ResNet backbone: 18 or 34 with basic blocks; 50, 101 or 152 with bottlenecks.
        spec: default boxes; the network has the six levels of ``SSD300``.
        pool_padding: ``"symmetric"`` as torchvision and MXNet, ``"same"`` as TensorFlow.
        layout: of images and features. MXNet computes NHWC on GPUs only.
        precision: of the convolutions; parameters are float32. MXNet computes fp16 on GPUs only.
        reduce_statistics: returns sums over the ranks whose batch norms share statistics, see
            `gaudi_models.mxnet.layers.ReduceStatistics`; each rank has its own statistics when None.

    Returns:
        A HybridBlock from normalised float32 images [batch, 3, 300, 300] (or [batch, 300, 300, 3]) to raw float32
        ``(logits, offsets)``: [batch, 8732, num_classes] and [batch, 8732, 4] (dy, dx, dh, dw), rows in the order of
        `gaudi_ops.default_boxes`.

    Raises:
        ValueError: an argument is outside its choices, or there are fewer than 2 classes.
    """
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; it counts the background, so use at least 2")
    require_choice("depth", depth, STAGE_BLOCKS)
    require_choice("pool_padding", pool_padding, SSD_PADDINGS)
    require_choice("layout", layout, get_args(Layout))
    require_choice("precision", precision, COMPUTE_DTYPES)
    make = _LayerMaker(layout, COMPUTE_DTYPES[precision], reduce_statistics)
    return SSD(make, num_classes, depth, spec, pool_padding)


def _build_backbone(make: _LayerMaker, depth: int, padding: PoolPadding) -> tuple[nn.HybridSequential, int]:
    """Build the ResNet up to its third stage; return it and its number of output channels."""
    backbone = nn.HybridSequential(prefix="")
    backbone.add(make.convolve(Unit(STEM_FILTERS, 7, 2), 3, "conv1"))
    backbone.add(make.normalize(STEM_FILTERS, "conv1_bn"))
    backbone.add(nn.Activation("relu"))
    # Without padding but with the last window cut off at the edge it is TensorFlow's SAME, for sizes that are even.
    is_same = padding == "same"
    backbone.add(nn.MaxPool2D(3, 2, 0 if is_same else 1, layout=make.layout, ceil_mode=is_same))
    channels = STEM_FILTERS
    for stage, stage_stride in enumerate(SSD_STAGE_STRIDES):
        for block in range(STAGE_BLOCKS[depth][stage]):
            units = list_units(depth, STAGE_FILTERS[stage], stage_stride if block == 0 else 1)
            backbone.add(ResidualBlock(make, units, channels, f"stage{stage + 1}_block{block + 1}"))
            channels = units[-1].filters
    return backbone, channels
