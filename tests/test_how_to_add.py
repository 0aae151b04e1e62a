"""Apply the diff of each page in docs/add to a copy of the packages, and run the tests that it brings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "add").glob("*.md"))


def read_diff(page: Path) -> str:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return str(diff)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of what the tests of a package read."""
    shutil.copytree(ROOT / "packages", tmp_path / "packages", ignore=shutil.ignore_patterns("__pycache__", "dist"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def apply(diff: str, folder: Path) -> None:
    # A repository above the folder would be the one that paths are of.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--whitespace=error"]
    done = subprocess.run(command, input=diff, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"write the diff anew: {done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_diff_applies_and_brings_tests(copy: Path, page: Path) -> None:
    diff = read_diff(page)
    apply(diff, copy)
    assert re.search(r"^\+\+\+ b/\S*test_\w+\.py$", diff, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_added_works(copy: Path, page: Path) -> None:
    diff = read_diff(page)
    apply(diff, copy)
    tests = re.findall(r"^\+\+\+ b/(\S*test_\w+\.py)$", diff, re.MULTILINE)
    sources = os.pathsep.join(str(copy / "packages" / path.name / "src") for path in (ROOT / "packages").iterdir())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout
