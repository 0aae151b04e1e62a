"""Image classifiers by name: our ResNets and ResNeXts, and the ResNets of keras.applications."""

from __future__ import annotations

from typing import Any

from gaudi_models.architectures import APPLICATIONS, CLASSIFIERS, RESNETS
from gaudi_models.layers import Network, synchronize
from gaudi_models.padding import Padding
from gaudi_models.resnet import BATCH_NORM_MOMENTUM, ResNetBackbone
from gaudi_ops.errors import require_choice
from gaudi_ops.tf.batch_norm import ReduceStatistics
from gaudi_ops.tf.convolution import Implementation
from gaudi_ops.tf.keras_api import keras

FEATURES = "features"
LOGITS = "logits"
HEAD_STDDEV = 0.01


def build_classifier(
    name: str,
    num_classes: int = 1000,
    *,
    dtype: str = "float32",
    padding: Padding | None = None,
    image_size: int = 224,
    dropout: float = 0.0,
    zero_gamma: bool = False,
    momentum: float = BATCH_NORM_MOMENTUM,
    implementation: Implementation = "auto",
    reduce_statistics: ReduceStatistics | None = None,
) -> Any:
    """Build a classifier with new weights.

    Args:
        name: one of `gaudi_models.architectures.CLASSIFIERS`: ``"resnet50"``, ``"resnext101"``, ..., and
            ``"resnet50_keras"``, ``"resnet50v2_keras"``, ... for those of keras.applications.
        num_classes: 2 or more.
        dtype: Keras precision policy of the layers; pooled features and logits are float32 in any.
        padding: where strided layers pad, see `gaudi_models.padding`; None: as the original program,
            ``"symmetric_stem"`` for a ResNet and ``"same"`` for a ResNeXt.
        image_size: height and width of the images in pixels, at least 32.
        dropout: share of the pooled features that is dropped in training.
        zero_gamma: see `gaudi_models.resnet.ResNetBackbone`, as the next two; keras.applications' have their own.
        momentum: of the batch norms' moving averages.
        implementation: of grouped convolutions.
        reduce_statistics: of batch norms over several devices, see `gaudi_models.resnet.ResNetBackbone`.

    Returns:
        A Keras model from images [batch, image_size, image_size, 3], normalised, to raw logits float32
        [batch, num_classes].

    Raises:
        ValueError: for a name, a padding, a size or a number of classes that does not exist.
    """
    require_choice("model", name, CLASSIFIERS)
    if num_classes < 2:
        raise ValueError(f"num_classes is {num_classes}; use at least 2")
    if image_size < 32:
        raise ValueError(f"image_size is {image_size}; use at least 32")
    if name in APPLICATIONS:
        images, features = _build_application(name, image_size, dtype, padding, reduce_statistics)
    else:
        architecture = RESNETS[name]
        images = keras.Input([image_size, image_size, 3], name="images")
        features = ResNetBackbone(
            architecture.depth,
            padding=padding or architecture.padding,
            dtype=dtype,
            cardinality=architecture.cardinality,
            zero_gamma=zero_gamma,
            momentum=momentum,
            implementation=implementation,
            reduce_statistics=reduce_statistics,
        )(images)
    return Network(images, _add_head(features, num_classes, dropout), name=name)


def feature_extractor(classifier: Any) -> Any:
    """Return the part of a classifier up to its pooled features, float32 [batch, features]; it shares the weights."""
    features = classifier.get_layer(FEATURES).output
    return Network(classifier.input, features, name=f"{classifier.name}_features")


def freeze_backbone(classifier: Any) -> None:
    """Train only the head; the batch norms of the backbone use their moving statistics and keep them."""
    for layer in classifier.layers:
        layer.trainable = layer.name == LOGITS


def _add_head(x: Any, num_classes: int, dropout: float) -> Any:
    # In float32 from the mean on: that is little work, and an argmax among bfloat16 logits has ties.
    x = keras.layers.GlobalAveragePooling2D(name=FEATURES, dtype="float32")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout", dtype="float32")(x)
    initializer = keras.initializers.RandomNormal(stddev=HEAD_STDDEV)
    return keras.layers.Dense(num_classes, kernel_initializer=initializer, name=LOGITS, dtype="float32")(x)


def _build_application(
    name: str, image_size: int, dtype: str, padding: Padding | None, reduce_statistics: ReduceStatistics | None
) -> tuple[Any, Any]:
    """Build a network of keras.applications in the precision `dtype`; return its input and its last feature map."""
    if padding not in (None, "symmetric"):
        raise ValueError(f"padding is {padding!r}; {name} has 'symmetric' only")
    policy = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(dtype)
    try:
        build = getattr(keras.applications, APPLICATIONS[name])
        model = build(include_top=False, weights=None, input_shape=(image_size, image_size, 3))
        if reduce_statistics is not None:
            model = synchronize(model, reduce_statistics)
    finally:
        keras.mixed_precision.set_global_policy(policy)
    return model.input, model.output
