"""Backbone and size of the images: chosen once, kept with the weights, and found again by all that uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.classification.classifier import Classifier
from gaudi_apps.detection import detector
from gaudi_apps.detection.detector import Detector, SSDTask, make_preprocessor, run_export
from gaudi_apps.inference.predictor import read_trained
from gaudi_apps.runtime.errors import RunChangedError
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.errors import DataError, FlagError
from gaudi_distributed import SingleProcess
from gaudi_models.architectures import SSDArchitecture
from gaudi_models.weights import WeightsMetadata
from gaudi_models.weights.contents import write_tensors
from gaudi_ops.tf.keras_api import keras

COMMON = ("--batch_size", 2, "--lr_warmup_steps", 2, "--save_checkpoints_steps", 2, "--dtype", "fp32")
LARGE = SSDArchitecture("resnet18", 512)
CATEGORIES = (Category(7, "red"), Category(9, "blue"))


@pytest.fixture(scope="module")
def large_task() -> SSDTask:
    keras.utils.set_random_seed(0)
    task = SSDTask(3, keras_policy="float32", weight_decay=5e-4, communicator=SingleProcess(), architecture=LARGE)
    for variable in task.model.variables:  # many detections, of different scores
        if "class_head" in variable.name and "bias" in variable.name:
            variable.assign(np.tile([3.0, 0.0, 0.0], variable.shape[0] // 3))
    return task


@pytest.mark.costly
def test_a_run_remembers_its_network(
    ssd_train: Callable[..., Any], records: Path, image_dir: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = ("--data_dir", records, "--model_dir", run, *COMMON)
    network = ("--backbone", "resnet18", "--image_size", 512)
    done = ssd_train(*flags, *network, "--steps", 2, "--no_evaluate", "--vis_dataloader")
    assert done.status == 0, done.err
    metadata = CheckpointFolder(run / "checkpoints").load_newest().metadata
    assert (metadata["model"], metadata["image_size"]) == ("ssd_resnet18", 512)
    # Neither flag is given again where the checkpoint is used.
    done = ssd_train(*flags, "--mode", "eval")
    assert done.status == 0, done.err
    done = ssd_train("--mode", "predict", "--model_dir", run, "--inference", image_dir)
    assert done.status == 0, done.err
    # Training on is that of the same network or none.
    for other in (("--backbone", "resnet18"), ("--backbone", "resnet50", "--image_size", 512), ()):
        done = ssd_train(*flags, *other, "--steps", 3, "--no_evaluate")
        assert (done.status, type(done.error)) == (78, RunChangedError)
        assert done.error.field in ("backbone", "image_size")
    done = ssd_train(*flags, *network, "--steps", 3, "--no_evaluate")
    assert done.status == 0, done.err


@pytest.mark.costly
def test_a_run_remembers_that_its_boxes_vote(
    ssd_train: Callable[..., Any], records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--data_dir", records, "--model_dir", tmp_path / "run", *COMMON, "--backbone", "resnet18")
    assert ssd_train(*flags, "--box_voting", "--steps", 2, "--no_evaluate").status == 0
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").load_newest().metadata["box_voting"] is True
    votes, find_boxes = [], detector.find_boxes

    def note(model: Any, images: Any, box_voting: bool) -> Any:
        votes.append(box_voting)
        return find_boxes(model, images, box_voting)

    monkeypatch.setattr(detector, "find_boxes", note)
    assert ssd_train(*flags, "--mode", "eval").status == 0
    assert votes
    assert all(votes)
    assert read_trained(tmp_path / "run")[1].box_voting
    done = ssd_train(*flags, "--steps", 3, "--no_evaluate")
    assert (done.status, done.error.field) == (78, "box_voting")


@pytest.mark.costly
def test_parity_needs_the_network_of_the_checkpoint(
    ssd_train: Callable[..., Any], records: Path, tmp_path: Path
) -> None:
    flags = ("--data_dir", records, "--model_dir", tmp_path, *COMMON)
    assert ssd_train(*flags, "--image_size", 512, "--steps", 2, "--no_evaluate").status == 0
    done = ssd_train(*flags, "--mode", "parity", "--parity_output", tmp_path / "other")
    assert done.status == 64
    assert isinstance(done.error, FlagError)
    assert done.error.flag == "--image_size"


def test_a_network_that_does_not_exist_is_refused(ssd_train: Callable[..., Any], tmp_path: Path) -> None:
    for flag, value in (("--image_size", 400), ("--backbone", "resnet101")):
        done = ssd_train("--use_fake_data", "--model_dir", tmp_path / "run", flag, value)
        assert done.status == 64
        assert str(value) in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_a_detector_of_another_network_is_loaded(large_task: SSDTask, image_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    categories = [{"id": 3, "name": "red", "supercategory": ""}, {"id": 5, "name": "blue", "supercategory": ""}]
    config = {"categories": categories, "pool_padding": "same", "model": LARGE.name, "image_size": LARGE.image_size}
    CheckpointFolder(tmp_path / "checkpoints").save(7, large_task.read_state(), config)
    image = make_preprocessor(512).from_encoded((image_dir / "1.png").read_bytes())
    boxes, labels, scores = (one[0] for one in Detector(large_task.model).detect(image[None]))
    detector = Detector.load(tmp_path)
    assert detector.image_size == 512
    (found,) = detector.predict([image_dir / "1.png"], score_threshold=0.05)
    rows = (labels > 0) & (scores >= 0.05)
    assert rows.any()
    np.testing.assert_allclose(found.boxes_yxyx, boxes[rows], atol=1e-5)
    np.testing.assert_array_equal(found.labels, labels[rows])


def test_a_classifier_is_no_detector_and_a_detector_no_classifier(tmp_path: Path) -> None:
    for model, size, load in (("resnet50", 224, Detector.load), (LARGE.name, 512, Classifier.load)):
        metadata = WeightsMetadata("symmetric", [{"name": "bee"}], size, model)
        write_tensors({"conv1/kernel": np.zeros([7, 7, 3, 64], np.float32)}, tmp_path / "x", metadata=metadata)
        with pytest.raises(DataError) as caught:
            load(tmp_path / "x")
        assert caught.value.path == str(tmp_path / "x")


@pytest.mark.slow
def test_exports_are_of_the_network(large_task: SSDTask, noise_images: list[bytes], tmp_path: Path) -> None:
    images = np.stack([make_preprocessor(512).from_encoded(one) for one in noise_images[:1]])
    exports = run_export(
        large_task.model,
        CATEGORIES,
        noise_images[:1],
        tmp_path,
        ("saved_model", "tflite", "safetensors", "onnx"),
        step=12,
        architecture=LARGE,
        pool_padding="same",
        box_voting=True,
    )
    for path, (agreement, *_) in exports.items():
        assert agreement.is_close
        assert agreement.compared > 20
        manifest = json.loads((path / "export.json").read_text())
        assert (manifest["model"], manifest["image_size"], manifest["box_voting"]) == ("ssd_resnet18", 512, True)
    loaded = Detector.load(tmp_path / "safetensors")
    assert loaded.image_size == 512
    expected = Detector(large_task.model, box_voting=True).detect(images)
    np.testing.assert_allclose(loaded.detect(images)[0], expected[0], atol=1e-5)
