"""The recorded calls from `main` to the train step are those of a real step."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.training_path import PROGRAMS, read_paths, trace

ROOT = Path(__file__).resolve().parents[1]


def test_each_program_has_a_path() -> None:
    paths = read_paths(ROOT)
    assert paths.keys() == PROGRAMS.keys()
    assert [path[0].rpartition("/")[2] for path in paths.values()] == [f"{name}.py:main" for name in PROGRAMS]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_path_is_that_of_a_real_step(program: str) -> None:
    assert trace(program) == read_paths(ROOT)[program]
