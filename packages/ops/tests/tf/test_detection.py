from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import gaudi_ops
from gaudi_ops.tf import decode_boxes, default_boxes, encode_targets, non_max_suppression
from gaudi_ops.tf.detection import suppress_by_overlaps

FOLDER = Path(__file__).parents[1] / "golden"
TARGETS, NMS = np.load(FOLDER / "targets.npz"), np.load(FOLDER / "nms.npz")

seeds = st.integers(0, 2**32 - 1)
traced_targets = tf.function(
    encode_targets, input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int32)]
)
traced_batch_targets = tf.function(
    encode_targets, input_signature=[tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, None], tf.int32)]
)


def random_objects(rng: np.random.Generator, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Boxes of all sizes on a grid, so that some are equal and some of no size, and their labels."""
    corners = rng.integers(0, 33, [count, 2, 2]) / np.float32(32)
    return np.sort(corners, axis=1).reshape(-1, 4).astype(np.float32), rng.integers(1, 81, count, np.int32)


def pad(arrays: list[npt.NDArray[Any]], rows: int) -> npt.NDArray[Any]:
    return np.stack([np.pad(a, [(0, rows - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in arrays])


def check_targets(result: Any, expected: Any) -> None:
    np.testing.assert_array_equal(result[0], expected[0])
    np.testing.assert_allclose(result[1], expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(result[2], expected[2])
    assert [part.dtype for part in result] == [tf.int32, tf.float32, tf.int32]


def test_default_boxes_are_numpys() -> None:
    np.testing.assert_array_equal(default_boxes(), gaudi_ops.default_boxes())


@pytest.mark.parametrize("case", range(5))
def test_targets_are_the_originals(case: int) -> None:
    result = encode_targets(TARGETS[f"gt_boxes_yxyx_{case}"], TARGETS[f"gt_classes_{case}"])
    check_targets(result, [TARGETS[f"{name}_{case}"] for name in ("classes", "boxes", "num_matched")])


def test_targets_of_a_padded_batch_are_the_originals() -> None:
    boxes = pad([TARGETS[f"gt_boxes_yxyx_{case}"] for case in range(5)], 70)
    labels = pad([TARGETS[f"gt_classes_{case}"] for case in range(5)], 70)
    expected = [[TARGETS[f"{name}_{case}"] for case in range(5)] for name in ("classes", "boxes", "num_matched")]
    check_targets(encode_targets(boxes, labels), expected)
    check_targets(traced_batch_targets(boxes, labels), expected)


@given(seeds, st.integers(0, 12))
@settings(max_examples=40, deadline=None)
def test_targets_are_numpys(seed: int, count: int) -> None:
    boxes, labels = random_objects(np.random.default_rng(seed), count)
    check_targets(traced_targets(boxes, labels), gaudi_ops.encode_targets(boxes, labels))


@given(seeds, st.lists(st.integers(0, 6), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_targets_of_a_batch_are_those_of_its_images(seed: int, counts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    objects = [random_objects(rng, count) for count in counts]
    boxes, labels = (pad([image[i] for image in objects], max(counts) + 1) for i in (0, 1))
    expected = zip(*(gaudi_ops.encode_targets(*image) for image in objects), strict=True)
    check_targets(traced_batch_targets(boxes, labels), [np.stack(part) for part in expected])


def test_a_box_that_is_no_number_takes_no_match_of_others() -> None:
    boxes = np.array([[np.nan] * 4, [0.1, 0.1, 0.6, 0.6], [0, np.nan, 1, 1]], np.float32)
    labels = np.array([1, 2, 3], np.int32)
    check_targets(encode_targets(boxes, labels), gaudi_ops.encode_targets(boxes[1:2], labels[1:2]))


@pytest.mark.parametrize("count", [1, 3])
def test_each_box_has_one_label(count: int) -> None:
    boxes = np.array([[0.1, 0.1, 0.6, 0.6], [0.2, 0.2, 0.9, 0.9]], np.float32)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        encode_targets(boxes, np.ones(count, np.int32))


def test_an_overlap_of_exactly_the_threshold_matches() -> None:
    """The object's own best is row 1, of side .6; it overlaps the square of row 0 and the wide box of row 2 by .5."""
    spec = gaudi_ops.DefaultBoxSpec(100, (1,), (100,), (50, 72), ((4,),))
    classes, _, num_matched = encode_targets([[0.25, 0.0, 0.75, 1.0]], [7], spec)
    np.testing.assert_array_equal(classes, [7, 7, 7, 0])
    assert num_matched == 3


def test_targets_in_a_data_pipeline_have_static_shapes() -> None:
    data = tf.data.Dataset.from_tensors(random_objects(np.random.default_rng(0), 3)).map(encode_targets).batch(2)
    assert [spec.shape.as_list() for spec in data.element_spec] == [[None, 8732], [None, 8732, 4], [None]]


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_decoding_is_numpys(dtype: Any) -> None:
    offsets = tf.cast(np.random.default_rng(0).normal(size=[2, 8732, 4]), dtype)
    traced = tf.function(decode_boxes, input_signature=[tf.TensorSpec([None, 8732, 4], dtype)])
    boxes = traced(offsets)
    assert boxes.dtype == tf.float32
    expected = gaudi_ops.decode_boxes(tf.cast(offsets, tf.float32))
    np.testing.assert_allclose(boxes, expected, rtol=1e-6, atol=1e-6)


def test_decoding_is_the_originals() -> None:
    golden = np.load(FOLDER / "box_decode.npz")
    # From the rows' order level, box, row, column to the model's.
    order, start = [], 0
    for size, boxes in zip(gaudi_ops.SSD300.feature_sizes, gaudi_ops.SSD300.boxes_per_cell, strict=True):
        rows = start + np.arange(boxes * size * size).reshape(boxes, size, size)
        order.append(rows.transpose(1, 2, 0).ravel())
        start += rows.size
    rows = np.concatenate(order)
    np.testing.assert_allclose(decode_boxes(golden["encoded"][rows]), golden["decoded_yxyx"][rows], rtol=0, atol=1e-6)


def test_detections_are_the_originals() -> None:
    scores = np.zeros((8732, 81), np.float32)
    scores[NMS["rows"], np.arange(1, 81)] = NMS["scores"]
    traced = tf.function(
        non_max_suppression, input_signature=[tf.TensorSpec([None, 8732, 4]), tf.TensorSpec([None, 8732, 81])]
    )
    results = traced(np.stack([NMS["boxes"]] * 2), np.stack([scores, 0 * scores]))
    assert [part.dtype for part in results] == [tf.float32, tf.int32, tf.float32]
    for result, name in zip(results, ("out_boxes", "out_labels", "out_scores"), strict=True):
        np.testing.assert_array_equal(result[0], NMS[name][::-1])
        np.testing.assert_array_equal(result[1], 0 * NMS[name])


@pytest.mark.costly
@given(seeds, st.sampled_from([0.2, 0.5, 0.7]), st.sampled_from([10, 150]), st.sampled_from([8, 29, 1000]))
@settings(max_examples=25, deadline=None)
def test_votes_are_numpys(seed: int, voting_iou: float, max_detections: int, max_voters: int) -> None:
    """Of both forms of suppression."""
    rng = np.random.default_rng(seed)
    boxes = np.sort(rng.random((2, 30, 2, 2), np.float32), axis=2).reshape(2, 30, 4)
    scores = np.array(rng.permutation(2 * 30 * 4).reshape(2, 30, 4) / 240, np.float32)  # no ties
    options: dict[str, Any] = {"max_detections": max_detections, "score_threshold": 0.25, "voting_iou": voting_iou}
    options |= {"max_voters": max_voters}
    by_library = non_max_suppression(boxes, scores, max_per_class=max_detections, **options)
    by_rounds = suppress_by_overlaps(boxes, scores, max_per_class=max_detections, **options)
    for results in (by_library, by_rounds):
        for image in range(2):
            expected = gaudi_ops.non_max_suppression(
                boxes[image], scores[image], max_per_class=max_detections, **options
            )
            for result, rows in zip(results, expected, strict=True):
                np.testing.assert_allclose(result[image, : len(rows)], rows, rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(result[image, len(rows) :], 0)


@given(seeds, st.sampled_from([0.3, 0.5, 0.8]), st.sampled_from([5, 200]), st.sampled_from([10, 150]))
@settings(max_examples=25, deadline=None)
def test_detections_are_numpys(seed: int, threshold: float, max_per_class: int, max_detections: int) -> None:
    rng = np.random.default_rng(seed)
    boxes = np.sort(rng.random((2, 30, 2, 2), np.float32), axis=2).reshape(2, 30, 4)
    scores = np.array(rng.permutation(2 * 30 * 4).reshape(2, 30, 4) / 240, np.float32)  # no ties
    options: dict[str, Any] = {"iou_threshold": threshold, "max_per_class": max_per_class}
    options |= {"max_detections": max_detections, "score_threshold": 0.25}
    results = non_max_suppression(boxes, scores, **options)
    for image in range(2):
        for result, expected in zip(
            results, gaudi_ops.non_max_suppression(boxes[image], scores[image], **options), strict=True
        ):
            assert result.shape[1] == max_detections
            np.testing.assert_array_equal(result[image, : len(expected)], expected)
            np.testing.assert_array_equal(result[image, len(expected) :], 0)


@given(seeds, st.sampled_from([0.3, 0.5, 0.8]), st.sampled_from([5, 200]), st.sampled_from([10, 150]))
@settings(max_examples=25, deadline=None)
def test_suppression_in_rounds_is_numpys(seed: int, threshold: float, max_per_class: int, max_detections: int) -> None:
    """With rows to spare and without, and images that take different numbers of rounds."""
    rng = np.random.default_rng(seed)
    boxes = np.sort(rng.random((2, 30, 2, 2), np.float32), axis=2).reshape(2, 30, 4)
    scores = np.array(rng.permutation(2 * 30 * 4).reshape(2, 30, 4) / 240, np.float32)  # no ties
    options: dict[str, Any] = {"iou_threshold": threshold, "max_detections": max_detections, "score_threshold": 0.25}
    options |= {"max_per_class": max_per_class}
    results = suppress_by_overlaps(boxes, scores, **options)
    assert [part.dtype for part in results] == [tf.float32, tf.int32, tf.float32]
    for image in range(2):
        expected = gaudi_ops.non_max_suppression(boxes[image], scores[image], **options)
        for result, rows in zip(results, expected, strict=True):
            assert result.shape[1] == max_detections
            np.testing.assert_array_equal(result[image, : len(rows)], rows)
            np.testing.assert_array_equal(result[image, len(rows) :], 0)


def test_a_chain_of_boxes_is_suppressed_as_one_after_the_other() -> None:
    """Each overlaps the next one alone, so every second one stays, and each is decided in a round of its own."""
    tops = np.arange(40, dtype=np.float32)[:, None] * np.array([0.25, 0, 0.25, 0], np.float32)
    boxes = (tops + np.array([0, 0, 1, 1], np.float32))[None]
    scores = np.stack([np.zeros(40), np.linspace(0.9, 0.1, 40)], axis=1)[None].astype(np.float32)
    kept, labels, values = suppress_by_overlaps(boxes, scores, iou_threshold=0.55, max_detections=40)
    np.testing.assert_array_equal(values[0, :20], scores[0, ::2, 1])
    np.testing.assert_array_equal(kept[0, :20], boxes[0, ::2])
    assert labels.numpy().tolist() == [[1] * 20 + [0] * 20]


def test_an_overlap_of_exactly_the_threshold_suppresses() -> None:
    boxes = np.array([[[0, 0, 4, 4], [0, 0, 4, 2], [0, 0, 4, 1.9]]], np.float32)
    scores = tf.constant([[[0, 0.75], [0, 0.5], [0, 0.25]]], tf.bfloat16)
    _, labels, values = non_max_suppression(boxes, scores, max_detections=4)
    np.testing.assert_array_equal(labels, [[1, 1, 0, 0]])
    np.testing.assert_array_equal(values, [[0.75, 0.25, 0, 0]])


@pytest.mark.costly
@pytest.mark.parametrize("suppress", [non_max_suppression, suppress_by_overlaps])
@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.3, 1.0, 1.5])
@pytest.mark.parametrize(("count", "voting_iou"), [(0, None), (3, 0.5), (60, None), (60, 0.5)])
def test_any_threshold_and_number_of_boxes(
    suppress: Any, threshold: float, count: int, voting_iou: float | None
) -> None:
    options: dict[str, Any] = {"iou_threshold": threshold, "voting_iou": voting_iou, "max_per_class": 20}
    options |= {"max_voters": 30, "score_threshold": 0.1}
    signature = [tf.TensorSpec([None, None, 4]), tf.TensorSpec([None, None, 3])]
    traced = tf.function(functools.partial(suppress, **options), input_signature=signature)
    rng = np.random.default_rng(0)
    boxes = np.sort(rng.random((count, 2, 2), np.float32), axis=1).reshape(count, 4)
    boxes[count // 2 :] = boxes[: count - count // 2]
    scores = np.array(rng.permutation(count * 3).reshape(count, 3) / max(count * 3, 1), np.float32)  # no ties
    expected = gaudi_ops.non_max_suppression(boxes, scores, **options)
    for result, rows in zip(traced(boxes[None], scores[None]), expected, strict=True):
        assert result.shape[1] == 200
        np.testing.assert_allclose(result[0, : len(rows)], rows, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(result[0, len(rows) :], 0)
