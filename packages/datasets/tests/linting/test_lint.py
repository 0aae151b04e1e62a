from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.records import write_records as write_class_records
from gaudi_datasets.classification.sources import RecordSource as ClassRecords
from gaudi_datasets.detection.coco import CocoAnnotations, parse_coco, read_coco
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.layouts.checking import BrokenImagesError
from gaudi_datasets.linting.lint import (
    annotated_files,
    annotations_of_records,
    labels_of_records,
    lint_classification,
    lint_detection,
    listed_files,
    record_images,
    report_broken,
)
from gaudi_datasets.linting.report import LintReport
from gaudi_datasets.linting.rules import (
    DUPLICATE,
    MISLABELLED,
    MISSING,
    NO_BOX,
    NO_IMAGE,
    NO_SIZE,
    OVERLAP,
    UNREADABLE,
    UNSCORED_NO_IMAGE,
    UNUSED,
)

Encode = Callable[..., bytes]
WriteCoco = Callable[..., Path]
BOX = [1.0, 2.0, 30.0, 40.0]


def lint_file(path: Path, other: Path | None = None) -> LintReport:
    others = None if other is None else annotated_files(read_coco(other), other.with_suffix(""))
    annotations = read_coco(path)
    return lint_detection(annotations, annotated_files(annotations, path.with_suffix("")), "name", others)


def test_a_faulty_data_set_is_reported_whole(write_coco: WriteCoco, encode: Encode) -> None:
    """Missing, truncated, folder-like, twice, in the other set, and a box of no size: all at once."""
    images = {"a.jpg": encode(1), "b.jpg": None, "c.jpg": encode(3)[:300], "d.png": encode(1), "e.jpg": encode(5)}
    boxes = [(1, 3, BOX), (1, 5, [0.0, 0.0, 0.0, 9.0]), (2, 5, BOX), (3, 5, BOX), (4, 3, BOX)]
    train = write_coco(images, boxes)
    val = write_coco({"x.jpg": encode(5), "y.jpg": encode(6)}, [(1, 3, BOX)], name="val")
    report = lint_file(train, val)
    rules = (MISSING, UNREADABLE, NO_SIZE, MISLABELLED, DUPLICATE, OVERLAP, NO_BOX, UNUSED)
    assert {rule: len(findings) for rule, findings in report.by_rule().items()} == dict.fromkeys(rules, 1)
    assert report.losses == 3
    assert (report.kind, report.images, report.boxes_kept, report.boxes_total) == ("detection", 5, 4, 5)
    folder = train.with_suffix("")
    missing, unreadable, no_size = report.findings[:3]
    assert missing.where == str(folder / "b.jpg")
    assert unreadable.where == str(folder / "c.jpg")
    assert no_size.where == f"{train}: annotation 2, image 1 (a.jpg)"
    assert re.findall(r"\d+", no_size.what) == ["0", "0", "0", "9"]
    overlap = next(one for one in report.findings if one.rule == OVERLAP)
    assert overlap.where == str(val.with_suffix("") / "x.jpg")
    assert overlap.what.endswith(str(folder / "e.jpg"))


def test_a_folder_in_place_of_a_image_is_unreadable(write_coco: WriteCoco) -> None:
    path = write_coco({"a.jpg": None}, [(1, 3, BOX)])
    (path.with_suffix("") / "a.jpg").mkdir()
    finding = lint_file(path).findings[0]
    assert (finding.rule, finding.where) == (UNREADABLE, str(path.with_suffix("") / "a.jpg"))
    assert "is a folder" in finding.what


def test_records_have_the_counts_of_what_they_were_made_of(
    write_coco: WriteCoco, encode: Encode, tmp_path: Path
) -> None:
    images = {f"{number}.jpg": encode(number) for number in range(5)}
    boxes = [(number, 3, [0.0, 0.0, 80.0, 60.0]) for number in range(1, 6)] + [(2, 5, BOX), (3, 5, BOX)]
    path = write_coco(images, boxes, crowds=(7,))
    annotations = read_coco(path)
    write_records(annotations, path.with_suffix(""), tmp_path / "out", "train", keep_empty=True, shards=2)
    source = RecordSource(tmp_path / "out", "train")
    again = annotations_of_records(source)
    report = lint_detection(again, record_images(source), source.name)
    assert report.classes == lint_file(path).classes
    assert [str(finding) for finding in report.findings] == [f"{source.name}: class '$owl[/]' (id 9)"]
    assert again.faults == ()


def test_damaged_records_are_named_and_the_others_counted(
    write_coco: WriteCoco, encode: Encode, tmp_path: Path
) -> None:
    path = write_coco({f"{n}.jpg": encode(n) for n in range(3)}, [(n, 3, BOX) for n in (1, 2, 3)])
    write_records(read_coco(path), path.with_suffix(""), tmp_path / "out", "train", keep_empty=True, shards=1)
    (shard,) = (tmp_path / "out").glob("*.tfrecord")
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    source = RecordSource(tmp_path / "out", "train")
    report = lint_detection(annotations_of_records(source), record_images(source), source.name)
    assert (report.images, report.boxes_kept, report.losses) == (3, 2, 1)
    assert report.findings[0].where == f"{source.name}: image 0"
    assert report.findings[0].what.startswith(f"{shard}: record 0: its checksum")


@pytest.fixture
def class_folder(tmp_path: Path, encode: Encode) -> Path:
    for number, name in enumerate(["cat/a.jpg", "cat/b.jpg", "dog/c.png", "dog/d.jpg"]):
        (tmp_path / "classes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "classes" / name).write_bytes(encode(number % 3, "PNG" if name.endswith("png") else "JPEG"))
    return tmp_path / "classes"


def test_class_folders_are_linted_by_their_sorted_files(class_folder: Path) -> None:
    source = FolderSource(class_folder)
    report = lint_classification(source.files.labels, source.class_names, listed_files(source.files), source.name)
    assert (report.kind, report.images, report.boxes_total) == ("classification", 4, None)
    assert [(one.name, one.images, one.boxes) for one in report.classes] == [("cat", 2, None), ("dog", 2, None)]
    (finding,) = report.findings
    assert finding.where == str(class_folder / "dog/d.jpg")
    assert finding.what.endswith(str(class_folder / "cat/a.jpg"))


def test_records_of_classes_are_linted(class_folder: Path, tmp_path: Path) -> None:
    write_class_records(FolderSource(class_folder), tmp_path / "out", "train")
    source = ClassRecords(tmp_path / "out", "train")
    labels = labels_of_records(source)
    report = lint_classification(labels, (*source.class_names, "owl"), record_images(source), source.name)
    assert [(one.name, one.images) for one in report.classes] == [("cat", 2), ("dog", 2), ("owl", 0)]
    assert [finding.rule.name for finding in report.findings] == [DUPLICATE.name, NO_IMAGE.name]
    scored = lint_classification(labels, (*source.class_names, "owl"), record_images(source), source.name, scores=True)
    assert [finding.rule for finding in scored.findings] == [DUPLICATE, UNSCORED_NO_IMAGE]
    assert report.losses == 0


def test_every_fault_of_the_annotations_is_in_the_report(tmp_path: Path) -> None:
    document = {"images": [{"id": 1}, {"id": 1}], "annotations": [5], "categories": [{"id": 1, "name": "a"}]}
    with pytest.raises(DataError) as error:
        parse_coco(document, Path("gt.json"))
    report = report_broken("gt.json", error.value)
    assert report.losses == 3
    assert [str(finding)[:30] for finding in report.findings] == [
        "gt.json: image 1 (images[0]): ",
        "gt.json: image 1 (images[1]): ",
        "gt.json: annotations[0]: is 5;",
    ]
    json.dumps(report.as_json())
    assert [str(one) for one in report_broken("x", DataError("x: is empty")).findings] == ["x: is empty"]


def test_every_broken_image_is_in_the_report() -> None:
    errors = [DataError("is empty", path=name) for name in ("a.jpg", "b.jpg")]
    findings = report_broken("x", BrokenImagesError("x", errors, 2, 5)).findings
    assert [str(one) for one in findings] == list(map(str, errors))


def test_annotations_without_images_have_a_report() -> None:
    document = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "a"}]}
    annotations: CocoAnnotations = parse_coco(document, Path("gt.json"))
    report = lint_detection(annotations, annotated_files(annotations, "."), "gt.json")
    assert (report.images, report.boxes_total, report.sizes) == (0, 0, {})
