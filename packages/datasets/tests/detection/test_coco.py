from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gaudi_datasets.detection.coco import (
    COCO_CATEGORIES,
    NO_SIZE,
    PAST_EDGE,
    BoxFault,
    Category,
    parse_coco,
    read_coco,
    select_images,
)
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.linting.rules import WRONG_AREA, find_box_faults

DOCUMENT: dict[str, Any] = {
    "images": [
        {"id": 5, "file_name": "b.jpg", "height": 40, "width": 60},
        {"id": 0, "file_name": "sub/a.jpg", "height": 100, "width": 200},
    ],
    "annotations": [
        {"id": 0, "image_id": 0, "category_id": 9, "bbox": [10, 20, 30.5, 40], "area": 7.5, "iscrowd": 1},
        {"id": 3, "image_id": 5, "category_id": 0, "bbox": [0, 0, 60, 40]},
        {"id": 2, "image_id": 0, "category_id": 0, "bbox": [1, 2, 3, 4], "iscrowd": 0},
    ],
    "categories": [{"id": 9, "name": "dog", "supercategory": "animal"}, {"id": 0, "name": "cat"}],
}
PATH = Path("x.json")


def changed(name: str, position: int, /, **fields: Any) -> dict[str, Any]:
    """DOCUMENT with fields of one record changed; None removes one."""
    document = copy.deepcopy(DOCUMENT)
    record = document[name][position] | fields
    document[name][position] = {key: value for key, value in record.items() if value is not None}
    return document


def test_a_file_is_read_into_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(DOCUMENT))
    coco = read_coco(path)
    assert coco.path == path
    assert coco.categories == (Category(0, "cat"), Category(9, "dog", "animal"))
    assert coco.file_names == ("b.jpg", "sub/a.jpg")
    assert coco.faults == ()
    for name, dtype, values in [
        ("image_ids", np.int64, [5, 0]),
        ("heights", np.int32, [40, 100]),
        ("widths", np.int32, [60, 200]),
        ("box_splits", np.int64, [0, 1, 3]),
        ("annotation_ids", np.int64, [3, 0, 2]),
        ("boxes_xywh", np.float64, [[0, 0, 60, 40], [10, 20, 30.5, 40], [1, 2, 3, 4]]),
        ("category_ids", np.int64, [0, 9, 0]),
        ("areas", np.float64, [2400, 7.5, 12]),
        ("is_crowd", np.bool_, [False, True, False]),
    ]:
        array = getattr(coco, name)
        assert array.dtype == dtype, name
        assert array.tolist() == values, name


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (changed("images", 1, id=5), "image 5 (images[1]): its id was"),
        (changed("annotations", 1, id=0), "annotation 0 (annotations[1]): its id was"),
        (changed("categories", 1, id=9), "category 9 (categories[1]): its id was"),
        (changed("annotations", 0, image_id=999), "image_id 999 is of no"),
        (changed("annotations", 0, category_id=999), "category_id 999 is of no"),
        (changed("annotations", 0, bbox=None), "bbox is missing"),
        (changed("annotations", 0, image_id=None), "image_id is missing"),
        (changed("annotations", 0, id=None), "annotations[0]: id is missing"),
        (changed("annotations", 0, image_id=True), "image_id is true"),
        (changed("annotations", 0, image_id="0"), 'image_id is "0"'),
        (changed("annotations", 0, bbox=[1, 2, 3, float("inf")]), "must be four"),
        (changed("annotations", 0, area=float("nan")), "area is NaN"),
        (changed("annotations", 0, iscrowd=2), "iscrowd is 2"),
        (changed("annotations", 0, iscrowd=True), "iscrowd is true"),
        (changed("images", 0, height=0), "image 5 (images[0]): height is 0"),
        (changed("images", 0, width=60.0), "width is 60.0"),
        (changed("images", 0, file_name=""), "file_name is"),
        (changed("images", 0, file_name=7), "file_name is 7"),
        (changed("categories", 0, name=None), "name is missing"),
    ],
)
def test_faults_are_named(document: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        parse_coco(document, PATH)
    assert str(error.value).startswith("x.json: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "file_name",
    ["/etc/passwd", "../a.jpg", "a/../../b.jpg", "..", "C:\\a.jpg", "..\\a.jpg", "\\a.jpg", "a\0.jpg"],
)
def test_file_names_stay_in_the_folder(file_name: str) -> None:
    with pytest.raises(DataError, match="leaves the image"):
        parse_coco(changed("images", 0, file_name=file_name), PATH)


@pytest.mark.parametrize("file_name", ["a.jpg", "a/b/c.jpg", "..a.jpg", "a..b/c.jpg", "ä ö.jpg"])
def test_other_file_names_are_taken(file_name: str) -> None:
    assert parse_coco(changed("images", 0, file_name=file_name), PATH).file_names[0] == file_name


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "is a list,"),
        ("x", "is no JSON object"),
        ({}, "images is missing"),
        ({**DOCUMENT, "annotations": {}}, "annotations is a"),
        ({**DOCUMENT, "annotations": [3]}, "annotations[0]: is 3"),
        ({"images": [], "annotations": [], "categories": []}, "categories is empty"),
    ],
)
def test_what_is_no_annotation_document_is_refused(document: object, message: str) -> None:
    with pytest.raises(DataError) as error:
        parse_coco(document, PATH)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("box", "rule"),
    [
        ([10, 10, 0, 5], NO_SIZE),
        ([10, 10, 5, -1], NO_SIZE),
        ([10, 10, 1e-9, 5], NO_SIZE),
        ([10, 10, 191, 5], PAST_EDGE),
        ([10, 10, 5, 90.001], PAST_EDGE),
        ([-0.1, 10, 5, 5], PAST_EDGE),
        ([10, -0.1, 5, 5], PAST_EDGE),
    ],
)
def test_boxes_that_cannot_be_stored_are_left_out(box: list[float], rule: str) -> None:
    coco = parse_coco(changed("annotations", 0, bbox=box), PATH)
    assert coco.faults == (BoxFault(0, 0, rule, (box[0], box[1], box[2], box[3])),)
    assert coco.annotation_ids.tolist() == [3, 2]
    assert coco.box_splits.tolist() == [0, 1, 2]


def test_a_box_may_fill_its_image() -> None:
    assert parse_coco(changed("annotations", 0, bbox=[0, 0, 200, 100]), PATH).faults == ()


def test_rounding_takes_no_box_past_the_edge() -> None:
    box = [200 * 0.41, 100 * 0.41, 200 * 0.59 + 1e-12, 100 * 0.59 + 1e-12]
    assert box[0] + box[2] > 200
    assert box[1] + box[3] > 100
    assert parse_coco(changed("annotations", 0, bbox=box), PATH).faults == ()


@given(st.lists(st.integers(0, 4), max_size=30))
def test_each_image_has_its_own_boxes(image_of_box: list[int]) -> None:
    document = {
        "images": [{"id": 10 - row, "file_name": f"{row}.jpg", "height": 9, "width": 9} for row in range(5)],
        "annotations": [
            {"id": number, "image_id": 10 - row, "category_id": 1, "bbox": [0, 0, 1, 1]}
            for number, row in enumerate(image_of_box)
        ],
        "categories": [{"id": 1, "name": "x"}],
    }
    coco = parse_coco(document, PATH)
    for row in range(5):
        own = coco.annotation_ids[coco.box_splits[row] : coco.box_splits[row + 1]]
        assert own.tolist() == [number for number, image in enumerate(image_of_box) if image == row]


def test_there_are_eighty_in_id_order() -> None:
    ids = [category.id for category in COCO_CATEGORIES]
    assert len(ids) == 80
    assert ids == sorted(set(ids))
    assert set(range(1, 91)) - set(ids) == {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
    assert COCO_CATEGORIES[0] == Category(1, "person", "person")
    assert COCO_CATEGORIES[-1] == Category(90, "toothbrush", "indoor")
    assert len({category.name for category in COCO_CATEGORIES}) == 80


def test_wrong_areas_are_replaced_and_counted(tmp_path: Path) -> None:
    """Without a mask an area is that of the box; with one, and in COCO's own files, it is the mask's."""
    box = [2.5, 3, 20, 10]
    areas: list[dict[str, Any]] = [
        {"area": 231.0},  # counts both ends, as (w + 1) * (h + 1)
        {"area": 0},
        {"area": 199.9},
        {"area": 214.0},
        {"area": 77.5, "segmentation": [[2, 3, 22, 3, 22, 13]]},
        {},
    ]
    document: dict[str, Any] = {
        "images": [{"id": 1, "file_name": "a.jpg", "height": 40, "width": 60}],
        "annotations": [
            {"id": number, "image_id": 1, "category_id": 1, "bbox": box, **fields}
            for number, fields in enumerate(areas)
        ],
        "categories": [{"id": 1, "name": "ant"}],
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document))
    coco = read_coco(path)
    assert coco.areas.tolist() == [200, 200, 199.9, 214, 77.5, 200]
    assert coco.wrong_areas == {0: 231, 1: 0}
    findings = [each for each in find_box_faults(coco) if each.rule is WRONG_AREA]
    assert len(findings) == 2
    assert select_images(coco, np.array([], np.int64)).wrong_areas == {}
    assert parse_coco(document, path).wrong_areas == {}
    Image.new("RGB", (60, 40)).save(tmp_path / "a.jpg")
    manifest = write_records(coco, tmp_path, tmp_path / "records", "train", keep_empty=False)
    assert manifest["boxes"]["areas_replaced"] == 2
    assert RecordSource(tmp_path / "records", "train").read(0).areas.tolist() == pytest.approx(coco.areas.tolist())
    path.write_text(json.dumps({**document, "info": {"url": "http://cocodataset.org"}}))
    assert read_coco(path).areas.tolist() == [231, 0, 199.9, 214, 77.5, 200]


def test_an_area_below_0_is_replaced_and_one_beyond_float32_refused() -> None:
    coco = parse_coco(changed("annotations", 0, area=-5), PATH)
    assert (coco.areas.tolist(), coco.wrong_areas) == ([2400, 1220, 12], {0: -5})
    with pytest.raises(DataError) as caught:
        parse_coco(changed("annotations", 0, area=1e39), PATH)
    assert (caught.value.path, caught.value.field) == (str(PATH), "area")
    assert "annotations[0]" in str(caught.value.record)
