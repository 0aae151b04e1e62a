"""The program `resnext_train`: train, evaluate and use ResNeXts, or plan a training.

TensorFlow is imported only once the flags are found good and there is something to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from gaudi_apps.classification.resnext import FORMER_FLAGS, ResNeXtConfig, find_mode, make_train_config, validate
from gaudi_apps.cli.program import Program
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.plan import find_version_in
from gaudi_distributed.cluster.rank_info import RankInfo

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application


class ResNeXtTrain(Program):
    """Train and use ResNeXts."""

    prog = "resnext_train"
    description = "Train and evaluate ResNeXt classifiers on ImageNet or folders of classes, on Gaudi, GPU or CPU."
    config = ResNeXtConfig
    former_flags = FORMER_FLAGS

    def validate(self, config: ResNeXtConfig) -> None:
        """Raise FlagError for a value that breaks a rule."""
        validate(config)

    def find_mode(self, config: ResNeXtConfig) -> str:
        """Return the mode that flags choose."""
        return find_mode(config)

    def print_plan(self, config: ResNeXtConfig, workers: int, launch: LaunchReport | None) -> None:
        """Print the plan of a training."""
        from gaudi_apps.classification.plan import print_plan

        version = find_version_in(config.run.model_dir, clean=config.run.clean)
        train_config = make_train_config(config, Distribution(RankInfo(size=workers)), version)
        print_plan(train_config, launch, as_json=config.run.json)

    def open(self, config: ResNeXtConfig, distribution: Distribution) -> Application:
        """Make the application."""
        from gaudi_apps.classification.application import ClassificationApplication

        return ClassificationApplication(self.module, config, partial(make_train_config, distribution=distribution))


PROGRAM = ResNeXtTrain()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments, those of the command line when None, and leave the process."""
    PROGRAM.run(argv)


if __name__ == "__main__":
    main()
