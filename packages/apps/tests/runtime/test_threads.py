"""Which threads are chosen, from figures that the tests give, and that a choice can be measured for real."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.runtime.errors import ThreadTrialError
from gaudi_apps.runtime.settings import DeviceSettings
from gaudi_apps.runtime.tensorflow import Threads, cache_file, choose_fastest, find_threads, list_choices, measure
from gaudi_datasets.errors import MissingInputError
from gaudi_distributed.devices.machine import count_processors

SECONDS = {Threads(2, 1): 0.3, Threads(2, 2): 0.2}


def choose(cache: Path, seconds: dict[Threads, float] = SECONDS) -> tuple[Threads, str]:
    return choose_fastest(list(seconds), seconds.__getitem__, cache, "this machine")


@pytest.mark.parametrize(
    ("processors", "cores", "choices"),
    [
        (1, 1, [(1, 1)]),
        (2, 2, [(2, 1), (2, 2)]),
        (16, 8, [(16, 1), (16, 2), (16, 16), (8, 1), (8, 2), (8, 16)]),
        (4, 8, [(4, 1), (4, 2), (4, 4)]),  # --max_cpus 4
    ],
)
def test_choices(processors: int, cores: int, choices: list[tuple[int, int]]) -> None:
    assert list_choices(processors, cores) == [Threads(*each) for each in choices]


@pytest.mark.parametrize(("flag", "max_cpus", "expected"), [(3, 1, 3), (0, 1, 1), ("auto", 1, 1), (0, 0, None)])
def test_runtimes_of_exports_get_the_threads_of_the_flags(flag: Any, max_cpus: int, expected: int | None) -> None:
    settings = DeviceSettings("cpu", "fp32", 0, intra_threads=flag, max_cpus=max_cpus)
    assert settings.runtime_threads == (expected or count_processors())


def test_what_the_user_gives_is_in_all_choices() -> None:
    assert list_choices(8, 4, intra=3) == [Threads(3, 1), Threads(3, 2), Threads(3, 8)]
    assert list_choices(8, 4, inter=0) == [Threads(8, 8), Threads(4, 8)]


def test_the_fastest_is_measured_once(tmp_path: Path) -> None:
    cache = tmp_path / "gaudi" / "threads.json"
    threads, text = choose(cache)
    assert threads == Threads(2, 2)
    assert re.findall(r"[\d.]+", text)[:4] == ["2", "2", "2", "1.50"]
    slower = dict.fromkeys(SECONDS, 1.0) | {Threads(2, 2): 2.0}
    threads, text = choose(cache, slower)
    assert threads == Threads(2, 2)
    assert str(cache) in text
    assert [path.name for path in cache.parent.iterdir()] == ["threads.json"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"this machine": [2]}',
        '{"this machine": ["2", 2]}',
        '{"this machine": [9, 9]}',
        '{"this machine": [true, 2]}',
    ],
)
def test_a_file_of_another_form_is_measured_anew(tmp_path: Path, content: str) -> None:
    cache = tmp_path / "threads.json"
    cache.write_text(content)
    assert choose(cache)[0] == Threads(2, 2)
    assert json.loads(cache.read_text()) == {"this machine": [2, 2]}


def test_other_machines_answers_stay(tmp_path: Path) -> None:
    cache = tmp_path / "threads.json"
    cache.write_text('{"another": [64, 1]}')
    choose(cache)
    assert json.loads(cache.read_text()) == {"another": [64, 1], "this machine": [2, 2]}


def test_what_cannot_be_kept_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gaudi").touch()
    assert choose(tmp_path / "gaudi" / "threads.json")[0] == Threads(2, 2)
    assert "threads: not kept: " in capsys.readouterr().out


def test_the_users_cache_is_where_the_system_says() -> None:
    assert cache_file({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/gaudi/threads.json")
    assert cache_file({}) == Path.home() / ".cache/gaudi/threads.json"


def test_without_a_home_the_cache_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(_: int) -> None:
        raise KeyError

    monkeypatch.setattr("pwd.getpwuid", find)
    monkeypatch.delenv("HOME", raising=False)
    with pytest.raises(MissingInputError):
        cache_file({})


def test_numbers_are_taken_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_threads(0, 3, 8, dtype="float32", on_cpu=True) == Threads(8, 3)
    assert not capsys.readouterr().out


def test_nothing_is_measured_for_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_threads("auto", 3, 8, dtype="float32", on_cpu=False) == Threads(8, 3)
    assert re.findall(r"\d+", capsys.readouterr().out) == ["8", "3"]


@pytest.mark.slow
def test_a_choice_is_measured_in_a_process_of_its_own() -> None:
    assert 1e-4 < measure(Threads(1, 1), "float32") < 100


@pytest.mark.slow
@pytest.mark.usefixtures("bf16_kernels")  # without them a trial takes minutes beside other work
def test_a_choice_is_measured_in_bfloat16() -> None:
    assert 1e-4 < measure(Threads(1, 1), "bfloat16") < 100


@pytest.mark.slow
def test_a_trial_that_fails_is_told() -> None:
    with pytest.raises(ThreadTrialError, match="float7"):
        measure(Threads(1, 1), "float7")
