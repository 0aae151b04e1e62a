"""SSD300 with a ResNet backbone, as in the MLPerf training benchmark, and SSD512.

Source: Liu et al., "SSD: Single Shot MultiBox Detector", https://arxiv.org/abs/1512.02325, with the backbone of
https://arxiv.org/abs/1512.03385 cut after its third stage, whose stride is 1.
"""

from __future__ import annotations

from typing import Any

from gaudi_models.architectures import SSD_STAGE_STRIDES, ExtraLevels, list_extra_levels
from gaudi_models.layers import Network
from gaudi_models.padding import SSD_PADDINGS, PoolPadding
from gaudi_models.resnet import ResNetBackbone
from gaudi_ops import SSD300, DefaultBoxSpec
from gaudi_ops.errors import require_choice
from gaudi_ops.tf.batch_norm import ReduceStatistics
from gaudi_ops.tf.keras_api import keras


def build_ssd(
    num_classes: int,
    *,
    depth: int = 34,
    width: float = 1.0,
    spec: DefaultBoxSpec = SSD300,
    pool_padding: PoolPadding = "same",
    dtype: str = "float32",
    reduce_statistics: ReduceStatistics | None = None,
) -> Any:
    """Build the detector.

    Args:
        num_classes: classes with the background, 81 for COCO.
        depth: of the ResNet backbone: 18, 34 or 50; see `gaudi_models.architectures.SSDArchitecture`.
        width: share of the published filters that the backbone and the levels after it have, above 0 and up to 1.
        spec: default boxes, and the size of the images: ``SSD300`` or ``SSD512``, whose network has a level more.
        pool_padding: of the pooling and of the levels after the backbone; ``"same"`` as TensorFlow, ``"symmetric"`` as
            torchvision and MXNet.
        dtype: Keras precision policy of the layers.
        reduce_statistics: of batch norms over several devices, see `gaudi_models.resnet.ResNetBackbone`.

    Returns:
        A Keras model from images [batch, 300, 300, 3], normalised, to ``(logits, offsets)``: float32
        [batch, 8732, num_classes], raw, and float32 [batch, 8732, 4] (dy, dx, dh, dw); rows ordered as
        `gaudi_ops.default_boxes`. With ``SSD512``, images are of 512 pixels, and rows are 24564.

    Raises:
        ValueError: if there are fewer than 2 classes, ``pool_padding`` is neither, the width is none, or the levels'
            sizes are not those of ``spec``.
    """
    require_choice("pool_padding", pool_padding, SSD_PADDINGS)
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; it counts the background, so use at least 2")
    images = keras.Input([spec.image_size, spec.image_size, 3], name="images")
    padding = SSD_PADDINGS[pool_padding]
    backbone = ResNetBackbone(
        depth, SSD_STAGE_STRIDES, padding, dtype, reduce_statistics=reduce_statistics, width=width
    )
    levels = _feature_levels(backbone(images), list_extra_levels(spec, width), pool_padding, dtype)
    sizes = tuple(level.shape[1] for level in levels)
    if sizes != spec.feature_sizes:
        raise ValueError(f"the network has levels of {sizes} cells and the default boxes {spec.feature_sizes}")
    logits, offsets = [], []
    for number, (level, boxes) in enumerate(zip(levels, spec.boxes_per_cell, strict=True), 1):
        # So that gradients meet in twos: TensorFlow adds three in an order that changes from run to run.
        level = keras.layers.Identity(name=f"level{number}", dtype=dtype)(level)
        logits.append(_head(level, boxes, num_classes, f"class_head{number}", dtype))
        offsets.append(_head(level, boxes, 4, f"box_head{number}", dtype))
    join = keras.layers.Concatenate
    outputs = (
        join(axis=1, name="logits", dtype="float32")(logits),
        join(axis=1, name="offsets", dtype="float32")(offsets),
    )
    return Network(images, outputs, name=f"ssd_resnet{depth}")


def freeze_backbone(detector: Any) -> None:
    """Train only the levels after the backbone and the heads; batch norms use their moving statistics and keep them."""
    for layer in detector.layers:
        layer.trainable = not layer.name.startswith(("conv1", "stage"))


def _feature_levels(features: Any, extra_levels: ExtraLevels, pool_padding: PoolPadding, dtype: str) -> list[Any]:
    levels = [features]
    for number, (narrow, wide, stride, is_padded) in enumerate(extra_levels, 1):
        name = f"extra{number}_conv2"
        x = keras.layers.Conv2D(narrow, 1, activation="relu", name=f"extra{number}_conv1", dtype=dtype)(levels[-1])
        padding = "same" if is_padded else "valid"
        if is_padded and pool_padding == "symmetric":
            x = keras.layers.ZeroPadding2D(1, name=f"{name}_pad", dtype=dtype)(x)
            padding = "valid"
        levels.append(keras.layers.Conv2D(wide, 3, stride, padding, activation="relu", name=name, dtype=dtype)(x))
    return levels


def _head(level: Any, boxes: int, channels: int, name: str, dtype: str) -> Any:
    """Apply a 3x3 convolution and reshape to a row for each default box of the level: [batch, boxes, channels]."""
    x = keras.layers.Conv2D(boxes * channels, 3, padding="same", name=name, dtype=dtype)(level)
    return keras.layers.Reshape([-1, channels], name=f"{name}_rows", dtype=dtype)(x)
