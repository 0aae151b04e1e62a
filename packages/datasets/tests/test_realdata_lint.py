"""Lint and show on real annotations and photographs, in the folder that REAL_DATA names."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.linting.rules import NO_BOX, NO_SIZE, UNUSED

run: Callable[..., int] = runpy.run_path(str(Path(__file__).with_name("run_command.py")))["run_command"]

FOLDER = Path(os.environ.get("REAL_DATA", ""))

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get("REAL_DATA"), reason="REAL_DATA is unset; it must name the folder of real data"
    ),
]

BCCD = ["voc", "--voc_dir", str(FOLDER / "bccd" / "BCCD"), "--image_sets"]
CLOTHING = FOLDER / "clothing"


def coco(split: str) -> list[str]:
    folder = FOLDER / "coco_ccby"
    annotations = folder / "annotations" / f"instances_{split}2017.json"
    return ["coco", "--annotations", str(annotations), "--images", str(folder / f"{split}2017")]


def clothing(split: str) -> list[str]:
    return ["folders", "--folder", str(CLOTHING / split)]


def lint(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run("lint", *argv, "--json") == status
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_two_boxes_of_no_area_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    report = lint(capsys, *BCCD, "train", "val", "--val_image_sets", "test", status=65)
    assert (report["images"], report["boxes"], report["losses"]) == (292, {"kept": 3941, "of": 3943}, 2)
    assert report["counts"] == {NO_SIZE.name: 2}
    named = sorted(finding["where"].split("(")[-1] for finding in report["findings"])
    assert named == ["BloodImage_00338.jpg)", "BloodImage_00343.jpg)"]
    assert [(one["name"], one["boxes"]) for one in report["classes"]] == [
        ("Platelets", 292),
        ("RBC", 3348),
        ("WBC", 301),
    ]
    assert report["sizes"]["height"] == {"min": 480, "median": 480, "max": 480}
    assert lint(capsys, *BCCD, "train", "val", "--allow") == lint(capsys, *BCCD, "train", "val", status=65)
    assert lint(capsys, *BCCD, "test")["losses"] == 0


def test_coco_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    others = [flag.replace("--", "--val_") for flag in coco("val")[1:]]
    report = lint(capsys, *coco("train"), *others)
    assert (report["images"], report["boxes"]) == (80, {"kept": 770, "of": 770})
    assert report["counts"] == {NO_BOX.name: 1, UNUSED.name: 13}
    assert sum(one["crowds"] for one in report["classes"]) == 9
    assert sum(one["boxes"] > 0 or one["crowds"] > 0 for one in report["classes"]) == 67
    assert lint(capsys, *coco("val"))["boxes"] == {"kept": 517, "of": 517}


def test_photographs_in_class_folders_lose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    train = lint(capsys, "folders", "--folder", CLOTHING / "train", "--val_folder", CLOTHING / "validation")
    assert (train["images"], len(train["classes"]), train["findings"]) == (1023, 10, [])
    test = lint(capsys, "folders", "--folder", CLOTHING / "test")
    assert (test["images"], max(one["images"] for one in test["classes"])) == (372, 73)


def test_records_have_the_findings_of_their_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", *coco("val"), "--output_dir", tmp_path, "--split", "val") == 0
    report, files = lint(capsys, "records", "--data_dir", tmp_path, "--records", "val"), lint(capsys, *coco("val"))
    assert report["counts"] == files["counts"]
    assert report["sizes"] == files["sizes"]
    for one, other in zip(report["classes"], files["classes"], strict=True):
        assert one == other


def test_sheets_and_images_are_drawn(tmp_path: Path) -> None:
    data = {"bccd": [*BCCD, "train"], "coco": coco("train"), "clothing": clothing("test")}
    for name, flags in data.items():
        assert run("lint", *flags, "--sheet", tmp_path / f"{name}.png", "--allow") == 0
        with Image.open(tmp_path / f"{name}.png") as sheet:
            assert sheet.width == 2250
            assert sheet.height > 1500
            assert np.asarray(sheet.convert("L")).std() > 40  # samples on it
        assert run("show", *flags, "--output_dir", tmp_path / name, "--count", 3) == 0
        assert len(list((tmp_path / name).iterdir())) == 3


def test_what_training_gets_is_drawn(tmp_path: Path) -> None:
    for name, flags in {"coco": coco("train"), "clothing": clothing("test")}.items():
        assert run("show", *flags, "--output_dir", tmp_path / name, "--count", 2, "--augmented") == 0
        for path in (tmp_path / name).iterdir():
            with Image.open(path) as image:
                assert image.width > 3 * 640
