from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.examples import ClassificationExample, encode_example
from gaudi_datasets.classification.layouts import check_all
from gaudi_datasets.classification.records import write_records as write_class_records
from gaudi_datasets.classification.sources import RecordSource
from gaudi_datasets.errors import BadImageError
from gaudi_datasets.image_files import check_pixels
from gaudi_datasets.layouts.checking import BrokenImagesError, check_sources, check_when_read
from gaudi_datasets.records.conversion import write_shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ant").mkdir()
    for number in range(8):
        Image.effect_noise((16, 16), 50).convert("RGB").save(tmp_path / "ant" / f"{number}.jpg")
    return tmp_path


def test_whole_images_pass_and_progress_counts_all(folder: Path) -> None:
    counts: list[tuple[int, int]] = []
    check_all(FolderSource(folder), lambda done, total: counts.append((done, total)))
    assert counts == [(number, 8) for number in range(1, 9)]


def test_all_broken_images_are_named_and_counted(folder: Path) -> None:
    source = FolderSource(folder)
    for number in range(5):
        path = folder / "ant" / f"{number}.jpg"
        path.write_bytes(path.read_bytes()[:300])
    (folder / "ant" / "7.jpg").unlink()
    with pytest.raises(BrokenImagesError) as error:
        check_all(source)
    assert (error.value.exit_status, error.value.count, error.value.path) == (65, 6, str(folder))
    assert len(error.value.errors) == 6
    assert error.value.remedy
    assert not [each for each in error.value.errors if each.remedy and each.remedy in str(error.value)]
    named = {str(each).partition(".jpg")[0][-1] for each in error.value.errors}
    assert named == set("012347")
    again = copy.copy(error.value)
    assert (str(again), again.count) == (str(error.value), 6)


def test_images_of_records_are_checked(tmp_path: Path) -> None:
    good = np.zeros((8, 8, 3), np.uint8)
    Image.fromarray(good).save(tmp_path / "a.jpg")
    encoded = (tmp_path / "a.jpg").read_bytes()

    def encode(index: int) -> tuple[bytes, str]:
        content = encoded if index else encoded[:100]
        example = ClassificationExample(index, content, 9 if index == 2 else 8, 8, 0)  # the last is lower than it says
        return encode_example(example, image_format="jpeg", class_name="ant"), ""

    write_shards(
        encode,
        3,
        tmp_path / "records",
        "train",
        manifest={"kind": "classification", "classes": ["ant"]},
        fingerprint="x",
        shards=1,
        processes=1,
    )
    with pytest.raises(BrokenImagesError) as error:
        check_all(RecordSource(tmp_path / "records", "train"))
    assert error.value.count == 2


def spoil(path: Path) -> None:
    """Take the second half of a JPEG's pixels, so that its structure remains."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 4] + b"\xff\xd9")


def test_a_bad_image_is_named_when_it_is_read(folder: Path) -> None:
    spoil(folder / "ant" / "3.jpg")
    source = FolderSource(folder)
    bad = source.rows.tolist().index(3)
    checked = check_when_read(source)
    assert (checked.class_names, len(checked), checked.read(bad - 1).image_id) == (("ant",), 8, source.rows[bad - 1])
    for _ in range(2):
        with pytest.raises(BadImageError) as error:
            checked.read(bad)
        assert "3.jpg" in str(error.value.record)
    with pytest.raises(BrokenImagesError) as broken:
        check_when_read(source, verify=True)
    assert broken.value.count == 1


def test_bad_images_are_skipped_and_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = FolderSource(folder)
    for row in source.rows[[6, 7, 0]].tolist():
        spoil(folder / "ant" / f"{row}.jpg")
    checked = check_when_read(source, "skip", verify=True)
    for _ in range(2):
        ids = [checked.read(index).image_id for index in range(8)]
        assert ids == source.rows[[1, 1, 2, 3, 4, 5, 1, 1]].tolist()
    assert sorted(re.findall(r"image (\d) of 8", capsys.readouterr().err)) == ["1", "2", "3"]
    for path in (folder / "ant").iterdir():
        path.write_bytes(b"")
    with pytest.raises(BadImageError) as error:
        check_when_read(FolderSource(folder), "skip").read(0)
    assert error.value.path == str(folder)


def test_records_are_verified_and_what_nothing_proves_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded = cv2.imencode(".jpg", np.zeros((8, 8, 3), np.uint8))[1].tobytes()

    def encode(index: int) -> tuple[bytes, str]:
        example = ClassificationExample(index, encoded, 8, 8, 0)
        return encode_example(example, image_format="jpeg", class_name="ant"), ""

    manifest = {"kind": "classification", "classes": ["ant"]}
    write_shards(encode, 4, tmp_path, "train", manifest=manifest, fingerprint="", shards=1)
    check_when_read(RecordSource(tmp_path, "train"), verify=True)
    assert ";" not in capsys.readouterr().out
    (tmp_path / "train.json").unlink()
    check_when_read(RecordSource(tmp_path, "train"), verify=True)
    assert ";" in capsys.readouterr().out
    (path,) = tmp_path.glob("train-*")
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(BrokenImagesError) as error:
        check_when_read(RecordSource(tmp_path, "train"), verify=True)
    assert error.value.count == 1


def test_a_second_start_notices_a_file_of_the_same_size_and_time(folder: Path, tmp_path: Path) -> None:
    known = tmp_path.parent / f"{tmp_path.name}.json"
    assert check_sources({"train": FolderSource(folder)}, known).keys() == {"train"}
    states = check_sources({"train": FolderSource(folder)}, known)
    assert check_sources({"train": FolderSource(folder)}, known) == states
    known.write_text(json.dumps(states))
    path = folder / "ant" / "3.jpg"
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(bytes(len(content)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    for content_of_known in (known.read_text(), "[]", "{"):
        known.write_text(content_of_known)
        with pytest.raises(BrokenImagesError) as error:
            check_sources({"train": FolderSource(folder)}, known)
        assert error.value.count == 1
    known.unlink()


def test_broken_images_of_all_splits_are_counted_at_once(folder: Path, tmp_path: Path) -> None:
    (folder / "ant" / "3.jpg").write_bytes(b"")
    with pytest.raises(BrokenImagesError) as error:
        check_sources({"train": FolderSource(folder), "val": FolderSource(folder)}, tmp_path / "none.json")
    assert (error.value.count, len(error.value.errors), error.value.exit_status) == (2, 2, 65)


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


def count_decoded(source: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Read all images of a source that is checked, and count those that are decoded for it."""
    decoded = list[object]()

    def note(encoded: bytes, place: object) -> None:
        decoded.append(place)
        check_pixels(encoded, place)

    with monkeypatch.context() as patched:
        patched.setattr("gaudi_datasets.layouts.checking.check_pixels", note)
        checked = check_when_read(source)
        for _ in range(2):
            for index in range(len(checked)):
                checked.read(index)
    return len(decoded)


def test_images_are_decoded_once_for_a_data_set(folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    assert count_decoded(FolderSource(folder), monkeypatch) == 8
    assert count_decoded(FolderSource(folder), monkeypatch) == 0
    (cache,) = (elsewhere / "cache" / "gaudi" / "decoded").iterdir()
    content = cache.read_bytes()
    for damaged in (b"", content[:-1], bytes([content[0] ^ 1]) + content[1:], content[:-1] + b"\0"):
        cache.write_bytes(damaged)
        assert count_decoded(FolderSource(folder), monkeypatch) == 8
    (folder / "ant" / "3.jpg").write_bytes((folder / "ant" / "4.jpg").read_bytes())
    assert count_decoded(FolderSource(folder), monkeypatch) == 8


def test_without_a_cache_each_process_decodes(folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    for _ in range(2):
        assert count_decoded(FolderSource(folder), monkeypatch) == 8


@pytest.mark.parametrize("decode", [False, True])
def test_records_of_decoded_images_are_not_decoded_again(
    folder: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, decode: bool
) -> None:
    write_class_records(FolderSource(folder), elsewhere / "records", "train", decode=decode)
    write_class_records(FolderSource(folder), elsewhere / "others", "train", decode=not decode)
    source, other = (RecordSource(elsewhere / name, "train") for name in ("records", "others"))
    assert (source.is_decoded, source.fingerprint) == (decode, other.fingerprint)
    assert count_decoded(source, monkeypatch) == (0 if decode else 8)


def test_checksums_are_known_before_the_first_image_is_read() -> None:
    """A source compares what it reads by the checksums that come with its fingerprint."""

    class Source:
        name, is_asked = "photos", False

        @property
        def fingerprint(self) -> str:
            self.is_asked = True
            return ""

        def __len__(self) -> int:
            return 1

        def read(self, index: int) -> Any:
            assert self.is_asked
            return SimpleNamespace(encoded=write_jpeg(), file_name="1.jpg")

    assert check_when_read(Source()).read(0).file_name == "1.jpg"


def write_jpeg() -> bytes:
    return bytes(cv2.imencode(".jpg", np.zeros([16, 16, 3], np.uint8))[1])
