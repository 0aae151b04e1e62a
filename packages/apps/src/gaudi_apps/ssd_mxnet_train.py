"""The program `ssd_mxnet_train`: train, validate and use SSD-ResNet34 in MXNet, or plan a training.

MXNet is imported only once the flags are found good and there is something to compute; TensorFlow never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from gaudi_apps.cli.launch import become_launcher
from gaudi_apps.cli.program import Program
from gaudi_apps.detection.config import SSDConfig
from gaudi_apps.mxnet.config import FORMER_FLAGS, TRAINING, SSDMXNetConfig, validate
from gaudi_apps.runtime.errors import flag_error
from gaudi_apps.runtime.settings import Distribution
from gaudi_datasets.arguments import FormerFlagError, list_options, split_word
from gaudi_datasets.errors import FlagError

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application


class SSDMXNetTrain(Program):
    """Train and use SSD-ResNet34 in MXNet."""

    prog = "ssd_mxnet_train"
    description = "Train and validate SSD-ResNet34 in MXNet, as an MLPerf v0.7 submission did, on GPU or CPU."
    config = SSDMXNetConfig
    former_flags = FORMER_FLAGS

    def parse(self, arguments: Sequence[str]) -> SSDMXNetConfig:
        """Return the flags, complete and validated; of a flag that ssd_train alone has, the error says so."""
        try:
            config: SSDMXNetConfig = super().parse(arguments)
        except FormerFlagError:
            raise
        except FlagError as error:
            word = split_word(error.flag or "")
            of_both = list_options(SSDMXNetConfig)
            if word is None or word[0] in of_both or word[0] not in list_options(SSDConfig):
                raise
            raise FlagError(f"{error}; ssd_train has {error.flag}", flag=error.flag) from None
        return config

    def validate(self, config: SSDMXNetConfig) -> None:
        """Raise FlagError for a value that breaks a rule."""
        validate(config)

    def find_mode(self, config: SSDMXNetConfig) -> str:
        """Return the mode that flags choose."""
        if config.run.dry_run:
            return "dry_run"
        return "train" if config.run.mode in TRAINING else config.run.mode

    def start_ranks(self, config: SSDMXNetConfig, arguments: Sequence[str]) -> None:
        """Become the launcher of the submission's experiments or of several processes, if the flags ask for them."""
        if not config.run.submission:
            super().start_ranks(config, arguments)
            return
        system = config.schedule.system
        if system is not None:
            raise flag_error(f"--system {system}: with --submission SYSTEM names it", "leave one of them out")
        # The last one counts: the ranks train, whatever the words before it and the file of --config say.
        become_launcher(["--submission", "--", self.prog, *arguments, "--no_submission"])

    def print_plan(self, config: SSDMXNetConfig, workers: int, launch: LaunchReport | None) -> None:
        """Print the plan of a training."""
        from gaudi_apps.mxnet.plan import print_plan

        print_plan(config, workers, launch)

    def open(self, config: SSDMXNetConfig, distribution: Distribution) -> Application:
        """Make the application."""
        from gaudi_apps.mxnet.application import SSDMXNetApplication

        return SSDMXNetApplication(config, distribution)


PROGRAM = SSDMXNetTrain()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments, those of the command line when None, and leave the process."""
    PROGRAM.run(argv)


if __name__ == "__main__":
    main()
