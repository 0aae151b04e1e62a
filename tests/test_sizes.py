"""Files and functions stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


def find_large(path: Path) -> Iterator[str]:
    """Yield a line for the file if it is too long, and for each function of it that is, its docstring not counted."""
    text = path.read_text(encoding="utf-8")
    if (lines := len(text.splitlines())) > MAX_FILE_LINES:
        yield f"{path}: {lines} lines; at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            length = node.end_lineno - node.lineno + 1 if node.end_lineno else 0
            if docstring is not None and docstring.end_lineno is not None:
                length -= docstring.end_lineno - docstring.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}"


def test_files_and_functions_are_small() -> None:
    paths = [*ROOT.glob("packages/*/src/**/*.py"), ROOT / "noxfile.py"]
    assert len(paths) > 10
    assert [fault for path in paths for fault in find_large(path)] == []


def test_what_is_large_is_found(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text("def f():\n" + '    """Doc.\n\n    More.\n    """\n' + "    x = 1\n" * 60 + "\n" * 440)
    assert [fault.removeprefix(str(path)) for fault in find_large(path)] == [
        ": 505 lines; at most 500",
        ":1: f has 61 lines; at most 60",
    ]
