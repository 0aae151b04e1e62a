"""Classes on real photographs, in the folder that REAL_DATA names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.records import write_records
from gaudi_datasets.classification.sources import RecordSource
from gaudi_datasets.sampling import PADDING_ID, InputOptions

FOLDER = Path(os.environ.get("REAL_DATA", "")) / "clothing"

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get("REAL_DATA"), reason="REAL_DATA is unset; it must name the folder of real data"
    ),
]

COUNTS = {"train": 1023, "validation": 341, "test": 372}


@pytest.mark.parametrize("split", COUNTS)
def test_clothing_is_the_same_from_folders_and_from_records(split: str, tmp_path: Path) -> None:
    from gaudi_datasets.classification.pipeline import eval_dataset, train_dataset

    folders = FolderSource(FOLDER / split)
    assert (len(folders), len(folders.class_names)) == (COUNTS[split], 10)
    manifest = write_records(folders, tmp_path, split, shards=3, decode=True)
    assert manifest["images"] == {"kept": COUNTS[split], "of": COUNTS[split]}
    assert (sum(count > 0 for count in manifest["images_per_class"]), manifest["fixed"]) == (10, {})
    records = RecordSource(tmp_path, split)
    assert records.class_names == folders.class_names
    options = InputOptions(32, image_size=64, seed=1)
    ids: list[int] = []
    for one, other in zip(eval_dataset(folders, options), eval_dataset(records, options), strict=True):
        _assert_same(one, other)
        ids += one["image_ids"].numpy().tolist()
    assert sorted(image_id for image_id in ids if image_id != PADDING_ID) == list(range(COUNTS[split]))
    for one, other in zip(
        train_dataset(folders, options).take(5), train_dataset(records, options).take(5), strict=True
    ):
        _assert_same(one, other)


def test_reduced_scale_is_nearer_to_the_average_of_all_pixels() -> None:
    """At 128, photographs of 640x480 are decoded at a half; at 64 at a quarter."""
    import tensorflow as tf

    from gaudi_datasets.classification.pipeline import MEAN_RGB, prepare_image, prepare_pixels, resized_side

    photographs = [path.read_bytes() for path in sorted((FOLDER.parent / "coco_ccby" / "train2017").glob("*.jpg"))]
    for side in (128, 64):
        reduced, plain = [], []
        for encoded in photographs:
            pixels = tf.io.decode_jpeg(encoded, channels=3)
            if pixels.shape[0] % 4 or pixels.shape[1] % 4:
                continue
            scale = resized_side(side) / min(pixels.shape[:2])
            height, width = (round(each * scale) for each in pixels.shape[:2])
            top, left = (height - side) // 2, (width - side) // 2
            average = tf.image.resize(pixels, [height, width], antialias=True)[top : top + side, left : left + side]
            reduced.append(np.abs(prepare_image(encoded, side) + MEAN_RGB - average).mean())
            plain.append(np.abs(prepare_pixels(pixels, side) + MEAN_RGB - average).mean())
        assert len(reduced) > 20
        assert np.mean(reduced) < 0.75 * np.mean(plain)
        assert (np.array(reduced) < np.array(plain)).all()


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
