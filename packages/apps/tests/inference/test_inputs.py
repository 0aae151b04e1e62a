from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import PIL.ExifTags
import PIL.Image
import pytest

from gaudi_apps.detection.detections import make_export_preprocessor
from gaudi_apps.detection.detector import make_preprocessor
from gaudi_apps.inference.media import InputImage, Preprocessor, VideoWriter, find_files, predict_images, read_images
from gaudi_apps.inference.predictor import find_inputs
from gaudi_apps.inference.visualizer import Image, decode_image
from gaudi_datasets.detection.pipeline import prepare_image, prepare_pixels
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_ops.files import FileError
from gaudi_ops.program import describe_error


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def find(folder: Path, *inputs: str) -> list[str]:
    return [str(Path(str(path)).relative_to(folder)) for path in find_files([f"{folder}/{text}" for text in inputs])]


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    touch(tmp_path, "b.JPG", "a.jpeg", "notes.txt", "c.MP4", "sub/d.png", "sub/e.txt", "x[1].png")
    (tmp_path / "folder.png").mkdir()
    assert find(tmp_path, "") == ["a.jpeg", "b.JPG", "c.MP4", "x[1].png"]
    assert find(tmp_path, "sub", "b.JPG") == ["sub/d.png", "b.JPG"]
    assert find(tmp_path, "*.jp*g", "sub/*") == ["a.jpeg", "sub/d.png"]
    assert find(tmp_path, "**/*.png") == ["sub/d.png", "x[1].png"]
    assert find(tmp_path, "a.jpeg", "*", "a.jpeg") == ["a.jpeg", "b.JPG", "c.MP4", "x[1].png"]
    assert find(tmp_path, "x[1].png") == ["x[1].png"]  # a name of a file, before it is a pattern
    assert find(tmp_path, "notes.txt") == ["notes.txt"]  # whoever names it may know what it is


def test_nothing_to_predict_on_is_a_missing_input(tmp_path: Path) -> None:
    touch(tmp_path, "notes.txt")
    for text, what in (
        ("", "holds no image"),
        ("*.txt", "matches no image"),
        ("nowhere", "is not there"),
    ):
        with pytest.raises(MissingInputError, match=what):
            find_files([f"{tmp_path}/{text}"])


def test_a_folder_of_folders_of_images_is_told_as_the_pattern_that_takes_them(tmp_path: Path) -> None:
    top = tmp_path / "top [1]"
    top.mkdir()
    (top / "train").mkdir()
    touch(top, "train/hats/a.png", "train/shoes/b.jpg")
    with pytest.raises(MissingInputError) as found:
        find_files([str(top)])
    pattern = re.search(r"'(.+)'", found.value.remedy or "")
    assert pattern is not None
    assert find_files([pattern[1]]) == [top / "train" / "hats" / "a.png", top / "train" / "shoes" / "b.jpg"]


def test_hidden_files_of_a_folder_are_passed_over(tmp_path: Path) -> None:
    touch(tmp_path, "plain.jpg", "._plain.jpg", ".hidden.png")
    assert find(tmp_path, "") == ["plain.jpg"]
    assert find(tmp_path, "._plain.jpg", ".h*") == ["._plain.jpg", ".hidden.png"]  # who names it wants it


def test_images_in_folders_below_are_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = tmp_path / "top"
    top.mkdir()
    touch(top, "a.png", "hats/b.png", "hats/._b.png", "hats/c.txt", "shoes/c.MP4", ".thumbs/d.png")
    assert find_inputs([str(top)], tmp_path / "out") == [top / "a.png"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 image" in line
    pattern = re.search(r"'(.+)'", line)
    assert pattern is not None
    files = find_files([str(top), pattern[1]], tells=True)
    assert files == [top / "a.png", top / "hats" / "b.png", top / "shoes" / "c.MP4"]
    assert find_files([str(top)]) == [top / "a.png"]
    assert capsys.readouterr().err == ""


def test_what_is_named_as_an_image_and_is_no_file_is_a_bad_file(image_dir: Path, tmp_path: Path) -> None:
    for ending in (".jpg", ".mp4"):
        (tmp_path / f"gone{ending}").symlink_to(tmp_path / "nowhere")
        os.mkfifo(tmp_path / f"pipe{ending}")
    (tmp_path / "link.png").symlink_to(image_dir / "1.png")
    files = find_files([str(tmp_path)])
    bad: list[tuple[Path, Exception]] = []
    read = list(read_images(files, make_preprocessor(300), lambda _, *error: bad.append(error)))
    assert [one.path for one in read] == [tmp_path / "link.png"]
    assert [path.name for path, _ in bad] == ["gone.jpg", "gone.mp4", "pipe.jpg", "pipe.mp4"]
    assert [type(error) for _, error in bad] == [MissingInputError, DataError, FileError, FileError]
    with pytest.raises(MissingInputError):
        find_files([f"{tmp_path}/gone.jpg"])
    assert find_files([f"{tmp_path}/pipe.jpg"]) == [tmp_path / "pipe.jpg"]


def test_a_disk_that_fails_is_no_bad_file(image_dir: Path) -> None:
    def fail(number: int) -> Preprocessor:
        def read(encoded: bytes) -> None:
            raise OSError(number, os.strerror(number))

        return Preprocessor(read, read)  # type: ignore[arg-type]

    path, bad = image_dir / "1.png", list[Exception]()
    for number in (errno.EIO, errno.ESTALE, errno.EMFILE):
        with pytest.raises(OSError) as caught:
            list(read_images([path], fail(number), lambda *error: bad.append(error[-1])))
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
    assert not bad
    of_a_file = [errno.EACCES, errno.ENAMETOOLONG]
    for number in of_a_file:
        assert not list(read_images([path], fail(number), lambda *error: bad.append(error[-1])))
    assert [getattr(error, "errno", None) for error in bad] == of_a_file


def test_images_frames_and_bad_files_are_numbered(image_dir: Path, tmp_path: Path) -> None:
    broken, text = tmp_path / "broken.png", tmp_path / "text.jpg"
    broken.write_bytes((image_dir / "1.png").read_bytes()[:-60])
    text.write_text("no image")
    writer = VideoWriter(tmp_path / "clip", 10)
    for number in (1, 2, 3):
        path = writer.write(np.asarray(cv2.imread(str(image_dir / f"{number}.png"))[:, :, ::-1], np.uint8))
    writer.close()
    files = [image_dir / "5.png", broken, path, text, tmp_path / "gone.png", image_dir / "4.png"]
    bad: list[tuple[int, Path, Exception]] = []
    read = list(read_images(files, make_preprocessor(300), lambda *error: bad.append(error)))
    assert [one.image_id for one in read] == [1, 3, 4, 5, 8]
    assert [(image_id, file) for image_id, file, _ in bad] == [(2, broken), (6, text), (7, tmp_path / "gone.png")]
    first, *frames = read[:4]
    assert (first.name, first.frame, first.rate) == (f"{files[0]}", None, 0)
    np.testing.assert_array_equal(first.network_input, prepare_image(files[0].read_bytes()))
    np.testing.assert_array_equal(first.pixels, cv2.imread(str(files[0]))[:, :, ::-1])
    for number, frame in enumerate(frames):
        assert (frame.name, frame.frame, frame.rate) == (f"{path}#{number}", number, 10)
        np.testing.assert_array_equal(frame.network_input, prepare_pixels(frame.pixels))
    messages = [describe_error(error) for _, _, error in bad]
    assert messages[0].startswith(f"{broken}: cannot be decoded")
    assert "cannot be decoded" in messages[1]
    assert isinstance(bad[2][2], MissingInputError)
    assert bad[2][2].path == str(tmp_path / "gone.png")


def test_an_image_is_decoded_once(image_dir: Path) -> None:
    decoded: list[Image] = []

    def decode(encoded: bytes) -> Image:
        decoded.append(decode_image(encoded))
        return decoded[-1]

    prepare = Preprocessor(np.sum, decode)
    bad: list[Exception] = []
    (read,) = read_images([image_dir / "1.png"], prepare, lambda _id, _file, error: bad.append(error))
    assert len(decoded) == 1
    assert read.pixels is decoded[0]
    assert (read.height, read.width) == decoded[0].shape[:2]
    assert read.network_input == decoded[0].sum()


def write_kinds(folder: Path) -> list[Path]:
    """Write one photo as it is read at once, as it has to be turned or converted, with warnings, and damaged."""
    pixels = np.random.default_rng(3).integers(0, 256, (9, 12, 3), np.uint8)
    photo = PIL.Image.fromarray(cv2.resize(pixels, (160, 120), interpolation=cv2.INTER_CUBIC))
    marks = PIL.Image.Exif()
    marks[PIL.ExifTags.Base.Orientation] = 6
    for name, options in (("progressive", {"progressive": True}), ("turned", {"exif": marks}), ("plain", {})):
        photo.save(folder / f"{name}.jpg", **options)
    for mode in ("L", "CMYK"):
        photo.convert(mode).save(folder / f"{mode}.jpg")
    photo.save(folder / "photo.png")
    photo.save(folder / "photo.webp")
    for ending in ("jpg", "png"):
        whole = (folder / f"{'plain' if ending == 'jpg' else 'photo'}.{ending}").read_bytes()
        middle = len(whole) // 2
        (folder / f"cut.{ending}").write_bytes(whole[:middle])
        (folder / f"without-middle.{ending}").write_bytes(whole[: middle - 40] + whole[middle + 40 :])
        (folder / f"spare.{ending}").write_bytes(whole[:-2] + b"\0" + whole[-2:])
        (folder / f"flipped.{ending}").write_bytes(whole[:middle] + bytes([whole[middle] ^ 0x10]) + whole[middle + 1 :])
    return sorted(folder.iterdir())


def test_one_decoding_tells_what_two_tell(tmp_path: Path) -> None:
    files = write_kinds(tmp_path)
    once = make_export_preprocessor(64)
    assert once.decode_strictly is not None
    told: list[list[tuple[Path, str]]] = []
    found: list[list[InputImage]] = []
    for prepare in (once, replace(once, decode_strictly=None)):
        told.append([])
        note = lambda image_id, path, error: told[-1].append((path, describe_error(error)))  # noqa: E731
        found.append(list(read_images(files, prepare, note)))
    at_once, twice = found
    assert told[0] == told[1]
    assert {path.name for path, _ in told[0]} >= {"cut.jpg", "cut.png", "without-middle.png", "flipped.png"}
    assert [image.path for image in at_once] == [image.path for image in twice]
    assert {"plain.jpg", "turned.jpg", "CMYK.jpg", "spare.jpg"} <= {image.path.name for image in at_once}
    for one, other in zip(at_once, twice, strict=True):
        np.testing.assert_array_equal(one.pixels, other.pixels)
        np.testing.assert_array_equal(one.network_input, other.network_input)


def test_an_image_that_a_decoder_refuses_is_named(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    cv2.imwrite(str(path), np.zeros([16, 16, 3], np.uint8))

    def refuse(encoded: bytes) -> None:
        raise DataError("cannot be decoded")

    found: list[Exception] = []
    note = lambda image_id, source, error: found.append(error)  # noqa: E731
    assert list(read_images([path], Preprocessor(refuse, refuse), note)) == []  # type: ignore[arg-type]
    assert [one.path for one in found if isinstance(one, DataError)] == [str(path)]


def test_a_name_may_begin_with_a_tilde(image_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "~tmp.png").write_bytes((image_dir / "1.png").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert find_files(["~tmp.png"]) == [Path("~tmp.png")]
    prepare = make_preprocessor(300)
    assert predict_images("~tmp.png", prepare, 1, lambda batch: [image.name for image in batch]) == "~tmp.png"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_files(["~/~tmp.png"]) == [tmp_path / "~tmp.png"]


def test_frames_that_come_in_one_array_are_told_apart() -> None:
    buffer = np.zeros([2, 2, 3], np.uint8)

    def read() -> Iterator[Image]:
        for number in range(3):
            buffer[:] = number
            yield buffer

    prepare = Preprocessor(lambda pixels: np.array(pixels, np.float32))
    read_pixels = list(predict_images(read(), prepare, 3, lambda batch: [image.read_pixels for image in batch]))
    assert [int(one().max()) for one in read_pixels] == [0, 1, 2]
