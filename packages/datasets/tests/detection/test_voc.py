from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_datasets.detection.coco import NO_SIZE, parse_coco
from gaudi_datasets.detection.voc import read_annotation, read_voc
from gaudi_datasets.errors import DataError, FlagError, MissingInputError

OBJECT = """<object><name>{name}</name><difficult>{difficult}</difficult>
<bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox></object>"""
SIZE = "<size><width>60</width><height>40</height><depth>3</depth></size>"


def annotation(stem: str, *objects: str, size: str = SIZE) -> str:
    return f"<annotation><filename>{stem}.png</filename>{size}{''.join(objects)}</annotation>"


def an_object(name: str, *box: float, difficult: int = 0) -> str:
    return OBJECT.format(name=name, box=box, difficult=difficult)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "ImageSets" / "Main").mkdir(parents=True)
    texts = {
        "a": annotation("a", an_object("dog", 1, 2, 11, 22), an_object("cat", 0, 0, 60, 40, difficult=1)),
        "b": annotation("b", an_object("ant", 5, 5, 5, 9)),
        "c": annotation("c"),
    }
    for stem, text in texts.items():
        (tmp_path / "Annotations" / f"{stem}.xml").write_text(text)
    for name, stems in {"train": "a\nc\n", "val": "b -1\n\n", "both": "a\nb\n"}.items():
        (tmp_path / "ImageSets" / "Main" / f"{name}.txt").write_text(stems)
    return tmp_path


def test_a_folder_becomes_coco_annotations(root: Path) -> None:
    document = read_voc(root, ["train"])
    assert document["images"] == [
        {"id": 1, "file_name": "a.png", "height": 40, "width": 60},
        {"id": 3, "file_name": "c.png", "height": 40, "width": 60},
    ]
    assert document["annotations"] == [
        {"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 10, 20], "area": 200, "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 2, "bbox": [0, 0, 60, 40], "area": 2400, "iscrowd": 1},
    ]
    assert [one["name"] for one in document["categories"]] == ["ant", "cat", "dog"]
    assert parse_coco(document, root).faults == ()


def test_image_sets_agree_on_ids_and_an_image_comes_once(root: Path) -> None:
    document = read_voc(root, ["train", "val", "both"])
    assert [one["id"] for one in document["images"]] == [1, 3, 2]
    assert document["categories"] == read_voc(root, ["val"])["categories"]


def test_names_may_hold_spaces_and_a_number_may_follow(root: Path) -> None:
    (root / "Annotations" / "my a.xml").write_text(annotation("my a"))
    for text in ("my a\n", "my a  1\n", "my a.png\n", "images/my a.png 1\n"):
        (root / "ImageSets" / "Main" / "train.txt").write_text(text)
        assert [one["file_name"] for one in read_voc(root, ["train"])["images"]] == ["my a.png"]


def test_an_annotation_is_kept_as_few_texts(root: Path) -> None:
    content = read_annotation(root / "Annotations" / "a.xml")
    assert content.size == ("40", "60")
    assert content.objects[0] == ("dog", "0", "1", "2", "11", "22")


def test_a_box_whose_edges_meet_has_no_size(root: Path) -> None:
    (fault,) = parse_coco(read_voc(root, ["val"]), root).faults
    assert fault.rule == NO_SIZE


def test_classes_can_be_given(root: Path) -> None:
    document = read_voc(root, ["train"], ["dog", "cat"])
    assert [one["category_id"] for one in document["annotations"]] == [1, 2]
    with pytest.raises(DataError, match=r"class 'ant' .* dog, cat") as caught:
        read_voc(root, ["val"], ["dog", "cat"])
    assert str(caught.value.path).endswith("b.xml")
    with pytest.raises(FlagError) as twice:
        read_voc(root, ["train"], ["dog", "cat", "dog"])
    assert twice.value.flag == "--class_names"


def test_missing_parts_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="both, train, val"):
        read_voc(root, ["test"])
    with pytest.raises(MissingInputError, match="Annotations"):
        read_voc(tmp_path / "nowhere", ["train"])
    (root / "ImageSets" / "Main" / "train.txt").write_text("../../x\n")
    with pytest.raises(MissingInputError, match="which an image"):
        read_voc(root, ["train"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no XML"),
        ("<annotation>", "is no XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><annotation>&b;</annotation>', "is no XML that can be"),
        (annotation("a", size=""), "has no size/height"),
        (annotation("a", size=SIZE.replace("60", "0")), "must be at"),
        (annotation("a", an_object("", 1, 2, 3, 4)), "<object> has no name"),
        (annotation("a", "<object><name>dog</name></object>"), "has no bndbox/xmin"),
        (annotation("a", an_object("dog", float("nan"), 2, 3, 4)), "bndbox/xmin 'nan'"),
    ],
)
def test_faults_name_the_file(root: Path, text: str, message: str) -> None:
    (root / "Annotations" / "a.xml").write_text(text)
    with pytest.raises(DataError) as error:
        read_voc(root, ["train"])
    assert "a.xml: " in str(error.value)
    assert message in str(error.value)


def test_an_image_set_is_read_as_utf_8(root: Path) -> None:
    path = root / "ImageSets" / "Main" / "train.txt"
    path.write_text("a\nc\n", encoding="utf-8-sig")
    assert [one["id"] for one in read_voc(root, ["train"])["images"]] == [1, 3]
    path.write_bytes(b"a\nf\xe9e\n")
    with pytest.raises(DataError) as caught:
        read_voc(root, ["train"])
    assert caught.value.path == str(path)


def make_days(root: Path, *names: str, width: int = 60) -> None:
    """Write annotations in folders of Annotations/; those of day2 and later are wider."""
    for name in names:
        path = root / "Annotations" / f"{name}.xml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(annotation(path.stem, size=SIZE.replace("60", str(width + name.count("day2")))))


@pytest.mark.parametrize("line", ["day2/0", "day2\\0.jpg 1", "JPEGImages/day2/0.png", "/a/Annotations/DAY2/0.xml -1"])
def test_a_line_names_the_folder_of_its_annotation(root: Path, line: str) -> None:
    make_days(root, "day1/0", "day2/0")
    (root / "ImageSets" / "Main" / "train.txt").write_text(f"{line}\na\n")
    found = [(one["id"], one["file_name"], one["width"]) for one in read_voc(root, ["train"])["images"]]
    assert found == [(5, "day2/0.png", 61), (1, "a.png", 60)]


def test_a_line_without_folder_must_fit_one_annotation(root: Path) -> None:
    path = root / "ImageSets" / "Main" / "train.txt"
    path.write_text("a\n0\n")
    make_days(root, "day1/0")
    assert [one["file_name"] for one in read_voc(root, ["train"])["images"]] == ["a.png", "day1/0.png"]
    make_days(root, "day2/0")
    with pytest.raises(DataError, match=r"day1/0\.xml .* Annotations/day2/0\.xml") as caught:
        read_voc(root, ["train"])
    assert (caught.value.path, caught.value.record) == (str(path), "line 2")
    assert "day1/0" in str(caught.value.remedy)
    make_days(root, "0")  # which is all that the line says
    assert [one["file_name"] for one in read_voc(root, ["train"])["images"]] == ["a.png", "0.png"]


def test_a_line_of_another_folder_names_no_annotation(root: Path) -> None:
    make_days(root, "day1/0", "day2/1")
    (root / "ImageSets" / "Main" / "train.txt").write_text("day2/0\n")
    with pytest.raises(MissingInputError, match=r"day2/0\.xml"):
        read_voc(root, ["train"])
    (root / "JPEGImages" / "day3").mkdir(parents=True)
    (root / "JPEGImages" / "day3" / "0.png").touch()
    (root / "ImageSets" / "Main" / "train.txt").write_text("day3/0\n")
    with pytest.raises(MissingInputError, match=r"day3/0\.xml"):
        read_voc(root, ["train"])
