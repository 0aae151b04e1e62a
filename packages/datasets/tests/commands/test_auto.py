"""The subcommands that take a data set in any layout."""

from __future__ import annotations

import json
import os
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.classification import layouts as classification
from gaudi_datasets.detection import layouts as detection
from gaudi_datasets.errors import DataError
from gaudi_datasets.linting.rules import OVERLAP, UNSCORED_NO_IMAGE

run: Callable[..., int] = runpy.run_path(str(Path(__file__).parents[1] / "run_command.py"))["run_command"]


@pytest.fixture
def boxes(tmp_path: Path) -> Path:
    """Write ten images with a box, in Pascal VOC without lists, and one without annotation."""
    folder = tmp_path / "boxes"
    folder.mkdir()
    for number in range(11):
        Image.effect_noise((60, 40), 50).convert("RGB").save(folder / f"{number}.jpg")
        box = f"<xmin>1</xmin><ymin>2</ymin><xmax>{20 + number}</xmax><ymax>20</ymax>"
        size = "<size><width>60</width><height>40</height></size>"
        text = f"<annotation>{size}<object><name>cat</name><bndbox>{box}</bndbox></object></annotation>"
        if number < 10:
            (folder / f"{number}.xml").write_text(text)
    return folder


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    for name in ("ant", "bee"):
        for number in range(10):
            path = tmp_path / "classes" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((16, 16), 50).save(path)
    return tmp_path / "classes"


def test_boxes_of_any_layout_are_converted(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = boxes.with_name("records")
    assert run("convert", "auto", "--data", boxes, "--output_dir", records, "--val_share", 0.3) == 0
    assert "10.jpg" in capsys.readouterr().err
    data, again = detection.open_data(boxes, val_share=0.3), detection.open_data(records)
    assert data.val is not None
    assert again.val is not None
    assert (len(again.train), len(again.val)) == (7, 3)
    for one, other in ((data.train, again.train), (data.val, again.val)):
        for row in range(len(one)):
            first, second = one.read(row), other.read(row)
            assert (first.image_id, first.encoded) == (second.image_id, second.encoded)
            np.testing.assert_array_equal(first.boxes_yxyx, second.boxes_yxyx)
    assert run("convert", "auto", "--data", records, "--output_dir", boxes.with_name("again")) == 64


@pytest.mark.parametrize("kind", ["boxes", "classes"])
def test_records_do_not_hide_the_images_that_they_are_made_of(kind: str, request: pytest.FixtureRequest) -> None:
    data: Path = request.getfixturevalue(kind)
    before = sorted(data.rglob("*"))
    assert run("convert", "auto", "--data", data, "--output_dir", f"{data}/../{data.name}") == 64
    assert sorted(data.rglob("*")) == before


def test_classes_are_converted(classes: Path) -> None:
    records = classes.with_name("records")
    assert run("convert", "auto", "--data", classes, "--output_dir", records) == 0
    data, again = classification.open_data(classes), classification.open_data(records)
    assert data.val is not None
    assert again.val is not None
    for one, other in ((data.train, again.train), (data.val, again.val)):
        labels = [(one.read(row).label, one.read(row).encoded) for row in range(len(one))]
        assert labels == [(other.read(row).label, other.read(row).encoded) for row in range(len(other))]


def test_each_split_is_linted(boxes: Path, classes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("lint", "auto", "--data", boxes, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["splits"]["train"]["boxes"] == {"kept": 10, "of": 10}
    assert any("10.jpg" in note for note in report["notes"])
    (boxes / "3.jpg").write_bytes((boxes / "3.jpg").read_bytes()[:500])
    assert run("lint", "auto", "--data", boxes, "--json") == 65
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["counts"] == {"unreadable image": 1}
    assert run("lint", "auto", "--data", boxes, "--allow") == 0
    assert run("lint", "auto", "--data", classes, "--json") == 0
    capsys.readouterr()
    records = classes.with_name("records")
    run("convert", "auto", "--data", classes, "--output_dir", records)
    capsys.readouterr()
    assert run("lint", "auto", "--data", records, "--json") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert {split: each["images"] for split, each in splits.items()} == {"train": 16, "val": 4}
    assert run("lint", "auto", "--data", classes / "ant", "--json") == 65
    assert list(json.loads(capsys.readouterr().out)["counts"]) == ["broken data set"]
    assert run("lint", "auto", "--data", classes / "nowhere") == 66


def test_images_of_any_layout_are_shown(boxes: Path, classes: Path) -> None:
    for data in (boxes, classes):
        shown = data.with_name(f"{data.name}-shown")
        assert run("show", "auto", "--data", data, "--output_dir", shown, "--count", 2, "--split", "val") == 0
        assert len(list(shown.iterdir())) == 2
        assert run("show", "auto", "--data", data, "--output_dir", shown, "--split", "test") == 66


@pytest.mark.costly
def test_a_sheet_of_each_split_says_where_it_is(
    boxes: Path, classes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("lint", "auto", "--data", boxes, "--sheet", tmp_path / "one.png", "--allow") == 0
    assert capsys.readouterr().out.splitlines()[-1].partition(":")[0] == str(tmp_path / "one.png")
    for split in ("train", "val"):
        (classes.with_name("splits") / split).parent.mkdir(exist_ok=True)
        shutil.copytree(classes, classes.with_name("splits") / split)
    command = ["lint", "auto", "--data", classes.with_name("splits"), "--sheet", tmp_path / "two.png", "--allow"]
    assert run(*command, "--json") == 0
    sheets = [tmp_path / f"two-{split}.png" for split in ("train", "val")]
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == [str(path) for path in sheets]
    for path in (tmp_path / "one.png", *sheets):
        with Image.open(path) as image:
            assert image.width == 2250
    assert run("lint", "auto", "--data", boxes, "--sheet", tmp_path / "sheet.gif") == 64


def test_missing_images_end_lint_and_conversion(boxes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3, 10):
        (boxes / f"{number}.jpg").unlink()
    assert run("lint", "auto", "--data", boxes, "--json") == 65
    findings = json.loads(capsys.readouterr().out)["splits"]["train"]["findings"]
    assert sum(finding["rule"] == "missing image" for finding in findings) == 7
    records = boxes.with_name("records")
    assert run("convert", "auto", "--data", boxes, "--output_dir", records) == 66
    assert not records.exists()
    assert run("convert", "auto", "--data", boxes, "--output_dir", records, "--allow") == 0


def test_images_of_every_other_split_are_compared_with_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "val", "test"):
        for name in ("ant", "bee"):
            path = tmp_path / split / name / f"{split}.png"
            path.parent.mkdir(parents=True)
            Image.effect_noise((16, 16), 50).save(path)
    shutil.copy(tmp_path / "train" / "ant" / "train.png", tmp_path / "test" / "bee" / "again.png")
    (tmp_path / "val" / "ant" / "broken.png").write_bytes(b"none")
    assert run("lint", "auto", "--data", tmp_path, "--json") == 65
    splits = json.loads(capsys.readouterr().out)["splits"]
    found = [(finding["rule"], Path(finding["where"]).name) for each in splits.values() for finding in each["findings"]]
    assert sorted(found) == [("in both sets", "again.png"), ("unreadable image", "broken.png")]


@pytest.mark.parametrize("kind", ["boxes", "classes"])
def test_a_folder_that_cannot_be_read_ends_the_program(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data: Path = request.getfixturevalue(kind)
    (data / "deep").mkdir()
    scan = os.scandir

    def refuse(path: str) -> Any:
        if Path(path) == data / "deep":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for command in (["lint", "auto"], ["convert", "auto", "--output_dir", data.with_name("records")]):
        assert run(*command, "--data", data) == 74
        assert str(data / "deep") in capsys.readouterr().err


MAKE_SENSE = "label_name,bbox_x,bbox_y,bbox_width,bbox_height,image_name\nant,1,2,3,4,0.png"
TABLE = "filename,class,xmin,ymin,xmax,ymax\n" + "\n".join(f"{number}.png,ant,1,2,9,9" for number in range(10))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (MAKE_SENSE.encode(), ("label_name, bbox_x", "xmin, ymin")),
        (b"ant/0.png,1,2,9,9,ant\n", ("ant/0.png, 1", "xmin, ymin")),
        (TABLE.encode("utf-16"), ("in UTF-8",)),
        (TABLE.encode("utf-16-le"), ("in UTF-8",)),
    ],
)
def test_a_table_that_is_not_understood_is_no_class(
    content: bytes, told: tuple[str, ...], classes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = classes / "boxes.csv"
    table.write_bytes(content)
    assert run("lint", "auto", "--data", classes) == 0  # beside two classes it is a stray one
    shutil.rmtree(classes / "bee")
    capsys.readouterr()
    assert run("lint", "auto", "--data", classes) == 65
    error = capsys.readouterr().err
    assert all(words in error for words in ("boxes.csv", *told))
    for path in (classes, table):
        with pytest.raises(DataError) as caught:
            detection.open_data(path)
        assert all(words in str(caught.value) for words in ("boxes.csv", *told))
    table.write_text(TABLE)
    assert run("lint", "auto", "--data", classes) == 0


def test_one_class_without_a_table_or_with_splits_is_read(classes: Path) -> None:
    shutil.rmtree(classes / "bee")
    assert run("lint", "auto", "--data", classes) == 0
    (classes / "train").mkdir()
    (classes / "ant").rename(classes / "train" / "ant")
    (classes / "notes.csv").write_text(MAKE_SENSE)
    assert run("lint", "auto", "--data", classes) == 0


def test_advice_on_an_empty_class_is_of_its_split(classes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = classes.with_name("data")
    shutil.copytree(classes, data / "train")
    shutil.copytree(classes / "ant", data / "val" / "ant")
    assert run("lint", "auto", "--data", data, "--json") == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert [list(splits[split]["counts"])[-1] for split in ("train", "val")] == [OVERLAP.name, UNSCORED_NO_IMAGE.name]
    assert run("lint", "auto", "--data", data) == 0
    assert "cannot be scored" in capsys.readouterr().out


@pytest.mark.parametrize("split", ["", "train"])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("labels/{}.txt", "0 0,5 0,5 0,2 0,2"),
        ("labels/{}.txt", "0.0 .5 .5 .2 .2"),
        ("labels/{}.txt", "0 120 100 30 30"),
        ("labels/{}.txt", "0 .5 .5 .2 .2 .93"),
        ("ant/{}.txt", "cat .5 .5 .2 .2"),
        ("ann/{}.png.json", '{"objects": []}'),
        ("xml/{}.xml", "<root></root>"),
        ("Annotations/all.dat", ""),
    ],
)
def test_annotations_that_are_not_understood_are_no_class(
    name: str, line: str, split: str, classes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = classes.with_name("data") / split
    shutil.copytree(classes / "ant", folder / "ant")
    for number in range(10):
        path = folder / name.format(number)
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{line}\nmore\n")
    data, named = classes.with_name("data"), name.format(0) if line else "Annotations/"
    for command in (["lint", "auto"], ["convert", "auto", "--output_dir", classes.with_name("records")]):
        assert run(*command, "--data", data) == 65
        error = capsys.readouterr().err
        assert all(words in error for words in (str(data), named, *line.split('"')))
    shutil.copytree(classes / "bee", folder / "bee")
    assert run("lint", "auto", "--data", data) == 0  # beside two classes they are stray ones
