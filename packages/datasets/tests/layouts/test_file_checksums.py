from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c
import pytest

from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.layouts.file_checksums import find_checksums

CONTENTS = [b"one", b"two", b"three"]
Find = Callable[[], tuple[list[int], list[int]]]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gaudi" / "checksums"


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"{number}.jpg" for number in range(3)]
    for path, content in zip(found, CONTENTS, strict=True):
        path.write_bytes(content)
    return found


@pytest.fixture
def find(paths: list[Path], cache: Path) -> Find:
    """Return the checksums, and which files were read for them."""

    def find() -> tuple[list[int], list[int]]:
        read = []

        def read_content(index: int) -> bytes:
            read.append(index)
            return paths[index].read_bytes()

        found = find_checksums(paths, [path.name for path in paths], read_content, "these")
        return found.tolist(), sorted(read)

    return find


def test_files_are_read_once(find: Find) -> None:
    checksums = [google_crc32c.value(content) for content in CONTENTS]
    assert find() == (checksums, [0, 1, 2])
    assert find() == (checksums, [])


def test_a_replaced_file_is_read_again_whatever_its_time_says(find: Find, paths: list[Path]) -> None:
    before, _ = find()
    status = paths[1].stat()
    other = paths[1].with_name("other")
    other.write_bytes(b"owt")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(paths[1])
    assert find() == ([before[0], google_crc32c.value(b"owt"), before[2]], [1])


def test_names_need_not_be_in_utf8(cache: Path, paths: list[Path]) -> None:
    for _ in range(2):
        found = find_checksums(paths[:1], [os.fsdecode(b"caf\xe9.jpg")], lambda index: CONTENTS[index], "these")
        assert found.tolist() == [google_crc32c.value(CONTENTS[0])]


def damage(content: bytes) -> Iterator[bytes]:
    yield b""
    yield content[:-1]
    yield content[:40] + bytes([content[40] ^ 1]) + content[41:]


def test_a_damaged_cache_is_made_anew(find: Find, cache: Path) -> None:
    checksums, _ = find()
    (path,) = cache.iterdir()
    for content in damage(path.read_bytes()):
        path.write_bytes(content)
        assert find() == (checksums, [0, 1, 2])


def test_without_a_cache_all_are_read(find: Find, cache: Path) -> None:
    cache.parent.parent.write_text("is a file")
    assert find() == find()
    assert find()[1] == [0, 1, 2]


def test_a_missing_file_is_named(find: Find, paths: list[Path]) -> None:
    paths[2].unlink()
    with pytest.raises(MissingInputError) as caught:
        find()
    assert caught.value.path == str(paths[2])


def test_who_is_stopped_goes_on_from_what_was_read(paths: list[Path], cache: Path) -> None:
    read: list[int] = []

    def read_content(index: int) -> bytes:
        if index == 2 and len(read) < 3:
            raise KeyboardInterrupt
        read.append(index)
        return paths[index].read_bytes()

    names = [path.name for path in paths]
    with pytest.raises(KeyboardInterrupt):
        find_checksums(paths, names, read_content, "these")
    before, read[:] = {*read}, [0, 0, 0]
    found = find_checksums(paths, names, read_content, "these")
    assert found.tolist() == [google_crc32c.value(content) for content in CONTENTS]
    assert before == {0, 1}
    assert read[3:] == [2]
