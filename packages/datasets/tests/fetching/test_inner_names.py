from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gaudi_datasets.fetching.inner_names import check_inner_name, fold_name


@pytest.mark.parametrize(
    ("name", "inner"), [("a", "a"), ("./a//b/", "a/b"), ("a b/ü.jpg", "a b/ü.jpg"), ("..a/b..", "..a/b..")]
)
def test_good_names(name: str, inner: str) -> None:
    assert check_inner_name(name) == inner


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("", "is empty"),
        ("./", "is empty"),
        ("..", "leaves the folder"),
        ("a/..", "leaves the folder"),
        ("/a", "is absolute"),
        ("\\\\host\\share\\a", "is absolute"),
        ("a\\b", "has a backslash"),
        ("z:a", "is absolute"),
        ("a\0b", "is not printable"),
        ("a\udcffb", "is not printable"),
        ("ü" * 128, "is longer than 1024 bytes, or than 255"),
    ],
)
def test_bad_names(name: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        check_inner_name(name)


@given(st.text(st.sampled_from("./\\:aC\0 \u202e"), max_size=12))
def test_what_passes_stays_below_the_folder(name: str) -> None:
    try:
        inner = check_inner_name(name)
    except ValueError:
        return
    assert Path("/folder", inner).resolve().is_relative_to("/folder/")
    assert str(PurePosixPath(inner)) == inner == check_inner_name(inner)


def test_names_that_are_one_file_on_some_systems() -> None:
    assert fold_name("A/É") == fold_name("a/e\u0301")
    assert fold_name("a") != fold_name("b")
