"""On real annotations and photographs, in the folder that REAL_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from gaudi_datasets.detection.coco import NO_SIZE, PAST_EDGE, CocoAnnotations, parse_coco, read_coco
from gaudi_datasets.detection.records import write_records
from gaudi_datasets.detection.scoring import FIGURES, score_detections
from gaudi_datasets.detection.sources import CocoSource, RecordSource, ground_truth
from gaudi_datasets.detection.voc import IMAGE_FOLDER, read_voc
from gaudi_datasets.detection.yolo import read_yolo
from gaudi_datasets.errors import DataError, MissingInputError

FOLDER = Path(os.environ.get("REAL_DATA", ""))

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get("REAL_DATA"), reason="REAL_DATA is unset; it must name the folder of real data"
    ),
]


def test_the_published_figures_are_met() -> None:
    folder = FOLDER / "coco_eval_oracle"
    truth = folder / "instances_val2014_100.json"
    scores = score_detections(truth, folder / "instances_val2014_fakebbox100_results.json")
    published = [0.505, 0.697, 0.573, 0.586, 0.519, 0.501, 0.387, 0.594, 0.595, 0.640, 0.566, 0.564]
    assert {name: round(value or 0, 3) for name, value in scores.figures.items()} == dict(
        zip(FIGURES, published, strict=True)
    )
    assert (scores.images, scores.detections) == (100, 734)


@pytest.mark.parametrize(
    ("truth", "detections", "ap"),
    [("edge_gt", "edge_dt", 0.7129), ("gt", "dt", 0.9084), ("zero_gt", "zero_dt", 1.0)],
)
def test_edge_cases_are_scored(truth: str, detections: str, ap: float) -> None:
    folder = FOLDER / "edge_json"
    scores = score_detections(folder / f"{truth}.json", folder / f"{detections}.json")
    assert scores.figures["AP"] == pytest.approx(ap, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dt", "is a list"),
        ("edge_dt", "is a list"),
        ("zero_dt", "is a list"),
        ("healthcheck_bad", r"image 1 \(images\[1\]\): its id .*\(1 of 5 faults\)"),
    ],
)
def test_files_with_faults_are_refused(name: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"{name}\.json: {message}"):
        read_coco(FOLDER / "edge_json" / f"{name}.json")


@pytest.mark.parametrize("name", ["gt", "edge_gt", "zero_gt", "healthcheck_quality"])
def test_annotations_without_their_images_leave_nothing(name: str, tmp_path: Path) -> None:
    coco = read_coco(FOLDER / "edge_json" / f"{name}.json")
    with pytest.raises(MissingInputError, match="there is no"):
        write_records(coco, FOLDER / "edge_json", tmp_path / "out", "train", keep_empty=True)
    assert not (tmp_path / "out").exists()


def test_boxes_of_doubtful_quality_are_counted() -> None:
    coco = read_coco(FOLDER / "edge_json" / "healthcheck_quality.json")
    assert coco.annotation_ids.tolist() == [3]
    assert [(fault.annotation_id, fault.rule) for fault in coco.faults] == [
        (1, NO_SIZE),
        (2, PAST_EDGE),
        (4, PAST_EDGE),
    ]


def test_coco_is_converted(tmp_path: Path) -> None:
    folder = FOLDER / "coco_ccby"
    for split, kept, boxes in [("train", 79, 770), ("val", 57, 517)]:
        coco = read_coco(folder / "annotations" / f"instances_{split}2017.json")
        manifest = write_records(coco, folder / f"{split}2017", tmp_path, split, keep_empty=split == "val")
        images, boxes_told = manifest["images"], manifest["boxes"]
        assert (images["kept"], boxes_told["kept"], boxes_told["of"]) == (kept, boxes, boxes)
        source = RecordSource(tmp_path, split)
        assert len(source) == kept
        assert len(source.categories) == 80
        assert sum(int(source.read(row).is_crowd.sum()) for row in range(kept)) == int(coco.is_crowd.sum())


def test_blood_cells_are_converted_from_voc(tmp_path: Path) -> None:
    root = FOLDER / "bccd" / "BCCD"
    for split, sets, figures in [
        ("train", ["train", "val"], (292, 3941, 3943)),
        ("val", ["test"], (72, 945, 945)),
    ]:
        coco = parse_coco(read_voc(root, sets), root)
        manifest = write_records(coco, root / IMAGE_FOLDER, tmp_path, split, keep_empty=split == "val")
        images, boxes_told = manifest["images"], manifest["boxes"]
        assert (images["kept"], boxes_told["kept"], boxes_told["of"]) == figures
        assert [category.name for category in coco.categories] == ["Platelets", "RBC", "WBC"]


def test_the_ground_truth_of_records_scores_one_against_itself(tmp_path: Path) -> None:
    folder = FOLDER / "coco_ccby"
    coco = read_coco(folder / "annotations" / "instances_val2017.json")
    write_records(coco, folder / "val2017", tmp_path, "val", keep_empty=True)
    document = ground_truth(RecordSource(tmp_path, "val"))
    detections = [one | {"score": 0.9} for one in document["annotations"] if not one["iscrowd"]]
    scores = score_detections(folder / "annotations" / "instances_val2017.json", detections)
    assert scores.figures["AP50"] == pytest.approx(1)
    assert scores.figures["AP"] == pytest.approx(1)
    assert scores.images == 57


def read_split(name: str, split: str) -> tuple[CocoAnnotations, Path]:
    if name == "bccd":
        root = FOLDER / "bccd" / "BCCD"
        return parse_coco(read_voc(root, ["test"] if split == "val" else ["train", "val"]), root), root / IMAGE_FOLDER
    folder = FOLDER / "coco_ccby"
    return read_coco(folder / "annotations" / f"instances_{split}2017.json"), folder / f"{split}2017"


@pytest.mark.parametrize("name", ["bccd", "coco_ccby"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_files_and_records_give_the_same_examples(name: str, split: str, tmp_path: Path) -> None:
    coco, images = read_split(name, split)
    write_records(coco, images, tmp_path, split, keep_empty=split == "val", shards=7, processes=2, decode=True)
    records, files = RecordSource(tmp_path, split), CocoSource(coco, images, keep_empty=split == "val")
    assert len(records) == len(files)
    for index in range(len(files)):
        one, other = vars(files.read(index)), vars(records.read(index))
        assert all(np.array_equal(value, other[key]) for key, value in one.items())


def test_blood_cells_are_the_same_from_yolo(tmp_path: Path) -> None:
    coco, images = read_split("bccd", "val")
    (tmp_path / "labels").mkdir()
    (tmp_path / "images").symlink_to(images)
    names = [category.name for category in coco.categories]
    for row, name in enumerate(coco.file_names):
        boxes = slice(*coco.box_splits[row : row + 2])
        size = np.array([coco.widths[row], coco.heights[row]])
        x, y, width, height = (coco.boxes_xywh[boxes] / np.tile(size, 2)).T
        columns = zip(coco.category_ids[boxes] - 1, x + width / 2, y + height / 2, width, height, strict=True)
        lines = [f"{number} {cx:.6f} {cy:.6f} {w:.6f} {h:.6f}" for number, cx, cy, w, h in columns]
        (tmp_path / "labels" / f"{Path(name).stem}.txt").write_text("\n".join(lines))
    (tmp_path / "list.txt").write_text("".join(f"images/{name}\n" for name in coco.file_names))
    (tmp_path / "data.yaml").write_text(f"test: list.txt\nnames: {names}\n")
    document, folder = read_yolo(tmp_path / "data.yaml", "test")
    found = parse_coco(document, tmp_path)
    assert folder == tmp_path / "images"
    order = np.argsort(coco.file_names)
    assert found.file_names == tuple(coco.file_names[row] for row in order)
    boxes_of = [np.arange(*coco.box_splits[row : row + 2]) for row in order]
    np.testing.assert_allclose(found.boxes_xywh, coco.boxes_xywh[np.concatenate(boxes_of)], atol=1e-3)
    assert found.category_ids.tolist() == coco.category_ids[np.concatenate(boxes_of)].tolist()
    assert found.faults == ()
