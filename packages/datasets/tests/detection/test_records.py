from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
from PIL import Image

from gaudi_datasets.detection.coco import NO_SIZE, PAST_EDGE, CocoAnnotations, parse_coco
from gaudi_datasets.detection.records import describe_records, write_records
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(1, 6):
        Image.effect_noise((60, 40), 50).convert("RGB").save(folder / f"{number}.jpg")
    return folder


def make_annotations(**fields: Any) -> CocoAnnotations:
    """Five images: 1 has two boxes, 2 none, 3 a crowd, 4 a bad box only, 5 a box and a box past the edge."""
    boxes = [(1, [0, 0, 30, 40], 0), (1, [1, 1, 2, 2], 1), (3, [0, 0, 9, 9], 1), (4, [3, 3, 0, 3], 0)]
    boxes += [(5, [15, 10, 15, 10], 0), (5, [50, 30, 11, 5], 0)]
    size = {"height": 40, "width": 60} | fields
    document = {
        "images": [{"id": number, "file_name": f"{number}.jpg", **size} for number in range(1, 6)],
        "annotations": [
            {"id": number, "image_id": image_id, "category_id": 7, "bbox": box, "iscrowd": is_crowd}
            for number, (image_id, box, is_crowd) in enumerate(boxes)
        ],
        "categories": [{"id": 7, "name": "bee"}, {"id": 3, "name": "ant"}],
    }
    return parse_coco(document, Path("x.json"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_training_leaves_out_images_without_a_box(images: Path, tmp_path: Path) -> None:
    manifest = write_records(make_annotations(), images, tmp_path / "out", "train", keep_empty=False)
    dropped = manifest["boxes"].pop("dropped")
    assert (manifest["images"], manifest["boxes"]) == ({"kept": 2, "of": 5}, {"kept": 3, "of": 6})
    assert list(dropped.values()) == [1, 1, 1]
    assert {NO_SIZE, PAST_EDGE} <= set(dropped)
    manifest["boxes"]["dropped"] = dropped
    assert re.findall(r"\d+", describe_records(manifest)) == ["2", "5", "3", "6", "1", "1", "1", "1"]
    source = RecordSource(tmp_path / "out", "train")
    assert [source.read(row).image_id for row in range(len(source))] == [1, 5]
    example = source.read(1)
    assert example.encoded == (images / "5.jpg").read_bytes()
    assert example.boxes_yxyx.tolist() == [[0.25, 0.25, 0.5, 0.5]]
    assert example.labels.tolist() == [2]
    assert source.read(0).is_crowd.tolist() == [False, True]


def test_evaluation_keeps_all_images_dealt_in_turn(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = write_records(make_annotations(), images, out, "val", keep_empty=True, shards=2)
    assert (manifest["images"]["kept"], manifest["boxes"]["kept"], manifest["boxes"]["of"]) == (5, 4, 6)
    assert names(out) == ["val-00000-of-00002.tfrecord", "val-00001-of-00002.tfrecord", "val.index", "val.json"]
    source = RecordSource(out, "val")
    assert [source.read(row).image_id for row in range(5)] == [1, 2, 3, 4, 5]


def test_the_manifest_tells_what_is_there(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_records(make_annotations(), images, out, "val", keep_empty=True, shards=2)
    manifest = json.loads((out / "val.json").read_text())
    assert manifest["images"] == {"kept": 5, "of": 5}
    assert [one["id"] for one in manifest["categories"]] == [3, 7]
    for shard, records in zip(manifest["shards"], [3, 2], strict=True):
        content = (out / shard["name"]).read_bytes()
        assert shard["bytes"] == len(content)
        assert shard["records"] == records
        assert shard["crc32c"] == f"{google_crc32c.value(content):08x}"


def test_the_same_input_gives_the_same_files(images: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_records(make_annotations(), images, tmp_path / name, "val", keep_empty=True)
    for name in names(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_progress_is_told(images: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    write_records(
        make_annotations(),
        images,
        tmp_path / "out",
        "val",
        keep_empty=True,
        shards=2,
        progress=lambda *now: told.append(now),
    )
    assert told == [(done, 5) for done in range(1, 6)]


def test_a_damaged_image_leaves_nothing_behind(images: Path, tmp_path: Path) -> None:
    encoded = (images / "3.jpg").read_bytes()
    (images / "3.jpg").write_bytes(encoded[:-200])
    with pytest.raises(DataError, match=r"3\.jpg: cannot be decoded"):
        write_records(make_annotations(), images, tmp_path / "out", "val", keep_empty=True)
    assert not (tmp_path / "out").exists()


def test_a_missing_image_or_folder_leaves_nothing_behind(images: Path, tmp_path: Path) -> None:
    (images / "3.jpg").unlink()
    with pytest.raises(MissingInputError, match="there is no") as caught:
        write_records(make_annotations(), images, tmp_path / "out", "val", keep_empty=True)
    assert str(caught.value.path).endswith("3.jpg")
    with pytest.raises(MissingInputError, match="there is no"):
        write_records(make_annotations(), tmp_path / "none", tmp_path / "out", "val", keep_empty=True)
    assert not (tmp_path / "out").exists()


def test_an_image_of_another_size_is_named(images: Path, tmp_path: Path) -> None:
    message = r"1\.jpg: is 40 pixels high and 60 wide, annotated \(image 1\) as 41 and 60"
    with pytest.raises(DataError, match=message):
        write_records(make_annotations(height=41), images, tmp_path / "out", "val", keep_empty=True)


def test_earlier_records_are_replaced_only_when_told(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_records(make_annotations(), images, out, "val", keep_empty=True, shards=3)
    with pytest.raises(UnsafeError, match="--overwrite"):
        write_records(make_annotations(), images, out, "val", keep_empty=True)
    (out / "notes.txt").write_text("mine")
    write_records(make_annotations(), images, out, "train", keep_empty=False)
    write_records(make_annotations(), images, out, "val", keep_empty=True, shards=1, overwrite=True)
    assert names(out) == [
        "notes.txt",
        "train-00000-of-00001.tfrecord",
        "train.index",
        "train.json",
        "val-00000-of-00001.tfrecord",
        "val.index",
        "val.json",
    ]


def test_files_in_no_manifest_are_never_replaced(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "val-of-somebody").write_text("mine")
    with pytest.raises(UnsafeError, match="was not written"):
        write_records(make_annotations(), images, out, "val", keep_empty=True, overwrite=True)
    (out / "val-of-somebody").unlink()
    (out / "val.json").write_text('{"shards": null}')
    with pytest.raises(UnsafeError, match="was not written"):
        write_records(make_annotations(), images, out, "val", keep_empty=True, overwrite=True)


def test_a_failed_overwrite_keeps_the_earlier_records(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_records(make_annotations(), images, out, "val", keep_empty=True)
    before = {name: (out / name).read_bytes() for name in names(out)}
    (images / "5.jpg").unlink()
    with pytest.raises(MissingInputError):
        write_records(make_annotations(), images, out, "val", keep_empty=True, overwrite=True)
    assert {name: (out / name).read_bytes() for name in names(out)} == before


@pytest.mark.parametrize(("split", "shards"), [("a/b", 0), ("..", 0), ("", 0), ("val", -1)])
def test_bad_arguments_are_refused(images: Path, tmp_path: Path, split: str, shards: int) -> None:
    with pytest.raises(ValueError, match=r"a word|at least 0"):
        write_records(make_annotations(), images, tmp_path / "out", split, keep_empty=True, shards=shards)


def test_no_image_to_learn_from_is_an_error(images: Path, tmp_path: Path) -> None:
    document = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "x"}]}
    with pytest.raises(DataError, match="none of 0 images"):
        write_records(parse_coco(document, Path("x.json")), images, tmp_path / "out", "train", keep_empty=False)
