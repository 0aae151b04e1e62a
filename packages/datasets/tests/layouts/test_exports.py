"""Tables and exports of labelling tools, as these write them, opened as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from gaudi_datasets.detection.layouts import DetectionData, open_data
from gaudi_datasets.errors import DataError, MissingInputError

WIDTH, HEIGHT = 200, 100
# Of each image: class, and left, top, right and bottom in pixels.
BOXES = {
    "a.jpg": [("ant", (10, 20, 50, 80)), ("bee", (0, 0, 200, 100))],
    "b.jpg": [("bee", (100, 10, 180, 30))],
    "c.jpg": [("ant", (20, 20, 40, 40))],
    "d.jpg": [("ant", (60, 50, 90, 90))],
}


def make_images(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in BOXES:
        Image.effect_noise((WIDTH, HEIGHT), 50).convert("RGB").save(folder / name)


def write_table(path: Path, names: list[str]) -> None:
    rows = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
    for name in names:
        rows += [f"{name},{WIDTH},{HEIGHT},{label},{','.join(map(str, box))}" for label, box in BOXES[name]]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def tensorflow_tables(root: Path) -> None:
    make_images(root / "images")
    write_table(root / "data" / "train_labels.csv", ["a.jpg", "b.jpg", "c.jpg"])
    write_table(root / "data" / "test_labels.csv", ["d.jpg"])


def open_images(root: Path) -> None:
    make_images(root / "images")
    rows = [
        "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside"
    ]
    mids = {"ant": "/m/0_k2", "bee": "/m/01h3n"}
    for name, boxes in BOXES.items():
        for label, (x0, y0, x1, y1) in boxes:
            shares = f"{x0 / WIDTH},{x1 / WIDTH},{y0 / HEIGHT},{y1 / HEIGHT}"
            rows.append(f"{name[:-4]},xclick,{mids[label]},1,{shares},0,0,0,0,0")
    rows.append("0001eeaf4aed83f9,xclick,/m/0_k2,1,0.1,0.2,0.1,0.2,0,0,0,0,0")
    (root / "oidv6-train-annotations-bbox.csv").write_text("\n".join(rows))
    (root / "class-descriptions-boxable.csv").write_text("/m/0_k2,ant\n/m/01h3n,bee\n")


def cvat(root: Path) -> None:
    make_images(root / "images")
    images = []
    for number, (name, boxes) in enumerate(BOXES.items()):
        shapes = "".join(
            f'<box label="{label}" source="manual" occluded="0" xtl="{x0}.00" ytl="{y0}.00" xbr="{x1}.00" '
            f'ybr="{y1}.00" z_order="0"><attribute name="age">2</attribute></box>'
            for label, (x0, y0, x1, y1) in boxes
        )
        images.append(f'<image id="{number}" name="{name}" width="{WIDTH}" height="{HEIGHT}">{shapes}</image>')
    head = '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version><meta></meta>'
    (root / "annotations.xml").write_text(f"{head}{''.join(images)}</annotations>")


def region(label: str, box: tuple[int, int, int, int]) -> dict[str, Any]:
    x0, y0, x1, y1 = box
    return {
        "x": 100 * x0 / WIDTH,
        "y": 100 * y0 / HEIGHT,
        "width": 100 * (x1 - x0) / WIDTH,
        "height": 100 * (y1 - y0) / HEIGHT,
        "rotation": 0,
        "rectanglelabels": [label],
    }


def label_studio(root: Path) -> None:
    make_images(root)
    tasks = []
    for number, (name, boxes) in enumerate(BOXES.items(), 1):
        results = [
            {
                "original_width": WIDTH,
                "original_height": HEIGHT,
                "image_rotation": 0,
                "value": region(label, box),
                "id": f"r{number}",
                "from_name": "label",
                "to_name": "image",
                "type": "rectanglelabels",
                "origin": "manual",
            }
            for label, box in boxes
        ]
        annotation = {"id": number, "completed_by": 1, "result": results, "was_cancelled": False, "lead_time": 3.2}
        image = f"/data/upload/1/0a1b2c3d-{name}"
        tasks.append({"id": number, "annotations": [annotation], "predictions": [], "data": {"image": image}})
    (root / "project-1-at-2024-01-01.json").write_text(json.dumps(tasks))


def label_studio_min(root: Path) -> None:
    make_images(root / "photos")
    tasks = [
        {
            "image": f"/data/local-files/?d=photos/{name}",
            "id": number,
            # A control may have any name.
            "segmentation": [{**region(*one), "original_width": WIDTH, "original_height": HEIGHT} for one in boxes[:1]],
            "label": [{**region(*one), "original_width": WIDTH, "original_height": HEIGHT} for one in boxes[1:]],
            "annotator": 1,
            "annotation_id": number,
            "lead_time": 2.5,
        }
        for number, (name, boxes) in enumerate(BOXES.items(), 1)
    ]
    (root / "min.json").write_text(json.dumps(tasks))


def labelme(root: Path) -> None:
    make_images(root)
    for name, boxes in BOXES.items():
        shapes: list[dict[str, Any]] = [
            {
                "label": label,
                "points": [[x1, y1], [x0, y0]],  # drawn from the lower right corner
                "group_id": None,
                "description": "",
                "shape_type": "rectangle",
                "flags": {},
            }
            for label, (x0, y0, x1, y1) in boxes
        ]
        document = {"version": "5.3.1", "flags": {}, "shapes": shapes, "imagePath": name, "imageData": "QUJD" * 30000}
        (root / f"{name[:-4]}.json").write_text(json.dumps({**document, "imageHeight": HEIGHT, "imageWidth": WIDTH}))


def boxes_of(data: DetectionData) -> dict[str, list[tuple[str, Any]]]:
    found = {}
    for source in filter(None, (data.train, data.val, data.test)):
        for index in range(len(source)):
            example = source.read(index)
            boxes_yxyx = example.boxes_yxyx * (HEIGHT, WIDTH, HEIGHT, WIDTH)
            found[Path(example.file_name).name] = [
                (source.categories[label - 1].name, pytest.approx([x0, y0, x1, y1], abs=0.01))
                for label, (y0, x0, y1, x1) in zip(example.labels.tolist(), boxes_yxyx.tolist(), strict=True)
            ]
    return found


MAKERS = {
    "CSV": tensorflow_tables,
    "Open Images CSV": open_images,
    "CVAT": cvat,
    "Label Studio": label_studio,
    "Label Studio (": label_studio_min,
    "LabelMe": labelme,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_boxes_are_read_as_they_were_drawn(kind: str, tmp_path: Path) -> None:
    MAKERS[kind](tmp_path)
    data = open_data(tmp_path, val_share=0.3)
    assert data.layout.startswith(kind)
    assert data.val is not None
    found = boxes_of(data)
    assert found == {name: [(label, list(map(float, box))) for label, box in boxes] for name, boxes in BOXES.items()}
    assert [each.name for each in data.categories] == ["ant", "bee"]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (tensorflow_tables, "data/train_labels.csv"),
        (open_images, "oidv6-train-annotations-bbox.csv"),
        (cvat, "annotations.xml"),
        (label_studio, "project-1-at-2024-01-01.json"),
        (label_studio_min, "min.json"),
    ],
)
def test_one_file_is_read_alone(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    make(tmp_path)
    data = open_data(tmp_path / name, val_share=0.3)
    assert set(data.split) == {"train", "val"}


def test_the_tables_of_tensorflow_keep_their_test_images(tmp_path: Path) -> None:
    tensorflow_tables(tmp_path)
    data = open_data(tmp_path, val_share=0.4)
    assert data.test is not None
    assert (len(data.train), len(data.val or ()), len(data.test)) == (2, 1, 1)
    assert data.test.read(0).file_name.endswith("d.jpg")


def test_images_that_are_not_there_are_counted(tmp_path: Path) -> None:
    open_images(tmp_path)
    (note,) = (note for note in open_data(tmp_path).notes if "0001eeaf4aed83f9" in note)
    assert note.startswith("left out 1 ")
    for name in BOXES:
        (tmp_path / "images" / name).unlink()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "other.jpg")
    with pytest.raises(MissingInputError):
        open_data(tmp_path)


@pytest.mark.parametrize("other", ["extra", "."])
def test_images_of_no_split_leave_those_of_training_there(other: str, tmp_path: Path) -> None:
    names = [f"{folder}/{number}.jpg" for folder, count in (("train", 6), ("val", 3)) for number in range(count)]
    names += [f"{other}/{name}.jpg" for name in ("left", "over")]
    write_numbered(tmp_path, "filename", [[name] for name in names], names)
    data = open_data(tmp_path)
    assert data.val is not None
    assert (len(data.train), len(data.val)) == (6, 3)
    assert [note for note in data.notes if note.startswith("left out 2 images") and "over.jpg" in note]
    for name in names[:6]:
        (tmp_path / name).unlink()
    assert len(open_data(tmp_path).train) == 2  # of no split, where none is of training


def write_numbered(root: Path, columns: str, rows: list[list[str]], names: list[str]) -> None:
    """Write a table of boxes, the left edge of each the number of its row, and the images that it names."""
    lines = [",".join([*row, "ant", f"{number},0,{number + 20},20"]) for number, row in enumerate(rows)]
    (root / "annotations.csv").write_text("\n".join([f"{columns},class,xmin,ymin,xmax,ymax", *lines]))
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        Image.effect_noise((WIDTH, HEIGHT), 50).convert("RGB").save(root / name)


def test_names_of_files_go_before_ids(tmp_path: Path) -> None:
    names = [f"{number}.jpg" for number in range(1, 5)]
    write_numbered(tmp_path, "image_id,file_name", [[str(row), name] for row, name in enumerate(names)], names)
    found = boxes_of(open_data(tmp_path, val_share=0))
    assert found == {name: [("ant", [row, 0, row + 20, 20])] for row, name in enumerate(names)}


@pytest.mark.parametrize("column", ["split", "Set", "subset"])
def test_a_column_may_tell_the_split(column: str, tmp_path: Path) -> None:
    rows = [["0.jpg", "train"], ["1.jpg", "Validation"], ["2.jpg", "test"], ["3.jpg", "train"], ["1.jpg", "Validation"]]
    write_numbered(tmp_path, f"filename,{column}", rows, [name for name, _ in rows])
    found = {split: coco.file_names for split, (coco, _) in open_data(tmp_path).annotations.items()}
    assert found == {"train": ("0.jpg", "3.jpg"), "val": ("1.jpg",), "test": ("2.jpg",)}


@pytest.mark.parametrize("most", ["1", "1.0000000000000002", "1.00005"])
def test_shares_may_be_above_one_by_rounding(most: str, tmp_path: Path) -> None:
    make_images(tmp_path)
    rows = ["filename,class,xmin,ymin,xmax,ymax", f"a.jpg,ant,0.1,0.2,{most},{most}", "b.jpg,bee,0.5,0.5,0.6,0.7"]
    (tmp_path / "annotations.csv").write_text("\n".join(rows))
    found = boxes_of(open_data(tmp_path, val_share=0))
    assert found == {"a.jpg": [("ant", [20, 20, WIDTH, HEIGHT])], "b.jpg": [("bee", [100, 50, 120, 70])]}


def test_shares_may_be_past_the_edge(tmp_path: Path) -> None:
    make_images(tmp_path)
    rows = ["filename,class,xmin,ymin,xmax,ymax", "a.jpg,ant,0.1,0.2,1.05,1.5", "b.jpg,bee,0.5,0.5,0.6,0.7"]
    (tmp_path / "annotations.csv").write_text("\n".join(rows))
    data = open_data(tmp_path, val_share=0)
    assert boxes_of(data) == {"a.jpg": [("ant", [20, 20, WIDTH, HEIGHT])], "b.jpg": [("bee", [100, 50, 120, 70])]}
    for text in ("corners for shares", "clipped 1 "):
        assert [note for note in data.notes if text in note], text


def test_whole_corners_up_to_two_are_pixels(tmp_path: Path) -> None:
    make_images(tmp_path)
    (tmp_path / "annotations.csv").write_text("filename,class,xmin,ymin,xmax,ymax\na.jpg,ant,0,0,1,2\n")
    assert boxes_of(open_data(tmp_path, val_share=0)) == {"a.jpg": [("ant", [0, 0, 1, 2])]}


def test_names_of_columns_may_hold_what_divides_them(tmp_path: Path) -> None:
    names = [f"{number}.jpg" for number in range(3)]
    rows = [[name, f'"{WIDTH}, {HEIGHT}"'] for name in names]
    write_numbered(tmp_path, 'filename,"size (w, h)"', rows, names)
    found = boxes_of(open_data(tmp_path, val_share=0))
    assert found == {name: [("ant", [row, 0, row + 20, 20])] for row, name in enumerate(names)}


def test_paths_go_before_the_names_at_their_ends(tmp_path: Path) -> None:
    names = ["day1/0.jpg", "day2/0.jpg", "day2/1.jpg"]
    rows = [[Path(name).name, name.replace("/", "\\")] for name in names]
    write_numbered(tmp_path, "filename,path", rows, names)
    sets = open_data(tmp_path, val_share=0).annotations
    assert sets["train"][0].file_names == tuple(names)
    assert sets["train"][0].boxes_xywh[:, 0].tolist() == [0, 1, 2]


def test_a_table_made_of_xml_gives_way_to_it(tmp_path: Path) -> None:
    tensorflow_tables(tmp_path)
    for name, boxes in BOXES.items():
        objects = "".join(
            f"<object><name>{label}</name><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax>"
            "</bndbox></object>"
            for label, (x0, y0, x1, y1) in boxes
        )
        path = tmp_path / "annotations" / f"{name[:-4]}.xml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<annotation><filename>{name}</filename>{objects}</annotation>")
    data = open_data(tmp_path)
    assert data.layout.startswith("Pascal VOC")
    assert [note for note in data.notes if "train_labels.csv" in note]
    (tmp_path / "annotations" / "d.xml").unlink()
    with pytest.raises(DataError, match="CSV"):
        open_data(tmp_path)


def test_shapes_that_are_no_boxes_are_counted(tmp_path: Path) -> None:
    labelme(tmp_path)
    shapes: list[dict[str, Any]] = [
        {"label": "ant", "shape_type": "polygon", "points": [[10, 20], [50, 30], [30, 80]]},
        {"label": "bee", "shape_type": "circle", "points": [[100, 50], [100, 70]]},
        {"label": "ant", "shape_type": "line", "points": [[0, 0], [5, 5]]},
        {"label": "ant", "shape_type": "rectangle", "points": [[-7, 10], [20, 40]]},
    ]
    document = {"shapes": shapes, "imagePath": "..\\elsewhere\\a.jpg", "imageHeight": HEIGHT, "imageWidth": WIDTH}
    (tmp_path / "a.json").write_text(json.dumps(document))
    data = open_data(tmp_path, val_share=0)
    assert boxes_of(data)["a.jpg"] == [("ant", [10, 20, 50, 80]), ("bee", [80, 30, 120, 70]), ("ant", [0, 10, 20, 40])]
    for text in ("outlines made boxes: 2", "left out line shapes: 1", "clipped 1 "):
        assert [note for note in data.notes if text in note], text


def test_cvat_outlines_and_turned_boxes_are_counted(tmp_path: Path) -> None:
    cvat(tmp_path)
    image = f'<image id="0" name="a.jpg" subset="Train" width="{WIDTH}" height="{HEIGHT}">'
    shapes = (
        '<polygon label="ant" points="10.0,20.0;50.0,30.0;30.0,80.0"/><points label="bee" points="1,2"/>'
        '<box label="bee" xtl="80" ytl="40" xbr="120" ybr="60" rotation="90"/>'
    )
    (tmp_path / "annotations.xml").write_text(
        f"<annotations><version>1.1</version>{image}{shapes}</image></annotations>"
    )
    data = open_data(tmp_path, val_share=0)
    assert boxes_of(data) == {"a.jpg": [("ant", [10, 20, 50, 80]), ("bee", [90, 30, 110, 70])]}
    for text in ("outlines made boxes: 1", "left out points shapes: 1", "rotated boxes", "b.jpg"):
        assert [note for note in data.notes if text in note], text


def test_label_studio_takes_the_first_annotation(tmp_path: Path) -> None:
    label_studio(tmp_path)
    path = tmp_path / "project-1-at-2024-01-01.json"
    tasks = json.loads(path.read_text())
    first = tasks[0]["annotations"][0]
    tasks[0]["annotations"] = [{**first, "was_cancelled": True, "result": []}, first, {**first, "result": []}]
    tasks[1]["annotations"] = []
    turned = tasks[2]["annotations"][0]["result"][0]["value"]
    turned.update(x=50, y=50, width=10, height=10, rotation=90)  # 20 by 10 pixels, about the upper left corner
    tasks[3]["annotations"][0]["result"] = [{"type": "choices", "value": {"choices": ["good"]}}]
    path.write_text(json.dumps(tasks))
    data = open_data(tmp_path, val_share=0)
    assert boxes_of(data) == {
        "a.jpg": [(label, list(map(float, box))) for label, box in BOXES["a.jpg"]],
        "c.jpg": [("ant", [90, 50, 100, 70])],
    }
    for text in (
        "further annotations of a task: 1",
        "tasks without annotation: 1",
        "type choices: 1",
        "d.jpg",
        "b.jpg",
    ):
        assert [note for note in data.notes if text in note], text


def test_ellipses_of_label_studio_are_turned(tmp_path: Path) -> None:
    label_studio(tmp_path)
    path = tmp_path / "project-1-at-2024-01-01.json"
    tasks = json.loads(path.read_text())
    for task, angle in zip(tasks, (0, 90, 45, -90), strict=True):
        value = {"x": 50, "y": 50, "radiusX": 20, "radiusY": 10, "rotation": angle, "ellipselabels": ["ant"]}
        task["annotations"][0]["result"] = [{"original_width": WIDTH, "original_height": HEIGHT, "value": value}]
    path.write_text(json.dumps(tasks))
    side = (40**2 / 2 + 10**2 / 2) ** 0.5
    turned = [("ant", [90, 10, 110, 90])]
    assert boxes_of(open_data(tmp_path, val_share=0)) == {
        "a.jpg": [("ant", [60, 40, 140, 60])],
        "b.jpg": turned,
        "c.jpg": [("ant", [100 - side, 50 - side, 100 + side, 50 + side])],
        "d.jpg": turned,
    }


@pytest.mark.parametrize(("count", "mark"), [(1, ""), (1, "\ufeff"), (2000, "")])
def test_labelme_is_known_wherever_its_shapes_are(count: int, mark: str, tmp_path: Path) -> None:
    labelme(tmp_path)
    for path in tmp_path.glob("*.json"):
        document = json.loads(path.read_text())
        document["shapes"] *= count
        path.write_text(mark + json.dumps(document, sort_keys=True))
    found = boxes_of(open_data(tmp_path, val_share=0))
    assert {name: len(boxes) for name, boxes in found.items()} == {name: count * len(BOXES[name]) for name in BOXES}


@pytest.mark.parametrize(
    ("make", "name", "old", "new", "field"),
    [
        (tensorflow_tables, "data/train_labels.csv", ",10,20,", ",ten,20,", "xmin"),
        (tensorflow_tables, "data/train_labels.csv", ",ant,10", ",,10", "class"),
        (cvat, "annotations.xml", 'xtl="10.00"', 'xtl="nan"', "xtl"),
        (cvat, "annotations.xml", '<box label="ant"', "<box", "label"),
        (label_studio, "project-1-at-2024-01-01.json", '"x": 5.0', '"x": "5"', "x"),
        (labelme, "a.json", "[50, 80]", "[50]", "points"),
    ],
)
def test_faults_name_the_file_and_the_field(
    make: Callable[[Path], None], name: str, old: str, new: str, field: str, tmp_path: Path
) -> None:
    make(tmp_path)
    text = (tmp_path / name).read_text()
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new, 1))
    with pytest.raises(DataError) as error:
        open_data(tmp_path)
    assert (error.value.path, error.value.field) == (str(tmp_path / name), field)
    assert error.value.record
