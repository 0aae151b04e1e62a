from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from gaudi_apps.detection.data import read_architecture
from gaudi_apps.detection.detector import Detector, SSDTask, make_preprocessor
from gaudi_apps.inference.media import read_images
from gaudi_apps.inference.visualizer import decode_image
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_datasets.detection.pipeline import prepare_image
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_models.architectures import SSDArchitecture
from gaudi_models.weights import WeightsMetadata
from gaudi_models.weights.contents import write_tensors
from gaudi_ops import iou


def prepare(image_dir: Path, *numbers: int) -> Any:
    return np.stack([prepare_image((image_dir / f"{number}.png").read_bytes()) for number in numbers])


def test_detections_of_a_network(task: SSDTask, image_dir: Path) -> None:
    """A network that has learnt nothing finds something everywhere: as many boxes as there may be."""
    boxes, labels, scores = Detector(task.model).detect(prepare(image_dir, 1, 2))
    assert (boxes.shape, labels.shape, scores.shape) == ((2, 200, 4), (2, 200), (2, 200))
    assert boxes.min() >= 0
    assert boxes.max() <= 1
    for image in range(2):
        assert (np.diff(scores[image]) <= 0).all()
        found = labels[image] > 0
        assert found.sum() > 10
        assert (scores[image][found] > 0.05).all()
        assert set(labels[image][found]) <= {1, 2}
        for label in (1, 2):
            rows = boxes[image][labels[image] == label]
            # Suppression saw the boxes before they were clipped to the image: those inside it are apart.
            inside = rows[((rows > 0) & (rows < 1)).all(axis=1)]
            overlaps = iou(inside, inside)
            assert (overlaps[~np.eye(len(inside), dtype=bool)] <= 0.5 + 1e-5).all()


def test_detections_are_where_the_network_says(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path
) -> None:
    detector = Detector(oracle({3: truth[3], 4: truth[4]}))
    boxes, labels, scores = detector.detect(prepare(image_dir, 4, 1, 3))
    assert labels[:, 0].tolist() == [1, 0, 2]
    assert (labels[:, 1:] == 0).all()
    assert scores[0, 0] == pytest.approx(np.exp(6) / (np.exp(6) + 1), abs=1e-4)
    np.testing.assert_allclose(boxes[[0, 2], 0], [truth[4][0][0], truth[3][0][0]], atol=1e-5)


@pytest.fixture(scope="module")
def run_dir(task: SSDTask, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with a checkpoint of the network."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.json").write_text("{}")
    categories = [{"id": 3, "name": "red", "supercategory": ""}, {"id": 5, "name": "blue", "supercategory": ""}]
    config = {"categories": categories, "pool_padding": "same", "model": "ssd_resnet18"}
    CheckpointFolder(folder / "checkpoints").save(7, task.read_state(), config)
    return folder


@pytest.fixture(scope="module")
def detector(run_dir: Path) -> Detector:
    """Load the run, which no test changes."""
    return Detector.load(run_dir)


def test_a_run_is_loaded_and_detects_in_files_bytes_and_pixels(
    task: SSDTask, detector: Detector, image_dir: Path
) -> None:
    paths = [image_dir / "1.png", image_dir / "2.png"]
    # In batches of one size: of boxes that overlap and score alike, the last bit decides which stays.
    expected = Detector(task.model).detect(prepare(image_dir, 1, 2, 1))
    found = detector.predict([paths[0], paths[1].read_bytes(), decode_image(paths[0].read_bytes())], batch_size=3)
    assert detector.class_names == ("red", "blue")
    for number, (boxes, labels, scores) in enumerate(zip(*expected, strict=True)):
        rows = (labels > 0) & (scores >= 0.3)
        np.testing.assert_allclose(found[number].boxes_yxyx, boxes[rows], atol=1e-5)
        np.testing.assert_array_equal(found[number].labels, labels[rows])
        np.testing.assert_allclose(found[number].scores, scores[rows], atol=1e-5)
        assert found[number].names == tuple(("red", "blue")[label - 1] for label in labels[rows])
        assert len(found[number].scores) > 0


def test_a_run_that_names_no_network_has_the_default_one() -> None:
    assert read_architecture({"pool_padding": "same"}) == SSDArchitecture("resnet34", 300)


def test_files_of_another_kind_are_refused(detector: Detector, image_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(MissingInputError) as missing:
        Detector.load(tmp_path)
    assert missing.value.path == str(tmp_path)
    np.savez(tmp_path / "x.npz", **{"conv1/kernel": np.zeros([7, 7, 3, 64], np.float32)})
    with pytest.raises(DataError) as unnamed:
        Detector.load(tmp_path / "x.npz")
    assert unnamed.value.path == str(tmp_path / "x.npz")
    with pytest.raises(MissingInputError):
        detector.predict([image_dir / "none.png"])


def test_a_runtime_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'onnx'.*'onnxruntime'"):
        Detector.load(tmp_path, runtime=cast("Any", "onnx"))


@pytest.mark.costly
def test_weights_of_a_part_of_a_detector_are_refused(tmp_path: Path) -> None:
    metadata = WeightsMetadata("same_pool", [{"name": "bee"}], 300)
    write_tensors({"conv1/kernel": np.zeros([7, 7, 3, 64], np.float32)}, tmp_path / "x", metadata=metadata)
    with pytest.raises(DataError) as caught:
        Detector.load(tmp_path / "x")
    assert caught.value.path == str(tmp_path / "x")


@pytest.mark.costly
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_photo_gives_the_same_detections_in_each_orientation(
    detector: Detector, image_dir: Path, tmp_path: Path, turn: int
) -> None:
    """From a file, from bytes and as `--inference` reads it; a PNG, so that the pixels are the same."""
    from PIL import Image, ImageOps

    upright, marks = Image.open(image_dir / "1.png").convert("RGB"), Image.Exif()
    marks[0x0112] = {6: 8, 8: 6}.get(turn, turn)  # what turns a photo upright, applied backwards
    buffer = io.BytesIO()
    upright.save(buffer, "PNG", exif=marks)
    stored = ImageOps.exif_transpose(Image.open(buffer))
    marks[0x0112] = turn
    stored.save(tmp_path / "a.png", exif=marks)
    expected, _ = detector.predict([image_dir / "1.png"] * 2)  # a batch of another size rounds differently
    found = detector.predict([tmp_path / "a.png", (tmp_path / "a.png").read_bytes()])
    for one in found:
        np.testing.assert_array_equal(one.boxes_yxyx, expected.boxes_yxyx)
        np.testing.assert_array_equal(one.scores, expected.scores)
    (read,) = read_images([tmp_path / "a.png"], make_preprocessor(300), lambda *_: pytest.fail("it is a whole image"))
    np.testing.assert_array_equal(read.pixels, np.asarray(upright))
