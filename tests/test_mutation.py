"""The mutation check, in a process of its own, on a package of two functions whose tests miss something."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """
def double(value: int | None, *, times: int = 2) -> int:
    return value * times


def wait(is_done: bool) -> int:
    while not is_done:
        is_done = True
    return 3
"""
TESTS = """
from measured.numbers import double, wait


def test_double():
    assert double(2) == 4


def test_wait():
    assert wait(False) == 3
"""
PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from tools import mutation
mutation.ROOT, mutation.LIBRARIES, mutation.SLACK = Path(sys.argv[2]), (), 5
mutation.REPORT = mutation.ROOT / "runs" / "mutation.md"
mutation.TESTS = {"measured.numbers": ("test_numbers.py",)}
sys.exit(mutation.main(sys.argv[3:]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Make the folder of a package and its tests."""
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "__init__.py").touch()
    (tmp_path / "measured" / "numbers.py").write_text(SOURCE)
    (tmp_path / "test_numbers.py").write_text(TESTS)
    return tmp_path


def check(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(package), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def find_changes(report: str, heading: str) -> set[str]:
    """List the lines that the mutants under a heading have in place of others."""
    _, _, part = report.partition(f"## {heading}\n")
    lines = re.findall(r"^\+(?!\+)(.*)$", part.partition("\n## ")[0], re.MULTILINE)
    return {" ".join(line.split()) for line in lines}


@pytest.mark.slow
def test_what_no_test_notices_is_listed(package: Path) -> None:
    done = check(package, "--all", "--most_survivors", "22")
    assert done.returncode == 1, done.stderr
    report = (package / "runs" / "mutation.md").read_text()
    assert report in done.stdout
    assert "| measured.numbers | 18 | 13 | 1 | 4 | 22.2% |" in report
    assert find_changes(report, "survived") == {
        *("return value + times", "return value ** times"),
        *("while not not is_done:", "while is_done:"),
    }
    assert find_changes(report, "timeout") == {"is_done = False"}
    assert (package / "measured" / "numbers.py").read_text() == SOURCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "told"),
    [(TESTS.replace("4", "5"), "test_double"), ("def test_nothing():\n    pass\n", "is not imported")],
)
def test_tests_that_fail_or_do_not_import_the_module_are_refused(package: Path, tests: str, told: str) -> None:
    (package / "test_numbers.py").write_text(tests)
    done = check(package, "--sample", "1")
    assert done.returncode == 1
    assert told in done.stderr
    assert not (package / "runs").exists()


def test_mutants_differ_in_what_is_computed_and_the_seed_decides_their_order(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools import mutation

    monkeypatch.syspath_prepend(package)
    first, same, other = (list(mutation.find_mutants(["measured.numbers"], seed, None)) for seed in (0, 0, 1))
    assert first == same
    assert first != other
    sources = [mutant.source for mutant in first]
    assert sorted(sources) == sorted(mutant.source for mutant in other)
    # No annotation is changed and no mark between parameters; what is no Python is left out.
    assert len(set(sources)) == len(sources) == 18
    assert all("int | None, *," in source for source in sources)
    for source in sources:
        compile(source, "numbers.py", "exec")
    assert list(mutation.find_mutants(["measured.numbers"], 0, 3)) == first[:3]
