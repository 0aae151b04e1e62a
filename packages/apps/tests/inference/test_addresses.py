"""Cameras, streams, and images and videos on the web: what they are, what they give, and what is refused."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from gaudi_apps.inference import addresses
from gaudi_apps.inference.addresses import Address, fetch_image, is_live, is_video, parse_address, read_encoded
from gaudi_apps.inference.media import VideoWriter, find_files, read_frames
from gaudi_datasets.errors import DataError, FlagError, MissingInputError, TransferError
from gaudi_datasets.fetching.downloads import Download, Fetcher


@pytest.fixture
def clip(tmp_path: Path) -> bytes:
    """Make a video of 6 frames."""
    writer = VideoWriter(tmp_path / "clip", 10)
    for number in range(6):
        path = writer.write(np.full((64, 96, 3), 30 * number, np.uint8))
    writer.close()
    return path.read_bytes()


@pytest.mark.parametrize(
    ("text", "camera", "name", "shown"),
    [
        ("0", 0, "webcam-0", "webcam:0"),
        ("webcam:2", 2, "webcam-2", "webcam:2"),
        ("http://a.example/b/c%20d.jpg?e=f", None, "c_d.jpg", "http://a.example/b/c%20d.jpg?e=f"),
        ("https://me:secret@a.example/", None, "a.example", "https://a.example/"),
        ("rtsp://me:secret@10.0.0.1:554/live", None, "live", "rtsp://10.0.0.1:554/live"),
        ("http://a.example/a.jpg?Token=x%20y&b=1", None, "a.jpg", "http://a.example/a.jpg?Token=***&b=1"),
        (
            "rtsp://a.example/user=me&password=pw",
            None,
            "user_____password____",
            "rtsp://a.example/user=***&password=***",
        ),
        ("http://a.example/b?api_key=k#access_token=t", None, "b", "http://a.example/b?api_key=***#access_token=***"),
        ("http://a.example/" + "\u56fe" * 99, None, "\u56fe" * 33, "http://a.example/" + "\u56fe" * 99),
        ("http://a.example/..%2F..%2F.x.png", None, "x.png", "http://a.example/..%2F..%2F.x.png"),
    ],
)
def test_addresses_and_cameras_are_told_from_paths(text: str, camera: int | None, name: str, shown: str) -> None:
    (address,) = find_files([text])
    assert isinstance(address, Address)
    assert (address.camera, address.name, str(address)) == (camera, name, shown)


def test_a_file_whose_name_is_a_number_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("7").touch()
    assert find_files(["7"]) == [Path("7")]
    assert parse_address("webcam:7") == Address("webcam:7")


@pytest.mark.parametrize(
    "text", ["ftp://a.example/b.jpg", "file:///etc/passwd", "http://", "http://a b/c", "http://[x", "http://a:99999/x"]
)
def test_other_schemes_and_broken_addresses_are_refused(text: str) -> None:
    with pytest.raises(FlagError) as refused:
        find_files([text])
    assert refused.value.flag == "--inference"
    assert refused.value.path in (text, ascii(text))
    assert "\n" not in str(refused.value)


def test_an_image_is_fetched_whatever_its_address_ends_with(pages: tuple[str, dict[str, Any]], image_dir: Path) -> None:
    base, served = pages
    content = (image_dir / "1.png").read_bytes()
    served["/a.png"] = served["/shot"] = ("image/png", content)
    for path in ("/a.png", "/shot"):
        assert not is_video(Address(base + path))
        assert read_encoded(Address(base + path)) == content


def test_a_video_is_read_from_the_web(pages: tuple[str, dict[str, Any]], clip: bytes) -> None:
    base, served = pages
    served["/clip.mp4"] = served["/stream"] = ("video/mp4", clip)
    for path in ("/clip.mp4", "/stream"):
        assert is_video(Address(base + path))
        assert is_live(Address(base + path)) == (path == "/stream")
        frames = list(read_frames(Address(base + path)))
        assert [frame.number for frame in frames] == list(range(6))
        assert frames[0].pixels.shape == (64, 96, 3)


def test_a_stream_of_images_is_read_as_they_come(pages: tuple[str, dict[str, Any]], image_dir: Path) -> None:
    base, served = pages
    jpeg = cv2.imencode(".jpg", cv2.imread(str(image_dir / "1.png")))[1].tobytes()

    def write(send: Callable[[bytes], Any]) -> None:
        while True:
            send(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%b\r\n" % (len(jpeg), jpeg))

    served["/camera"] = ("multipart/x-mixed-replace; boundary=frame", write)
    frames = read_frames(Address(f"{base}/camera"))
    assert is_live(Address(f"{base}/camera"))
    assert [next(frames).number for _ in range(4)] == [0, 1, 2, 3]
    frames.close()


def test_what_a_server_cannot_give_is_named(
    pages: tuple[str, dict[str, Any]], image_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, served = pages
    served["/text.jpg"] = ("text/html", b"<html>no image</html>")
    served["/large.png"] = ("image/png", (image_dir / "1.png").read_bytes())
    with pytest.raises(MissingInputError) as missing:
        fetch_image(Address(f"{base}/none.jpg".replace("http://", "http://me:secret@")))
    assert missing.value.path == f"{base}/none.jpg"
    assert "secret" not in str(missing.value)
    with pytest.raises(DataError) as no_image:
        fetch_image(Address(f"{base}/text.jpg"))
    assert no_image.value.path == f"{base}/text.jpg"
    monkeypatch.setattr(addresses, "IMAGE_BYTES", 50)
    with pytest.raises(DataError) as too_large:
        fetch_image(Address(f"{base}/large.png"))
    assert "50" in str(too_large.value)

    def fail(self: object, download: Download) -> None:
        raise TransferError(f"cannot parse {download.url}", path=download.url)

    monkeypatch.setattr(Fetcher, "fetch", fail)
    with pytest.raises(TransferError) as failed:
        fetch_image(Address("http://me:hunter2@a.example/x.jpg?token=abc"))
    assert not {"hunter2", "abc"} & set(re.split(r"\W", str(failed.value)))


def test_an_image_that_never_ends_is_given_up(
    pages: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    base, served = pages

    def write(send: Callable[[bytes], Any]) -> None:
        while True:
            send(b"x" * 1000)

    served["/endless.jpg"] = ("image/jpeg", write)
    monkeypatch.setattr(addresses, "IMAGE_SECONDS", 0.05)
    monkeypatch.setattr(addresses, "IMAGE_BYTES", 2**40)
    with pytest.raises(TransferError) as late:
        fetch_image(Address(f"{base}/endless.jpg"))
    assert "0.05 seconds" in str(late.value)


@pytest.mark.parametrize(
    "text", ["webcam:97", "rtsp://me:secret@127.0.0.1:9/live", "http://127.0.0.1:9/a.mp4", "http://127.0.0.1:9/live"]
)
def test_a_camera_and_a_server_that_are_not_there_are_named(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    address = Address(text)
    with pytest.raises(TransferError) as gone:
        list(read_frames(address) if is_video(address) else [])
    assert gone.value.path == str(address)
    assert gone.value.exit_status == 74
    assert "secret" not in str(gone.value)
    assert "secret" not in capfd.readouterr().err


def test_threads_that_open_streams_stay_within_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that begins while another one opens a stream, and is longer about it, must not lose the protocols."""
    variable = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
    monkeypatch.delenv(variable, raising=False)
    level = cv2.getLogLevel()
    begun, ended = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def announce(lock: threading.Lock) -> Iterator[None]:
        begun.set()
        with lock:
            yield

    def begin() -> tuple[str, int]:
        with addresses._quiet_opencv():
            begun.set()
            assert ended.wait(60)
            return os.environ.get(variable, ""), cv2.getLogLevel()

    with ThreadPoolExecutor(1) as pool:
        with addresses._quiet_opencv():
            monkeypatch.setattr(addresses, "_CAPTURE_LOCK", announce(addresses._CAPTURE_LOCK))
            other = pool.submit(begin)
            assert begun.wait(60)
        ended.set()
        options, other_level = other.result()
    assert "protocol_whitelist" in options
    assert other_level == 0
    assert variable not in os.environ
    assert cv2.getLogLevel() == level


def test_a_playlist_on_the_web_reaches_no_file_of_this_machine(
    pages: tuple[str, dict[str, Any]], clip: bytes, tmp_path: Path
) -> None:
    base, served = pages
    (tmp_path / "private.mp4").write_bytes(clip)
    lines = ["#EXTM3U", "#EXT-X-TARGETDURATION:1", "#EXTINF:1,", f"file://{tmp_path}/private.mp4", "#EXT-X-ENDLIST"]
    served["/list.m3u8"] = ("application/vnd.apple.mpegurl", "\n".join(lines).encode())
    with pytest.raises((TransferError, DataError)):
        list(read_frames(Address(f"{base}/list.m3u8")))
