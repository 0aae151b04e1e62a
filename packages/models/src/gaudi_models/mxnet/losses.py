"""The training loss of the single-shot detector, by looking closely at those default boxes that count only."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt

from gaudi_ops.reference import HUBER_DELTA, NEGATIVES_PER_POSITIVE

# By what share of its value the last row may be less than the first: neighbouring float32 differ by at least as much.
_SHARE_OF_ALL_ROWS = 2.0**-24


def ssd_loss(
    logits: Any, offsets: Any, classes: Any, target_offsets: Any, num_matched: npt.ArrayLike
) -> tuple[Any, Any, Any]:
    """Loss of `gaudi_ops.tf.ssd_loss`; call it within `mxnet.autograd.record()`.

    Per image: the cross entropy of the positives and of the hardest negatives, 3 for each positive, plus Huber's loss
    of the positives' offsets, both over the number of matches; then the mean over images. Among negatives of the same
    entropy those of lower rows count. An image without positives gives 0.

    The hardest are found by one partial sort of probabilities that take no part in the gradient, and only they and the
    positives are gathered for what does: gradients of 8732 rows of 81 classes would be nearly all zeros.

    Args:
        logits: float32 [batch, boxes, classes].
        offsets: float32 [batch, boxes, 4].
        classes: int32 or float32 [batch, boxes], 0 for background.
        target_offsets: float32 [batch, boxes, 4].
        num_matched: integers [batch], no array of MXNet's: how many of each row of classes are not 0, as the loader
            tells. The largest sizes what is gathered, and to ask the device for it would mean to wait.

    Returns:
        loss, class loss and box loss, float32 [1]; the first is the sum of the others.
    """
    most, boxes = max(int(np.max(num_matched, initial=0)), 1), logits.shape[1]
    count = min((1 + NEGATIVES_PER_POSITIVE) * most, boxes)
    with mx.autograd.pause():
        hardness, positives = _hardness(logits, classes)
        places = mx.nd.arange(count, ctx=logits.context).reshape((1, -1))
        is_counted = mx.nd.broadcast_lesser(places, (1 + NEGATIVES_PER_POSITIVE) * positives)
        is_positive = mx.nd.broadcast_lesser(places[:, :most], positives)
        weights = 1 / mx.nd.maximum(positives, 1)
        firsts = mx.nd.arange(0, len(logits) * boxes, boxes, ctx=logits.context, dtype="int32").reshape((-1, 1))
        rows = mx.nd.broadcast_add(largest_rows(hardness, count), firsts)
        of_positives = rows[:, :most]
    entropy = -mx.nd.pick(mx.nd.log_softmax(_take(logits, rows)), _take(classes, rows))
    class_loss = _mean_of_images(mx.nd.where(is_counted, entropy, mx.nd.zeros_like(entropy)), weights)
    errors = _take(offsets, of_positives) - _take(target_offsets, of_positives)
    huber = mx.nd.sum(_huber(errors), axis=2)
    box_loss = _mean_of_images(mx.nd.where(is_positive, huber, mx.nd.zeros_like(huber)), weights)
    return class_loss + box_loss, class_loss, box_loss


def largest_rows(values: Any, count: int) -> Any:
    """The rows of the largest of each line, largest first; ties go to the lower row.

    Args:
        values: float32 [lines, n], without NaN; other than 0 they are at least 1.2e-38 in size.
        count: how many of each line.

    Returns:
        int32 [lines, count].
    """
    # MXNet's own order of equal values is any. In float64 there is room to make them differ.
    wide = values.astype("float64")
    row = mx.nd.arange(values.shape[1], dtype="float64", ctx=values.context).reshape((1, -1))
    ordered = wide - mx.nd.broadcast_mul(mx.nd.abs(wide) + 1e-300, row * (_SHARE_OF_ALL_ROWS / values.shape[1]))
    return mx.nd.topk(ordered, k=count, axis=1, ret_typ="indices", dtype="int32")


class _Hardness(mx.gluon.HybridBlock):
    """What to order default boxes by, [batch, boxes], and the number of positives, [batch, 1].

    Positives come first, then what has the least probability of its class.
    """

    def hybrid_forward(self, F: Any, logits: Any, classes: Any) -> tuple[Any, Any]:  # noqa: N803 - Gluon's name
        probabilities = F.pick(F.softmax(logits), classes)
        # A probability that is no number counts as none, so that its loss is looked at, and tells.
        hardness = F.where(probabilities > 0, -probabilities, F.zeros_like(probabilities))
        positive = F.cast(classes > 0, "float32")
        return F.where(positive, F.ones_like(hardness), hardness), F.sum(positive, axis=1, keepdims=True)


_hardness = _Hardness()
# The probabilities of a batch take 23 MB, which would be allocated anew each time.
_hardness.hybridize(static_alloc=True, static_shape=True)


def _take(values: Any, rows: Any) -> Any:
    """Rows [batch, n] of values [batch, boxes, ...], counted over the whole batch.

    By `take`, whose gradient costs a third of that of `gather_nd`.
    """
    return mx.nd.take(values.reshape((-1, *values.shape[2:])), rows)


def _mean_of_images(losses: Any, weights: Any) -> Any:
    """The mean over images of the sum [batch, n] of each, times its weight."""
    return mx.nd.mean(mx.nd.broadcast_mul(losses, weights).sum(axis=1))


def _huber(errors: Any) -> Any:
    """Huber's loss of each error; MXNet has it over delta, of which it takes the root's reciprocal."""
    return HUBER_DELTA * mx.nd.smooth_l1(errors, scalar=HUBER_DELTA**-0.5)
