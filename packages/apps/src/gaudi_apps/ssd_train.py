"""The program `ssd_train`: train, evaluate and use SSD-ResNet34, or plan a training.

TensorFlow is imported only once the flags are found good and there is something to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from gaudi_apps.cli.program import Launch
from gaudi_apps.detection.config import FORMER_FLAGS, SSDConfig, find_mode, validate
from gaudi_apps.runtime.process_group import Distribution

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments (those of the command line when None) and leave the process."""
    PROGRAM.main(argv)


def _print_plan(config: SSDConfig, workers: int, launch: LaunchReport | None) -> None:
    from gaudi_apps.detection.plan import print_plan

    print_plan(config, workers, launch)


def _open(config: SSDConfig, distribution: Distribution) -> Application:
    from gaudi_apps.detection.application import SSDApplication

    return SSDApplication(config, distribution)


PROGRAM = Launch(
    prog="ssd_train",
    program=("-m", "gaudi_apps.ssd_train"),
    description="Train and evaluate SSD-ResNet34 on records of images with boxes, on Gaudi, GPU or CPU.",
    config=SSDConfig,
    validate=validate,
    print_plan=_print_plan,
    open=_open,
    mode_of=find_mode,
    former_flags=FORMER_FLAGS,
)

if __name__ == "__main__":
    main()
