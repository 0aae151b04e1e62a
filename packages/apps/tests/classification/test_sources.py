from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.classification.data import (
    DecodedSource,
    JoinedSource,
    encode_bitmap,
    open_source,
    open_training_data,
)
from gaudi_apps.resnet_train import ResNetConfig, make_train_config
from gaudi_apps.runtime.settings import Distribution
from gaudi_datasets.classification.sources import open_split
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.flags import parse_flags
from gaudi_distributed.cluster.rank_info import RankInfo


def test_splits_are_joined_in_their_order(folders: Path) -> None:
    first, second = (open_split(folders, name) for name in ("train", "more"))
    joined = open_source(str(folders), ["train", "more"])
    assert len(joined) == 18
    assert joined.class_names == ("blue", "green", "red")
    ids = [joined.read(index).image_id for index in range(18)]
    assert ids == [*(first.read(i).image_id for i in range(12)), *(12 + second.read(i).image_id for i in range(6))]
    assert len({*ids}) == 18
    assert joined.read(13).encoded == second.read(1).encoded
    assert joined.fingerprint != open_source(str(folders), ["more", "train"]).fingerprint


def test_val_and_validation_mean_each_other(folders: Path) -> None:
    assert open_split(folders, "val").fingerprint == open_split(folders, "validation").fingerprint
    with pytest.raises(MissingInputError):
        open_source(str(folders), ["test"])
    with pytest.raises(MissingInputError, match="--data_dir: is not given"):
        open_source(None, ["train"])


@pytest.mark.parametrize("name", ["train-00000-of-00001", "train/train-00000-of-00001"])
def test_a_folder_of_the_folder_that_has_the_split_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "full" / "tf_records" / name
    path.parent.mkdir(parents=True)
    path.touch()
    (tmp_path / "full" / "raw").mkdir()
    with pytest.raises(MissingInputError) as caught:
        open_split(tmp_path / "full", "train")
    assert caught.value.path == str(tmp_path / "full")
    assert '"tf_records"' in str(caught.value.remedy)


def test_splits_of_other_classes_are_not_joined(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    cv2.imwrite(str(tmp_path / "cat" / "1.png"), np.zeros((8, 8, 3), np.uint8))
    sources = [open_split(folders, "train"), open_split(tmp_path.parent, tmp_path.name)]
    with pytest.raises(DataError, match="other classes") as caught:
        JoinedSource(sources)
    assert caught.value.path == sources[1].name
    assert sources[0].name in str(caught.value)


@pytest.mark.parametrize("shape", [(5, 4, 3), (4, 5, 3), (1, 1, 3), (7, 6, 3)])
def test_a_bitmap_is_the_pixels(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    np.testing.assert_array_equal(tf.io.decode_image(encode_bitmap(pixels), channels=3), pixels)


def test_an_image_that_only_tensorflow_refuses_is_named(folders: Path) -> None:
    source = open_split(folders, "train")
    example = source.read(0)
    source.read = lambda index: replace(example, encoded=example.encoded[:-9])  # type: ignore[method-assign]
    with pytest.raises(DataError) as caught:
        DecodedSource(source, max_bytes=10**6).read(0)
    assert caught.value.record == f"{source.name}: record 0"


def test_decoded_images_are_kept_as_far_as_memory_goes(folders: Path) -> None:
    source = open_split(folders, "train")
    cached = DecodedSource(source, max_bytes=20_000)
    for _ in range(2):
        examples = [cached.read(index) for index in range(len(cached))]
    kept = [example for example in examples if example.encoded.startswith(b"BM")]
    assert 0 < len(kept) < len(source)
    assert sum(len(example.encoded) for example in kept) <= 20_000 + 54
    for index, example in enumerate(examples):
        original = source.read(index)
        assert (example.image_id, example.label) == (original.image_id, original.label)
        images = [tf.io.decode_image(one.encoded, channels=3) for one in (example, original)]
        np.testing.assert_array_equal(*images)
    assert cached.read(0) is cached.read(0)
    assert (cached.fingerprint, cached.class_names) == (source.fingerprint, source.class_names)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_of_a_machine_share_the_memory_for_decoded_images(
    ranks: int, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reads all images in the end, and would else keep as many as fit into half of what is free."""
    most = list[int]()
    monkeypatch.setattr("gaudi_datasets.memory.measure_free_memory", lambda: 1600)
    monkeypatch.setattr(DecodedSource, "__init__", lambda self, source, max_bytes=-1: most.append(max_bytes))
    monkeypatch.setattr(DecodedSource, "__len__", lambda self: 12)
    words = ["--data_dir", str(folders), "--cache_decoded_image", "--batch_size", "8"]
    config = parse_flags(ResNetConfig, words, prog="resnet_train")
    distribution = Distribution(RankInfo(size=ranks, local_size=ranks))
    open_training_data(make_train_config(config, distribution))
    assert most == [800 // ranks]
