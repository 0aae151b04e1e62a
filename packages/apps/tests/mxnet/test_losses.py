from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import gaudi_ops.tf
from gaudi_apps.mxnet.losses import SSDLoss, largest_rows, set_apart
from gaudi_ops import reference

VALUES = st.sampled_from([0.0, 1e-38, 1e-7, 0.3, 0.30000001, 1.0, 1.0000001, 87.0])


@given(st.lists(st.lists(VALUES, min_size=9, max_size=9), min_size=1, max_size=3), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_largest_rows_are_those_of_the_mask(values: list[list[float]], count: int) -> None:
    array = np.array(values, np.float32)
    rows = largest_rows(set_apart(mx.nd, mx.nd.array(array)), count).asnumpy()
    assert rows.dtype == np.int32
    expected = np.argsort(-array, axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(rows, expected)
    mask = np.zeros(array.shape, bool)
    np.put_along_axis(mask, rows, True, axis=1)
    np.testing.assert_array_equal(mask, reference.topk_mask(array, count))


def test_neighbouring_numbers_are_told_apart_in_long_rows() -> None:
    """The last of 8732 rows is larger by one unit in the last place: it comes first, and then the others in order."""
    values = np.full([1, 8732], 1.9999999, np.float32)
    values[0, -1] = np.nextafter(values[0, 0], np.float32(3))
    rows = largest_rows(set_apart(mx.nd, mx.nd.array(values)), 100).asnumpy()[0]
    assert rows.tolist() == [8731, *range(99)]


def make_batch(seed: int, images: int = 3, boxes: int = 200, classes: int = 5, share: float = 0.1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(1, classes, [images, boxes]) * (rng.random([images, boxes]) < share)
    return {
        "logits": rng.normal(0, 3, [images, boxes, classes]).astype(np.float32),
        "offsets": rng.normal(0, 2, [images, boxes, 4]).astype(np.float32),
        "classes": labels.astype(np.int32),
        "target_offsets": rng.normal(0, 2, [images, boxes, 4]).astype(np.float32),
        "num_matched": (labels > 0).sum(axis=1).astype(np.int32),
    }


def compute(batch: dict[str, Any], loss_function: SSDLoss | None = None) -> tuple[list[float], list[Any]]:
    """Compute the three losses, and the gradients of their sum with respect to logits and offsets."""
    num_matched = batch["num_matched"]
    arrays = {name: mx.nd.array(values, dtype=values.dtype) for name, values in batch.items() if name != "num_matched"}
    losses, gradients = (loss_function or SSDLoss())(**arrays, num_matched=num_matched)
    return [float(loss.asscalar()) for loss in losses], [each.asnumpy() for each in gradients]


@pytest.mark.costly
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.005, 0.1, 0.3, 1.0]))
@settings(max_examples=25, deadline=None)
def test_loss_and_gradients_are_those_of_tensorflow(seed: int, share: float) -> None:
    batch = make_batch(seed, share=share)
    losses, gradients = compute(batch)
    np.testing.assert_allclose(losses, reference.ssd_loss(**batch), rtol=1e-5, atol=1e-6)
    tensors = {name: tf.constant(values) for name, values in batch.items()}
    with tf.GradientTape() as tape:
        tape.watch([tensors["logits"], tensors["offsets"]])
        expected = gaudi_ops.tf.ssd_loss(**tensors)
    np.testing.assert_allclose(losses, [loss.numpy() for loss in expected], rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(
        gradients, tape.gradient(expected[0], [tensors["logits"], tensors["offsets"]]), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)


def test_of_equal_negatives_the_lower_rows_count() -> None:
    batch = make_batch(0, images=1, boxes=50)
    batch["classes"][:] = 0
    batch["classes"][0, 30], batch["num_matched"] = 2, np.array([1])
    batch["logits"][:] = 1.0
    (gradient, _) = compute(batch)[1]
    assert np.flatnonzero(gradient[0].any(axis=-1)).tolist() == [0, 1, 2, 30]


def test_an_image_without_objects_adds_nothing() -> None:
    batch = make_batch(1)
    batch["classes"][1], batch["num_matched"][1] = 0, 0
    losses, gradients = compute(batch)
    assert all(not gradient[1].any() for gradient in gradients)
    others = {name: np.delete(values, 1, axis=0) for name, values in batch.items()}
    np.testing.assert_allclose(losses, np.array(compute(others)[0]) * 2 / 3, rtol=1e-5)


def test_no_objects_at_all_is_no_loss() -> None:
    losses, gradients = compute(make_batch(2, share=0))
    assert losses == [0, 0, 0]
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_stays_none(value: float) -> None:
    batch = make_batch(3)
    batch["logits"][0, 7] = value
    assert not np.isfinite(compute(batch)[0][0])


def test_a_class_without_any_probability_has_its_loss() -> None:
    """Of a positive: exact, although no float32 holds its probability."""
    batch = make_batch(4, images=1, boxes=20)
    batch["logits"][:], batch["classes"][:] = 0, 0
    batch["classes"][0, 4], batch["num_matched"] = 1, np.array([1])
    batch["logits"][0, 4, 2] = 1000
    assert compute(batch)[0][1] == pytest.approx(1000 + 3 * np.log(5), rel=1e-6)


def test_one_object_takes_batches_of_any_shape_one_after_the_other() -> None:
    """Check that arrays kept from a batch have no part in the next one."""
    loss_function = SSDLoss()
    for seed, images, boxes, share in [(5, 3, 200, 0.1), (6, 3, 200, 0.02), (7, 2, 200, 0.1), (8, 2, 90, 0.9)]:
        batch = make_batch(seed, images, boxes, share=share)
        losses, gradients = compute(batch, loss_function)
        expected, expected_gradients = compute(batch)
        assert losses == expected
        for ours, theirs in zip(gradients, expected_gradients, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_the_scale_is_of_the_gradients_alone() -> None:
    batch = make_batch(9)
    losses, gradients = compute(batch)
    scaled_losses, scaled = compute(batch, SSDLoss(128.0))
    assert scaled_losses == losses
    for ours, theirs in zip(scaled, gradients, strict=True):
        np.testing.assert_array_equal(ours, 128 * theirs)


def test_gradients_go_on_to_what_the_outputs_come_from() -> None:
    batch = make_batch(10)
    weight = mx.nd.array([2.0])
    weight.attach_grad()
    logits, offsets = (mx.nd.array(batch[name]) for name in ("logits", "offsets"))
    with mx.autograd.record():
        first, second = [mx.nd.broadcast_mul(values, weight.reshape((1, 1, 1))) for values in (logits, offsets)]
    classes, targets = (mx.nd.array(batch[name]) for name in ("classes", "target_offsets"))
    _, gradients = SSDLoss()(first, second, classes, targets, batch["num_matched"])
    mx.autograd.backward([first, second], gradients)
    expected = sum((gradients[i].asnumpy() * batch[name]).sum() for i, name in enumerate(("logits", "offsets")))
    assert weight.grad.asscalar() == pytest.approx(expected, rel=1e-4)
