from __future__ import annotations

import json
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.detection.coco import COCO_CATEGORIES, Category, parse_coco
from gaudi_datasets.detection.records import describe_records, write_records
from gaudi_datasets.detection.sources import CocoSource, RecordSource, ground_truth
from gaudi_datasets.documents import seal
from gaudi_datasets.errors import DataError, MissingInputError

DOCUMENT = {
    "images": [{"id": number, "file_name": f"{number}.jpg", "height": 40, "width": 60} for number in range(4)],
    "annotations": [
        {"id": 1, "image_id": 0, "category_id": 1, "bbox": [3.5, 5, 20, 30], "area": 500, "iscrowd": 0},
        {"id": 2, "image_id": 0, "category_id": 90, "bbox": [0, 0, 60, 40], "area": 2400, "iscrowd": 1},
        {"id": 3, "image_id": 3, "category_id": 90, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0},
    ],
    "categories": [
        {"id": 1, "name": "person", "supercategory": "person"},
        {"id": 90, "name": "toothbrush", "supercategory": "indoor"},
    ],
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(4):
        Image.effect_noise((60, 40), 50).convert("RGB").save(images / f"{number}.jpg")
    coco = parse_coco(DOCUMENT, Path("x.json"))
    write_records(coco, images, tmp_path / "records", "val", shards=2, keep_empty=True)
    return tmp_path / "records"


def test_the_manifest_names_the_categories(data_dir: Path) -> None:
    source = RecordSource(data_dir, "val")
    assert source.name == f"{data_dir}:val"
    assert source.categories == (Category(1, "person", "person"), Category(90, "toothbrush", "indoor"))
    assert len(source) == 4
    assert source.read(0).labels.tolist() == [1, 2]


def test_records_without_a_manifest_are_of_coco(data_dir: Path) -> None:
    (data_dir / "val.json").unlink()
    source = RecordSource(data_dir, "val")
    assert source.categories == COCO_CATEGORIES
    assert source.read(0).labels.tolist() == [1, 80]


def test_the_fingerprint_is_of_the_data_and_not_of_its_place(data_dir: Path, tmp_path: Path) -> None:
    first = RecordSource(data_dir, "val").fingerprint
    copy = Path(shutil.copytree(data_dir, tmp_path / "copy"))
    assert RecordSource(copy, "val").fingerprint == first
    changed = {**DOCUMENT, "annotations": DOCUMENT["annotations"][:2]}
    write_records(
        parse_coco(changed, Path("x.json")), tmp_path / "images", tmp_path / "changed", "val", shards=2, keep_empty=True
    )
    assert RecordSource(tmp_path / "changed", "val").fingerprint != first

    # Without a manifest, by the names and sizes of the shards.
    for folder in (data_dir, copy, tmp_path / "changed"):
        (folder / "val.json").unlink()
    bare = RecordSource(data_dir, "val").fingerprint
    assert bare == RecordSource(copy, "val").fingerprint != first
    assert RecordSource(tmp_path / "changed", "val").fingerprint != bare


def test_the_ground_truth_is_that_of_the_annotations(data_dir: Path) -> None:
    document = ground_truth(RecordSource(data_dir, "val"))
    assert sorted(document["images"], key=lambda image: image["id"]) == DOCUMENT["images"]
    assert document["categories"] == DOCUMENT["categories"]
    for found, expected in zip(document["annotations"], DOCUMENT["annotations"], strict=True):
        assert found.pop("bbox") == pytest.approx(expected["bbox"], abs=1e-4)
        assert found == {name: value for name, value in expected.items() if name != "bbox"}
    parse_coco(ground_truth(RecordSource(data_dir, "val")), Path("x.json"))


def test_threads_may_read(data_dir: Path) -> None:
    source = RecordSource(data_dir, "val")
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda number: source.read(number % 4).image_id, range(200)))
    assert ids == [0, 1, 2, 3] * 50


def test_missing_records_are_named_with_the_remedy(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="has no records"):
        RecordSource(data_dir, "train")
    with pytest.raises(MissingInputError, match="is not there"):
        RecordSource(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match="is a file"):
        RecordSource(data_dir / "val.json", "val")


def test_a_missing_shard_is_noticed(data_dir: Path) -> None:
    (data_dir / "val-00001-of-00002.tfrecord").unlink()
    with pytest.raises(MissingInputError, match="has 1 of 2 files"):
        RecordSource(data_dir, "val")


def test_a_name_that_tells_of_many_shards_is_no_matter(data_dir: Path) -> None:
    """Three billion numbers would fill the memory."""
    (data_dir / "train-0000000007-of-3000000000").touch()
    with pytest.raises(MissingInputError) as caught:
        RecordSource(data_dir, "train")
    assert "train-0000000000-of-3000000000" in str(caught.value)
    assert "2999999996" in str(caught.value)


def test_a_shard_that_is_cut_off_is_noticed(data_dir: Path) -> None:
    shard = data_dir / "val-00001-of-00002.tfrecord"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"has not the \d+ bytes of its"):
        RecordSource(data_dir, "val")
    (data_dir / "val.json").unlink()
    with pytest.raises(DataError, match="record 1 is cut"):
        RecordSource(data_dir, "val")


def test_a_damaged_record_is_named(data_dir: Path) -> None:
    shard = data_dir / "val-00001-of-00002.tfrecord"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    source = RecordSource(data_dir, "val")
    assert source.read(0).image_id == 0
    with pytest.raises(DataError, match="record 0: its checksum is") as caught:
        source.read(1)
    assert str(caught.value.path).endswith("val-00001-of-00002.tfrecord")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "another"}, "is no manifest"),
        ({"version": 1}, "has version 1, known is 3"),
        ({"kind": None}, "does not tell"),
        ({"kind": "classification"}, "tells of classification"),
        ({"categories": []}, "names no categories"),
        ({"shards": []}, "does not tell"),
        ({"categories": [{"id": "x", "name": "y"}]}, "id is"),
    ],
)
def test_a_wrong_manifest_is_refused(data_dir: Path, changes: dict[str, object], message: str) -> None:
    path = data_dir / "val.json"
    path.write_text(json.dumps(seal(json.loads(path.read_text()) | changes)))
    with pytest.raises(DataError, match=message):
        RecordSource(data_dir, "val")


def test_empty_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "val-00000-of-00001.tfrecord").touch()
    with pytest.raises(DataError, match="are empty"):
        RecordSource(tmp_path, "val")


@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_without_records_the_examples_are_the_same(
    data_dir: Path, tmp_path: Path, keep_empty: bool, shards: int
) -> None:
    images = tmp_path / "images"
    with Image.open(images / "3.jpg") as image:
        image.convert("CMYK").save(images / "3.jpg")
    coco = parse_coco(DOCUMENT, Path("x.json"))
    manifest = write_records(coco, images, tmp_path / "out", "train", shards=shards, keep_empty=keep_empty)
    assert describe_records(manifest).endswith("; images fixed: 1 CMYK JPEG made RGB")
    raw, records = CocoSource(coco, images, keep_empty=keep_empty), RecordSource(tmp_path / "out", "train")
    assert len(raw) == len(records) == (4 if keep_empty else 2)
    assert raw.categories == records.categories
    for index in range(len(raw)):
        one, other = vars(raw.read(index)), vars(records.read(index))
        for name, value in one.items():
            if isinstance(value, np.ndarray):
                assert value.dtype == other[name].dtype
                np.testing.assert_array_equal(value, other[name])
            else:
                assert value == other[name]


def test_the_fingerprint_of_files_is_of_the_data_and_not_of_its_place(data_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tmp_path / "images", tmp_path / "copy"))

    def fingerprint(folder: Path, keep_empty: bool = True, **changes: object) -> str:
        coco = parse_coco({**DOCUMENT, **changes}, Path("x.json"))
        return CocoSource(coco, folder, keep_empty=keep_empty).fingerprint

    first = fingerprint(tmp_path / "images")
    assert fingerprint(copy) == first
    assert fingerprint(copy, keep_empty=False) != first
    assert fingerprint(copy, annotations=DOCUMENT["annotations"][:2]) != first
    assert fingerprint(copy, categories=[*DOCUMENT["categories"], {"id": 91, "name": "x"}]) != first
    (copy / "2.jpg").write_bytes((copy / "2.jpg").read_bytes()[::-1])
    assert fingerprint(copy) != first
    (copy / "2.jpg").unlink()
    with pytest.raises(MissingInputError, match="there is no") as caught:
        fingerprint(copy)
    assert str(caught.value.path).endswith("2.jpg")
    assert str(caught.value.remedy).endswith(".json")


def test_an_image_that_is_replaced_later_is_named(data_dir: Path, tmp_path: Path) -> None:
    source = CocoSource(parse_coco(DOCUMENT, Path("x.json")), tmp_path / "images", keep_empty=True)
    before, path = source.list_files(), source.path(0)
    assert source.read(0).file_name == path.name
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DataError) as caught:
        source.read(0)
    assert caught.value.path == str(path)
    after = CocoSource(parse_coco(DOCUMENT, Path("x.json")), tmp_path / "images", keep_empty=True).list_files()
    assert [name for name in before if before[name] != after[name]] == [path.name]


def test_files_are_decoded_whole_when_told(tmp_path: Path) -> None:
    """A PNG whose chunks are right, but not what is compressed in them."""
    Image.effect_noise((60, 40), 50).save(tmp_path / "0.png")
    encoded = bytearray((tmp_path / "0.png").read_bytes())
    start, length = encoded.index(b"IDAT"), int.from_bytes(encoded[33:37], "big")
    assert encoded[37:41] == b"IDAT"
    encoded[start + 104 : start + 204] = bytes(100)
    chunk = encoded[start : start + 4 + length]
    encoded[start + 4 + length : start + 8 + length] = zlib.crc32(chunk).to_bytes(4, "big")
    (tmp_path / "0.png").write_bytes(encoded)
    document = {
        "images": [{"id": 1, "file_name": "0.png", "height": 40, "width": 60}],
        "annotations": [],
        "categories": DOCUMENT["categories"],
    }
    coco = parse_coco(document, Path("x.json"))
    assert CocoSource(coco, tmp_path, keep_empty=True).read(0).encoded == encoded
    with pytest.raises(DataError, match=r"0\.png: cannot be decoded"):
        CocoSource(coco, tmp_path, keep_empty=True, decode=True).read(0)
    with pytest.raises(DataError, match=r"0\.png: cannot be decoded"):
        write_records(coco, tmp_path, tmp_path / "out", "val", keep_empty=True, decode=True)
