from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gaudi_datasets.classification.class_folders import FolderSource
from gaudi_datasets.classification.listed_files import PNG_FIX, FileList, ListedSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.image_files import CMYK_FIX

Encode = Callable[..., bytes]


def make_list(labels: list[int]) -> FileList:
    names = np.array([f"{label}/{row}.jpg".encode() for row, label in enumerate(labels)], np.bytes_)
    count = len(labels)
    return FileList(Path(), ("a", "b", "c", "d"), names, np.array(labels, np.int32), *np.ones((2, count), np.int64))


@given(labels=st.lists(st.integers(0, 3), min_size=1, max_size=40), count=st.integers(1, 5))
def test_so_many_of_each_class_are_the_first_of_it(labels: list[int], count: int) -> None:
    labels.sort()
    source = ListedSource(make_list(labels))
    before = source.rows.tolist()
    source.keep_per_class(count)
    seen: Counter[int] = Counter()
    expected = []
    for row in before:
        seen[labels[row]] += 1
        if seen[labels[row]] <= count:
            expected.append(row)
    assert source.rows.tolist() == expected


def test_named_images_are_kept_in_order_and_keep_ids_and_labels(class_tree: Path) -> None:
    source = FolderSource(class_tree)
    before = [row for row in source.rows.tolist() if row in (1, 8)]
    fingerprint = source.former_fingerprint
    source.files.names[:] = [
        name.rpartition(b"/")[2] + bytes([65 + row]) for row, name in enumerate(source.files.names)
    ]
    source.keep_named(["somewhere/1.jpgB", "3.jpgI"], "list.txt")
    assert source.rows.tolist() == before
    assert source.class_names == ("cat", "dog", "eel")
    assert source.former_fingerprint != fingerprint


@pytest.mark.parametrize(
    ("names", "message"), [(["nothing.jpg"], 'list.txt: names "nothing.jpg", no image of'), ([], "names no image")]
)
def test_a_list_of_other_images_is_refused(class_tree: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        FolderSource(class_tree).keep_named(names, "list.txt")


def test_images_are_fixed_as_they_are_read(tmp_path: Path, encode: Encode) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "cmyk.jpg").write_bytes(encode(1, mode="CMYK"))
    (tmp_path / "a" / "png.jpg").write_bytes(encode(2, "PNG"))
    files = FolderSource(tmp_path).files
    for only_jpeg in (False, True):
        source = ListedSource(files, only_jpeg=only_jpeg)
        cmyk, png = (source.read_image(source.rows.tolist().index(row)) for row in (0, 1))
        assert (cmyk.format, cmyk.fix) == ("jpeg", CMYK_FIX)
        assert Image.open(io.BytesIO(cmyk.encoded)).mode == "RGB"
        assert (png.format, png.fix) == (("jpeg", PNG_FIX) if only_jpeg else ("png", ""))
        pixels = [np.asarray(Image.open(io.BytesIO(each)), int) for each in (png.encoded, encode(2, "PNG"))]
        assert np.abs(pixels[0] - pixels[1]).mean() < (2 if only_jpeg else 1e-9)


def test_a_source_is_pickled_for_other_processes(class_tree: Path) -> None:
    source = FolderSource(class_tree)
    copy = pickle.loads(pickle.dumps(source))  # noqa: S301  our own
    assert vars(copy.read(3)) == vars(source.read(3))


def test_a_million_images_are_listed_in_little_memory() -> None:
    count = 1_281_167
    names = np.full(count, b"n01440764_12345.JPEG", "S20")
    files = FileList(Path(), ("a",), names, np.zeros(count, np.int32), *np.zeros((2, count), np.int64))
    arrays = (files.names, files.labels, files.sizes, files.times_ns)
    assert sum(array.nbytes for array in arrays) < 60e6
