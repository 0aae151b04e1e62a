"""Images that annotations name and that are not there, beside others of their names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from packages.datasets.tests.layouts.annotated import annotate, draw, names_of, write, write_coco

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.layouts.recognition import read_boxes

STEMS = ("a", "b", "c", "d")
_HEAD = "filename,class,xmin,ymin,xmax,ymax"
_BOX = "ant,3,4,20,30"


def lose_of_voc(root: Path) -> None:
    for stem in STEMS:
        annotate(root / "train" / "annotations" / f"{stem}.xml", f"{stem}.jpg")
        for split in ("train", "test"):
            draw(root / split / "images" / f"{stem}.jpg")
    (root / "train" / "images" / "d.jpg").unlink()


def lose_of_table(root: Path) -> None:
    for folder, stems in (("train", "abc"), ("test", "abcd")):
        for stem in stems:
            draw(root / "images" / folder / f"{stem}.jpg")
    write(root / "train_labels.csv", "\n".join([_HEAD, *(f"{stem}.jpg,{_BOX}" for stem in STEMS)]))


def lose_of_cvat(root: Path) -> None:
    lose_of_table(root)
    (root / "train_labels.csv").unlink()
    box = '<box label="ant" xtl="3" ytl="4" xbr="20" ybr="30"/>'
    images = [f'<image name="{stem}.jpg" subset="Train" width="60" height="40">{box}</image>' for stem in STEMS]
    write(root / "all.xml", f"<annotations><version>1.1</version>{''.join(images)}</annotations>")


def lose_of_coco(root: Path) -> None:
    lose_of_table(root)
    (root / "train_labels.csv").unlink()
    write_coco(root / "annotations" / "instances_train.json", [f"{stem}.jpg" for stem in STEMS])


def lose_of_days(root: Path) -> None:
    for name in ("day1/a", "day1/d", "day2/a"):
        draw(root / f"{name}.jpg")
    write(
        root / "all.csv", "\n".join([_HEAD, *(f"{day}/{stem}.jpg,{_BOX}" for day in ("day2", "day1") for stem in "ad")])
    )


def lose_a_folder(root: Path) -> None:
    lose_of_days(root)
    (root / "day2" / "a.jpg").unlink()


def lose_by_case(root: Path) -> None:
    for name in ("A", "b"):
        draw(root / "images" / f"{name}.jpg")
    write(root / "all.csv", "\n".join([_HEAD, *(f"{name}.jpg,{_BOX}" for name in "aAb")]))


def lose_of_labelme(root: Path) -> None:
    for name in ("cam1/a", "cam2/a", "cam2/b"):
        draw(root / f"{name}.jpg")
    shape = {"label": "ant", "shape_type": "rectangle", "points": [[3, 4], [20, 30]]}
    for stem in "ab":
        write(root / "cam1" / f"{stem}.json", json.dumps({"shapes": [shape], "imagePath": f"{stem}.jpg"}))


def lose_of_darknet(root: Path) -> None:
    for folder, stems in (("obj_train_data", "abcd"), ("obj_valid_data", "abc")):
        for stem in stems:
            draw(root / folder / f"{stem}.jpg")
            write(root / folder / f"{stem}.txt", "0 0.5 0.5 0.2 0.2\n")
    write(root / "train.txt", "".join(f"data/obj_train_data/{stem}.jpg\n" for stem in "abc"))
    write(root / "valid.txt", "".join(f"data/obj_valid_data/{stem}.jpg\n" for stem in STEMS))


@pytest.mark.parametrize(
    ("lose", "lost", "found"),
    [
        (lose_of_voc, "d.xml", {"train": [f"train/images/{stem}.jpg" for stem in "abc"]}),
        (lose_of_table, "d.jpg", {"train": [f"images/train/{stem}.jpg" for stem in "abc"]}),
        (lose_of_cvat, "d.jpg", {"train": [f"images/train/{stem}.jpg" for stem in "abc"]}),
        (lose_of_coco, "d.jpg", {"train": [f"images/train/{stem}.jpg" for stem in "abc"]}),
        (lose_of_days, "day2/d.jpg", {"": ["day1/a.jpg", "day1/d.jpg", "day2/a.jpg"]}),
        (lose_a_folder, "day2/a.jpg, day2/d.jpg", {"": ["day1/a.jpg", "day1/d.jpg"]}),
        (lose_by_case, "a.jpg", {"": ["images/A.jpg", "images/b.jpg"]}),
        (lose_of_labelme, "b.jpg of cam1/b.json", {"": ["cam1/a.jpg"]}),
        (
            lose_of_darknet,
            "obj_valid_data/d.jpg",
            {
                "train": [f"obj_train_data/{stem}.jpg" for stem in "abc"],
                "val": [f"obj_valid_data/{stem}.jpg" for stem in "abc"],
            },
        ),
    ],
)
def test_no_other_image_takes_the_place_of_a_lost_one(
    lose: Callable[[Path], None], lost: str, found: dict[str, list[str]], tmp_path: Path
) -> None:
    lose(tmp_path)
    assert names_of(tmp_path) == found
    assert [note for note in read_boxes(tmp_path).notes if "left out" in note and note.endswith(lost)]
    coco, _ = read_boxes(tmp_path).sets[next(iter(found))]
    assert len(coco.annotation_ids) == len(coco.file_names)


def test_a_file_alone_takes_no_image_of_another_split(tmp_path: Path) -> None:
    lose_of_table(tmp_path)
    assert [Path(name).name for name in read_boxes(tmp_path / "train_labels.csv").missing] == ["d.jpg"]


def test_a_folder_of_training_has_the_images_of_splits_without_one(tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / "train" / f"{stem}.jpg")
    for split, stems in (("train", "abc"), ("val", "d")):
        write(tmp_path / f"{split}.csv", "\n".join([_HEAD, *(f"{stem}.jpg,{_BOX}" for stem in stems)]))
    assert names_of(tmp_path) == {"train": [f"train/{stem}.jpg" for stem in "abc"], "val": ["train/d.jpg"]}


def test_an_image_that_two_names_may_mean_is_refused(tmp_path: Path) -> None:
    draw(tmp_path / "images" / "a.jpg")
    write(tmp_path / "all.csv", "\n".join([_HEAD, f"old/a.jpg,{_BOX}", f"new/a.jpg,{_BOX}"]))
    with pytest.raises(DataError) as caught:
        read_boxes(tmp_path)
    assert caught.value.path == str(tmp_path / "all.csv")


def test_images_of_validation_are_none_of_training(tmp_path: Path) -> None:
    for stem in STEMS:
        draw(tmp_path / "val" / f"{stem}.jpg")
    write_coco(tmp_path / "annotations" / "instances_train.json", ["a.jpg", "b.jpg"])
    with pytest.raises(MissingInputError) as caught:
        read_boxes(tmp_path)
    assert caught.value.path == str(tmp_path / "annotations" / "instances_train.json")


@pytest.mark.parametrize(
    ("counts", "found"),
    [
        ({"train": "abc", "val": "def"}, {"train": "abc", "val": "def"}),
        ({"train": "abcde", "val": "f"}, {"train": "abcde", "val": "f"}),
        ({"day1": "abcd", "day2": "ef"}, {"": "abcdef"}),
    ],
)
def test_a_file_of_coco_may_be_of_several_folders(
    counts: dict[str, str], found: dict[str, str], tmp_path: Path
) -> None:
    for folder, stems in counts.items():
        for stem in stems:
            draw(tmp_path / "images" / folder / f"{stem}.jpg")
    write_coco(tmp_path / "annotations" / "all.json", [f"{stem}.jpg" for stem in "abcdef"])
    assert {split: [Path(name).stem for name in names] for split, names in names_of(tmp_path).items()} == {
        split: list(stems) for split, stems in found.items()
    }
    (note,) = read_boxes(tmp_path).notes
    assert [folder for folder in counts if f"images/{folder}" in note] == list(counts)


def test_folders_of_equal_names_are_not_taken_together(tmp_path: Path) -> None:
    for name in ("day1/a", "day1/b", "day2/b", "day2/c"):
        draw(tmp_path / f"{name}.jpg")
    write_coco(tmp_path / "all.json", ["a.jpg", "b.jpg", "c.jpg"])
    with pytest.raises(DataError, match="day1 and day2"):
        read_boxes(tmp_path)
    draw(tmp_path / "day1" / "d.jpg")
    write_coco(tmp_path / "all.json", ["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    assert [Path(name).name for name in read_boxes(tmp_path).missing] == ["c.jpg"]


def test_an_image_that_coco_lists_twice_is_refused(tmp_path: Path) -> None:
    draw(tmp_path / "a.jpg")
    write_coco(tmp_path / "all.json", ["a.jpg", "./a.jpg"])
    with pytest.raises(DataError) as caught:
        read_boxes(tmp_path)
    assert (caught.value.path, caught.value.field) == (str(tmp_path / "all.json"), "images")


def test_coco_finds_names_in_other_cases(tmp_path: Path) -> None:
    for name in ("day1/A.JPG", "day1/b.Jpg", "day2/A.jpg"):
        draw(tmp_path / name)
    write_coco(tmp_path / "all.json", ["Day1/a.jpg", "day1/b.jpg"])
    assert names_of(tmp_path) == {"": ["day1/A.JPG", "day1/b.Jpg"]}


def test_an_annotation_of_two_images_is_refused(tmp_path: Path) -> None:
    for stem in ("a", "b", "photo"):
        draw(tmp_path / f"{stem}.jpg")
    annotate(tmp_path / "a.xml", "photo.jpg")
    annotate(tmp_path / "b.xml", "elsewhere.jpg")
    with pytest.raises(DataError) as caught:
        read_boxes(tmp_path)
    assert (caught.value.path, caught.value.field) == (str(tmp_path / "a.xml"), "filename")
    (tmp_path / "photo.jpg").unlink()
    assert names_of(tmp_path) == {"": ["a.jpg", "b.jpg"]}
