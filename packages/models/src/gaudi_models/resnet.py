"""Residual networks of basic blocks: ResNet-18 and ResNet-34, as a trunk that a detector or a classifier ends.

Source: He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385, table 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gaudi_ops.tf.keras_api import keras

PoolPadding = Literal["same", "symmetric"]

STAGE_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
STAGE_FILTERS = (64, 128, 256, 512)
BATCH_NORM_MOMENTUM = 0.9
BATCH_NORM_EPSILON = 1e-5


@dataclass(frozen=True)
class ResNetTrunk:
    """What a trunk of basic blocks is made of; calling it on a Keras tensor builds the layers.

    Stride-2 convolutions pad on both sides, as PyTorch does. The pooling's padding differs between the programs that
    weights come from, and weights used with the wrong one load and are quietly worse, so it is a choice here.

    Args:
        depth: 18 or 34.
        stage_strides: stride of each stage's first block; its length is the number of stages built.
        pool_padding: ``"same"`` as TensorFlow, ``"symmetric"`` as torchvision and MXNet.
        dtype: Keras precision policy of the layers, such as ``"float32"`` or ``"mixed_bfloat16"``.

    Raises:
        ValueError: for a depth, a number of stages or a padding that does not exist.
    """

    depth: int = 34
    stage_strides: Sequence[int] = (1, 2, 2, 2)
    pool_padding: PoolPadding = "same"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.depth not in STAGE_BLOCKS:
            raise ValueError(f"depth is {self.depth}; use one of {sorted(STAGE_BLOCKS)}")
        if not 1 <= len(self.stage_strides) <= len(STAGE_FILTERS):
            raise ValueError(f"stage_strides has {len(self.stage_strides)} entries; use 1 to {len(STAGE_FILTERS)}")
        if self.pool_padding not in get_args(PoolPadding):
            raise ValueError(f"pool_padding is {self.pool_padding!r}; use one of {get_args(PoolPadding)}")

    def __call__(self, images: Any) -> Any:
        """Features [batch, height / s, width / s, filters] of images [batch, height, width, 3]."""
        x = self._convolve(images, 64, 7, 2, "conv1")
        x = keras.layers.ReLU(name="conv1_relu", dtype=self.dtype)(self._normalize(x, "conv1_bn"))
        x = self._pool(x)
        for stage, stride in enumerate(self.stage_strides):
            for block in range(STAGE_BLOCKS[self.depth][stage]):
                x = self._block(
                    x, STAGE_FILTERS[stage], stride if block == 0 else 1, f"stage{stage + 1}_block{block + 1}"
                )
        return x

    def _pool(self, x: Any) -> Any:
        padding = "same"
        if self.pool_padding == "symmetric":
            # Zeros are no larger than what follows a ReLU, so they stand for the border that PyTorch ignores.
            x = keras.layers.ZeroPadding2D(1, name="pool_pad", dtype=self.dtype)(x)
            padding = "valid"
        return keras.layers.MaxPooling2D(3, 2, padding=padding, name="pool", dtype=self.dtype)(x)

    def _convolve(self, x: Any, filters: int, kernel: int, stride: int, name: str) -> Any:
        padding = "same"
        if stride > 1 and kernel > 1:
            x = keras.layers.ZeroPadding2D(kernel // 2, name=f"{name}_pad", dtype=self.dtype)(x)
            padding = "valid"
        return keras.layers.Conv2D(
            filters,
            kernel,
            stride,
            padding,
            use_bias=False,
            kernel_initializer="he_normal",
            name=name,
            dtype=self.dtype,
        )(x)

    def _normalize(self, x: Any, name: str, gamma: str = "ones") -> Any:
        return keras.layers.BatchNormalization(
            momentum=BATCH_NORM_MOMENTUM,
            epsilon=BATCH_NORM_EPSILON,
            gamma_initializer=gamma,
            name=name,
            dtype=self.dtype,
        )(x)

    def _block(self, x: Any, filters: int, stride: int, name: str) -> Any:
        shortcut = x
        if stride > 1 or x.shape[-1] != filters:
            shortcut = self._convolve(x, filters, 1, stride, f"{name}_shortcut")
            shortcut = self._normalize(shortcut, f"{name}_shortcut_bn")
        y = self._convolve(x, filters, 3, stride, f"{name}_conv1")
        y = keras.layers.ReLU(name=f"{name}_relu1", dtype=self.dtype)(self._normalize(y, f"{name}_bn1"))
        y = self._convolve(y, filters, 3, 1, f"{name}_conv2")
        # Zero makes the block start as the identity: Goyal et al., https://arxiv.org/abs/1706.02677, section 5.1.
        y = self._normalize(y, f"{name}_bn2", gamma="zeros")
        y = keras.layers.Add(name=f"{name}_add", dtype=self.dtype)([y, shortcut])
        return keras.layers.ReLU(name=f"{name}_relu2", dtype=self.dtype)(y)
