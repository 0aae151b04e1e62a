"""Predictions on cameras and streams end when they are asked to, and keep what they have."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import pytest

from gaudi_apps.detection.detector import Detector, make_preprocessor
from gaudi_apps.detection.outputs import DetectionResults
from gaudi_apps.inference.addresses import Address
from gaudi_apps.inference.predictor import predict_files
from gaudi_datasets.detection.coco import Category

CATEGORIES = (Category(7, "red"), Category(9, "blue"))


@pytest.fixture
def camera(pages: tuple[str, dict[str, Any]], image_dir: Path) -> str:
    """Serve image 2 again and again, without an end."""
    base, served = pages
    jpeg = cv2.imencode(".jpg", cv2.imread(str(image_dir / "2.png")))[1].tobytes()

    def write(send: Callable[[bytes], Any]) -> None:
        while True:
            send(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (len(jpeg), jpeg))

    served["/camera"] = ("multipart/x-mixed-replace; boundary=frame", write)
    return f"{base}/camera"


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Give a signal, which raises an error where nobody handles it."""
    before = signal.signal(request.param, raise_unhandled)
    yield request.param
    signal.signal(request.param, before)


def raise_unhandled(number: int, _: object) -> None:
    raise AssertionError(f"nobody handles signal {number}")


def test_a_signal_ends_the_reading_and_the_results_are_written(
    oracle: Callable[..., Any], truth: dict[int, Any], camera: str, tmp_path: Path, number: signal.Signals
) -> None:
    lines: list[str] = []

    def note(*new: str) -> None:
        lines.extend(new)
        if len(lines) == 3:
            os.kill(os.getpid(), number)

    results = predict_files(
        Detector(oracle(truth)).detect,
        [Address(camera)],
        make_preprocessor(300),
        lambda folder: DetectionResults(folder, CATEGORIES, 0.3, save=("json",)),
        tmp_path / "out",
        batch_size=16,
        strict=False,
        write_lines=note,
        max_frames=50,
    )
    assert len(lines) == len(results.images) == 3
    table = json.loads((tmp_path / "out" / "files.json").read_text())
    assert [row["frame"] for row in table["images"]] == [0, 1, 2]
    assert signal.getsignal(number) is raise_unhandled


def test_a_frame_of_a_camera_is_answered_at_once(
    oracle: Callable[..., Any], truth: dict[int, Any], camera: str
) -> None:
    sizes: list[int] = []

    class Watched(Detector):
        def detect(self, images: Any) -> Any:
            sizes.append(len(images))
            return super().detect(images)

    found = Watched(oracle(truth), ("red", "blue")).predict(camera, batch_size=16)
    assert [next(found).frame for _ in range(3)] == [0, 1, 2]
    assert sizes == [1, 1, 1]
    found.close()
