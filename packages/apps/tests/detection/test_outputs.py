"""Check what predictions leave beside images: YOLO labels, CSV and crops, with classes, suppression and tracks."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from gaudi_apps.detection.config import ImageFlags, SaveFlag
from gaudi_apps.detection.detections import Tracker, find_labels
from gaudi_apps.detection.detector import Detector, make_preprocessor
from gaudi_apps.detection.outputs import DetectionFiles, DetectionResults, make_refinement
from gaudi_apps.inference.media import InputImage, Preprocessor, VideoWriter
from gaudi_apps.inference.predictor import predict_files
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.errors import FlagError, UnsafeError
from gaudi_ops.program import say

PREPROCESSOR = make_preprocessor(300)
CATEGORIES = (Category(7, "red"), Category(9, "blue"))
EVERYTHING: tuple[SaveFlag, ...] = ("images", "json", "txt", "csv", "crops")


def run(
    network: Any, files: Sequence[Path], folder: Path, categories: Any = CATEGORIES, **flags: Any
) -> tuple[DetectionResults, list[str]]:
    lines: list[str] = []
    given, detect = ImageFlags(**flags), Detector(network).detect
    refinement = make_refinement(given, categories, detect, PREPROCESSOR, 2)
    results = predict_files(
        detect,
        files,
        PREPROCESSOR,
        lambda draft: DetectionResults(draft, categories, 0.3, refinement=refinement, save=given.save),
        folder,
        batch_size=2,
        strict=False,
        max_frames=given.max_frames,
        write_lines=lambda *new: lines.extend(new),
    )
    return results, lines


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_kind_of_output(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    faint = [([0.7, 0.7, 0.9, 0.9], 1, -1.0)]  # a score of .27: in the JSON file alone
    network = oracle({1: truth[1], 2: truth[2] + faint})
    files = [image_dir / f"{number}.png" for number in (1, 2, 3)]
    results, _ = run(network, files, tmp_path / "out", save=EVERYTHING)
    out = tmp_path / "out"
    assert (out / "classes.txt").read_text() == "red\nblue\n"
    found = {path.name: path.read_text() for path in sorted((out / "labels").iterdir())}
    assert list(found) == ["1.txt", "2.txt", "3.txt"]
    assert found["3.txt"] == ""
    numbers = [float(text) for text in found["2.txt"].split()]
    np.testing.assert_allclose(numbers, [0, 46 / 150, 46 / 120, 60 / 150, 60 / 120], atol=1e-5)
    rows = read_csv(out / "detections.csv")
    assert [(row["path"], row["class"], row["category_id"], row["frame"]) for row in rows] == [
        (str(files[0]), "blue", "9", ""),
        (str(files[1]), "red", "7", ""),
    ]
    np.testing.assert_allclose([float(rows[1][side]) for side in ("left", "top", "right", "bottom")], [16, 16, 76, 76])
    assert (rows[1]["image_width"], rows[1]["image_height"], rows[1]["track_id"]) == ("150", "120", "")
    assert [str(path.relative_to(out)) for path in sorted((out / "crops").rglob("*.jpg"))] == [
        "crops/blue/1-1.jpg",
        "crops/red/2-1.jpg",
    ]
    red = cv2.imread(str(out / "crops" / "red" / "2-1.jpg"))
    assert red.shape == (60, 60, 3)
    assert np.abs(red.astype(int).mean(axis=(0, 1)) - [0, 0, 255]).max() < 5  # OpenCV reads BGR
    assert len(json.loads((out / "detections.json").read_text())) == 3
    named = ["detections.json", "files.json", "labels/", "classes.txt", "detections.csv", "crops/"]
    assert results.files == named
    assert all((out / name).exists() for name in named)
    # Once more, in place of what is there.
    run(network, files, out, save=EVERYTHING)
    assert len(read_csv(out / "detections.csv")) == 2


@pytest.mark.costly
def test_only_what_is_asked_for_is_written(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    for save, names in (
        (("csv",), ["detections.csv"]),
        (("txt",), ["classes.txt", "labels"]),
        (("json",), ["detections.json", "files.json"]),
        (("images",), ["1.png.png"]),
    ):
        out = tmp_path / save[0]
        results, lines = run(oracle(truth), [image_dir / "1.png"], out, save=save)
        assert sorted(path.name for path in out.iterdir()) == [".predictions.json", *names]
        assert len(lines) == 1
        assert ("drawn" in results.describe(out)) == (save == ("images",))
    table = json.loads((tmp_path / "json" / "files.json").read_text())
    assert table["images"][0]["drawn"] is None


@pytest.mark.costly
def test_classes_are_chosen_by_name_or_id(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    files = sorted(image_dir.iterdir())
    for classes, category in ((("red",), 7), (("9",), 9)):
        results, lines = run(oracle(truth), files, tmp_path / classes[0], classes=classes)
        written = json.loads((tmp_path / classes[0] / "detections.json").read_text())
        assert {one["category_id"] for one in written} == {category}
        assert len(lines) == len(written) == results.num_detections == {7: 2, 9: 3}[category]
    assert find_labels((), CATEGORIES) is None


def test_an_integer_is_an_id_and_a_text_first_a_name() -> None:
    digits = tuple(Category(number, str(number - 1)) for number in (0, 1, 2))  # labels 1, 2, 3
    cases: list[tuple[Any, set[int]]] = [
        ([1], {2}),
        (np.array([1, 2]), {2, 3}),
        (np.int64(1), {2}),
        (0, {1}),
        (["1"], {3}),
        ("1", {3}),
        ("2", {3}),
        ([0, "0"], {1, 2}),
    ]
    for given, labels in cases:
        assert find_labels(given, digits) == frozenset(labels)
    strangers: list[Any] = [-1, [np.int64(-1)], True, [True], 7.5, [None]]
    for unknown in strangers:
        with pytest.raises(FlagError) as refused:
            find_labels(unknown, digits)
        assert refused.value.flag == "--classes"
    with pytest.raises(FlagError) as refused:
        find_labels(8, (Category(7, "8"),))
    assert "8 (7)" in (refused.value.remedy or "")


def test_a_name_of_several_classes_is_that_of_all_of_them() -> None:
    categories = (*CATEGORIES, Category(11, "red"), Category(13, "7"))
    for given, labels in (("red", {1, 3}), ((7, "blue"), {1, 2}), (("7",), {4}), ("11", {3})):
        assert find_labels(given, categories) == frozenset(labels)


@pytest.mark.parametrize(
    ("given", "suggested"), [("Reds", "red"), ("bleu", "blue"), ("8", "red (7)"), ("elephant", "blue (9)")]
)
def test_an_unknown_class_gets_a_suggestion(given: str, suggested: str) -> None:
    with pytest.raises(FlagError) as unknown:
        find_labels((given,), CATEGORIES)
    assert unknown.value.flag == "--classes"
    assert suggested in (unknown.value.remedy or "")


def test_overlapping_boxes_of_two_classes_are_one_with_agnostic_nms(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    box = truth[2][0][0]
    near = [box[0], box[1], box[2], box[3] - 0.05]
    network = oracle({2: [(box, 1, 4.0), (near, 2, 6.0)]})
    run(network, [image_dir / "2.png"], tmp_path / "a")
    run(network, [image_dir / "2.png"], tmp_path / "b", agnostic_nms=True)
    apart, together = (json.loads((tmp_path / name / "detections.json").read_text()) for name in ("a", "b"))
    assert sorted(one["category_id"] for one in apart) == [7, 9]
    assert [one["category_id"] for one in together] == [9]
    rows = np.array([box, near], np.float32), np.array([1, 2], np.int32), np.array([0.5, 0.9], np.float32)
    # Classes are chosen first, so a class that is not wanted suppresses nothing.
    refinement = make_refinement(
        ImageFlags(classes=("red",), agnostic_nms=True), CATEGORIES, Detector(network).detect, PREPROCESSOR, 2
    )
    assert refinement.choose(rows)[1].tolist() == [1]


def test_windows_are_as_large_whether_channels_come_first_or_last() -> None:
    """The network's side is that of its input, `[side, side, 3]` or `[3, side, side]`."""
    pixels = np.zeros([700, 900, 3], np.uint8)
    seen: list[int] = []

    def detect(images: Any) -> Any:
        seen.append(len(images))
        count = len(images)
        return np.zeros([count, 1, 4], np.float32), np.zeros([count, 1], np.int32), np.zeros([count, 1], np.float32)

    rows = np.zeros([0, 4], np.float32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    for axes in ((0, 1, 2), (2, 0, 1)):
        prepare = Preprocessor(lambda part, axes=axes: np.zeros([300, 300, 3]).transpose(axes))  # type: ignore[misc]
        image = InputImage(Path("a"), None, 0.0, 700, 900, prepare.from_pixels(pixels), lambda: pixels)
        make_refinement(ImageFlags(tiles="auto"), CATEGORIES, detect, prepare, 64).apply(image, rows)
    assert seen == [4, 4]


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_an_earlier_prediction_left_is_removed_and_nothing_else(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    (out / "labels").mkdir(parents=True)
    (out / "labels" / "own.txt").write_text("0 .5 .5 1 1\n")
    (tmp_path / "other.txt").write_text("mine")
    run(oracle(truth), [image_dir / f"{number}.png" for number in (1, 2, 3)], out, save=EVERYTHING)
    assert {"labels/1.txt", "labels/3.txt", "crops/red/2-1.jpg", "detections.csv", "2.png.png"} <= set(list_files(out))
    (out / "labels" / "2.txt").write_text("corrected by hand")
    written = json.loads((out / ".predictions.json").read_text())
    other = (tmp_path / "other.txt").stat()
    for name in ("../other.txt", str(tmp_path / "other.txt")):  # as no prediction writes it
        written[name] = [other.st_size, other.st_mtime_ns]
    (out / ".predictions.json").write_text(json.dumps(written))
    run(oracle(truth), [image_dir / "1.png"], out, save=("txt",))
    left = ["labels/1.txt", "labels/2.txt", "labels/own.txt"]
    assert list_files(out) == [".predictions.json", "classes.txt", *left]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["labels"]
    assert (out / "labels" / "2.txt").read_text() == "corrected by hand"
    assert (tmp_path / "other.txt").read_text() == "mine"


@pytest.mark.costly
@pytest.mark.parametrize("name", ["labels/1.txt", "classes.txt", "1.png.png", "crops/blue"])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_file_that_is_not_as_a_prediction_wrote_it_is_not_replaced(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path, name: str, is_written: bool
) -> None:
    network, out = oracle(truth), tmp_path / "out"
    if is_written:
        run(network, [image_dir / "2.png"], out, save=EVERYTHING)
        run(network, [image_dir / "1.png"], out, save=("json",) if name == "crops/blue" else EVERYTHING)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text("mine")
    before = {file: (out / file).read_bytes() for file in list_files(out)}
    with pytest.raises(UnsafeError) as refused:
        run(network, [image_dir / "1.png"], out, save=EVERYTHING)
    assert (refused.value.path, refused.value.exit_status) == (str(out / name), 77)
    assert "--output_dir" in (refused.value.remedy or "")
    assert {file: (out / file).read_bytes() for file in list_files(out)} == before


def test_a_name_that_is_taken_is_told_before_the_network_computes(image_dir: Path, tmp_path: Path) -> None:
    def detect(images: Any) -> Any:
        raise AssertionError

    (tmp_path / "files.json").mkdir()
    make_results = partial(DetectionResults, categories=CATEGORIES, score_threshold=0.3)
    with pytest.raises(UnsafeError) as refused:
        predict_files(detect, [image_dir / "1.png"], PREPROCESSOR, make_results, tmp_path, batch_size=1, strict=False)
    assert refused.value.path == str(tmp_path / "files.json")
    assert list(tmp_path.iterdir()) == [tmp_path / "files.json"]


def test_names_that_are_long_or_no_text_end_no_prediction(
    oracle: Callable[..., Any],
    truth: dict[int, Any],
    image_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["\u56fe" * 80 + ".png", "\u56fe" * 79 + "\u7247.png", os.fsdecode(b"caf\xe9.png")]
    files = [Path(shutil.copy(image_dir / "2.png", tmp_path / name)) for name in names]
    categories = (Category(1, "\u56fe" * 90), Category(2, "b"))
    results, lines = run(oracle(truth), files, tmp_path / "out", categories, save=EVERYTHING)
    assert results.bad_files == []
    drawn = {row["drawn"] for row in results.images}
    assert len(drawn) == len(lines) == 3
    written = list_files(tmp_path / "out")
    assert drawn <= set(written)
    for folder in ("labels/", "crops/"):
        assert sum(name.startswith(folder) for name in written) == 3
    for name in written:
        assert name.isprintable()
    assert len(read_csv(tmp_path / "out" / "detections.csv")) == 3
    say(lines[2])
    assert "caf\\udce9.png" in capsys.readouterr().out


@pytest.mark.costly
def test_a_name_that_is_taken_gets_the_next_free_number(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    make_folders(tmp_path, "x", "y")
    files = [tmp_path / name for name in ("a.png-3", "x/a.png", "y/a.png")]
    for number, file in enumerate(files, 1):
        shutil.copy(image_dir / f"{number}.png", file)
    results, _ = run(oracle(truth), files, tmp_path / "out", save=("images", "txt"))
    assert [row["drawn"] for row in results.images] == ["a.png-3.png", "a.png.png", "a.png-4.png"]
    shutil.move(files[0], tmp_path / "a.png-3.png")
    run(oracle(truth), [tmp_path / "a.png-3.png", *files[1:]], tmp_path / "out", save=("txt",))
    assert sorted(path.name for path in (tmp_path / "out" / "labels").iterdir()) == [
        "a.png-3.txt",
        "a.png-4.txt",
        "a.txt",
    ]


def test_a_spreadsheet_takes_no_name_for_a_formula(tmp_path: Path) -> None:
    names = ("=1+1", "+a", "-b", "@c", "\td", "e=")
    files = DetectionFiles(tmp_path, ("csv",), [Category(number, name) for number, name in enumerate(names, 1)])
    boxes = np.tile(np.array([[0.1, 0.1, 0.9, 0.9]], np.float32), (6, 1))
    files.add(make_image("-x.jpg"), (boxes, np.arange(1, 7, dtype=np.int32), np.full(6, 0.9, np.float32)))
    files.close()
    rows = read_csv(tmp_path / "detections.csv")
    assert [row["class"] for row in rows] == ["'=1+1", "'+a", "'-b", "'@c", "'\td", "e="]
    assert {(row["path"], row["category_id"], row["score"]) for row in rows[:1]} == {("'-x.jpg", "1", "0.900000")}


def make_image(name: str, frame: int | None = None) -> InputImage:
    pixels = np.zeros([20, 30, 3], np.uint8)
    return InputImage(Path(name), frame, 0.0, 20, 30, np.zeros([2, 2, 3], np.float32), lambda: pixels, image_id=1)


def test_names_of_classes_and_files_stay_in_the_folder(tmp_path: Path) -> None:
    names = ("../../up", "a/b", "a_b", "..", "CON\n", "ok")
    categories = [Category(number, name) for number, name in enumerate(names, 1)]
    files = DetectionFiles(tmp_path / "in", EVERYTHING, categories)
    (tmp_path / "in").mkdir()
    boxes = np.tile(np.array([[0.1, 0.1, 0.9, 0.9]], np.float32), (6, 1))
    rows = boxes, np.arange(1, 7, dtype=np.int32), np.full(6, 0.9, np.float32)
    for image in (make_image("x.jpg"), make_image("other/x.jpg"), make_image("x.mp4", 3)):
        files.add(image, rows)
    files.close()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    folders = sorted(path.name for path in (tmp_path / "in" / "crops").iterdir())
    assert len(folders) == 6
    assert "a_b" in folders
    assert all(path.resolve().is_relative_to(tmp_path / "in") for path in tmp_path.rglob("*"))
    assert sorted(path.name for path in (tmp_path / "in" / "labels").iterdir()) == [
        "x.jpg-1.txt",
        "x.txt",
        "x_000003.txt",
    ]
    assert len((tmp_path / "in" / "classes.txt").read_text().splitlines()) == 6


def test_no_more_frames_than_asked_for(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    results, _ = run(
        oracle(truth), [write_clip(image_dir, tmp_path, 5), image_dir / "2.png"], tmp_path / "o", max_frames=3
    )
    assert [row.get("frame") for row in results.images] == [0, 1, 2, None]


def write_clip(image_dir: Path, folder: Path, frames: int) -> Path:
    """Write a video of image 2 only."""
    writer = VideoWriter(folder / "clip", 10)
    for _ in range(frames):
        path = writer.write(np.asarray(cv2.imread(str(image_dir / "2.png"))[:, :, ::-1], np.uint8))
    writer.close()
    return path


def test_objects_of_a_video_keep_their_numbers(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    other = [([0.7, 0.7, 0.95, 0.95], 2, 5.0)]
    network = oracle({2: truth[2] + other})
    first, second = (write_clip(image_dir, tmp_path / name, 6) for name in make_folders(tmp_path, "a", "b"))
    _, lines = run(network, [first, image_dir / "2.png", second], tmp_path / "o", track=True, save=EVERYTHING)
    rows = read_csv(tmp_path / "o" / "detections.csv")
    tracks: dict[str, set[str]] = {}
    for row in rows:
        if row["frame"] not in ("", "0"):  # a track begins where it is seen again
            tracks.setdefault(f"{row['path']} {row['class']}", set()).add(row["track_id"])
    assert len(tracks) == 4
    assert all(len(numbers) == 1 for numbers in tracks.values())
    assert len(set.union(*tracks.values()) - {""}) == 4
    assert [row["track_id"] for row in rows if row["frame"] == ""] == ["", ""]
    written = json.loads((tmp_path / "o" / "detections.json").read_text())
    numbered = [one["track_id"] for one in written if "track_id" in one]
    assert sorted(set(numbered)) == sorted(int(number) for number in set.union(*tracks.values()))
    assert any(line.endswith(" #1") for line in lines)


def make_folders(root: Path, *names: str) -> list[str]:
    for name in names:
        (root / name).mkdir()
    return list(names)


def test_a_video_that_comes_twice_is_followed_from_new() -> None:
    tracker, numbers = Tracker(), []
    rows = np.zeros((1, 4), np.float32), np.ones(1, np.int32), np.array([0.9], np.float32)
    for frame in (0, 1, 2, 0, 1, 2):
        numbers.append(tracker.follow("clip", frame, 30, np.array([[0, 0, 100, 100]], np.float32), rows).tolist())
    assert numbers == [[1]] * 3 + [[2]] * 3


@pytest.mark.parametrize("score", [0.31, 0.36, 0.9])
@pytest.mark.parametrize("step", [0, 10])
def test_each_listed_object_gets_a_number_from_its_second_frame_on(score: float, step: int) -> None:
    tracker, numbers = Tracker(), []
    for frame in range(6):
        boxes = [[300, 300, 400, 400], [step * frame, 0, step * frame + 100, 100]][: 1 + (frame > 0)]
        scores = np.array([0.9, score][: len(boxes)], np.float32)
        rows = np.zeros((len(boxes), 4), np.float32), np.ones(len(boxes), np.int32), scores
        numbers.append(tracker.follow("clip", frame, 30, np.array(boxes, np.float32), rows).tolist())
    assert numbers == [[1], [1, 0], *[[1, 2]] * 4]
