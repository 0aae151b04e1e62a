"""Run benchmarks, each in a process of its own: `python -m benchmarks`, or with names and `--budget_seconds`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def list_benchmarks() -> list[str]:
    """The modules of this folder that are programs."""
    modules = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__main__")
    return [path.stem for path in modules if "main(run)" in path.read_text(encoding="utf-8")]


def main() -> int:
    """Run the named ones, or all; 1 when a figure is not what it must be, or a benchmark failed."""
    names = list_benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"among {', '.join(names)}; none: all of them")
    parser.add_argument("--budget_seconds", type=float, default=60.0, help="about how long each measures")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in names]:
        parser.error(f"there is no benchmark {unknown[0]!r}; choose among {', '.join(names)}")
    failed = []
    for name in arguments.names or names:
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--budget_seconds", f"{arguments.budget_seconds:g}"]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"not met, or failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
