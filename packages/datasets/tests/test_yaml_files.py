from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.yaml_files import load_yaml


def test_plain_values_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("names: {0: cat, 1: dög}\ntrain: [a, b]\nempty:\n")
    assert load_yaml(path) == {"names": {0: "cat", 1: "dög"}, "train": ["a", "b"], "empty": None}
    path.write_text("")
    assert load_yaml(path) is None


def test_a_small_file_cannot_become_a_huge_one(tmp_path: Path) -> None:
    path = tmp_path / "laughs.yaml"
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60))]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"found a reference \(\*\).*line 2"):
        load_yaml(path)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.yaml"
    with path.open("wb") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(DataError, match="has 16777217 bytes; a YAML file may have 16777216"):
        load_yaml(path)


@pytest.mark.parametrize(
    "text",
    ["a: [1", "!!python/name:os.system", "--- 1\n--- 2", "a: \x01", "\xff".encode("latin-1"), "{a: 1}: [}", "9" * 5000],
)
def test_what_is_not_yaml_is_named_in_one_line(text: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match="is not YAML of plain values") as caught:
        load_yaml(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a folder"):
        load_yaml(tmp_path)
    with pytest.raises(MissingInputError, match="there is no such file"):
        load_yaml(tmp_path / "none.yaml")
