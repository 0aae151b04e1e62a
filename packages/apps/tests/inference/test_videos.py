from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from gaudi_apps.inference import media as videos
from gaudi_apps.inference.media import VideoWriter, read_frames
from gaudi_apps.inference.visualizer import Image
from gaudi_datasets.errors import DataError


def paint(number: int) -> Image:
    """Of an odd size, and red."""
    return np.full((121, 151, 3), (20 * number, 0, 200 - 10 * number), np.uint8)


def write(stem: Path, frames: int) -> Path:
    writer = VideoWriter(stem, 12.5)
    paths = {writer.write(paint(number)) for number in range(frames)}
    writer.close()
    (path,) = paths
    return path


@pytest.mark.parametrize("codecs", [videos.CODECS, videos.CODECS[1:], (("", "ZZZZ"), *videos.CODECS)])
def test_what_is_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codecs: tuple[tuple[str, str], ...]
) -> None:
    monkeypatch.setattr(videos, "CODECS", codecs)
    path = write(tmp_path / "a.b", 6)
    assert path.stem == "a.b"
    frames = list(read_frames(path))
    assert [frame.number for frame in frames] == list(range(6))
    assert {frame.rate for frame in frames} == {12.5}
    for frame in frames:
        assert frame.pixels.shape == (120, 150, 3)
        np.testing.assert_allclose(frame.pixels[5:-5, 5:-5].mean(axis=(0, 1)), paint(frame.number)[0, 0], atol=6)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_video_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", 6).read_bytes()
    # A name with a number in it is a sequence of images to OpenCV where it is nothing else.
    for name, content in (("cut.mp4", whole[: len(whole) // 2]), ("text.avi", b"hello"), ("001.mp4", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="not a video") as caught:
            list(read_frames(tmp_path / name))
        assert caught.value.path == str(tmp_path / name)


def test_a_video_that_is_cut_short_gives_the_frames_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "CODECS", videos.CODECS[1:])
    writer = VideoWriter(tmp_path / "x", 25)
    for number in range(12):  # noise, so that the frames are most of the file
        path = writer.write(np.random.default_rng(number).integers(0, 256, (120, 150, 3), np.uint8))
    writer.close()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    frames = read_frames(path)
    assert [next(frames).number for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"x\.avi: ends after \d of 12 frames"):
        list(frames)


def test_a_video_that_the_disk_does_not_take_is_told(tmp_path: Path) -> None:
    """Files above 8 KiB are refused here, as by a disk that is full, of which OpenCV tells nothing."""
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, 1 << 13)); import numpy as np; from pathlib import Path; "
        "from gaudi_apps.inference.media import VideoWriter; writer = VideoWriter(Path(sys.argv[1]), 25.0); "
        "draw = np.random.default_rng(0).integers; "
        "[writer.write(draw(0, 256, (120, 150, 3), np.uint8)) for _ in range(30)]\n"
        "try: writer.close()\nexcept OSError as error: print(error.errno, error.filename)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EIO), str(tmp_path / "x.mp4")]


def test_no_codec_is_an_error_of_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(videos, "CODECS", ((".mp4", "ZZZZ"),))
    with pytest.raises(OSError, match="OpenCV"):
        VideoWriter(tmp_path / "x", 25).write(paint(0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", [0.0, 90000.0, float("nan"), float("inf")])
def test_a_video_without_a_rate_gets_one(told: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x", 2)
    capture = cv2.VideoCapture

    class Rateless:
        def __init__(self, name: str) -> None:
            self._capture = capture(name)
            self.read, self.release = self._capture.read, self._capture.release

        def get(self, what: int) -> float:
            return told if what == cv2.CAP_PROP_FPS else float(self._capture.get(what))

    monkeypatch.setattr(cv2, "VideoCapture", Rateless)
    assert {frame.rate for frame in read_frames(path)} == {25.0}


def write_jpegs(path: Path, sides: list[int]) -> Path:
    """Write frames of noise of these sizes as Motion JPEG."""
    images = [np.random.default_rng(n).integers(0, 256, (side, side, 3), np.uint8) for n, side in enumerate(sides)]
    path.write_bytes(b"".join(cv2.imencode(".jpg", image)[1].tobytes() for image in images))
    return path


@pytest.mark.parametrize(("sides", "noted"), [([48] * 4 + [96] * 8, ["8 of 12"]), ([48] * 12, [])])
def test_a_change_of_size_is_noted(
    sides: list[int], noted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """OpenCV gives the last frame of the first size in place of the others."""
    frames = list(read_frames(write_jpegs(tmp_path / "x.mjpeg", sides)))
    assert [frame.number for frame in frames] == list(range(12))
    assert re.findall(r"\d+ of \d+", capsys.readouterr().err) == noted


def test_a_name_like_an_address_is_one_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain, path = write(Path("plain"), 3), write(Path("cam:1"), 3)
    assert path == Path("cam:1").with_suffix(plain.suffix)
    assert sorted(tmp_path.iterdir()) == [tmp_path / path, tmp_path / plain]
    assert len(list(read_frames(path))) == 3
