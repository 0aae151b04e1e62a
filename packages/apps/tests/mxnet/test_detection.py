from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import tensorflow as tf

import gaudi_ops.tf
from gaudi_apps.mxnet.task import Detector
from gaudi_models.mxnet.ssd import build_ssd
from gaudi_ops import decode_boxes, non_max_suppression


def make_outputs(seed: int, images: int = 2, classes: int = 6) -> tuple[Any, Any]:
    """Logits and offsets by which some boxes of each image are something, as of a trained network."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=[images, 8732, classes]).astype(np.float32)
    logits[..., 0] += 5
    for image in logits:
        image[rng.choice(8732, 300, replace=False), rng.integers(1, classes, 300)] += 7
    return logits, rng.normal(0, 0.5, [images, 8732, 4]).astype(np.float32)


def detect(logits: Any, offsets: Any, **options: Any) -> Any:
    def compute(images: Any) -> tuple[Any, Any]:
        assert isinstance(images, mx.nd.NDArray)
        return mx.nd.array(logits), mx.nd.array(offsets)

    return Detector(compute, mx.cpu(), **options).detect(np.zeros([2, 3, 1, 1]))


def test_detections_are_those_of_tensorflow() -> None:
    logits, offsets = make_outputs(0)
    boxes, labels, scores = detect(logits, offsets)
    expected = gaudi_ops.tf.non_max_suppression(gaudi_ops.tf.decode_boxes(offsets), tf.nn.softmax(logits))
    assert (labels > 0).sum() > 200
    np.testing.assert_array_equal(labels, expected[1])
    np.testing.assert_allclose(boxes, np.clip(expected[0], 0, 1), atol=1e-5)
    np.testing.assert_allclose(scores, expected[2], atol=1e-6)
    assert (boxes.dtype, labels.dtype, scores.dtype) == (np.float32, np.int32, np.float32)


def test_rules_are_followed() -> None:
    logits, offsets = make_outputs(1)
    rules: dict[str, Any] = {"score_threshold": 0.3, "iou_threshold": 0.2, "max_per_class": 40, "max_detections": 9}
    boxes, labels, scores = detect(logits, offsets, **rules)
    assert boxes.shape == (2, 9, 4)
    for row in range(2):
        probabilities = mx.nd.softmax(mx.nd.array(logits[row])).asnumpy()
        expected = non_max_suppression(decode_boxes(offsets[row]), probabilities, **rules)
        np.testing.assert_allclose(boxes[row], np.clip(expected[0], 0, 1), atol=1e-6)
        np.testing.assert_array_equal(labels[row], expected[1])
        np.testing.assert_array_equal(scores[row], expected[2])


def test_what_is_not_filled_is_zero() -> None:
    logits, offsets = make_outputs(2)
    logits[1] = [9, 0, 0, 0, 0, 0]
    boxes, labels, scores = detect(logits, offsets)
    assert not boxes[1].any()
    assert not labels[1].any()
    assert not scores[1].any()
    assert labels[0].any()


def test_a_network_is_used_as_trained() -> None:
    net = build_ssd(3, depth=18)
    net.initialize()
    before = {name: parameter.data().asnumpy() for name, parameter in net.collect_params().items()}
    boxes, labels, scores = Detector(net, mx.cpu()).detect(np.ones([1, 3, 300, 300]))
    assert (boxes.shape, labels.shape, scores.shape) == ((1, 200, 4), (1, 200), (1, 200))
    for name, parameter in net.collect_params().items():
        np.testing.assert_array_equal(before[name], parameter.data().asnumpy())
