"""The program `gaudi-apps`: pages about runs that are there, without TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from gaudi_datasets.arguments import is_switch_on
from gaudi_datasets.commands.data_flags import Debug, subcommand
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags
from gaudi_ops.program import run_program, say

PROGRAM = "gaudi-apps"


@dataclass(frozen=True)
class Report:
    """Write report.html of runs again, from the files that they left."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        from gaudi_apps.inference.report_page import write_report

        if not self.run_dirs:
            raise FlagError("report: name the folder of a run", flag="run_dirs")
        for run_dir in self.run_dirs:
            say(write_report(run_dir))


@dataclass(frozen=True)
class Compare:
    """Write one page that compares several runs: figures, curves, and flags that differ."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of 2 to 10 runs"""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("compare.html")
    """the page to write"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        from gaudi_apps.inference.report_page import write_comparison

        write_comparison(self.run_dirs, self.output)
        say(self.output)


_COMMANDS = subcommand(Report, "report") | subcommand(Compare, "compare")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments, those of the process when None, and leave with its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    run_program(lambda: parse_arguments(arguments).run(), prog=PROGRAM, debug=is_switch_on(arguments, "debug"))


def parse_arguments(argv: Sequence[str]) -> Any:
    """Return the command that arguments ask for; see `gaudi_datasets.flags.parse_flags` for what is raised."""
    return parse_flags(_COMMANDS, argv, prog=PROGRAM, description="Write pages about runs, and compare runs.")


if __name__ == "__main__":
    main()
