from __future__ import annotations

import copy
import datetime as dt
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gaudi_datasets.documents import (
    MASKED,
    Faults,
    FaultyRecordsError,
    Record,
    RecordError,
    is_finite_number,
    load_json,
    load_yaml,
    shorten,
)
from gaudi_datasets.errors import DataError, MissingInputError


@pytest.mark.parametrize(
    "content", [b"", b" \n", b"{", b"[1, NaN]", b"[Infinity]", b"\xff\xfe\x00", b"[" * 100_000, b"{'a': 1}"]
)
def test_what_is_not_json_is_an_error_of_the_data(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.json: is ") as error:
        load_json(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="there is no"):
        load_json(tmp_path / "x.json")
    with pytest.raises(DataError, match="is a folder"):
        load_json(tmp_path)


def test_masks_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    annotation = {"id": 1, "image_id": 2, "category_id": 3}
    other = {"bbox": [], "segmentation": [[4]]}
    path.write_text(json.dumps({"annotations": [{**annotation, "segmentation": [[1, 2, 3]]}], "other": other}))
    assert load_json(path) == {"annotations": [annotation], "other": other}
    assert load_json(path, mark_masks=True) == {"annotations": [{**annotation, MASKED: True}], "other": other}


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, [1], -1, 2**63, 10**400])
def test_an_integer_is_an_integer(value: Any) -> None:
    with pytest.raises(RecordError, match="n is"):
        Record({"n": value}).integer("n")


def test_zero_and_the_largest_integer_are_taken() -> None:
    assert Record({"n": 0}).integer("n") == 0
    assert Record({"n": 2**63 - 1}).integer("n") == 2**63 - 1
    assert Record({}).integer("n", default=3) == 3


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), 10**400, [1.0]])
def test_a_number_is_finite(value: Any) -> None:
    assert not is_finite_number(value)
    with pytest.raises(RecordError):
        Record({"n": value}).number("n")


@pytest.mark.parametrize("value", [None, [], [1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, True], "1234", {"x": 1}])
def test_a_box_is_four_numbers(value: Any) -> None:
    with pytest.raises(RecordError):
        Record({"bbox": value}).box_xywh("bbox")


def test_a_text_is_not_empty_unless_that_is_its_default() -> None:
    with pytest.raises(RecordError):
        Record({"name": ""}).text("name")
    assert Record({"name": ""}).text("name", default="") == ""
    assert Record({}).text("name", default="") == ""


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(RecordError) as caught:
        Record({"name": "\ud800"}).text("name")
    assert caught.value.field == "name"
    assert Record({"name": "caf\udce9"}).text("name") == "caf\udce9"  # a file's name that is not UTF-8


def test_the_first_fault_is_named_and_all_are_counted() -> None:
    faults = Faults(Path("x.json"))
    records = [{"id": 7, "n": 1}, {"id": 8, "n": "a"}, 5, {"n": 2}]
    assert list(faults.parse("categories", records, lambda record: record.integer("n"))) == [1, 2]
    with pytest.raises(FaultyRecordsError) as error:
        faults.raise_any()
    first = error.value
    assert (first.path, first.record, first.field) == ("x.json", "category 8 (categories[1])", "n")
    assert str(first).endswith("(1 of 2 faults)")
    assert [(one.record, one.field) for one in first.errors] == [(first.record, "n"), ("categories[2]", None)]
    again = copy.copy(first)  # by the rule that sends it from process to process
    assert (str(again), again.count, len(again.errors)) == (str(first), 2, 2)


def test_long_values_are_cut() -> None:
    assert len(shorten("x" * 1000)) == 60
    assert "2020" in shorten({dt.date(2020, 1, 1): ""})


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
    with pytest.raises(DataError, match="16777217 bytes"):
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
    with pytest.raises(MissingInputError, match="there is no"):
        load_yaml(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "2020-13-45",
        "!!int x",
        "!!float x",
        "!!bool x",
        "!!timestamp x",
        "2001-12-14t21:59:43.10+99:99",
        "9" * 5000,
        "0x" + "f" * 4000,
        f'!!int {{=: "0x{"f" * 4000}"}}',
        "1" + ":1" * 500_000,
    ],
)
def test_values_that_are_none_of_their_kind_are_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"names: {text}\n")
    with pytest.raises(DataError) as caught:
        load_yaml(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("load", [load_json, load_yaml])
@pytest.mark.posix
def test_a_pipe_is_no_document(tmp_path: Path, load: Any) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(DataError) as caught:
        load(tmp_path / "x")
    assert caught.value.path == str(tmp_path / "x")
