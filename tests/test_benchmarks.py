"""The program that measures: what it selects, how it deals time, what becomes of a failure, its table."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import __main__ as program  # noqa: E402
from benchmarks.catalogue import NEED_TORCH, SHARES, deal_seconds  # noqa: E402
from benchmarks.input_shares import PARTS, describe_rounds  # noqa: E402
from benchmarks.measurement import Figure, Timing, compare, interleave, ratio  # noqa: E402
from benchmarks.results import (  # noqa: E402
    COLUMNS,
    RESULTS,
    Outcome,
    compare_with,
    describe_machine,
    find_processor_name,
    format_results,
    list_rows,
    read_earlier,
    read_rows,
    split_machines,
)

FIGURES = (
    Figure("step over keras", 1.52, least=1.4, note="ours 7.1, keras 4.7 images/s", spread=0.034),
    Figure("step | bf16", 0.5, "of 1", least=0.55),
    Figure("product", 868.4, "GFLOP/s"),
    Figure("memory", 1.01, most=1.05),
)
OUTCOMES = [Outcome("ssd_step", FIGURES), Outcome("startup", (), "RuntimeError: no step")]


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Outcome]:
    """Return a function that runs the text of a module as a benchmark."""
    (tmp_path / "made").mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def run(text: str, limit: float = 600.0) -> Outcome:
        (tmp_path / "made" / "one.py").write_text(text)
        return program.measure("one", 1.0, limit=limit, package="made")

    return run


def test_every_benchmark_is_in_the_catalogue() -> None:
    modules = (ROOT / "benchmarks").glob("*.py")
    assert {path.stem for path in modules if "\n    main(run)\n" in path.read_text(encoding="utf-8")} == SHARES.keys()
    assert SHARES.keys() > NEED_TORCH


def test_time_is_dealt_by_shares_and_all_of_it() -> None:
    names, left = list(SHARES), 1500.0
    dealt = {}
    for number, name in enumerate(names, 1):
        dealt[name] = deal_seconds(name, names[number:], left)
        left -= dealt[name]
    assert left == pytest.approx(0)
    assert dealt["ssd_step"] == pytest.approx(dealt["coco_scoring"] * SHARES["ssd_step"] / SHARES["coco_scoring"])


def test_shares_of_the_input_are_of_one_round_each() -> None:
    rounds = []
    for slow in (1, 2, 10):  # of all alike, which changes no ratio
        parts = {name: slow * seconds for name, seconds in zip(PARTS, (1, 1, 4, 1, 2, 1), strict=True)}
        rounds.append(
            parts | {"ours": 16 * slow, "plain": 40 * slow, "Grain": 20, "torchvision": 32, "bound": 8 * slow}
        )
    found = list(describe_rounds(rounds))
    plain, torchvision, grain, bound, *shares = found
    assert [each.value for each in found] == [2.5, 1, 0.625, 0.5, *(seconds / 16 for seconds in (1, 1, 4, 1, 2, 1, 6))]
    assert [each.passed for each in (plain, torchvision, grain, bound)] == [True, True, True, False]
    assert torchvision.spread == 2 - 0.2
    assert [each.name.rpartition(": ")[2] for each in shares[:-1]] == [*PARTS]


def test_the_peak_comes_first() -> None:
    assert next(iter(SHARES)) == "matrix_peak"


def test_selection(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.parse([]).only is None
    assert program.parse(["--only", "startup", "ssd_step", "--minutes", "10"]).only == ["startup", "ssd_step"]
    for flag, arguments in {"--only": ["--only", "nothing"], "--minutes": ["--minutes", "0"]}.items():
        with pytest.raises(SystemExit) as end:
            program.parse(arguments)
        assert end.value.code == 2
        assert flag in capsys.readouterr().err.splitlines()[-1]


def test_candidates_take_turns() -> None:
    calls: list[str] = []
    timings = interleave({name: functools.partial(calls.append, name) for name in "ab"}, 3)
    assert "".join(calls) == "abababab"
    assert {name: len(timing.seconds) for name, timing in timings.items()} == {"a": 3, "b": 3}
    calls.clear()
    interleave({"a": lambda: calls.append("a")}, 1, warm_up=False)
    assert calls == ["a"]


def test_ratios_are_of_rounds() -> None:
    """The machine is half as fast in the second round, which hits both alike."""
    timings = {"slow": Timing((2.0, 4.0, 3.0), (0, 0, 0)), "fast": Timing((1.0, 2.0, 1.0), (0, 0, 0))}
    assert ratio(timings, "slow", "fast") == 2
    figure = compare("one", timings, "slow", "fast", least=2.0, note="so")
    assert (figure.value, figure.spread, figure.passed, figure.note) == (2, 1, True, "so")


def test_table_holds_what_was_measured() -> None:
    rows = list_rows(OUTCOMES)
    assert rows[0] == (
        *("ssd_step", "step over keras", "1.52 x", "0.034", "at least 1.4", "yes"),
        "ours 7.1, keras 4.7 images/s",
    )
    assert rows[1][1:6] == ("step / bf16", "0.5 of 1", "", "at least 0.55", "NO")
    assert rows[2][4:6] == ("", "")
    assert rows[4] == ("startup", "failed", "", "", "", "NO", "RuntimeError: no step")


def test_others_on_the_machine_are_told() -> None:
    timing = {"median_seconds": 1.0, "others_processors": 0.7}
    (row,) = list_rows([Outcome("one", (Figure("a", 1.0, details={"ours": timing}),))])
    assert row[-1] == "others kept 0.7 processors busy"


def test_a_committed_table_is_read_again() -> None:
    machine = {"machine": "some processor, 2 processors, 24 GiB", "date": "2030-01-01", "versions": "Python 3.11"}
    preface = "# Results\n\nBy hand.\n\n"
    former = f"{preface}## another\n\n- date: 2029-01-01\n\n## {machine['machine']}\n\n- date: 2029-01-02\n"
    written = format_results(machine, OUTCOMES, former, ("ssd_step", "startup"))
    assert written.startswith(f"{preface}## another\n")
    machines = split_machines(written)
    assert list(machines) == ["another", machine["machine"]]
    assert machines["another"].strip() == "- date: 2029-01-01"
    text = machines[machine["machine"]]
    assert "- date: 2030-01-01" in text
    assert split_machines("") == {}
    assert all(len(line.split("|")) == len(COLUMNS) + 2 for line in text.splitlines() if line.startswith("|"))
    assert read_earlier(text) == {
        ("ssd_step", "step over keras"): 1.52,
        ("ssd_step", "step / bf16"): 0.5,
        ("ssd_step", "product"): 868.4,
        ("ssd_step", "memory"): 1.01,
    }
    assert compare_with(read_earlier(text), OUTCOMES) == []


def test_rows_of_benchmarks_that_did_not_run_stay() -> None:
    machine, names = {"machine": "some processor", "date": "2030-01-01"}, ("startup", "ssd_step", "memory")
    former = format_results(machine, OUTCOMES, "", names)
    again = [Outcome("memory", FIGURES[3:]), Outcome("startup", (Figure("help", 0.2, "s"),))]
    text = split_machines(format_results({**machine, "date": "2030-01-02"}, again, former, names))["some processor"]
    assert [row[:3] for row in read_rows(text)] == [
        ("startup", "help", "0.2 s"),
        *(row[:3] for row in read_rows(former) if row[0] == "ssd_step"),
        ("memory", "memory", "1.01 x"),
    ]
    assert [line.partition(": ")[2] for line in text.strip().splitlines()[:2]] == ["2030-01-02", "ssd_step"]


def test_changes_are_told_by_direction() -> None:
    earlier = {
        ("ssd_step", "step over keras"): 1.3,
        ("ssd_step", "step / bf16"): 0.6,
        ("ssd_step", "product"): 700.0,
        ("ssd_step", "memory"): 1.0,
        ("ssd_step", "left out"): 3.0,
        ("startup", "help"): 0.2,
        ("another", "did not run"): 1.0,
    }
    lines = compare_with(earlier, [*OUTCOMES, Outcome("new", (Figure("one", 1.0),))])
    assert [line.split(":")[0] for line in lines] == ["better", "worse", "changed", "new", "gone", "gone"]
    assert lines[0].split(": ") == ["better", "step over keras", "1.52 x, was 1.3"]
    assert [line.split(": ") for line in lines[4:]] == [["gone", "left out, was 3"], ["gone", "help, was 0.2"]]


def test_figures_come_from_a_process_of_their_own(write_module: Callable[[str], Outcome]) -> None:
    outcome = write_module(
        "from benchmarks.measurement import Figure, main\n"
        "def run(budget_seconds):\n"
        "    yield Figure('seconds', budget_seconds, 's', most=0.1)\n"
        "main(run)\n"
    )
    assert outcome.error == ""
    assert outcome.figures == (Figure("seconds", program.MEASURED, "s", most=0.1),)
    assert not outcome.passed


def test_a_failure_leaves_what_was_measured_before(write_module: Callable[[str], Outcome]) -> None:
    outcome = write_module(
        "from benchmarks.measurement import Figure, main\n"
        "def run(budget_seconds):\n"
        "    yield Figure('first', 1.0, least=2.0)\n"
        "    raise ValueError('the losses differ')\n"
        "main(run)\n"
    )
    assert outcome == Outcome("one", (Figure("first", 1.0, least=2.0),), "ValueError: the losses differ")


def test_what_takes_too_long_is_ended(write_module: Callable[..., Outcome]) -> None:
    outcome = write_module("import signal\nsignal.pause()\n", limit=0.2)
    assert "more than 0 s" in outcome.error


def test_others_go_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = {"matrix_peak": Outcome("matrix_peak", FIGURES), "startup": OUTCOMES[1]}
    monkeypatch.setattr(program, "measure", lambda name, seconds, limit, package: outcomes[name])
    monkeypatch.setattr(program, "RESULTS", tmp_path / "results.md")
    monkeypatch.setattr(program, "SHARES", {name: SHARES[name] for name in outcomes})
    path = tmp_path / "folder" / "bench.json"
    assert program.main(["--json", str(path), "--write_results"]) == 1
    written = json.loads(path.read_text())
    assert [each["error"] for each in written["benchmarks"]] == ["", "RuntimeError: no step"]
    assert (tmp_path / "results.md").read_text().count("| matrix_peak") == len(FIGURES)
    captured = capsys.readouterr()
    assert "has no table" in captured.out
    assert captured.err.endswith(": matrix_peak, startup\n")
    program.main(["--json", str(path)])
    assert "compared with results.md:" in capsys.readouterr().out


def test_what_has_no_time_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moments = iter([0.0, 0.0, 0.0, 50.0, 50.0, 50.0, 95.0, 95.0, 95.0, 95.0])  # seconds: begin, and of each benchmark
    limits = {}

    def measure(name: str, seconds: float, *, limit: float, package: str) -> Outcome:
        limits[name] = limit
        return Outcome(name, (), "ended" if name == "ssd_step" else "")

    monkeypatch.setattr(program, "measure", measure)
    monkeypatch.setattr(program, "prepare_environments", lambda names: None)
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    path = tmp_path / "bench.json"
    names = ["matrix_peak", "ssd_step", "startup"]
    assert program.main(["--only", *names, "--minutes", "1", "--json", str(path)]) == 1
    assert limits["ssd_step"] == pytest.approx(1.5 * 60 - 50)
    assert [each["benchmark"] for each in json.loads(path.read_text())["benchmarks"]] == ["matrix_peak"]
    assert capsys.readouterr().err.split("--only ")[1].split() == names[1:]


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert " processors, " in machine["machine"]
    assert "numpy " in machine["versions"]


@pytest.mark.parametrize(
    ("model", "name", "found"),
    [
        (17, "AMD EPYC", "AMD EPYC of family 6, model 17"),
        (1, "AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763 64-Core Processor"),
        (79, "Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel(R) Xeon(R) of family 6, model 79"),
    ],
)
def test_processors_of_one_name_are_told_apart(model: int, name: str, found: str) -> None:
    assert find_processor_name(f"cpu family\t: 6\nmodel\t\t: {model}\nmodel name\t: {name}\n") == found
    assert find_processor_name("cpu family\t: 6\nmodel\t\t: 79\n") == ""


def test_committed_results_can_be_compared_with() -> None:
    path = RESULTS
    if path.exists():
        assert {where for where, _ in read_earlier(path.read_text(encoding="utf-8"))} <= SHARES.keys()
