"""One function prints, and escapes: no module of the packages writes to the terminal in another way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRINTER, COPY = "ops/src/gaudi_ops/program.py", "distributed/src/gaudi_distributed/errors.py"
# What may name a stream, with how often: to ask if it is a terminal, to flush it, or to give it to a library.
OTHERS = {
    "apps/src/gaudi_apps/inference/converters.py": 2,  # flushes around what a library in C writes
    "apps/src/gaudi_apps/inference/predictor.py": 1,  # asks if it is a terminal
    "apps/src/gaudi_apps/training/comparisons.py": 3,  # asks; moves all output to standard error under --json
    "datasets/src/gaudi_datasets/commands/bench.py": 1,  # asks
    "datasets/src/gaudi_datasets/fetching/display.py": 1,  # asks
    "datasets/src/gaudi_datasets/program.py": 1,  # the stream of a line of progress, which `say` and `show_status` get
    "distributed/src/gaudi_distributed/failure/rank_client.py": 2,  # flushes
    "distributed/src/gaudi_distributed/launch/guard.py": 3,  # runs without the package, by its file alone
    "distributed/src/gaudi_distributed/launch/running.py": 1,  # copies what a shell of another host writes
    "distributed/src/gaudi_distributed/launch/schedulers.py": 1,  # writes a job's file, which is taken as it is
}
PRINTING = {"print", "Console", "print_exc", "print_exception", "print_tb", "StreamHandler", "basicConfig"}


def find_printing(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each use of a standard stream, and of each call that prints."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "sys":
            if node.attr.strip("_") in ("stdout", "stderr"):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "sys":
            yield node.lineno
        elif isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            is_method = isinstance(called, ast.Attribute) and name == "print"  # of a console
            if name in PRINTING and not is_method:
                yield node.lineno


def test_one_function_prints() -> None:
    found = {}
    for path in sorted((ROOT / "packages").glob("*/src/**/*.py")):
        name = path.relative_to(ROOT / "packages").as_posix()
        count = len([*find_printing(ast.parse(path.read_text(encoding="utf-8")))])
        if count and name not in (PRINTER, COPY):
            found[name] = count
    assert found == OTHERS


@pytest.mark.parametrize(
    "line",
    [
        "print(name)",
        "sys.stdout.write(name)",
        "sys.__stderr__.write(name)",
        "from sys import *",
        "Console().print(name)",
        "traceback.print_exc()",
        "logging.StreamHandler()",
    ],
)
def test_another_way_is_found(line: str) -> None:
    assert [*find_printing(ast.parse(line))] == [1]


def read_functions(path: str) -> dict[str, str]:
    """Read the source of each function and class at the top of a module."""
    tree = ast.parse((ROOT / "packages" / path).read_text(encoding="utf-8"))
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def test_the_launcher_prints_as_the_other_programs_do() -> None:
    ours, copied = read_functions(PRINTER), read_functions(COPY)
    same = {name for name in ours.keys() & copied.keys() if ours[name] == copied[name]}
    assert same == {"_Output", "escape", "flush_output", "open_output", "shorten"}
