"""Data sets as people have them: masks beside photos, lists, keypoints, several kinds of annotations."""

from __future__ import annotations

import tempfile
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from packages.datasets.tests.layouts.annotated import annotate, draw, names_of, write, write_coco

from gaudi_datasets.detection.layouts import open_data
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.layouts.inventory import Inventory
from gaudi_datasets.layouts.labelling_tools import _name_task
from gaudi_datasets.layouts.recognition import _find_above, _inventory_around, read_boxes
from gaudi_datasets.layouts.threads import map_threads

STEMS = ("a", "b", "c", "d")


@pytest.mark.parametrize("stated", ["{}.jpg", ""])
@pytest.mark.parametrize(
    ("images", "annotations", "masks"),
    [
        ("images", "annotations/xmls", ["annotations/trimaps"]),
        ("JPEGImages", "Annotations", ["SegmentationClass", "SegmentationObject"]),
    ],
)
def test_masks_are_not_the_photos(
    images: str, annotations: str, masks: Sequence[str], stated: str, tmp_path: Path
) -> None:
    for stem in STEMS:
        draw(tmp_path / images / f"{stem}.jpg")
        annotate(tmp_path / annotations / f"{stem}.xml", stated.format(stem))
        for folder in masks:
            draw(tmp_path / folder / f"{stem}.png")
    assert names_of(tmp_path) == {"": [f"{images}/{stem}.jpg" for stem in STEMS]}


def test_lists_of_names_with_spaces(tmp_path: Path) -> None:
    for stem in ("photo 1", "photo 2", "photo 3"):
        draw(tmp_path / "JPEGImages" / f"{stem}.jpg")
        annotate(tmp_path / "Annotations" / f"{stem}.xml")
    write(tmp_path / "ImageSets" / "Main" / "train.txt", "photo 1\nphoto 2\n")
    write(tmp_path / "ImageSets" / "Main" / "val.txt", "photo 3\nphoto 2\n")
    found = names_of(tmp_path)
    assert (len(found["train"]), len(found["val"])) == (2, 2)
    assert [note for note in read_boxes(tmp_path).notes if "val" in note and "photo 2.jpg" in note]


def test_lists_of_darknet_are_splits(tmp_path: Path) -> None:
    for stem in (*STEMS, "e"):
        draw(tmp_path / "obj" / f"{stem}.jpg")
        write(tmp_path / "obj" / f"{stem}.txt", "0 0.5 0.5 0.2 0.2\n")
    for name, stems in (("train", "ab"), ("valid", "c"), ("test", "d")):
        write(tmp_path / f"{name}.txt", "".join(f"data/obj/{stem}.jpg\n" for stem in stems))
    expected = {"train": ["obj/a.jpg", "obj/b.jpg"], "val": ["obj/c.jpg"], "test": ["obj/d.jpg"]}
    assert names_of(tmp_path) == expected
    assert [note for note in read_boxes(tmp_path).notes if "e.jpg" in note]


@pytest.mark.parametrize(
    "text", ["cat 0.5 0.5 0.2 0.2\n", "0 0.5 0.5 0.2\n", "0 0.5 0.5 0.1 0.1\n0 0.1 0.1 0.2 0.2 0.3 0.3\n"]
)
def test_broken_labels_are_no_image_that_shows_nothing(text: str, tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / f"{stem}.jpg")
        write(tmp_path / f"{stem}.txt", "0 0.5 0.5 0.2 0.2\n")
    write(tmp_path / "c.txt", text)
    with pytest.raises(DataError) as error:
        read_boxes(tmp_path)
    assert Path(str(error.value.path)) == tmp_path / "c.txt"


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (3, 2)])
def test_keypoints_are_left_out(shape: tuple[int, int], tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / "images" / f"{stem}.jpg")
        points = " ".join(["0.9"] * shape[0] * shape[1])
        write(tmp_path / "labels" / f"{stem}.txt", f"0 0.5 0.5 0.2 0.4 {points}\n")
    write(tmp_path / "data.yaml", f"train: images\nnames: [ant]\nkpt_shape: {list(shape)}\n")
    coco, _ = read_boxes(tmp_path).sets["train"]
    assert coco.boxes_xywh[0].tolist() == pytest.approx([24, 12, 12, 16])


POSES = (
    "0 .5 .5 .1 .1 .48 .48 .52 .52",
    "0 .5 .5 .1 .1 .48 .48 1 .52 .52 1",
    "0 .5 .5 .4 .8 .35 .2 2 .65 .85 2 0 0 0 .5 .5 1",
)
OUTLINES = (
    "0 .1 .1 .9 .1 .9 .9 .1 .9",
    "0 .4 .4 .6 .4 .6 .6 .4 .6",
    "0 .5 .5 .52 .5 .53 .52 .52 .54 .5 .53",
    "0 .5 .5 .9 .5 .52 .55",
    "0 0 .6 .5 .5 1 .6 1 1 0 1",
    "0 0 0 1 0 1 1 0 1 0 .5",
    f"{POSES[0]}\n0 .1 .1 .9 .1 .9 .9 .1 .9",
)


@pytest.mark.parametrize("has_yaml", [False, True])
@pytest.mark.parametrize("line", [*POSES, *OUTLINES])
def test_keypoints_without_their_number_are_no_outlines(line: str, has_yaml: bool, tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / "images" / f"{stem}.jpg")
        write(tmp_path / "labels" / f"{stem}.txt", f"{line}\n")
    if has_yaml:
        write(tmp_path / "data.yaml", "train: images\nnames: [ant]\n")
    if line in OUTLINES:
        count = 4 * len(line.splitlines())
        assert [note for note in read_boxes(tmp_path).notes if f" {count} outlines" in note]
        return
    with pytest.raises(DataError, match="kpt_shape") as caught:
        read_boxes(tmp_path)
    assert caught.value.path == str(tmp_path / "labels" / "a.txt")


def test_the_given_folder_chooses_among_kinds(tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / "images" / f"{stem}.jpg")
        annotate(tmp_path / "annotations" / f"{stem}.xml")
        write(tmp_path / "labels" / f"{stem}.txt", "0 0.5 0.5 0.2 0.2\n")
    with pytest.raises(DataError, match="several kinds"):
        read_boxes(tmp_path)
    assert read_boxes(tmp_path / "annotations").layout.startswith("Pascal VOC")
    assert read_boxes(tmp_path / "labels").layout.startswith("YOLO")
    assert [coco.file_names for coco, _ in read_boxes(tmp_path / "annotations" / "b.xml").sets.values()] == [("b.jpg",)]


def test_trainval_is_for_training(tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / "images" / f"{stem}.jpg")
    write_coco(tmp_path / "instances_trainval.json", ["a.jpg", "b.jpg", "c.jpg"])
    write_coco(tmp_path / "instances_test.json", ["d.jpg"])
    assert {split: len(names) for split, names in names_of(tmp_path).items()} == {"train": 3, "test": 1}


def test_missing_images_and_backslashes_of_coco(tmp_path: Path) -> None:
    for stem in STEMS[:2]:
        draw(tmp_path / "sub" / f"{stem}.jpg")
    write_coco(tmp_path / "all.json", [f"sub\\{stem}.jpg" for stem in (*STEMS, "e" * 300)])
    data = open_data(tmp_path)
    assert sorted(data.split["train"] + data.split["val"]) == ["sub/a.jpg", "sub/b.jpg"]  # type: ignore[operator]
    assert [Path(name).name for name in data.missing] == ["c.jpg", "d.jpg", f"{'e' * 300}.jpg"]


def test_links_are_named_where_images_are_missing(tmp_path: Path) -> None:
    draw(tmp_path / "elsewhere" / "a.jpg")
    annotate(tmp_path / "data" / "marks" / "a.xml")
    (tmp_path / "data" / "photos").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MissingInputError, match="photos"):
        read_boxes(tmp_path / "data")


def test_the_whole_system_is_not_searched() -> None:
    if not Path("/srv").is_dir():
        pytest.skip("there is no empty folder at the top")
    assert _inventory_around(Path("/srv/x.json")).root == Path("/srv")


@pytest.mark.parametrize("top", ["home", "users", "temporary"])
def test_nobodys_whole_home_is_searched(top: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path / "images" / "a.jpg")
    annotate(tmp_path / "annotations" / "a.xml")
    assert _find_above(tmp_path / "annotations")
    if top == "temporary":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    else:
        monkeypatch.setenv("HOME", str(tmp_path / "me" if top == "users" else tmp_path))
    assert _find_above(tmp_path / "annotations") == []


def test_equal_names_in_many_folders_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        draw(tmp_path / "images" / str(number) / "1.jpg")
        annotate(tmp_path / "labels" / str(number) / "1.xml")
    draw(tmp_path / "images" / "0" / "1.jpg.png")
    monkeypatch.delattr("gaudi_datasets.layouts.inventory.count_equal")
    inventory = Inventory(tmp_path)
    for number in range(4):
        assert inventory.find_image(f"labels/{number}/1.jpg", f"labels/{number}") == f"images/{number}/1.jpg"
        assert inventory.find_image("1.jpg", f"images/{number}") == f"images/{number}/1.jpg"


def test_the_image_beside_wins_among_equal_names(tmp_path: Path) -> None:
    for number in range(3):
        draw(tmp_path / str(number) / "1.jpg")
    inventory = Inventory(tmp_path)
    assert [inventory.find_image("1.jpg", str(number)) for number in range(3)] == ["0/1.jpg", "1/1.jpg", "2/1.jpg"]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("http://[x/a.jpg", "/a.jpg"),
        ("photo#1.jpg", "photo#1.jpg"),
        ("/data/local-files/?d=set/a%201.jpg", "set/a 1.jpg"),
        ("s3://bucket/set/a%201.jpg?key=1", "/set/a 1.jpg"),
    ],
)
def test_names_of_tasks(value: str, name: str) -> None:
    assert _name_task({"data": {"image": value}}) == name


@pytest.mark.parametrize("by_yaml", [True, False])
def test_images_that_share_a_file_of_labels_are_counted(by_yaml: bool, tmp_path: Path) -> None:
    for name in ("a.jpg", "a.png", "b.jpg", "c.png"):
        draw(tmp_path / "images" / name)
    for stem in "ab":
        write(tmp_path / "labels" / f"{stem}.txt", "0 0.5 0.5 0.2 0.2\n")
    if by_yaml:
        write(tmp_path / "data.yaml", "path: .\ntrain: images\nval: images\nnames: [ant]\n")
    else:
        write(tmp_path / "labels" / "c.txt", "")
    (note,) = [note for note in read_boxes(tmp_path).notes if "another one" in note]
    assert note.split(": ")[1] == "a.jpg, a.png"


@pytest.mark.parametrize("encoding", ["no-such", "utf-16", "utf-7"])
def test_xml_of_an_unknown_encoding_is_named(encoding: str, tmp_path: Path) -> None:
    draw(tmp_path / "a.jpg")
    write(tmp_path / "a.xml", f'<?xml version="1.0" encoding="{encoding}"?><annotation></annotation>')
    with pytest.raises(DataError) as error:
        read_boxes(tmp_path)
    assert Path(str(error.value.path)) == tmp_path / "a.xml"


@pytest.mark.parametrize(
    ("declared", "encoding", "name"),
    [
        ("gb2312", "gb2312", "猫"),
        ("gb2312", "gb18030", "貓㐀"),
        ("GBK", "gbk", "貓"),
        ("Big5", "big5", "貓"),
        ("Big5", "cp950", "裏"),
        ("Shift_JIS", "shift_jis", "ねこ"),
        ("Shift_JIS", "cp932", "①"),
        ("Windows-31J", "cp932", "髙"),
        ("iso-2022-jp", "iso2022_jp", "ねこ"),
        ("euc-kr", "euc_kr", "고양이"),
        ("euc-kr", "cp949", "똠"),
        ("ms949", "cp949", "똠"),
        ("windows-949", "cp949", "똠"),
        ("windows-936", "gbk", "貓"),
        ("x-sjis", "shift_jis", "ねこ"),
        ("windows-1251", "cp1251", "кот"),
        ("gb2312", "utf-8-sig", "고양이"),
    ],
)
def test_xml_in_the_encoding_of_a_country_is_read(declared: str, encoding: str, name: str, tmp_path: Path) -> None:
    draw(tmp_path / "a.jpg")
    annotate(tmp_path / "a.xml")
    head = f'<?xml version="1.0" encoding="{declared}"?>'
    text = (head + (tmp_path / "a.xml").read_text(encoding="utf-8").replace("ant<", f"{name}<")).encode(encoding)
    (tmp_path / "a.xml").write_bytes(text)
    coco, _ = read_boxes(tmp_path).sets[""]
    assert [category.name for category in coco.categories] == [name]


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        *((declared, b"\x81 ") for declared in ("gb2312", "Big5", "Shift_JIS", "iso-2022-jp", "euc-kr")),
        *((declared, "小猫고".encode()) for declared in ("gb2312", "Shift_JIS", "euc-kr")),
    ],
)
def test_xml_that_is_not_in_the_encoding_that_it_declares_is_refused(
    declared: str, name: bytes, tmp_path: Path
) -> None:
    draw(tmp_path / "a.jpg")
    annotate(tmp_path / "a.xml")
    head = f'<?xml version="1.0" encoding="{declared}"?>'.encode()
    (tmp_path / "a.xml").write_bytes(head + (tmp_path / "a.xml").read_bytes().replace(b"ant<", name + b"<"))
    with pytest.raises(DataError) as error:
        read_boxes(tmp_path)
    assert error.value.remedy == "save it as UTF-8, and declare that"


def test_threads_keep_the_order_of_many() -> None:
    assert list(map_threads(lambda item: item + 1, range(3000))) == list(range(1, 3001))


def test_images_that_are_converted_are_counted(tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / f"{stem}.bmp")
        annotate(tmp_path / f"{stem}.xml")
    assert [note for note in open_data(tmp_path).notes if note.startswith("4 images converted")]


def write_yolo(root: Path, names: bytes) -> None:
    for stem, label in (("a", 0), ("b", 1)):
        draw(root / f"{stem}.jpg")
        write(root / f"{stem}.txt", f"{label} .5 .5 .2 .2\n")
    (root / "classes.txt").write_bytes(names)


@pytest.mark.parametrize("names", [b"ant\nbee\n", b"\xef\xbb\xbfant\r\nbee\r\n\r\n \r\n"])
def test_names_of_classes_count_their_lines(names: bytes, tmp_path: Path) -> None:
    write_yolo(tmp_path, names)
    (coco, _), *_ = read_boxes(tmp_path).sets.values()
    assert [one.name for one in coco.categories] == ["ant", "bee"]


@pytest.mark.parametrize(
    ("names", "record"), [(b"ant\n\nbee\n", "line 2"), (b"\nant\nbee\n", "line 1"), (b"f\xe9e\nbee\n", None)]
)
def test_names_that_are_not_clear_are_refused(names: bytes, record: str | None, tmp_path: Path) -> None:
    write_yolo(tmp_path, names)
    with pytest.raises(DataError) as caught:
        read_boxes(tmp_path)
    assert (caught.value.path, caught.value.record) == (str(tmp_path / "classes.txt"), record)


def test_lists_of_voc_may_begin_with_a_mark_of_utf_8(tmp_path: Path) -> None:
    for stem in ("fée", "b"):
        draw(tmp_path / "JPEGImages" / f"{stem}.jpg")
        annotate(tmp_path / "Annotations" / f"{stem}.xml")
    train = tmp_path / "ImageSets" / "Main" / "train.txt"
    write(train, "")
    train.write_text("fée\nb\n", encoding="utf-8-sig")
    assert names_of(tmp_path) == {"train": ["JPEGImages/b.jpg", "JPEGImages/fée.jpg"]}
    train.write_text("fée\nb\n", encoding="latin-1")
    with pytest.raises(DataError) as caught:
        read_boxes(tmp_path)
    assert caught.value.path == str(train)


def make_days(root: Path, *days: str) -> Path:
    """Write images of equal names in the folder of each day, with annotations; return the folder of the lists."""
    for day in days:
        for stem in STEMS:
            draw(root / "JPEGImages" / day / f"{stem}.jpg")
            annotate(root / "Annotations" / day / f"{stem}.xml", f"{stem}.jpg")
    return root / "ImageSets" / "Main"


@pytest.mark.parametrize("form", ["{}/{}", "JPEGImages/{}/{}.jpg", "{}\\{} 1", "/elsewhere/VOC/Annotations/{}/{}.xml"])
def test_lists_of_voc_name_folders(form: str, tmp_path: Path) -> None:
    lists = make_days(tmp_path, "day1", "day2", "day3")
    named = {day: "\n".join(form.format(day, stem) for stem in STEMS) for day in ("day1", "day2", "day3")}
    write(lists / "train.txt", f"{named['day1']}\n{named['day2']}\n")
    write(lists / "val.txt", named["day3"])
    images = {day: [f"JPEGImages/{day}/{stem}.jpg" for stem in STEMS] for day in named}
    assert names_of(tmp_path) == {"train": images["day1"] + images["day2"], "val": images["day3"]}
    assert not read_boxes(tmp_path).notes
    (lists / "train.txt").unlink()
    write(lists / "trainval.txt", "\n".join(named.values()))
    assert names_of(tmp_path) == {"train": images["day1"] + images["day2"], "val": images["day3"]}


def test_a_name_in_several_folders_is_refused_without_them(tmp_path: Path) -> None:
    lists = make_days(tmp_path, "day1", "day2")
    write(lists / "train.txt", "day1/a\nday2/b\n\nc\n")
    with pytest.raises(DataError, match=r"day1/c\.xml .* Annotations/day2/c\.xml") as caught:
        read_boxes(tmp_path)
    assert (caught.value.path, caught.value.record) == (str(lists / "train.txt"), "line 4")
    assert "day1/c" in str(caught.value.remedy)


def test_what_a_list_names_in_a_folder_is_in_no_other(tmp_path: Path) -> None:
    lists = make_days(tmp_path, "day1", "day2", "day3")
    for name in ("Annotations/day2/a.xml", "JPEGImages/day3/b.jpg"):
        (tmp_path / name).unlink()
    for stem in STEMS:
        (tmp_path / "Annotations" / "day3" / f"{stem}.xml").unlink()
    write(lists / "train.txt", "day1/a\nday1/b\n")
    write(lists / "val.txt", "day2/a\nday2/b\nday3/a\nday3/b\n")
    assert names_of(tmp_path) == {
        "train": ["JPEGImages/day1/a.jpg", "JPEGImages/day1/b.jpg"],
        "val": ["JPEGImages/day2/b.jpg"],
    }
    assert [note for note in read_boxes(tmp_path).notes if "day2/a, day3/a, day3/b" in note]


def test_lists_of_voc_may_name_other_folders_than_there_are(tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / "photos" / f"{stem}.jpg")
        annotate(tmp_path / "annots" / f"{stem}.xml")
    write(tmp_path / "train.txt", "\n".join(f"/data/JPEGImages/{stem}.jpg" for stem in STEMS[:2]))
    write(tmp_path / "val.txt", "\n".join(f"photos/{stem}.jpg" for stem in STEMS[2:]))
    assert names_of(tmp_path) == {"train": ["photos/a.jpg", "photos/b.jpg"], "val": ["photos/c.jpg", "photos/d.jpg"]}


def test_lists_of_darknet_may_begin_with_a_mark_of_utf_8(tmp_path: Path) -> None:
    write_yolo(tmp_path, b"ant\nbee\n")
    (tmp_path / "train.txt").write_text("a.jpg\nb.jpg\n", encoding="utf-8-sig")
    assert names_of(tmp_path) == {"train": ["a.jpg", "b.jpg"]}


def test_labels_are_told_by_their_content_with_a_mark_and_in_capitals(tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / f"{stem}.jpg")
        (tmp_path / f"{stem}.txt").write_text(f"{int(stem == 'b')} .5 .5 .2 .2\n", encoding="utf-8-sig")
    (tmp_path / "d.txt").rename(tmp_path / "d.TXT")
    boxes = read_boxes(tmp_path)
    (coco, _), *_ = boxes.sets.values()
    assert ([one.name for one in coco.categories], coco.category_ids.tolist()) == (["0", "1"], [1, 2, 1, 1])
    assert [note for note in boxes.notes if " 2 classes " in note]


def test_names_that_differ_by_case_are_told_apart(tmp_path: Path) -> None:
    for name in ("img_1.jpg", "IMG_1.JPG"):
        draw(tmp_path / name)
        annotate(tmp_path / f"{name[:-4]}.xml", name)
    if len(list(tmp_path.iterdir())) < 4:
        pytest.skip("the file system does not tell them apart")
    assert names_of(tmp_path) == {"": ["IMG_1.JPG", "img_1.jpg"]}
    inventory = Inventory(tmp_path)
    assert [inventory.find_stem(stem, "") for stem in ("img_1", "IMG_1")] == ["img_1.jpg", "IMG_1.JPG"]


def test_coco_may_begin_with_a_mark_and_name_images_from_here(tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / "images" / f"{stem}.jpg")
    path = tmp_path / "annotations" / "all.json"
    write_coco(path, [f"./{stem}.jpg" for stem in STEMS])
    text = (
        path.read_text().replace('"bbox"', '"caption": "an ant", "bbox"').replace('"name": "ant"', '"name": "shapes"')
    )
    path.write_text(text, encoding="utf-8-sig")
    assert names_of(tmp_path) == {"": [f"images/{stem}.jpg" for stem in STEMS]}
    assert not [note for note in read_boxes(tmp_path).notes if "a.jpg" in note]


@pytest.mark.parametrize("kind", ["coco", "voc", "table"])
@pytest.mark.parametrize("disk", ["NFC", "NFD"])
def test_accents_are_one_letter_or_two(tmp_path: Path, kind: str, disk: Literal["NFC", "NFD"]) -> None:
    """Archives made on macOS have file names that annotations from elsewhere write otherwise."""
    stems = ("Größe", "á à", "plain")
    there = [unicodedata.normalize(disk, stem) for stem in stems]
    told = [unicodedata.normalize("NFD" if disk == "NFC" else "NFC", stem) for stem in stems]
    for stem in there:
        draw(tmp_path / "images" / f"{stem}.jpg")
    if kind == "coco":
        write_coco(tmp_path / "annotations.json", [f"{stem}.jpg" for stem in told])
    elif kind == "voc":
        for number, stem in enumerate(told):
            annotate(tmp_path / "xml" / f"{number}.xml", f"{stem}.jpg")
    else:
        rows = [f"{stem}.jpg,60,40,ant,3,4,20,30" for stem in told]
        write(tmp_path / "boxes.csv", "\n".join(["filename,width,height,class,xmin,ymin,xmax,ymax", *rows]))
    data = open_data(tmp_path)
    names = {each.file_name for source in data.sources.values() for each in map(source.read, range(len(source)))}
    assert {Path(name).name for name in names} == {f"{stem}.jpg" for stem in there}
    assert not [note for note in data.notes if "not there" in note]
