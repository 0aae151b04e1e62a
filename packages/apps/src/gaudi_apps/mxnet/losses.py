"""Compute the training loss of the single-shot detector and its gradients, over the default boxes that count alone."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt

from gaudi_ops.reference import HUBER_DELTA, NEGATIVES_PER_POSITIVE

# Share of its value that each row is put below the one before: small enough that the last of 2**20 rows stays above the
# next smaller float32, and large enough for a float64.
_SHARE_OF_A_ROW = 2.0**-44


class SSDLoss:
    """Compute the loss of `gaudi_ops.tf.ssd_loss` and its gradients, for `mxnet.autograd.backward`.

    The loss of an image is the cross entropy of its positives and hardest negatives, 3 for each positive, plus Huber's
    loss of the positives' offsets, divided by the number of positives; the loss of a batch is the mean over images.
    Among negatives of equal entropy those of lower rows count. An image without positives has loss 0.

    One partial sort of probabilities finds the hardest negatives. Losses and gradients are computed for these rows and
    the positives alone, gradients by their formulas: autograd would allocate and copy those of all 8732 rows of 81
    classes in each step, which takes longer than the loss.

    Args:
        scale: factor of the gradients; losses are not scaled.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self._order, self._rows = _Order(), _Rows(scale)
        # The probabilities of a batch take 23 MB, which would be allocated anew each time.
        self._order.hybridize(static_alloc=True, static_shape=True)
        self._rows.hybridize()
        self._gradients: list[Any] = []
        self._places: Any = None  # of what is not 0 in the gradients

    def __call__(
        self, logits: Any, offsets: Any, classes: Any, target_offsets: Any, num_matched: npt.ArrayLike
    ) -> tuple[tuple[Any, Any, Any], list[Any]]:
        """Compute losses and gradients; autograd records nothing of it.

        Args:
            logits: float32 [batch, boxes, classes].
            offsets: float32 [batch, boxes, 4].
            classes: int32 or float32 [batch, boxes], 0 for background.
            target_offsets: float32 [batch, boxes, 4].
            num_matched: integers [batch] in NumPy, the number of classes in each row that are not 0, from the loader.
                The largest one bounds the rows to compute; asking the device for it would mean to wait.

        Returns:
            loss, class loss and box loss, float32 [1], where the first one is the sum of the others; and the gradients
            of the loss with respect to logits and offsets. The next call overwrites the gradients, and relies on
            nobody else writing to them.
        """
        boxes = logits.shape[1]
        most = max(int(np.max(num_matched, initial=0)), 1)
        count = min((1 + NEGATIVES_PER_POSITIVE) * most, boxes)
        with mx.autograd.pause():
            order, positives = self._order(logits, classes)
            rows = largest_rows(order, count)
            firsts = mx.nd.arange(0, len(logits) * boxes, boxes, ctx=logits.context, dtype="int32")
            flat = [_flatten(each) for each in (logits, offsets, classes, target_offsets)]
            *losses, by_logits, by_offsets, places = self._rows(*flat, rows, positives, firsts)
            return (losses[0], losses[1], losses[2]), self._spread(
                (logits, offsets), (by_logits, by_offsets), places.reshape((1, -1))
            )

    def _spread(self, values: tuple[Any, ...], parts: tuple[Any, ...], places: Any) -> list[Any]:
        """Write rows of gradients to their places among zeros.

        Only the places of the call before are set to zero: filling all of them takes a fourth of the loss's time.
        """
        if [each.shape for each in self._gradients] != [each.shape for each in values]:
            self._gradients, self._places = [mx.nd.zeros_like(each) for each in values], None
        for gradient, part in zip(self._gradients, parts, strict=True):
            flat = _flatten(gradient)
            if self._places is not None:
                _put_rows(flat, mx.nd.zeros((self._places.shape[1], flat.shape[1]), ctx=flat.context), self._places)
            _put_rows(flat, _flatten(part), places)
        self._places = places
        return self._gradients


def largest_rows(order: Any, count: int) -> Any:
    """Return the places int32 [lines, count] of the largest of float64 [lines, n], largest first; see `set_apart`."""
    return mx.nd.topk(order, k=count, axis=1, ret_typ="indices", dtype="int32")


def set_apart(F: Any, values: Any) -> Any:  # noqa: N803 - Gluon's name
    """Make the values of each line differ without changing their order: of equal values the first one gets larger.

    MXNet's sort leaves the order of equal values open. In float64 there is room to make them differ. F is `mxnet.nd` or
    `mxnet.sym`; values are float32 [lines, n], without NaN, and 0 or at least 1.2e-38 in size; the result is float64.
    """
    wide = F.cast(values, "float64")
    shares = F.expand_dims(F.contrib.arange_like(wide, step=_SHARE_OF_A_ROW, axis=1), axis=0)
    return wide - F.broadcast_mul(F.abs(wide) + 1e-300, shares)


class _Order(mx.gluon.HybridBlock):
    """Compute the sort keys of default boxes, float64 [batch, boxes], and the number of positives, [batch, 1].

    Positives come first, then the lowest probabilities of the true class.
    """

    def hybrid_forward(self, F: Any, logits: Any, classes: Any) -> tuple[Any, Any]:  # noqa: N803 - Gluon's name
        probabilities = F.pick(F.softmax(logits), classes)
        # NaN counts as probability 0, so that its row is computed and makes the loss NaN.
        hardness = F.where(probabilities > 0, -probabilities, F.zeros_like(probabilities))
        positive = F.cast(classes > 0, "float32")
        order = set_apart(F, F.where(positive, F.ones_like(hardness), hardness))
        return order, F.sum(positive, axis=1, keepdims=True)


class _Rows(mx.gluon.HybridBlock):
    """Compute losses, the gradients of the rows that count, and the places of these rows.

    Inputs are logits, offsets, classes and target offsets as rows of the whole batch; and of each image the rows that
    may count, [batch, count], the number of positives, [batch, 1], and the place of its first row, [batch].
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def hybrid_forward(
        self,
        F: Any,  # noqa: N803 - Gluon's name
        logits: Any,
        offsets: Any,
        classes: Any,
        target_offsets: Any,
        rows: Any,
        positives: Any,
        firsts: Any,
    ) -> tuple[Any, ...]:
        places = F.broadcast_add(rows, F.expand_dims(firsts, axis=1))
        number = F.expand_dims(F.cast(F.contrib.arange_like(rows, axis=1), "float32"), axis=0)
        weights = F.broadcast_div(1 / F.maximum(positives, 1), F.sum(F.ones_like(positives)))
        of_class = F.broadcast_mul(F.broadcast_lesser(number, (1 + NEGATIVES_PER_POSITIVE) * positives), weights)
        of_box = F.broadcast_mul(F.broadcast_lesser(number, positives), weights)
        class_loss, by_logits = _cross_entropy(F, F.take(logits, places), F.take(classes, places))
        box_loss, by_offsets = _huber(F, F.take(offsets, places) - F.take(target_offsets, places))
        class_loss, box_loss = _weigh(F, class_loss, of_class), _weigh(F, box_loss, of_box)
        by_logits, by_offsets = (
            F.broadcast_mul(gradient, F.expand_dims(self._scale * weight, axis=2))
            for gradient, weight in ((by_logits, of_class), (by_offsets, of_box))
        )
        return class_loss + box_loss, class_loss, box_loss, by_logits, by_offsets, places


def _cross_entropy(F: Any, logits: Any, classes: Any) -> tuple[Any, Any]:  # noqa: N803 - Gluon's name
    """Return loss and gradient of each row, of logits [batch, n, classes] and classes [batch, n]."""
    numbers = F.cast(F.contrib.arange_like(logits, axis=2), "float32")
    labels = F.cast(F.expand_dims(classes, axis=2), "float32")
    is_class = F.broadcast_equal(labels, F.reshape(numbers, shape=(1, 1, -1)))
    return -F.pick(F.log_softmax(logits), classes), F.softmax(logits) - is_class


def _huber(F: Any, errors: Any) -> tuple[Any, Any]:  # noqa: N803 - Gluon's name
    """Return Huber's loss of each row and its gradient, of errors [batch, n, 4].

    MXNet's smooth_l1 is Huber's loss over delta, and its scalar is one over the root of delta.
    """
    losses = HUBER_DELTA * F.smooth_l1(errors, scalar=HUBER_DELTA**-0.5)
    return F.sum(losses, axis=2), F.clip(errors, -HUBER_DELTA, HUBER_DELTA)


def _weigh(F: Any, losses: Any, weights: Any) -> Any:  # noqa: N803 - Gluon's name
    """Return the sum of losses times weights; a loss of weight 0 does not count, even if it is NaN."""
    return F.sum(F.where(weights, losses * weights, F.zeros_like(losses)))


def _put_rows(values: Any, rows: Any, places: Any) -> None:
    """Write rows [n, m] to places [1, n] of values [boxes, m]: `values[places] = rows` in a third of the time."""
    mx.nd._internal._scatter_set_nd(values, rows, places, shape=values.shape, out=values)


def _flatten(values: Any) -> Any:
    """Return a view of [batch, n, ...] as [batch * n, ...]."""
    return values.reshape((-1, *values.shape[2:]))
