"""The detector's training input as a straightforward tf.data pipeline: what the loader is compared with.

Decoded whole, made float, cropped and resized, four colour operations of tf.image, targets by matching each image's
boxes to all default boxes. The crop is drawn in TensorFlow, as in the MLPerf training reference for TPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_ops import SSD300, default_boxes, default_boxes_cyxhw

SIDES = ("ymin", "xmin", "ymax", "xmax")


def plain_dataset(paths: Sequence[str], batch_size: int) -> Any:
    """Endless batches of (images, classes, offsets, number of matches) from records of detection examples."""
    dataset = tf.data.TFRecordDataset(list(paths)).repeat().shuffle(256)
    dataset = dataset.map(load, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)


def load(record: Any) -> tuple[Any, Any, Any, Any]:
    """One example of a batch."""
    encoded, boxes, labels = parse(record)
    image = tf.image.convert_image_dtype(tf.io.decode_jpeg(encoded, channels=3), tf.float32)
    window, kept = draw_window(boxes)
    boxes, labels = tf.boolean_mask(boxes, kept), tf.boolean_mask(labels, kept)
    boxes = tf.clip_by_value((boxes - tf.tile(window[:2], [2])) / tf.tile(window[2:] - window[:2], [2]), 0.0, 1.0)
    image = tf.image.crop_and_resize(image[None], window[None], [0], [300, 300])[0]
    image, boxes = tf.cond(tf.random.uniform([]) < 0.5, lambda: flip(image, boxes), lambda: (image, boxes))
    image = (jitter(image) - MEAN_RGB) / STDDEV_RGB
    return image, *encode_targets(boxes, labels)


def parse(record: Any) -> tuple[Any, Any, Any]:
    """Parse an encoded image, boxes y0, x0, y1, x1 in 0..1 and labels of objects that are no crowd."""
    floats = {f"image/object/bbox/{side}": tf.io.VarLenFeature(tf.float32) for side in SIDES}
    integers = {f"image/object/{name}": tf.io.VarLenFeature(tf.int64) for name in ("class/label", "is_crowd")}
    features = tf.io.parse_single_example(
        record, {"image/encoded": tf.io.FixedLenFeature([], tf.string), **floats, **integers}
    )
    boxes = tf.stack([tf.sparse.to_dense(features[name]) for name in floats], axis=1)
    objects = tf.equal(tf.sparse.to_dense(features["image/object/is_crowd"]), 0)
    labels = tf.cast(tf.sparse.to_dense(features["image/object/class/label"]), tf.int32)
    return features["image/encoded"], tf.boolean_mask(boxes, objects), tf.boolean_mask(labels, objects)


def draw_window(boxes: Any) -> tuple[Any, Any]:
    """Draw a window y0, x0, y1, x1 in 0..1, and find the boxes with their centre in it."""
    whole = (True, tf.constant([0.0, 0.0, 1.0, 1.0]), tf.ones([tf.shape(boxes)[0]], tf.bool))
    _, window, kept = tf.while_loop(
        lambda found, *_: tf.logical_not(found),
        lambda *_: tf.cond(tf.random.uniform([]) < 1 / 7, lambda: whole, functools.partial(propose, boxes)),
        (False, *whole[1:]),
    )
    return window, kept


def propose(boxes: Any) -> tuple[Any, Any, Any]:
    """Propose 50 windows; return if one is valid, the last such one, and the boxes with their centre in it."""
    height, width = tf.random.uniform([50], 0.3, 1.0), tf.random.uniform([50], 0.3, 1.0)
    top, left = tf.random.uniform([50]) * (1 - height), tf.random.uniform([50]) * (1 - width)
    windows = tf.stack([top, left, top + height, left + width], axis=1)
    min_iou = tf.gather([0.0, 0.1, 0.3, 0.5, 0.7, 0.9], tf.random.uniform([], 0, 6, tf.int32))
    centers = 0.5 * (boxes[:, :2] + boxes[:, 2:])
    inside = tf.reduce_all((centers > windows[:, None, :2]) & (centers < windows[:, None, 2:]), axis=-1)
    shaped = (height < 2 * width) & (width < 2 * height)
    valid = shaped & tf.reduce_all(iou(windows, boxes) > min_iou, axis=1) & tf.reduce_any(inside, axis=1)
    last = tf.maximum(tf.reduce_max(tf.where(valid, tf.range(50), -1)), 0)
    return tf.reduce_any(valid), windows[last], inside[last]


def iou(boxes_a: Any, boxes_b: Any) -> Any:
    """Overlap [n, m] of boxes [n, 4] with boxes [m, 4]."""
    low = tf.maximum(boxes_a[:, None, :2], boxes_b[None, :, :2])
    high = tf.minimum(boxes_a[:, None, 2:], boxes_b[None, :, 2:])
    intersection = tf.reduce_prod(tf.maximum(high - low, 0.0), axis=-1)
    areas_a, areas_b = (tf.reduce_prod(boxes[:, 2:] - boxes[:, :2], axis=-1) for boxes in (boxes_a, boxes_b))
    return intersection / (areas_a[:, None] + areas_b[None] - intersection)


def flip(image: Any, boxes: Any) -> tuple[Any, Any]:
    """Image and boxes mirrored left to right."""
    y0, x0, y1, x1 = tf.unstack(boxes, axis=1)
    return tf.image.flip_left_right(image), tf.stack([y0, 1 - x1, y1, 1 - x0], axis=1)


def jitter(image: Any) -> Any:
    """Apply the four colour operations."""
    image = tf.image.random_brightness(image, 0.125)
    image = tf.image.random_contrast(image, 0.5, 1.5)
    image = tf.image.random_saturation(image, 0.5, 1.5)
    return tf.clip_by_value(tf.image.random_hue(image, 0.05), 0.0, 1.0)


def encode_targets(boxes: Any, labels: Any) -> tuple[Any, Any, Any]:
    """Classes [8732], offsets [8732, 4] and number of matches of one image."""
    anchors, anchors_cyxhw = tf.constant(default_boxes()), default_boxes_cyxhw()
    # Something to reduce over where there is no object.
    boxes, labels = tf.pad(boxes, [[0, 1], [0, 0]]), tf.pad(labels, [[0, 1]])
    overlaps = iou(boxes, anchors)
    best = tf.one_hot(tf.argmax(overlaps, axis=1), SSD300.num_boxes, on_value=2.0)
    overlaps = tf.maximum(overlaps, tf.where(labels[:, None] > 0, best, 0.0))
    matches, matched = tf.argmax(overlaps, axis=0), tf.reduce_max(overlaps, axis=0) >= 0.5
    assigned = tf.where(matched[:, None], tf.gather(boxes, matches), anchors)
    sizes = assigned[:, 2:] - assigned[:, :2]
    centers = (assigned[:, :2] + 0.5 * sizes - anchors_cyxhw[:, :2]) / anchors_cyxhw[:, 2:] / 0.1
    offsets = tf.concat([centers, tf.math.log(sizes / anchors_cyxhw[:, 2:]) / 0.2], axis=1)
    classes = tf.where(matched, tf.gather(labels, matches), 0)
    return classes, tf.where(matched[:, None], offsets, 0.0), tf.math.count_nonzero(matched)
