"""The tests of gaudi_ops.tf and of the networks on a GPU; without TF32, for their limits are those of float32."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET  # of our own file, which pytest has just written

from benchmarks.gpu.card import open_card
from benchmarks.gpu.programs import FULL_PRECISION
from benchmarks.measurement import Figure, main

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"gaudi-ops": "packages/ops/tests/tf", "gaudi-models": "packages/models/tests"}


def run(budget_seconds: float) -> Iterator[Figure]:
    """Run them by package."""
    open_card()
    for package, folder in FOLDERS.items():
        yield run_tests(package, folder, budget_seconds / len(FOLDERS))


def run_tests(package: str, folder: str, seconds: float) -> Figure:
    """Run the quick tests of a folder; the figure is how many failed."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            folder,
            "-q",
            "-m",
            "not slow and not realdata",
            "-p",
            "no:cacheprovider",
        ]
        done = subprocess.run(
            [*command, f"--junitxml={report}", "--ignore-glob=*mxnet*"],
            cwd=ROOT,
            env={**os.environ, **FULL_PRECISION},
            capture_output=True,
            text=True,
            timeout=4 * seconds + 240,
            check=False,
        )
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout.strip()[-300:]}")
        suite = next(ET.parse(report).iter("testsuite")).attrib  # noqa: S314
    failed = [line for line in done.stdout.splitlines() if re.match("(FAILED|ERROR) ", line)]
    sys.stderr.write(done.stdout[-20000:])
    note = f"{suite['tests']} tests, {suite['skipped']} skipped"
    value = float(suite["failures"]) + float(suite["errors"])
    return Figure(f"tests of {package} on a GPU: failed", value, "tests", most=0, note=note, details={"failed": failed})


if __name__ == "__main__":
    main(run)
