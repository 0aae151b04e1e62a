from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from gaudi_apps.detection.detector import Detector, make_preprocessor
from gaudi_apps.detection.outputs import DetectionResults
from gaudi_apps.inference.media import VideoWriter, find_files, read_frames
from gaudi_apps.inference.predictor import find_inputs, predict_files
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.scoring import score_detections
from gaudi_datasets.drawing import INK, PAPER, class_colour
from gaudi_datasets.errors import DataError, MissingInputError

CATEGORIES = (Category(7, "red"), Category(9, "blue"))


def run(network: Any, files: Sequence[Path], folder: Path, **options: Any) -> tuple[DetectionResults, list[str]]:
    lines: list[str] = []
    score_threshold, max_boxes = options.pop("score_threshold", 0.3), options.pop("max_boxes", 50)
    results = predict_files(
        Detector(network).detect,
        files,
        make_preprocessor(300),
        lambda draft: DetectionResults(draft, CATEGORIES, score_threshold, max_boxes),
        folder,
        write_lines=lambda *new: lines.extend(new),
        **{"batch_size": 2, "strict": False, **options},
    )
    return results, lines


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.fixture
def clip(image_dir: Path, tmp_path: Path) -> Path:
    """Make a video of images 1 to 5."""
    writer = VideoWriter(tmp_path / "clip", 10)
    for number in range(1, 6):
        path = writer.write(np.asarray(cv2.imread(str(image_dir / f"{number}.png"))[:, :, ::-1], np.uint8))
    writer.close()
    return path


def test_a_batch_is_computed_while_the_results_of_the_former_one_are_written(image_dir: Path, tmp_path: Path) -> None:
    computed = [threading.Event() for _ in range(3)]

    def detect(images: Any) -> Any:
        next(event for event in computed if not event.is_set()).set()
        return np.array([[[0.0, 0, 1, 1]]]), np.ones([1, 1], np.int64), np.ones([1, 1])

    written: list[str] = []

    def write_lines(*lines: str) -> None:
        written.extend(lines)
        assert computed[min(len(written), 2)].wait(300)  # nobody has asked for it

    files = [image_dir / f"{number}.png" for number in (1, 2, 3)]
    make_results = partial(DetectionResults, categories=CATEGORIES, score_threshold=0.3, save=("json",))
    predict_files(
        detect,
        files,
        make_preprocessor(300),
        make_results,
        tmp_path / "out",
        batch_size=1,
        strict=False,
        write_lines=write_lines,
    )
    assert len(written) == 3


def test_a_large_batch_is_split_so_that_the_next_images_are_read_meanwhile(image_dir: Path, tmp_path: Path) -> None:
    sizes = []

    def detect(images: Any) -> Any:
        sizes.append(len(images))
        return np.zeros([len(images), 0, 4]), np.zeros([len(images), 0], np.int64), np.zeros([len(images), 0])

    files = [tmp_path / f"{number}.png" for number in range(20)]
    for path in files:
        path.symlink_to(image_dir / "1.png")
    results = predict_files(
        detect,
        files,
        make_preprocessor(300),
        lambda draft: DetectionResults(draft, CATEGORIES, 0.3, save=("json",)),
        tmp_path / "out",
        batch_size=128,
        strict=False,
        write_lines=lambda *_: None,
    )
    assert sizes == [16, 4]
    assert [image["file_name"] for image in results.images] == [path.name for path in files]


def test_detections_are_listed_drawn_and_written(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    faint = [([0.7, 0.7, 0.9, 0.9], 1, -1.0)]  # a score of .27, below what is shown
    network = oracle({1: truth[1], 2: truth[2] + faint})
    files = [image_dir / f"{number}.png" for number in (1, 2, 3)]
    out = tmp_path / "new" / "folder"
    results, lines = run(network, files, out)
    assert lines == [f"{files[0]}: 0.998 blue 8 8 68 68", f"{files[1]}: 0.998 red 16 16 76 76"]
    assert (len(results.images), len(results.bad_files), results.num_detections, results.num_listed) == (3, 0, 3, 2)
    assert results.count() == "2 detections from 0.3 on (3 in detections.json)"
    described = f"{out}: 3 images, 3 detections; detections.json, files.json and what was drawn"
    assert results.describe(out, ", 3 detections") == described
    names = ["1.png.png", "2.png.png", "3.png.png", "detections.json", "files.json"]
    assert sorted(path.name for path in out.iterdir()) == [".predictions.json", *names]

    drawn = [cv2.imread(str(out / name)) for name in names[:3]]
    # Below its caption, and enlarged four times: the frame of image 1 has its lower right corner at 271, image 3 none.
    assert drawn[0].shape[1] == 600
    assert (drawn[0][:4] == PAPER).all()
    frame = drawn[0][-480:][271, 100:260].astype(int)
    assert np.abs(frame - 30).max(axis=1).min() > 60
    assert np.abs(drawn[2][-60:].astype(int) - 90).max() <= 1

    detections = read(out / "detections.json")
    assert [(one["image_id"], one["category_id"]) for one in detections] == [(1, 9), (2, 7), (2, 7)]
    np.testing.assert_allclose(detections[0]["bbox"], [8, 8, 60, 60], atol=1e-3)
    assert detections[2]["score"] == pytest.approx(1 / (1 + np.e), abs=1e-3)
    table = read(out / "files.json")
    assert [(one["id"], one["file_name"], one["path"], one["drawn"]) for one in table["images"]] == [
        (number, path.name, str(path), f"{path.name}.png") for number, path in enumerate(files, 1)
    ]
    assert (table["images"][0]["height"], table["images"][0]["width"]) == (120, 150)
    # The table is a COCO document that the results fit.
    assert score_detections(table, detections).detections == 3


@pytest.mark.costly
def test_all_are_listed_and_those_that_are_not_drawn_are_counted(
    oracle: Callable[..., Any], image_dir: Path, tmp_path: Path
) -> None:
    rows = [
        ([0.2 * (n // 4), 0.2 * (n % 4), 0.2 * (n // 4) + 0.18, 0.2 * (n % 4) + 0.18], 1, 2 + n / 4) for n in range(12)
    ]
    results, lines = run(oracle({5: rows}), [image_dir / "5.png"], tmp_path / "all")
    scores = [float(line.split()[1]) for line in lines]
    assert len(scores) == results.num_detections == 12
    assert scores == sorted(scores, reverse=True)
    assert lines[0].split()[3:] == ["90", "48", "117", "70"]
    assert (results.boxes_left_out, results.images_cut) == (0, 0)
    _, good = run(oracle({5: rows}), [image_dir / "5.png"], tmp_path / "good", score_threshold=0.985)
    assert good == [line for line in lines if float(line.split()[1]) >= 0.985] != lines

    # Fewer boxes are drawn, the best ones, and the number of the others is in the lower right corner.
    few, cut_lines = run(oracle({5: rows}), [image_dir / "5.png"], tmp_path / "few", max_boxes=3)
    assert (cut_lines, few.boxes_left_out, few.images_cut) == (lines, 9, 1)
    full, cut = (cv2.imread(str(tmp_path / name / "5.png.png"))[-480:, :, ::-1] for name in ("all", "few"))
    frames = [(image == class_colour(1)).all(axis=2) for image in (full, cut)]
    assert 0 < frames[1].sum() < 0.4 * frames[0].sum()
    assert cut[-1, -1].tolist() == list(INK) != full[-1, -1].tolist()


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_a_video_and_images_at_any_batch_size(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, clip: Path, tmp_path: Path, batch_size: int
) -> None:
    out = tmp_path / "out"
    files = [image_dir / "2.png", clip, image_dir / "4.png"]
    results, lines = run(oracle(truth), files, out, batch_size=batch_size)
    assert len(results.images) == 7
    assert [line.split(":")[0] for line in lines] == [
        f"{files[0]}",
        *(f"{clip}#{number}" for number in range(5)),
        f"{files[2]}",
    ]
    assert [line.split()[2] for line in lines] == ["red", "blue", "red", "blue", "red", "blue", "red"]
    table = read(out / "files.json")["images"]
    assert [one.get("frame") for one in table] == [None, 0, 1, 2, 3, 4, None]
    assert {one["drawn"] for one in table[1:6]} == {f"{clip.name}.mp4"}
    frames = list(read_frames(out / f"{clip.name}.mp4"))
    assert len(frames) == 5
    assert frames[0].rate == 10
    assert frames[0].pixels.shape == (480, 600, 3)


def test_bad_files_are_named_skipped_and_counted(
    oracle: Callable[..., Any],
    truth: dict[int, Any],
    image_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes((image_dir / "1.png").read_bytes()[:-60])
    files = [broken, image_dir / "1.png"]
    results, lines = run(oracle(truth), files, tmp_path / "out")
    assert (len(results.bad_files), len(results.images), len(lines)) == (1, 1, 1)
    assert "\n1 of 2 files" in results.describe(tmp_path)
    assert f"skipped: {broken}: cannot be decoded" in capsys.readouterr().err
    table = read(tmp_path / "out" / "files.json")
    assert [one["id"] for one in table["images"]] == [2]
    assert [(one["id"], one["path"]) for one in table["bad_files"]] == [(1, str(broken))]
    assert "cannot be decoded" in table["bad_files"][0]["error"]

    for bad, strict in (([image_dir / "1.png", broken], True), ([broken], False)):
        with pytest.raises(DataError, match=r"broken\.png"):
            run(oracle(truth), bad, tmp_path / "none", strict=strict)
        assert not (tmp_path / "none").exists()


def test_files_of_one_name_are_kept_apart_and_earlier_results_replaced(
    oracle: Callable[..., Any], truth: dict[int, Any], image_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "1.png"
    other.parent.mkdir()
    other.write_bytes((image_dir / "2.png").read_bytes())
    out = tmp_path / "out"
    run(oracle(truth), [image_dir / "3.png"], out)
    run(oracle(truth), [image_dir / "1.png", other], out)
    assert [one["drawn"] for one in read(out / "files.json")["images"]] == ["1.png.png", "1.png-2.png"]
    assert sorted(path.name for path in out.iterdir()) == [
        ".predictions.json",
        "1.png-2.png",
        "1.png.png",
        "detections.json",
        "files.json",
    ]


def test_what_an_earlier_prediction_drew_is_not_predicted_on(
    oracle: Callable[..., Any],
    truth: dict[int, Any],
    image_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [Path(shutil.copy(image_dir / f"{number}.png", tmp_path)) for number in (1, 2)]
    for _ in range(2):
        files = find_inputs([str(tmp_path)], tmp_path)
        assert files == given
        run(oracle(truth), given, tmp_path)
    assert [path.name for path in find_files([str(tmp_path)])] == ["1.png", "1.png.png", "2.png", "2.png.png"]
    assert "2 files" in capsys.readouterr().err
    assert len(find_inputs([f"{tmp_path}/../{tmp_path.name}/*.png"], tmp_path)) == 2
    assert len(find_inputs([str(tmp_path)], tmp_path / "other")) == 4
    for path in given:
        path.unlink()
    with pytest.raises(MissingInputError) as caught:
        find_inputs([str(tmp_path)], tmp_path)
    assert caught.value.path == str(tmp_path)


def test_large_frames_make_small_batches(
    oracle: Callable[..., Any], image_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, detect = [], Detector.detect

    def watched(self: Detector, images: Any) -> Any:
        sizes.append(len(images))
        return detect(self, images)

    monkeypatch.setattr(Detector, "detect", watched)
    monkeypatch.setattr("gaudi_apps.inference.media.PIXEL_BYTES_PER_BATCH", 2 * 120 * 150 * 3)
    run(oracle({}), sorted(image_dir.iterdir()), tmp_path, batch_size=4)
    assert sizes == [3, 2]
