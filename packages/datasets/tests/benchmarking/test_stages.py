"""Check that the stages together make the same as the training input."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from gaudi_datasets.benchmarking.benchmark import store_smaller, try_smaller
from gaudi_datasets.benchmarking.classification_stages import make_prefixes, measure_classification
from gaudi_datasets.benchmarking.detection_stages import Loader, make_sample, measure_detection, open_batches
from gaudi_datasets.benchmarking.measurement import STAGES, Clocks, StageClock
from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.pipeline import draw_crops, train_dataset
from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.sources import CocoSource
from gaudi_datasets.sampling import InputOptions, SampleOrder

OPTIONS = InputOptions(8, image_size=32, seed=3)


@pytest.fixture(scope="module")
def coco(images: Path) -> CocoSource:
    return CocoSource(read_coco(images / "gt.json"), images / "images", keep_empty=False)


@pytest.mark.parametrize("loader", ["tensorflow", "opencv"])
def test_samples_of_detection_are_those_of_the_input(coco: CocoSource, loader: Loader) -> None:
    batch = next(iter(open_batches(coco, OPTIONS, loader)))
    indices, epochs = SampleOrder(len(coco), OPTIONS).at_step(0)
    sample, clock = make_sample(coco, OPTIONS, loader), StageClock()
    for row, (index, epoch) in enumerate(zip(indices.tolist(), epochs.tolist(), strict=True)):
        image, classes, offsets, num_matched = sample(index, epoch, clock)
        expected = np.asarray(batch["images"][row])
        np.testing.assert_array_equal(image, expected if loader == "tensorflow" else expected.transpose(1, 2, 0))
        np.testing.assert_array_equal(classes, batch["classes"][row])
        np.testing.assert_array_equal(offsets, batch["offsets"][row])
        assert num_matched == batch["num_matched"][row]
    assert clock.seconds.keys() == set(STAGES)


def test_stages_of_detection_are_measured_for_a_time(coco: CocoSource, clocks: Clocks) -> None:
    costs = measure_detection(coco, [1, 2, 3], OPTIONS, "opencv", seconds=5, clocks=clocks)
    assert costs == {"read": 250, "decode": 250, "crop": 500, "resize": 250, "colours": 250, "targets": 250}


@pytest.mark.costly
def test_pixels_of_classification_are_those_of_the_input(images: Path) -> None:
    source = FolderSource(images / "train")
    batch = next(iter(train_dataset(source, OPTIONS)))
    indices, epochs = SampleOrder(len(source), OPTIONS).at_step(0)
    rows = draw_crops([source.read(index) for index in indices.tolist()], epochs, OPTIONS)[:4]
    prefixes = make_prefixes(OPTIONS)
    assert list(prefixes) == ["nothing", "decode", "resize", "colours"]
    dataset = tf.data.Dataset.from_tensor_slices(rows).map(prefixes["colours"])
    np.testing.assert_array_equal(np.stack(list(dataset)), batch["images"])


@pytest.mark.costly
def test_stages_of_classification_are_measured_each_at_least_once(images: Path, clocks: Clocks) -> None:
    source = FolderSource(images / "train")
    costs = measure_classification(source, list(range(8)), OPTIONS, seconds=0, clocks=clocks)
    # 8 images in a call; what each stage of pixels adds is nothing by these clocks.
    assert costs == {"read": 31.25, "decode": 0, "crop": 31.25, "resize": 0, "colours": 0}


def test_images_are_stored_smaller_or_as_jpeg(coco: CocoSource, encode_image: Callable[..., bytes]) -> None:
    example = coco.read(2)
    assert store_smaller(example, 48) is example
    small = store_smaller(example, 24)
    assert (small.height, small.width) == (24, 31)
    with Image.open(io.BytesIO(small.encoded)) as image:
        assert (image.format, image.size) == ("JPEG", (31, 24))
    png = replace(example, encoded=encode_image(2, "PNG"))
    same_size = store_smaller(png, 1000)
    assert (same_size.height, same_size.width) == (48, 62)
    assert same_size.encoded.startswith(b"\xff\xd8")


def test_smaller_images_are_tried_where_there_is_something_to_gain(coco: CocoSource) -> None:
    examples = [coco.read(index) for index in range(4)]
    times = iter([9.0, 3.0])

    def measure(source: Any, indices: range, *, seconds: float) -> dict[str, float]:
        assert seconds == 2
        heights = {source.read(index).height for index in indices}
        return {"decode": next(times), "height": heights.pop()}

    assert try_smaller(examples, 24, measure, seconds=4) is None
    found = try_smaller(examples, 12, measure, seconds=4)
    assert found is not None
    assert (found.short_side, found.images, found.milliseconds) == (24, 4, (9, 3))
    assert found.larger == sum(min(example.height, example.width) > 24 for example in examples) > 0
    assert found.mean_bytes[0] == np.mean([len(example.encoded) for example in examples])
    assert found.mean_bytes[1] > 0
