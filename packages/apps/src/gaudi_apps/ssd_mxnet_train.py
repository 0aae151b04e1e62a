"""The program `ssd_mxnet_train`: train, validate and use SSD-ResNet34 in MXNet, or plan a training.

MXNet is imported only once the flags are found good and there is something to compute; TensorFlow never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from gaudi_apps.cli.launch import become_launcher
from gaudi_apps.cli.program import Launch
from gaudi_apps.mxnet.checks import TRAINING, validate
from gaudi_apps.mxnet.config import FORMER_FLAGS, SSDMXNetConfig
from gaudi_apps.runtime.process_group import Distribution
from gaudi_datasets.errors import FlagError

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments (those of the command line when None) and leave the process."""
    PROGRAM.main(argv)


def _print_plan(config: SSDMXNetConfig, workers: int, launch: LaunchReport | None) -> None:
    from gaudi_apps.mxnet.plan import print_plan

    print_plan(config, workers, launch)


def _open(config: SSDMXNetConfig, distribution: Distribution) -> Application:
    from gaudi_apps.mxnet.application import SSDMXNetApplication

    return SSDMXNetApplication(config, distribution)


def _mode_of(config: SSDMXNetConfig) -> str:
    if config.run.dry_run:
        return "rehearse"
    return "train" if config.run.mode in TRAINING else {"val": "eval"}.get(config.run.mode, config.run.mode)


class SSDMXNetLaunch(Launch):
    """The program on the command line, whose `--submission` starts `gaudi-run --submission`."""

    def start_ranks(self, config: SSDMXNetConfig, arguments: Sequence[str]) -> None:
        """Become the launcher of the submission's experiments or of several processes, if the flags ask for them."""
        if not config.run.submission:
            super().start_ranks(config, arguments)
            return
        if config.schedule.system is not None:
            raise FlagError(
                f"--system {config.schedule.system}: with --submission SYSTEM names it; leave one of them out"
            )
        kept = [word for word in arguments if word.partition("=")[0] != "--submission"]
        become_launcher(["--submission", "--", self.prog, *kept])


PROGRAM = SSDMXNetLaunch(
    prog="ssd_mxnet_train",
    program=("-m", "gaudi_apps.ssd_mxnet_train"),
    description="Train and validate SSD-ResNet34 in MXNet, as an MLPerf v0.7 submission did, on GPU or CPU.",
    config=SSDMXNetConfig,
    validate=validate,
    print_plan=_print_plan,
    open=_open,
    former_flags=FORMER_FLAGS,
    mode_of=_mode_of,
)

if __name__ == "__main__":
    main()
