"""SSD300 with ResNet-34 in layers of Keras, its loss with two top_k, and its inference: what ours are compared with.

The hardest negatives are found by the rank of a rank, and all classes of all default boxes go into the suppression.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from gaudi_ops.tf import decode_boxes
from gaudi_ops.tf.keras_api import keras

BLOCKS = ((64, 3, 1), (128, 4, 2), (256, 6, 1))
EXTRAS = (
    (256, 512, 2, "same"),
    (256, 512, 2, "same"),
    (128, 256, 2, "same"),
    (128, 256, 1, "valid"),
    (128, 256, 1, "valid"),
)
BOXES = (4, 6, 6, 6, 4, 4)


def build_plain_ssd(num_classes: int, policy: str) -> Any:
    """Build a Keras model from images [batch, 300, 300, 3] to logits and offsets."""
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(policy)
    images = keras.Input([300, 300, 3])
    x = keras.layers.MaxPooling2D(3, 2, "same")(_convolve(images, 64, 7, 2))
    for filters, count, stride in BLOCKS:
        for number in range(count):
            x = _block(x, filters, stride if number == 0 else 1, project=number == 0 and filters > 64)
    levels = [x]
    for narrow, wide, stride, padding in EXTRAS:
        x = keras.layers.Conv2D(narrow, 1, activation="relu")(x)
        x = keras.layers.Conv2D(wide, 3, stride, padding, activation="relu")(x)
        levels.append(x)
    outputs = []
    for columns in (num_classes, 4):
        heads = [
            keras.layers.Conv2D(boxes * columns, 3, padding="same")(level)
            for level, boxes in zip(levels, BOXES, strict=True)
        ]
        rows = [keras.layers.Reshape([-1, columns])(head) for head in heads]
        joined = keras.layers.Concatenate(axis=1)(rows)
        outputs.append(keras.layers.Activation("linear", dtype="float32")(joined))
    keras.mixed_precision.set_global_policy(before)
    return keras.Model(images, outputs)


def _convolve(x: Any, filters: int, kernel: int, stride: int, *, activate: bool = True) -> Any:
    x = keras.layers.Conv2D(filters, kernel, stride, "same", use_bias=False)(x)
    x = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)
    return keras.layers.ReLU()(x) if activate else x


def _block(x: Any, filters: int, stride: int, *, project: bool) -> Any:
    shortcut = _convolve(x, filters, 1, stride, activate=False) if project else x
    y = _convolve(_convolve(x, filters, 3, stride), filters, 3, 1, activate=False)
    return keras.layers.ReLU()(keras.layers.Add()([y, shortcut]))


def plain_loss(logits: Any, offsets: Any, classes: Any, target_offsets: Any, num_matched: Any) -> Any:
    """Compute the detector's loss."""
    positive = classes > 0
    counts = tf.reduce_sum(tf.cast(positive, tf.int32), axis=1)
    entropy = tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(classes, logits.shape[-1]), logits)
    negative = tf.where(positive, 0.0, entropy)
    _, order = tf.nn.top_k(negative, logits.shape[1])
    _, ranks = tf.nn.top_k(-order, logits.shape[1])
    hard = ranks < tf.minimum(3 * counts, logits.shape[1])[:, None]
    chosen = tf.cast(positive | hard, tf.float32)
    class_loss = tf.reduce_sum(entropy * chosen, axis=1)
    errors = offsets - target_offsets
    absolute = tf.abs(errors)
    box_errors = tf.reduce_sum(tf.where(absolute <= 1, 0.5 * tf.square(errors), absolute - 0.5), axis=2)
    box_loss = tf.reduce_sum(box_errors * tf.cast(positive, tf.float32), axis=1)
    return tf.reduce_mean((class_loss + box_loss) / tf.cast(num_matched, tf.float32))


def build_plain_step(model: Any, weight_decay: float, *, xla: bool = False) -> Callable[[Any, Any], Any]:
    """Make a training step with Keras' optimizer, from images and targets to the loss."""
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)

    @tf.function(jit_compile=xla or None)
    def step(images: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            logits, offsets = model(images, training=True)
            loss = plain_loss(logits, offsets, *targets)
            total = loss + weight_decay * tf.add_n([tf.nn.l2_loss(each) for each in model.trainable_variables])
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(total, variables), variables, strict=True))
        return loss

    return step


def find_boxes(logits: Any, offsets: Any) -> tuple[Any, Any, Any]:
    """Boxes, classes and scores of at most 200 detections of each image."""
    scores = tf.nn.softmax(tf.cast(logits, tf.float32))[..., 1:]
    found = tf.image.combined_non_max_suppression(
        decode_boxes(offsets)[:, :, None], scores, 200, 200, iou_threshold=0.5, score_threshold=0.05
    )
    return found.nmsed_boxes, found.nmsed_classes, found.nmsed_scores
