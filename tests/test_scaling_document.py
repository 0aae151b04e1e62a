"""The document on the cost of many ranks: its formulas and tables are what the code computes."""

from __future__ import annotations

import inspect
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gaudi_ops import scaling

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z_]+)(\(.*?\)[.a-z]*)` \| ([0-9.e+-]+) \|", TEXT, re.MULTILINE)
EXAMPLES = re.findall(r"```console\n\$ (\w+_train .*?)```\n(.*?)(?=```console|\Z)", TEXT, re.DOTALL)


def test_every_formula_is_there() -> None:
    functions = {
        name for name, one in inspect.getmembers(scaling, inspect.isfunction) if one.__module__ == scaling.__name__
    }
    assert {name for name, _, _ in ROWS} == functions


@pytest.mark.parametrize(
    ("name", "arguments", "value"), ROWS, ids=[f"{name}-{n}" for n, (name, _, _) in enumerate(ROWS)]
)
def test_its_number_is_computed(name: str, arguments: str, value: str) -> None:
    computed = eval(f"{name}{arguments}", dict(vars(scaling)))  # noqa: S307 the document is ours
    assert math.isclose(computed, float(value), rel_tol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "after"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_its_tables_are_what_the_program_prints(command: str, after: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    run = [sys.executable, "-m", f"gaudi_apps.{program}", *arguments]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    tables = re.findall(r"```text\n(.*?)```", after, re.DOTALL)
    assert tables
    assert [table for table in tables if table not in done.stdout] == []


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3
