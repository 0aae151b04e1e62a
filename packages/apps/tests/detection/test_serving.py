from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.detection.agreement import DetectionArrays, compare_detections
from gaudi_apps.detection.detector import Detector, DetectorExport, detect_by_builtins, detect_combined_nms, find_boxes
from gaudi_apps.inference.converters import to_float32, write_saved_model
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image
from gaudi_models.ssd import build_ssd

CATEGORIES = (Category(7, "red"), Category(9, "blue\nand ünlike"))


@pytest.fixture(scope="module")
def images(noise_images: list[bytes]) -> Any:
    return np.stack([prepare_image(one) for one in noise_images])


def to_detections(outputs: dict[str, Any]) -> DetectionArrays:
    return DetectionArrays(*(outputs[name].numpy() for name in ("boxes_yxyx", "labels", "scores")))


@pytest.mark.slow
def test_a_saved_model_finds_what_the_network_finds(
    detector_exports: dict[Path, Any], narrow_network: Any, noise_images: list[bytes], images: Any
) -> None:
    (saved,) = (path for path in detector_exports if path.name == "saved_model")
    signatures = tf.saved_model.load(str(saved)).signatures
    reference = DetectionArrays(*Detector(narrow_network).detect(images))
    outputs = signatures["serving_default"](encoded=tf.constant(noise_images))
    agreement = compare_detections(reference, to_detections(outputs))
    assert agreement.is_close
    assert agreement.compared > 20
    np.testing.assert_array_equal(outputs["num_detections"], (reference.labels > 0).sum(axis=1))
    assert outputs["boxes_yxyx"].shape == (3, 200, 4)
    assert outputs["labels"].dtype == outputs["num_detections"].dtype == tf.int32

    pixels = np.stack([tf.io.decode_png(one, channels=3) for one in noise_images])
    for batch in (1, 3):
        outputs = signatures["images"](images=tf.constant(pixels[:batch]))
        rows = DetectionArrays(reference.boxes_yxyx[:batch], reference.labels[:batch], reference.scores[:batch])
        assert compare_detections(rows, to_detections(outputs)).is_close


@pytest.mark.costly
def test_a_saved_model_names_its_classes(small_network: Callable[..., Any], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    write_saved_model(DetectorExport(small_network(3), CATEGORIES), saved)
    found = tf.saved_model.load(str(saved)).signatures["class_names"]()
    assert [name.decode() for name in found["class_names"].numpy()] == [one.name for one in CATEGORIES]
    assert found["category_ids"].numpy().tolist() == [7, 9]
    assert json.loads((saved / "assets" / "classes.json").read_text()) == [
        {"label": 1, "id": 7, "name": "red"},
        {"label": 2, "id": 9, "name": "blue\nand ünlike"},
    ]
    assert not (saved / "classes.json").exists()


@pytest.mark.costly
@pytest.mark.parametrize("box_voting", [False, True])
def test_other_suppressions_find_the_same_detections(detector_network: Any, images: Any, box_voting: bool) -> None:
    reference = DetectionArrays(*Detector(detector_network, box_voting=box_voting).detect(images))
    found = DetectionArrays(*(output.numpy() for output in detect_combined_nms(detector_network, images, box_voting)))
    assert compare_detections(reference, found).is_close
    np.testing.assert_array_equal(found.labels > 0, found.scores > 0)
    by_builtins = DetectionArrays(
        *(output.numpy() for output in detect_by_builtins(detector_network, images, box_voting))
    )
    assert compare_detections(reference, by_builtins).is_close
    np.testing.assert_array_equal(by_builtins.labels, reference.labels)


@pytest.mark.costly
def test_votes_move_boxes_and_keep_scores(detector_network: Any, images: Any) -> None:
    plain, voted = (
        DetectionArrays(*Detector(detector_network, box_voting=voting).detect(images)) for voting in (False, True)
    )
    np.testing.assert_array_equal(voted.labels, plain.labels)
    np.testing.assert_array_equal(voted.scores, plain.scores)
    assert np.abs(voted.boxes_yxyx - plain.boxes_yxyx).max() > 1e-3


@pytest.mark.slow
def test_a_copy_in_float32(images: Any) -> None:
    model = build_ssd(3, depth=18, pool_padding="symmetric", dtype="mixed_bfloat16")
    copy = to_float32(model)
    assert {layer.compute_dtype for layer in copy.layers} == {"float32"}
    assert {layer.compute_dtype for layer in model.layers} == {"float32", "bfloat16"}
    assert [layer.name for layer in copy.layers] == [layer.name for layer in model.layers]
    for one, other in zip(copy.variables, model.variables, strict=True):
        assert one.name == other.name
        np.testing.assert_array_equal(one, other)
    logits, _ = model(images, training=False)
    np.testing.assert_allclose(copy(images, training=False)[0], logits, atol=0.05 * np.abs(logits).max())
    assert find_boxes(copy, images)[0].dtype == tf.float32
