"""`benchmarks/against_former.py` has two checkouts take turns in processes of their own."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import pytest
from benchmarks import against_former
from benchmarks.against_former import compare, describe, measure_start, serve, take_turns

PROGRAM = "import sys\nprint('begins')\nprint('step 1/9')\nsys.exit({status})\n"


def make_checkout(root: Path, status: int = 0) -> Path:
    package = root / "packages" / "apps" / "src" / "gaudi_apps"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "ssd_train.py").write_text(PROGRAM.format(status=status))
    benchmarks = root / "benchmarks"
    benchmarks.mkdir()
    (benchmarks / "mxnet_step.py").write_text("def build_ours(precision):\n    return lambda: print('a step')\n")
    return root


def test_candidates_take_turns_and_the_first_does_not_count() -> None:
    calls: list[str] = []

    def take(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    seconds = take_turns({"former": lambda: take("former"), "this": lambda: take("this")}, 2)
    assert calls == ["this", "former", "former", "this", "this", "former"]
    assert seconds == {"former": [3.0, 6.0], "this": [4.0, 5.0]}


def test_the_ratio_is_of_medians() -> None:
    seconds = {"former": [1.0, 2.0, 9.0], "this": [2.1, 2.0, 2.2]}
    assert compare(seconds) == pytest.approx(1.05)
    assert describe("step", seconds, 1.03).endswith("NO")
    assert describe("step", seconds, 1.06).endswith("yes")


def test_turns_are_served() -> None:
    turns: list[int] = []
    answers = io.StringIO()
    serve(lambda: lambda: turns.append(1), itertools.count().__next__, io.StringIO("\n\n"), answers)
    assert len(turns) == 2
    assert [line.split()[1] for line in answers.getvalue().splitlines()] == ["1", "1"]
    assert [line.split()[0] for line in answers.getvalue().splitlines()] == [against_former.READY] * 2


def test_a_program_that_fails_is_an_error(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(make_checkout(tmp_path, 3) / "packages/apps/src")}
    words = ("gaudi_apps.ssd_train",)
    assert measure_start(words, "step 1/", environ=environ) > 0
    assert measure_start(words, "step 1/", environ=environ, clock="processor") > 0
    for line in ("", "step 2/"):
        with pytest.raises(RuntimeError, match=r"3$"):
            measure_start(words, line, environ=environ)


@pytest.mark.slow
def test_two_checkouts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(against_former, "ROOT", make_checkout(tmp_path / "this"))
    former = make_checkout(tmp_path / "former")
    only = ["help", "first_step", "mxnet_step"]
    written = tmp_path / "folder" / "seconds.json"
    arguments = [str(former), "--only", *only, "--rounds", "2", "--json", str(written)]
    assert against_former.main([*arguments, "--most", "1e9"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == only
    assert {
        name: {each: len(turns) for each, turns in one.items()} for name, one in json.loads(written.read_text()).items()
    } == {name: {"former": 2, "this": 2} for name in only}
    assert against_former.main([*arguments, "--clock", "processor", "--most", "0"]) == 1


def test_a_folder_without_packages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        against_former.main([str(tmp_path)])
