"""Folders import those below them only, as the README shows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gaudi_distributed

ROOT = Path(gaudi_distributed.__file__).parent
# From the bottom to the top.
ORDER = ("errors", "cluster", "devices", "comm", "failure", "launch", "doctor")


def list_imports() -> Iterator[tuple[str, str]]:
    """Yield the pairs of importing module and imported folder."""
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gaudi_distributed."):
                yield name, str(node.module).split(".")[1]


def test_every_folder_has_its_place() -> None:
    entries = {path.stem for path in ROOT.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert entries - {"__init__", "__pycache__"} == set(ORDER)


def test_folders_import_those_below_them() -> None:
    upward = {
        (name, folder)
        for name, folder in list_imports()
        if name != "__init__" and ORDER.index(folder) > ORDER.index(name.split(".")[0])
    }
    # The command imports the doctor when it is run.
    assert upward == {("launch.cli", "doctor")}
