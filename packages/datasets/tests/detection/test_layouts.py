"""Data sets in the layouts that people have, opened as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.detection.batches import train_batches
from gaudi_datasets.detection.layouts import DetectionData, open_data
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.sources import CocoSource, RecordSource
from gaudi_datasets.errors import DataError, FlagError, MissingInputError
from gaudi_datasets.layouts.boxes import ALL, BoxSets
from gaudi_datasets.layouts.checking import BrokenImagesError
from gaudi_datasets.layouts.recognition import read_boxes
from gaudi_datasets.sampling import InputOptions

WIDTH, HEIGHT = 60, 40
NAMES = ("ant", "bee")


def make_images(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((WIDTH, HEIGHT), 50).convert("RGB").save(path)


def box_of(number: int) -> tuple[int, int, int, int]:
    """Return left, top, width and height of the box of an image."""
    return 3 + number, 4, 20, 10 + number


def write_coco(path: Path, names: Sequence[str], **changes: Any) -> None:
    boxes = [list(map(float, box_of(number))) for number in range(len(names))]
    document = {
        "images": [
            {"id": number + 1, "file_name": name, "height": HEIGHT, "width": WIDTH} for number, name in enumerate(names)
        ],
        "annotations": [
            {
                "id": number + 1,
                "image_id": number + 1,
                "category_id": 1 + number % 2,
                "bbox": box,
                "area": box[2] * box[3],
            }
            for number, box in enumerate(boxes)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(NAMES, 1)],
        **changes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def write_xml(path: Path, image: str, number: int, size: str | None = None) -> None:
    x, y, width, height = box_of(number)
    size = size if size is not None else f"<size><width>{WIDTH}</width><height>{HEIGHT}</height></size>"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"<annotation><filename>{image}</filename>{size}<object><name>{NAMES[number % 2]}</name><bndbox>"
        f"<xmin>{x}</xmin><ymin>{y}</ymin><xmax>{x + width}</xmax><ymax>{y + height}</ymax></bndbox></object>"
        "</annotation>"
    )


def write_labels(path: Path, number: int) -> None:
    x, y, width, height = box_of(number)
    shares = ((x + width / 2) / WIDTH, (y + height / 2) / HEIGHT, width / WIDTH, height / HEIGHT)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{number % 2} " + " ".join(f"{share:.8f}" for share in shares) + "\n")


def coco_2017(root: Path) -> None:
    make_images(root / "train2017", STEMS)
    make_images(root / "val2017", ["v.jpg", "w.jpg"])
    write_coco(root / "annotations" / "instances_train2017.json", STEMS)
    write_coco(root / "annotations" / "instances_val2017.json", ["v.jpg", "w.jpg"])


def coco_of_roboflow(root: Path) -> None:
    for folder, names in (("train", STEMS), ("valid", ["v.jpg", "w.jpg"])):
        make_images(root / folder, names)
        write_coco(root / folder / "_annotations.coco.json", names)


def coco_in_one_folder(root: Path) -> None:
    make_images(root, STEMS)
    write_coco(root / "result.json", STEMS)


def voc_2012(root: Path) -> None:
    root = root / "VOCdevkit" / "VOC2012"
    make_images(root / "JPEGImages", [*STEMS, "v.jpg"])
    for number, name in enumerate([*STEMS, "v.jpg"]):
        write_xml(root / "Annotations" / f"{name[:-4]}.xml", name, number)
    sets = root / "ImageSets" / "Main"
    sets.mkdir(parents=True)
    (sets / "train.txt").write_text("\n".join(name[:-4] for name in STEMS))
    (sets / "val.txt").write_text("v\n")


def voc_beside_images(root: Path) -> None:
    make_images(root, STEMS)
    for number, name in enumerate(STEMS):
        write_xml(root / f"{name[:-4]}.xml", name, number)


def voc_in_annots(root: Path) -> None:
    make_images(root / "images", STEMS)
    for number, name in enumerate(STEMS):
        write_xml(root / "annots" / f"{name[:-4]}.xml", "elsewhere.jpg", number)


def voc_in_annotations(root: Path) -> None:
    make_images(root / "images" / "deep", STEMS)
    for number, name in enumerate(STEMS):
        write_xml(root / "annotations" / "xmls" / f"{name[:-4]}.xml", name, number, size="")


def voc_of_roboflow(root: Path) -> None:
    for folder, names in (("train", STEMS), ("valid", ["v.jpg"])):
        make_images(root / folder, names)
        for number, name in enumerate(names):
            write_xml(root / folder / f"{name[:-4]}.xml", name, number)


def yolo_with_yaml(root: Path) -> None:
    for split, names in (("train", STEMS), ("val", ["v.jpg"])):
        make_images(root / "images" / split, names)
        for number, name in enumerate(names):
            write_labels(root / "labels" / split / f"{name[:-4]}.txt", number)
    (root / "data.yaml").write_text("path: /not/here\ntrain: images/train\nval: images/val\nnames: [ant, bee]\n")


def yolo_of_folders(root: Path) -> None:
    for split, names in (("train", STEMS), ("valid", ["v.jpg"])):
        make_images(root / split / "images", names)
        for number, name in enumerate(names):
            write_labels(root / split / "labels" / f"{name[:-4]}.txt", number)
    (root / "classes.txt").write_text("ant\nbee\n")


def yolo_beside_images(root: Path) -> None:
    make_images(root / "all", STEMS)
    for number, name in enumerate(STEMS):
        write_labels(root / "all" / f"{name[:-4]}.txt", number)
    (root / "all" / "classes.txt").write_text("ant\nbee\n")


STEMS = [f"{letter}.jpg" for letter in "abcdefghij"]
SPLIT = (coco_2017, coco_of_roboflow, voc_2012, voc_of_roboflow, yolo_with_yaml, yolo_of_folders)
WHOLE = (coco_in_one_folder, voc_beside_images, voc_in_annots, voc_in_annotations, yolo_beside_images)


def boxes_of(source: Any) -> dict[str, tuple[str, list[float]]]:
    found = {}
    for index in range(len(source)):
        example = source.read(index)
        name = source.categories[example.labels[0] - 1].name
        y0, x0, y1, x1 = example.boxes_yxyx[0] * (HEIGHT, WIDTH, HEIGHT, WIDTH)
        found[Path(example.file_name).name] = name, [x0, y0, x1 - x0, y1 - y0]
    return found


def require_boxes(source: Any, names: Sequence[str]) -> None:
    found = boxes_of(source)
    assert sorted(found) == sorted(names)
    for name in names:
        number = STEMS.index(name)
        assert found[name][0] == NAMES[number % 2]
        assert found[name][1] == pytest.approx(box_of(number), abs=1e-3)


@pytest.mark.parametrize("make", SPLIT, ids=lambda make: make.__name__)
def test_splits_are_found(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    data = open_data(tmp_path)
    require_boxes(data.train, STEMS)
    assert data.val is not None
    assert "v.jpg" in boxes_of(data.val)
    assert (data.test, data.split) == (None, {})
    assert [each.name for each in data.categories] == list(NAMES)


@pytest.mark.parametrize("make", WHOLE, ids=lambda make: make.__name__)
def test_what_is_not_split_is_split(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    data = open_data(tmp_path, val_share=0.3, seed=1)
    assert data.val is not None
    assert (len(data.train), len(data.val)) == (7, 3)
    require_boxes(data.train, [Path(name).name for name in data.split["train"]])
    require_boxes(data.val, [Path(name).name for name in data.split["val"]])
    assert open_data(tmp_path, val_share=0.3, seed=1).split == data.split
    assert open_data(tmp_path, val_share=0).val is None


@pytest.mark.parametrize("make", [coco_2017, voc_in_annots, yolo_with_yaml], ids=lambda make: make.__name__)
def test_batches_are_those_of_records(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "data")
    data = open_data(tmp_path / "data")
    write_records(*data.annotations["train"], tmp_path / "records", "train", keep_empty=False)
    write_records(*data.annotations["val"], tmp_path / "records", "val", keep_empty=True)
    again = open_data(tmp_path / "records")
    assert again.layout.startswith("records")
    options = InputOptions(4, image_size=300, seed=3)
    for one, other in zip(first_batches(data, options), first_batches(again, options), strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("make", [coco_of_roboflow, voc_beside_images, yolo_of_folders], ids=lambda make: make.__name__)
def test_batches_of_tensorflow_are_those_of_records(make: Callable[[Path], None], tmp_path: Path) -> None:
    from gaudi_datasets.detection.pipeline import train_dataset
    from gaudi_datasets.tf_input import read_batches

    make(tmp_path / "data")
    data = open_data(tmp_path / "data", val_share=0.3)
    write_records(*data.annotations["train"], tmp_path / "records", "train", keep_empty=False)
    options = InputOptions(4, seed=3)
    sources = (data.train, RecordSource(tmp_path / "records", "train"))
    readers = [iter(read_batches(train_dataset(source, options))) for source in sources]
    for _ in range(3):
        one, other = ({name: each.numpy() for name, each in next(reader).items()} for reader in readers)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def first_batches(data: DetectionData, options: InputOptions) -> list[dict[str, Any]]:
    batches = train_batches(data.train, options)
    return [next(batches) for _ in range(3)]


def test_one_file_is_read_alone(tmp_path: Path) -> None:
    coco_2017(tmp_path)
    data = open_data(tmp_path / "annotations" / "instances_train2017.json")
    assert sorted([*data.split["train"], *data.split["val"]]) == STEMS
    yolo = tmp_path / "yolo"
    yolo_with_yaml(yolo)
    assert open_data(yolo / "data.yaml").split == {}


def test_records_are_split(tmp_path: Path) -> None:
    coco_in_one_folder(tmp_path / "data")
    coco, folder = open_data(tmp_path / "data", val_share=0).annotations["train"]
    write_records(coco, folder, tmp_path / "records", "train", keep_empty=False, shards=2)
    data = open_data(tmp_path / "records", val_share=0.3)
    whole = RecordSource(tmp_path / "records", "train")
    assert isinstance(data.val, RecordSource)
    assert (len(data.train), len(data.val)) == (7, 3)
    require_boxes(data.val, data.split["val"])
    assert len({whole.fingerprint, data.val.fingerprint, data.train.fingerprint}) == 3


def test_missing_and_unused_images_are_counted(tmp_path: Path) -> None:
    coco_2017(tmp_path)
    (tmp_path / "train2017" / "a.jpg").unlink()
    make_images(tmp_path / "train2017", ["new.jpg"])
    data = open_data(tmp_path)
    require_boxes(data.train, STEMS[1:])
    assert [note for note in data.notes if "a.jpg" in note and "1 annotated" in note]
    assert [note for note in data.notes if "train2017/new.jpg" in note]
    shutil.rmtree(tmp_path / "train2017")
    with pytest.raises(MissingInputError) as error:
        open_data(tmp_path)
    assert Path(str(error.value.path)).name == "instances_train2017.json"


def test_annotations_without_image_are_counted(tmp_path: Path) -> None:
    voc_in_annots(tmp_path)
    (tmp_path / "images" / "c.jpg").unlink()
    data = open_data(tmp_path, val_share=0)
    require_boxes(data.train, [name for name in STEMS if name != "c.jpg"])
    assert [note for note in data.notes if "annots/c.xml" in note]
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(MissingInputError):
        open_data(tmp_path)


@pytest.mark.parametrize(
    ("make", "images", "labels"),
    [(yolo_of_folders, "train/images", "train/labels"), (yolo_with_yaml, "images/train", "labels/train")],
)
def test_labels_without_image_and_images_without_labels_are_counted(
    make: Callable[[Path], None], images: str, labels: str, tmp_path: Path
) -> None:
    make(tmp_path)
    (tmp_path / images / "c.jpg").unlink()
    make_images(tmp_path / images, ["new.jpg"])
    (tmp_path / labels / "notes.txt").write_text("no boxes")
    data = open_data(tmp_path)
    require_boxes(data.train, [name for name in STEMS if name != "c.jpg"])
    assert [note for note in data.notes if " 1 file " in note and f"{labels.removeprefix('labels/')}/c.txt" in note]
    assert [note for note in data.notes if "new.jpg" in note]


def test_names_of_a_yaml_file_may_have_gaps(tmp_path: Path) -> None:
    yolo_with_yaml(tmp_path)
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames: {0: ant, 1: bee, 7: cat}\n")
    data = open_data(tmp_path)
    assert [(each.id, each.name) for each in data.categories] == [(1, "ant"), (2, "bee"), (8, "cat")]
    require_boxes(data.train, STEMS)


def test_outlines_become_boxes(tmp_path: Path) -> None:
    yolo_with_yaml(tmp_path)
    (tmp_path / "labels" / "train" / "a.txt").write_text("0 0.1 0.2 0.5 0.2 0.3 0.6\n")
    data = open_data(tmp_path)
    assert boxes_of(data.train)["a.jpg"][1] == pytest.approx([6, 8, 24, 16], abs=1e-3)
    assert [note for note in data.notes if "1 outline" in note]


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (["cat", "Cat", "dog"], ["'cat'", "'Cat'"]),
        (["dog ", "ant", "dog"], ["'dog '", "'dog'"]),
        (["cat", "dog", "cat"], ["'cat'", "'cat'"]),
        (["\u00e9", "e\u0301", "e"], ["'\u00e9'", "'e\u0301'"]),
        (["ant", "bee"], []),
    ],
)
def test_classes_of_names_that_look_alike_are_told(names: list[str], alike: list[str], tmp_path: Path) -> None:
    coco_in_one_folder(tmp_path)
    categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    write_coco(tmp_path / "result.json", STEMS, categories=categories)
    data = open_data(tmp_path)
    assert [each.name for each in data.categories] == names
    notes = [note for note in data.notes if note.startswith("2 classes")]
    assert [note.rpartition(": ")[2].split(", ") for note in notes] == ([alike] if alike else [])


@pytest.mark.parametrize(
    "make", [yolo_with_yaml, yolo_beside_images, voc_beside_images], ids=lambda make: make.__name__
)
def test_images_may_end_as_browsers_save_them(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    before = boxes_of(open_data(tmp_path, val_share=0).train)
    for path in sorted(tmp_path.rglob("*.jpg")):
        path.rename(path.with_suffix(".jfif"))
    for path in tmp_path.rglob("*.xml"):
        path.write_text(path.read_text().replace(".jpg", ".jfif"))
    after = boxes_of(open_data(tmp_path, val_share=0).train)
    assert after == {name.replace(".jpg", ".jfif"): boxes for name, boxes in before.items()}


def test_classes_must_agree(tmp_path: Path) -> None:
    coco_2017(tmp_path)
    categories = [{"id": 1, "name": "ant"}, {"id": 2, "name": "wasp"}]
    write_coco(tmp_path / "annotations" / "instances_val2017.json", ["v.jpg", "w.jpg"], categories=categories)
    with pytest.raises(DataError, match="wasp") as error:
        open_data(tmp_path)
    assert "bee" in str(error.value)


def test_what_is_ambiguous_names_the_choices(tmp_path: Path) -> None:
    yolo_with_yaml(tmp_path)
    coco_in_one_folder(tmp_path / "coco")
    with pytest.raises(DataError) as error:
        open_data(tmp_path)
    assert str(tmp_path / "data.yaml") in str(error.value)
    assert str(tmp_path / "coco" / "result.json") in str(error.value)
    assert open_data(tmp_path / "data.yaml").layout.startswith("YOLO")
    assert open_data(tmp_path / "coco" / "result.json").layout.startswith("COCO")


def test_equal_images_stay_together(tmp_path: Path) -> None:
    coco_in_one_folder(tmp_path)
    for name in "bcde":
        shutil.copy(tmp_path / "a.jpg", tmp_path / f"{name}.jpg")
    for seed in range(5):
        data = open_data(tmp_path, val_share=0.4, seed=seed)
        sides = {
            split for split, names in data.split.items() if {"a.jpg", "b.jpg", "c.jpg", "d.jpg", "e.jpg"} & {*names}
        }
        assert len(sides) == 1


def test_other_faults_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError):
        open_data(tmp_path / "nowhere")
    with pytest.raises(DataError):
        open_data(tmp_path)
    make_images(tmp_path, STEMS)
    with pytest.raises(DataError) as error:
        open_data(tmp_path)
    assert error.value.path == str(tmp_path)
    with pytest.raises(FlagError) as wrong:
        open_data(tmp_path, val_share=1)
    assert wrong.value.flag == "--val_share"
    write_coco(tmp_path / "val.json", STEMS)
    with pytest.raises(DataError):
        open_data(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(DataError):
        open_data(tmp_path / "x.bin")


@pytest.mark.parametrize("make", [yolo_beside_images, voc_in_annotations], ids=lambda make: make.__name__)
def test_all_images_without_a_readable_size_are_named(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    broken = [path for path in sorted(tmp_path.rglob("*.jpg")) if path.stem in "bdf"]
    for path in broken:
        path.write_bytes(b"no image")
    with pytest.raises(BrokenImagesError) as error:
        open_data(tmp_path)
    assert [str(each.path) for each in error.value.errors] == list(map(str, broken))


def csv_without_sizes(root: Path) -> None:
    make_images(root, STEMS)
    rows = [f"{name},{NAMES[row % 2]},{3 + row},4,{23 + row},{14 + row}" for row, name in enumerate(STEMS)]
    (root / "annotations.csv").write_text("\n".join(["filename,class,xmin,ymin,xmax,ymax", *rows]))


@pytest.mark.parametrize(
    "make",
    [yolo_beside_images, yolo_of_folders, yolo_with_yaml, voc_in_annotations, csv_without_sizes],
    ids=lambda make: make.__name__,
)
@pytest.mark.parametrize("is_link", [False, True])
def test_training_images_without_a_readable_size_may_be_skipped(
    make: Callable[[Path], None], is_link: bool, tmp_path: Path
) -> None:
    make(tmp_path)
    for path in sorted(tmp_path.rglob("[bd].jpg")):
        path.write_bytes(b"")
        if is_link:
            path.unlink()
            path.symlink_to("nowhere")
    with pytest.raises(BrokenImagesError) as error:
        open_data(tmp_path)
    assert error.value.count == 2
    data = open_data(tmp_path, val_share=0, on_bad_image="skip")
    require_boxes(data.train, sorted(set(STEMS) - {"b.jpg", "d.jpg"}))
    assert len([note for note in data.notes if note.startswith("left out 2 images") and "b.jpg" in note]) == 1


@pytest.mark.parametrize("make", [yolo_of_folders, yolo_with_yaml], ids=lambda make: make.__name__)
def test_images_of_validation_are_never_skipped(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    (path,) = tmp_path.rglob("v.jpg")
    path.write_bytes(b"")
    with pytest.raises(BrokenImagesError) as error:
        open_data(tmp_path, on_bad_image="skip")
    assert [each.path for each in error.value.errors] == [str(path)]


def test_no_reader_may_leave_images_of_no_split_beside_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coco_in_one_folder(tmp_path)
    ((images, folder),) = read_boxes(tmp_path).sets.values()
    sets = {"train": (images, folder), ALL: (images, folder)}
    monkeypatch.setattr("gaudi_datasets.detection.layouts.read_boxes", lambda *_: BoxSets("COCO", sets))
    with pytest.raises(RuntimeError, match="COCO"):
        open_data(tmp_path)


def test_the_source_keeps_names(tmp_path: Path) -> None:
    coco_2017(tmp_path)
    data = open_data(tmp_path)
    assert isinstance(data.train, CocoSource)
    assert list(data.train.file_names) == STEMS
