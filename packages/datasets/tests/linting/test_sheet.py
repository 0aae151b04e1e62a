from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.sources import CocoSource
from gaudi_datasets.drawing import class_colour
from gaudi_datasets.linting.lint import annotated_files, lint_detection
from gaudi_datasets.linting.report import LintReport
from gaudi_datasets.linting.rules import NO_SIZE, ClassCount, Finding
from gaudi_datasets.linting.sheet import describe_boxes, describe_images, draw_samples, write_sheet

Encode = Callable[..., bytes]
WriteCoco = Callable[..., Path]
BOX = [1.0, 2.0, 30.0, 40.0]


@pytest.fixture
def train(write_coco: WriteCoco, encode: Encode) -> Path:
    """Twenty images: only the last shows a dog, the first cannot be decoded, the second has no box."""
    images = {f"{n}.jpg": encode(n) if n else b"x" for n in range(20)}
    boxes = [(n, 3, BOX) for n in range(1, 21) if n != 2]
    return write_coco(images, [*boxes, (20, 5, [0.0, 0.0, 8.0, 16.0])])


def test_samples_show_every_class_and_no_broken_image(train: Path) -> None:
    source = CocoSource(read_coco(train), train.with_suffix(""), keep_empty=True)
    samples = draw_samples(source)
    assert len(samples) == 12
    assert sum((np.asarray(one) == class_colour(2)).all(axis=-1).sum() > 100 for one in samples) == 1
    assert [one.tobytes() for one in draw_samples(source)] == [one.tobytes() for one in samples]


def test_histograms_count_every_box_that_is_whole(train: Path) -> None:
    size, shape, number = describe_boxes(read_coco(train))
    assert len(size.values) == len(shape.values) == 20
    assert sorted(set(np.round(size.values, 2).tolist())) == [11.31, 34.64]
    assert sorted(set(shape.values.tolist())) == [0.5, 0.75]
    assert number.values.tolist() == [1, 0, *[1] * 17, 2]
    for histogram in (size, shape, number):
        assert (np.diff(histogram.edges) > 0).all()
        assert histogram.edges[0] <= histogram.values.min()
        assert histogram.values.max() <= histogram.edges[-1]


def test_many_boxes_in_a_image_and_none_at_all_have_bins() -> None:
    sizes = np.array([[100, 200], [0, 0]], np.int32)
    short, shape = describe_images(sizes)
    assert (short.values.tolist(), shape.values.tolist()) == ([100], [2])
    assert [len(one.values) for one in describe_images(np.zeros((0, 2), np.int32))] == [0, 0]


@pytest.mark.costly
@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_sheet_is_written_whole(train: Path, tmp_path: Path, ending: str) -> None:
    annotations = read_coco(train)
    images = annotated_files(annotations, train.with_suffix(""))
    report = lint_detection(annotations, images, "$x$ data")
    samples = draw_samples(CocoSource(annotations, train.with_suffix(""), keep_empty=True))
    path = tmp_path / "out" / f"sheet.{ending}"
    path.parent.mkdir()
    write_sheet(path, report, describe_boxes(annotations), samples if ending == "png" else samples[:2])
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    if ending == "png":
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        assert pixels.shape[1] == 2250
        assert (pixels == (66, 105, 208)).all(axis=-1).mean() > 0.01  # bars
        assert (pixels == (192, 57, 43)).all(axis=-1).any()  # the loss is told in red


@pytest.mark.costly
def test_a_sheet_of_nothing_and_of_letters_without_a_font_is_written(tmp_path: Path) -> None:
    classes = tuple(ClassCount(f"類{number}", number) for number in range(100))
    report = LintReport("データ", "classification", 0, classes=classes, findings=(Finding(NO_SIZE, "a", "b"),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_sheet(tmp_path / "sheet.png", report, describe_images(report.sizes_hw), [])
    assert (tmp_path / "sheet.png").stat().st_size > 10_000


def test_a_sheet_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        write_sheet(tmp_path / "nowhere" / "sheet.png", LintReport("x"), [], [])
    assert list(tmp_path.iterdir()) == []
