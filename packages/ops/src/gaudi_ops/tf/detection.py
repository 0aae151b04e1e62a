"""Default boxes, targets, decoding and suppression as TensorFlow functions; `gaudi_ops` has the same in NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import gaudi_ops.anchors
from gaudi_ops.anchors import SSD300, DefaultBoxSpec, default_boxes_cyxhw
from gaudi_ops.boxes import OWN_WEIGHT, VOTERS, VOTING_FLOOR
from gaudi_ops.targets import MATCH_IOU


def default_boxes(spec: DefaultBoxSpec = SSD300) -> Any:
    """Return default boxes, float32 [spec.num_boxes, 4], y0, x0, y1, x1; see `gaudi_ops.default_boxes`."""
    return tf.constant(gaudi_ops.anchors.default_boxes(spec))


def decode_boxes(offsets: Any, spec: DefaultBoxSpec = SSD300) -> Any:
    """Compute boxes from predicted offsets, in float32.

    Args:
        offsets: float32 or bfloat16 [..., spec.num_boxes, 4], dy, dx, dh, dw.
        spec: the default boxes.

    Returns:
        float32 [..., spec.num_boxes, 4], y0, x0, y1, x1 as fractions of the image, not clipped.
    """
    values, anchors = tf.cast(offsets, tf.float32), default_boxes_cyxhw(spec)
    centers = values[..., :2] * (spec.center_variance * anchors[:, 2:]) + anchors[:, :2]
    half_sizes = tf.exp(values[..., 2:] * spec.size_variance) * (0.5 * anchors[:, 2:])
    return tf.concat([centers - half_sizes, centers + half_sizes], axis=-1)


def _overlaps(boxes_yxyx: Any, spec: DefaultBoxSpec) -> Any:
    """Compute IoU [..., n, spec.num_boxes] of boxes [..., n, 4] with every default box; 0 for boxes of no size."""
    anchors = gaudi_ops.anchors.default_boxes(spec)
    y0, x0, y1, x1 = (boxes_yxyx[..., i, tf.newaxis] for i in range(4))
    height = tf.minimum(y1, anchors[:, 2]) - tf.maximum(y0, anchors[:, 0])
    width = tf.minimum(x1, anchors[:, 3]) - tf.maximum(x0, anchors[:, 1])
    intersection = tf.nn.relu(height) * tf.nn.relu(width)
    anchor_areas = (anchors[:, 2] - anchors[:, 0]) * (anchors[:, 3] - anchors[:, 1])
    return tf.math.divide_no_nan(intersection, (y1 - y0) * (x1 - x0) + anchor_areas - intersection)


def _encode(boxes_yxyx: Any, spec: DefaultBoxSpec) -> Any:
    """Compute offsets [..., spec.num_boxes, 4] of the box that is assigned to each default box."""
    anchors = default_boxes_cyxhw(spec)
    sizes = boxes_yxyx[..., 2:] - boxes_yxyx[..., :2]
    centers = boxes_yxyx[..., :2] + 0.5 * sizes
    moved = (centers - anchors[:, :2]) / anchors[:, 2:] / spec.center_variance
    return tf.concat([moved, tf.math.log(sizes / anchors[:, 2:]) / spec.size_variance], axis=-1)


def encode_targets(boxes_yxyx: Any, labels: Any, spec: DefaultBoxSpec = SSD300) -> tuple[Any, Any, Any]:
    """Compute training targets of an image, or of a batch of padded images; made for tf.data.

    Args:
        boxes_yxyx: float32 [..., n, 4] objects as y0, x0, y1, x1 in 0..1; boxes of no size are padding. n may be 0 and
            unknown, and there may be a batch dimension of unknown size.
        labels: int32 [..., n] their classes, from 1; 0 is background.
        spec: the default boxes.

    Returns:
        classes int32 [..., spec.num_boxes], 0 for background; offsets float32 [..., spec.num_boxes, 4], 0 where
        unmatched; the number of matched default boxes int32 [...]. Ties go to the object listed first and to the
        default box of the lower row, as in `gaudi_ops.encode_targets`.

    Raises:
        ValueError or InvalidArgumentError: there are more or fewer labels than boxes.
    """
    boxes, labels = tf.convert_to_tensor(boxes_yxyx, tf.float32), tf.convert_to_tensor(labels, tf.int32)
    batch_dims = boxes.shape.rank - 2
    # One row of padding keeps the reductions over objects defined where there is no object.
    labels = tf.pad(tf.ensure_shape(labels, boxes.shape[:-1]), [[0, 0]] * batch_dims + [[0, 1]])
    boxes = tf.pad(boxes, [[0, 0]] * batch_dims + [[0, 1], [0, 0]])

    valid = tf.reduce_all(boxes[..., 2:] > boxes[..., :2], axis=-1)
    overlaps = _overlaps(tf.where(valid[..., tf.newaxis], boxes, 0.0), spec)  # NaN would be the maximum everywhere
    # Twice the largest IoU there is: an object's own best default box can't be taken by mere overlap.
    forced = tf.one_hot(tf.argmax(overlaps, axis=-1, output_type=tf.int32), spec.num_boxes, on_value=2.0)
    overlaps = tf.maximum(overlaps, tf.where(valid[..., tf.newaxis], forced, 0.0))

    matches = tf.argmax(overlaps, axis=-2, output_type=tf.int32)
    matched = tf.reduce_max(overlaps, axis=-2) >= MATCH_IOU
    classes = tf.where(matched, tf.gather(labels, matches, batch_dims=batch_dims), 0)
    # Unmatched rows are encoded too, from the default boxes themselves, so that no logarithm of 0 arises.
    assigned = tf.where(
        matched[..., tf.newaxis],
        tf.gather(boxes, matches, batch_dims=batch_dims),
        gaudi_ops.anchors.default_boxes(spec),
    )
    offsets = tf.where(matched[..., tf.newaxis], _encode(assigned, spec), 0.0)
    return classes, offsets, tf.math.count_nonzero(matched, axis=-1, dtype=tf.int32)


def non_max_suppression(
    boxes_yxyx: Any,
    scores: Any,
    *,
    score_threshold: float = 0.05,
    iou_threshold: float = 0.5,
    max_per_class: int = 200,
    max_detections: int = 200,
    voting_iou: float | None = None,
    max_voters: int = VOTERS,
) -> tuple[Any, Any, Any]:
    """Keep, for each image and class, the best boxes that don't overlap a better one of the class.

    Args:
        boxes_yxyx: float32 [batch, boxes, 4], corners.
        scores: float32 or bfloat16 [batch, boxes, classes], column 0 is background and gives no detection.
        score_threshold: only scores above it count.
        iou_threshold: a box that overlaps a better one of its class by this or more is dropped; 0 keeps only the best.
        max_per_class: number of the best scores of a class that are considered.
        max_detections: rows of the result.
        voting_iou: see `gaudi_ops.non_max_suppression`.
        max_voters: see there.

    Returns:
        boxes float32 [batch, max_detections, 4], labels int32 [batch, max_detections] from 1, scores float32
        [batch, max_detections], best first; rows without a detection are 0 throughout.
    """
    boxes, scores = tf.cast(boxes_yxyx, tf.float32), tf.cast(scores, tf.float32)
    lowest, count = score_threshold, max_per_class
    if voting_iou is not None:
        lowest, count = VOTING_FLOOR * score_threshold, max(max_per_class, max_voters + 1)
    boxes, scores, count = _limit_to_boxes(boxes, scores, count)
    # What does not count is made all alike, among which the search for the best is three times as fast.
    by_class = tf.transpose(tf.where(scores > lowest, scores, scores.dtype.min)[..., 1:], [0, 2, 1])
    best = tf.math.top_k(by_class, count)
    candidates = tf.gather(boxes, best.indices, batch_dims=1)
    detections = tf.image.combined_non_max_suppression(
        tf.transpose(candidates[:, :, :max_per_class], [0, 2, 1, 3]),
        tf.transpose(best.values[..., :max_per_class], [0, 2, 1]),
        # TensorFlow drops above its threshold, from 0 to 1; this is the largest float32 below ours, and 0 has none.
        max_output_size_per_class=max_per_class if iou_threshold > 0 else 1,
        max_total_size=max_detections,
        iou_threshold=float(np.clip(np.nextafter(np.float32(iou_threshold), np.float32(0)), 0, 1)),
        score_threshold=score_threshold,
        clip_boxes=False,
    )
    found = tf.sequence_mask(detections.valid_detections, max_detections)
    labels = tf.where(found, tf.cast(detections.nmsed_classes, tf.int32) + 1, 0)
    kept = detections.nmsed_boxes
    if voting_iou is not None:
        weights = weigh_voters(best.values, score_threshold, max_voters)
        kept = vote_on_boxes(kept, labels, candidates, weights, voting_iou)
    return kept, labels, detections.nmsed_scores


def _limit_to_boxes(boxes: Any, scores: Any, count: int) -> tuple[Any, Any, int]:
    """Return boxes, scores and the count, at most the number of boxes; an unknown one grows by rows never counted."""
    if (number := scores.shape[1]) is not None:
        return boxes, scores, min(count, number)
    rows = [[0, 0], [0, count], [0, 0]]
    return tf.pad(boxes, rows), tf.pad(scores, rows, constant_values=scores.dtype.min), count


def weigh_voters(scores: Any, score_threshold: float, max_voters: int = VOTERS) -> Any:
    """Compute the weights of boxes that may vote, see `gaudi_ops.boxes.choose_voters`.

    Args:
        scores: float32 [batch, classes, m], the best ones of each class, in order; one more than max_voters of them
            are needed where there are as many.
        score_threshold: of detections.
        max_voters: largest number of voters of a class.

    Returns:
        float32 [batch, classes, m], 0 for what does not vote.
    """
    floor = VOTING_FLOOR * score_threshold
    if scores.shape[-1] > max_voters:
        floor = tf.maximum(scores[..., max_voters : max_voters + 1], floor)
    return tf.nn.relu(scores - floor)


def vote_on_boxes(boxes_yxyx: Any, labels: Any, voters_yxyx: Any, weights: Any, voting_iou: float) -> Any:
    """Move boxes that were kept to the weighted mean of those that vote, see `gaudi_ops.non_max_suppression`.

    Args:
        boxes_yxyx: float32 [batch, n, 4], the kept ones.
        labels: int32 [batch, n], their classes from 1; rows of label 0 are none, and stay.
        voters_yxyx: float32 [batch, classes, m, 4], without the background.
        weights: float32 [batch, classes, m], see `weigh_voters`; what is 0 does not vote.
        voting_iou: from which overlap on boxes vote, below 1.

    Returns:
        float32 [batch, n, 4].
    """
    places = tf.maximum(labels - 1, 0)
    # Sides one after the other, [batch, n, 4, m]: the numbers that are computed with lie side by side.
    own_sides = tf.gather(tf.transpose(voters_yxyx, [0, 1, 3, 2]), places, batch_dims=1)
    overlaps = _compute_iou(tf.split(boxes_yxyx, 4, axis=-1), tf.unstack(own_sides, axis=2))
    shares = tf.gather(weights, places, batch_dims=1) * tf.nn.relu(overlaps - voting_iou)
    total = tf.reduce_sum(shares, axis=-1, keepdims=True)
    # No matrix product, which devices and exports compute in fewer bits.
    own = OWN_WEIGHT * (1 - voting_iou)
    mean = (tf.reduce_sum(shares[:, :, tf.newaxis] * own_sides, axis=-1) + own * boxes_yxyx) / (total + own)
    return tf.where(tf.logical_and(total > 0, labels[..., tf.newaxis] > 0), mean, boxes_yxyx)


def suppress_by_overlaps(
    boxes_yxyx: Any,
    scores: Any,
    *,
    score_threshold: float = 0.05,
    iou_threshold: float = 0.5,
    max_per_class: int = 200,
    max_detections: int = 200,
    voting_iou: float | None = None,
    max_voters: int = VOTERS,
) -> tuple[Any, Any, Any]:
    """Compute `non_max_suppression` by operations that TensorFlow Lite has among its own.

    All candidates of a class are kept at first. Then each round drops those that overlap a better one that the round
    before has kept. After n rounds the best n candidates are decided, so the rounds end, with the result of choosing
    one box after the other; mostly a few rounds are enough.

    Arguments and result are those of `non_max_suppression`; scores are float32.
    """
    classes, lowest, wanted = scores.shape[-1] - 1, score_threshold, max_per_class
    if voting_iou is not None:
        lowest, wanted = VOTING_FLOOR * score_threshold, max(max_per_class, max_voters + 1)
    boxes_yxyx, scores, wanted = _limit_to_boxes(boxes_yxyx, scores, wanted)
    count = min(max_per_class, wanted)
    by_class = tf.transpose(tf.where(scores > lowest, scores, 0.0)[..., 1:], [0, 2, 1])
    best = tf.math.top_k(by_class, wanted)
    voters = tf.gather(boxes_yxyx, best.indices, batch_dims=1)  # [batch, classes, wanted, 4]
    candidates, values = voters[:, :, :count], best.values[..., :count]
    is_better = np.triu(np.ones((count, count), np.float32), 1)  # [better, other]
    overlaps = is_better * tf.cast(_find_pairwise_iou(candidates, candidates) >= iou_threshold, tf.float32)
    counts = tf.cast(values > score_threshold, tf.float32)

    def has_changed(former: Any, kept: Any) -> Any:
        return tf.reduce_max(tf.abs(former - kept)) > 0

    def drop(_: Any, kept: Any) -> tuple[Any, Any]:
        overlapping = tf.reduce_max(kept[..., tf.newaxis] * overlaps, axis=2)
        return kept, counts * (1 - overlapping)

    _, kept = tf.while_loop(has_changed, drop, (counts - 1, counts))
    flat = tf.reshape(values * kept, [-1, classes * count])
    found = tf.math.top_k(flat, min(max_detections, classes * count))
    boxes = tf.gather(tf.reshape(candidates, [-1, classes * count, 4]), found.indices, batch_dims=1)
    is_found = found.values > 0
    labels = tf.where(is_found, found.indices // count + 1, 0)
    boxes, values = tf.where(is_found[..., tf.newaxis], boxes, 0.0), found.values
    if voting_iou is not None:
        boxes = vote_on_boxes(boxes, labels, voters, weigh_voters(best.values, score_threshold, max_voters), voting_iou)
    if rest := max_detections - min(max_detections, classes * count):
        boxes = tf.pad(boxes, [[0, 0], [0, rest], [0, 0]])
        labels, values = (tf.pad(one, [[0, 0], [0, rest]]) for one in (labels, values))
    return boxes, labels, values


def _find_pairwise_iou(boxes_yxyx: Any, others_yxyx: Any) -> Any:
    """Compute the IoU of each box with each other: of [..., n, 4] and [..., m, 4] [..., n, m]; 0 without an area."""
    return _compute_iou(tf.split(boxes_yxyx, 4, axis=-1), tf.unstack(others_yxyx[..., tf.newaxis, :, :], axis=-1))


def _compute_iou(sides: Sequence[Any], others: Sequence[Any]) -> Any:
    """Compute the IoU of boxes given by top, left, bottom and right of shapes that broadcast; 0 without an area."""
    (y0, x0, y1, x1), (top, left, bottom, right) = sides, others
    height, width = tf.minimum(y1, bottom) - tf.maximum(y0, top), tf.minimum(x1, right) - tf.maximum(x0, left)
    intersection = tf.maximum(height, 0.0) * tf.maximum(width, 0.0)
    union = (y1 - y0) * (x1 - x0) + (bottom - top) * (right - left) - intersection
    return intersection / tf.maximum(union, np.finfo(np.float32).tiny)
