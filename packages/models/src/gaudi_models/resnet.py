"""Residual networks as the backbone of detectors and classifiers: ResNet-18 to 152, and ResNeXt.

Sources: see `gaudi_models.architectures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gaudi_models.architectures import STAGE_BLOCKS, STAGE_FILTERS, STEM_FILTERS, Unit, list_units, scale_filters
from gaudi_models.layers import Convolution2D, make_batch_norm
from gaudi_models.padding import Padding, Sides, find_rule
from gaudi_ops.errors import require_choice
from gaudi_ops.tf.batch_norm import ReduceStatistics
from gaudi_ops.tf.convolution import Implementation
from gaudi_ops.tf.keras_api import keras

BATCH_NORM_MOMENTUM = 0.9
BATCH_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class ResNetBackbone:
    """A ResNet or ResNeXt without its head; calling it on a Keras tensor builds the layers.

    Args:
        depth: 18 or 34, of basic blocks, or 50, 101 or 152, of bottlenecks.
        stage_strides: stride of each stage's first block; its length is the number of stages built.
        padding: where strided layers pad, see `gaudi_models.padding`.
        dtype: Keras precision policy of the layers, such as ``"float32"`` or ``"mixed_bfloat16"``.
        cardinality: groups of a bottleneck's 3x3 convolution; 32 for a ResNeXt, 1 for a ResNet.
        zero_gamma: whether each block starts as the identity, by a last batch norm whose gamma starts at zero
            (Goyal et al., https://arxiv.org/abs/1706.02677, section 5.1).
        momentum: of the batch norms' moving averages.
        implementation: of grouped convolutions, see `gaudi_ops.tf.grouped_conv2d`.
        reduce_statistics: of batch norms over several devices, see `gaudi_ops.tf.synchronized_batch_norm`; None: each
            device by itself. Variables are the same.
        width: see `gaudi_models.architectures.Architecture`.

    Raises:
        ValueError: for a depth, a number of stages, a padding, a cardinality or a width that does not exist.
    """

    depth: int = 34
    stage_strides: Sequence[int] = (1, 2, 2, 2)
    padding: Padding = "same_pool"
    dtype: str = "float32"
    cardinality: int = 1
    zero_gamma: bool = True
    momentum: float = BATCH_NORM_MOMENTUM
    implementation: Implementation = "auto"
    reduce_statistics: ReduceStatistics | None = None
    width: float = 1.0

    def __post_init__(self) -> None:
        require_choice("depth", self.depth, STAGE_BLOCKS)
        if not 1 <= len(self.stage_strides) <= len(STAGE_FILTERS):
            raise ValueError(f"stage_strides has {len(self.stage_strides)} entries; use 1 to {len(STAGE_FILTERS)}")
        if not 0 < self.width <= 1:
            raise ValueError(f"width is {self.width}; use a share of the filters, above 0 and up to 1")
        filters = scale_filters(STAGE_FILTERS[0], self.width)
        grouped = [unit for unit in list_units(self.depth, filters, 1, self.cardinality) if unit.groups > 1]
        if self.cardinality != 1 and not grouped:
            raise ValueError(f"cardinality is {self.cardinality}; basic blocks have no groups, so use 1")
        if any(unit.filters % unit.groups for unit in grouped):
            raise ValueError(f"cardinality is {self.cardinality}; it must divide {grouped[0].filters} filters")
        find_rule(self.padding)

    def __call__(self, images: Any) -> Any:
        """Build features [batch, height / s, width / s, filters] of images [batch, height, width, 3]."""
        rule = find_rule(self.padding)
        x = self._convolve(images, Unit(scale_filters(STEM_FILTERS, self.width), 7, 2), rule["stem"], "conv1")
        x = keras.layers.ReLU(name="conv1_relu", dtype=self.dtype)(self._normalize(x, "conv1_bn"))
        if rule["pool"] == "symmetric":
            # Zeros are no larger than what follows a ReLU, so they stand for the border that PyTorch ignores.
            x = keras.layers.ZeroPadding2D(1, name="pool_pad", dtype=self.dtype)(x)
        padding = "valid" if rule["pool"] == "symmetric" else "same"
        x = keras.layers.MaxPooling2D(3, 2, padding=padding, name="pool", dtype=self.dtype)(x)
        for stage, stride in enumerate(self.stage_strides):
            filters = scale_filters(STAGE_FILTERS[stage], self.width)
            for block in range(STAGE_BLOCKS[self.depth][stage]):
                name = f"stage{stage + 1}_block{block + 1}"
                x = self._block(x, filters, stride if block == 0 else 1, name)
        return x

    def _convolve(self, x: Any, unit: Unit, sides: Sides, name: str) -> Any:
        padding = "same"
        if unit.stride > 1 and unit.kernel > 1 and sides == "symmetric":
            x = keras.layers.ZeroPadding2D(unit.kernel // 2, name=f"{name}_pad", dtype=self.dtype)(x)
            padding = "valid"
        return Convolution2D(
            unit.filters,
            unit.kernel,
            unit.stride,
            padding,
            groups=unit.groups,
            implementation=self.implementation,
            kernel_initializer="he_normal",
            name=name,
            dtype=self.dtype,
        )(x)

    def _normalize(self, x: Any, name: str, gamma: str = "ones") -> Any:
        return make_batch_norm(
            self.reduce_statistics,
            momentum=self.momentum,
            epsilon=BATCH_NORM_EPSILON,
            gamma_initializer=gamma,
            name=name,
            dtype=self.dtype,
        )(x)

    def _block(self, x: Any, filters: int, stride: int, name: str) -> Any:
        units = list_units(self.depth, filters, stride, self.cardinality)
        sides = find_rule(self.padding)["convolution"]
        shortcut = x
        if stride > 1 or x.shape[-1] != units[-1].filters:
            shortcut = self._convolve(x, Unit(units[-1].filters, 1, stride), sides, f"{name}_shortcut")
            shortcut = self._normalize(shortcut, f"{name}_shortcut_bn")
        y = x
        for number, unit in enumerate(units, 1):
            y = self._convolve(y, unit, sides, f"{name}_conv{number}")
            is_last = number == len(units)
            y = self._normalize(y, f"{name}_bn{number}", gamma="zeros" if is_last and self.zero_gamma else "ones")
            if not is_last:
                y = keras.layers.ReLU(name=f"{name}_relu{number}", dtype=self.dtype)(y)
        total = keras.layers.Add(name=f"{name}_add", dtype=self.dtype)([y, shortcut])
        return keras.layers.ReLU(name=f"{name}_relu{len(units)}", dtype=self.dtype)(total)
