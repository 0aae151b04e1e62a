"""The program `ssd_train`: train, evaluate and use SSD-ResNet34, or plan a training.

TensorFlow is imported only once the flags are found good and there is something to compute.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from gaudi_apps.config_file import parse_config
from gaudi_apps.signals import interrupt_on_sigterm
from gaudi_apps.ssd.config import SSDConfig, validate
from gaudi_datasets.program import run_program

PROG = "ssd_train"
DESCRIPTION = "Train and evaluate SSD-ResNet34 on records of pictures with boxes, on Gaudi, GPU or CPU."


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments (those of the command line when None) and leave the process."""
    interrupt_on_sigterm()
    arguments = list(sys.argv[1:] if argv is None else argv)
    run_program(lambda: _run(arguments), prog=PROG, debug="--debug" in arguments)


def _run(arguments: Sequence[str]) -> int:
    config = parse_config(SSDConfig, arguments, prog=PROG, description=DESCRIPTION)
    validate(config)
    if config.run.mode == "plan":
        from gaudi_apps.ssd.plan_report import print_plan

        print_plan(config)
        return 0
    from gaudi_apps.ssd.run import run

    return run(config)


if __name__ == "__main__":
    main()
