from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.training.comparisons import make_document, print_table
from gaudi_apps.training.recording import (
    Difference,
    Recording,
    StepTensor,
    choose_tolerances,
    compare_step,
    find_first,
    make_tensor,
    read_recording,
    require_comparable,
    write_recording,
)
from gaudi_datasets.program import make_console
from gaudi_distributed.errors import ConfigurationError

FP32 = choose_tolerances(["fp32", "fp32"])


def make_step(**changed: Any) -> list[StepTensor]:
    generator = np.random.default_rng(0)
    values = {name: generator.normal(size=[3, 4]).astype(np.float32) for name in ("weight", "output", "gradient")}
    values |= changed
    return [
        make_tensor(1, "weight", "conv1/kernel", values["weight"], "conv1"),
        make_tensor(1, "output", "conv1", values["output"], "conv1"),
        make_tensor(1, "loss", "loss", np.array(3.0, np.float32)),
        make_tensor(1, "gradient", "conv1/kernel", values["gradient"], "conv1"),
    ]


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    write_recording(tmp_path / "recording", {"data": "a", "classes": ("x",)}, {"precision": "fp32"}, [make_step()])
    return read_recording(tmp_path / "recording")


def compare(recording: Recording, **changed: Any) -> list[Difference]:
    return compare_step(make_step(**changed), recording, 1, FP32)


def original(part: str) -> Any:
    return next(one.values for one in make_step() if one.metadata.part == part)


def test_equal_sides(recording: Recording) -> None:
    found = compare(recording)
    assert [one.largest for one in found] == [0, 0, 0, 0]
    assert find_first(found) is None


@pytest.mark.parametrize(("part", "place"), [("weight", 0), ("output", 1), ("gradient", 3)])
def test_the_first_difference_is_found(recording: Recording, part: str, place: int) -> None:
    values = original(part)
    values[1, 2] += 0.01
    found = compare(recording, **{part: values})
    assert find_first(found) == place
    assert found[place].largest == pytest.approx(0.01, rel=1e-4)
    norm = np.linalg.norm(values.astype(float) - original(part)) / np.linalg.norm(values.astype(float))
    assert found[place].norm == pytest.approx(norm, rel=1e-2)
    absolute, relative = FP32[found[place].tensor.part]
    assert found[place].bound == pytest.approx(absolute + relative * np.abs(values).max(), rel=1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_differs(recording: Recording, bad: float) -> None:
    values = original("output")
    values[0, 0] = bad
    found = compare(recording, output=values)
    assert find_first(found) == 1
    document = json.loads(json.dumps(make_document(found, {}, {}), allow_nan=False))
    assert document["first"]["max_difference"] is None


def test_large_tensors_are_compared_to_their_end(tmp_path: Path) -> None:
    values = np.zeros((1 << 20) + 5, np.float32)
    write_recording(tmp_path / "big", {}, {}, [[make_tensor(1, "output", "x", values, "x")]])
    other = values.copy()
    other[-1] = 2
    found = compare_step([make_tensor(1, "output", "x", other, "x")], read_recording(tmp_path / "big"), 1, FP32)
    assert (found[0].largest, found[0].norm) == (2, 1)


def test_tensors_of_one_side_only(recording: Recording) -> None:
    with pytest.raises(ConfigurationError, match="missing here") as caught:
        compare_step(make_step()[:3], recording, 1, FP32)
    assert caught.value.field == "step1/gradient/conv1/kernel"
    more = [*make_step(), make_tensor(1, "loss", "other", np.array(0, np.float32))]
    with pytest.raises(ConfigurationError, match="missing there") as caught:
        compare_step(more, recording, 1, FP32)
    assert caught.value.field == "step1/loss/other"
    with pytest.raises(ConfigurationError, match=r"\[2\] here, and \[3, 4\]") as caught:
        compare(recording, weight=np.zeros(2, np.float32))
    assert caught.value.field == "step1/weight/conv1/kernel"


@pytest.mark.parametrize(
    ("settings", "field", "there", "here"),
    [
        ({"data": "b", "classes": ["x"]}, "data", '"a"', '"b"'),
        ({"data": "a", "classes": ["y"]}, "classes", '["x"]', '["y"]'),
        ({"data": "a", "classes": ["x"], "seed": 1}, "seed", "null", "1"),
        ({"data": "a"}, "classes", '["x"]', "null"),
    ],
)
def test_another_setting_is_named(
    recording: Recording, settings: dict[str, Any], field: str, there: str, here: str
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"{there} there and {here} here")) as caught:
        require_comparable(settings, recording)
    assert caught.value.field == field
    assert caught.value.exit_status == 78


def test_equal_settings(recording: Recording) -> None:
    require_comparable({"data": "a", "classes": ("x",)}, recording)


@pytest.mark.parametrize(
    ("precisions", "output", "gradient"),
    [(["fp32", "fp32 NCHW"], 1e-4, 1e-3), (["fp32", "bf16"], 0.05, 0.3), (["bf16", "bf16"], 0.05, 0.3)],
)
def test_tolerances_follow_from_the_precisions(precisions: list[str], output: float, gradient: float) -> None:
    chosen = choose_tolerances(precisions)
    assert (chosen["output"][1], chosen["gradient"][1]) == (output, gradient)
    assert chosen["weight"] == (1e-8, 1e-6)
    assert set(choose_tolerances(precisions, 0.5, 0.25).values()) == {(0.25, 0.5)}


def test_the_table_shows_the_first_one_and_its_neighbours(
    recording: Recording, capsys: pytest.CaptureFixture[str]
) -> None:
    values = original("output") + np.float32(0.5)
    print_table(compare(recording, output=values), make_console(width=150))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip().startswith("1 of 4 ")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "conv1" in line]
    assert rows[1][:6] == ["first", "1", "output", "conv1", "conv1", "0.5"]
    assert rows[0][:6] == ["", "1", "weight", "conv1/kernel", "conv1", "0"]
    print_table(compare(recording), make_console(width=150))
    assert capsys.readouterr().out.startswith("4 tensors")


def test_the_document_has_all_tensors(recording: Recording) -> None:
    document = make_document(compare(recording, output=original("output") + 1), {"precision": "a"}, {"precision": "b"})
    assert (document["equal"], document["first"]["name"], document["first"]["layer"]) == (False, "conv1", "conv1")
    assert (document["this_side"], document["other_side"]) == ({"precision": "a"}, {"precision": "b"})
    assert [one["differs"] for one in document["tensors"]] == [False, True, False, False]
    equal = make_document(compare(recording), {}, {})
    assert (equal["equal"], equal["first"]) == (True, None)
