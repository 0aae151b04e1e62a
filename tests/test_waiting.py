"""No test sleeps or reads a clock: on a busy machine everything takes longer than somebody thought.

Tests wait for events instead, by what conftest.py at the root has for them: a channel, a gate, the end of processes. A
limit of time only ends what would never end, so it is a minute at least.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST_SECONDS = 60
WAITING = {"wait", "join", "communicate"}
COMMAND = re.compile(r"\bsleep [0-9.]+")


def find_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and what is wrong there, of a module or of code in its strings."""
    tree = ast.parse(text)
    limits = dict(find_numbers(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if "time" in names:
                yield node.lineno, "imports time"
        elif isinstance(node, ast.Call):
            yield from ((node.lineno, fault) for fault in check_call(node, limits))
        elif isinstance(node, ast.List | ast.Tuple):
            words = [getattr(element, "value", None) for element in node.elts]
            yield from ((node.lineno, fault) for fault in check_string(" ".join(map(str, words))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, fault) for fault in check_string(node.value))


def find_numbers(tree: ast.Module) -> Iterator[tuple[str, float]]:
    """Yield names that the module gives to numbers, and the numbers."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and isinstance(node.value.value, int | float):
                    yield target.id, node.value.value


def check_call(call: ast.Call, limits: Mapping[str, float]) -> Iterator[str]:
    """Yield what is wrong with a call; of limits, numbers are known, and names that stand for some."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if name == "sleep":
        yield "sleeps"
    given = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
    given += call.args if name in WAITING and len(call.args) == 1 else []
    for value in given:
        limit = limits.get(value.id) if isinstance(value, ast.Name) else getattr(value, "value", None)
        if isinstance(limit, int | float) and limit < LEAST_SECONDS:
            yield f"waits only {limit:g} s"


def check_string(text: str) -> Iterator[str]:
    """Yield what is wrong with a string, which may be a command or a program."""
    if COMMAND.search(text):
        yield "sleeps"
    if "time" in text or "sleep" in text:
        try:
            yield from (f"code {fault}" for _, fault in find_faults(textwrap.dedent(text)))
        except SyntaxError:
            return


def test_no_test_sleeps_or_reads_a_clock() -> None:
    paths = [ROOT / "conftest.py", *ROOT.glob("tests/**/*.py"), *ROOT.glob("packages/*/tests/**/*.py")]
    # The suite of faults is no test: it ends when its time is over, and sends signals at moments.
    paths = [path for path in paths if path.parent != ROOT / "tests" / "torture"]
    assert len(paths) > 100
    found = [(path, find_faults(path.read_text(encoding="utf-8"))) for path in paths]
    assert [f"{path.relative_to(ROOT)}:{line}: {fault}" for path, faults in found for line, fault in faults] == []


def test_what_waits_by_time_is_found() -> None:
    text = (Path(__file__).parent / "data" / "waiting" / "faults.txt").read_text()
    assert sorted(find_faults(text)) == [
        (1, "imports time"),
        (2, "imports time"),
        (7, "code imports time"),
        (13, "sleeps"),
        (16, "sleeps"),
        (16, "waits only 30 s"),
        (17, "sleeps"),
        (18, "waits only 5 s"),
        (19, "waits only 0.5 s"),
    ]
