"""The program `resnet_train`: train, evaluate and use ResNets, or plan a training.

TensorFlow is imported only once the flags are found good and there is something to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from gaudi_apps.classification.resnet import FORMER_FLAGS, ResNetConfig, make_train_config, validate
from gaudi_apps.cli.program import Program
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.plan import find_version_in
from gaudi_apps.training.recipe import Recipe, find_host
from gaudi_distributed.cluster.rank_info import RankInfo

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application


class ResNetTrain(Program):
    """Train and use ResNets."""

    prog = "resnet_train"
    description = "Train and evaluate image classifiers on ImageNet or folders of classes, on Gaudi, GPU or CPU."
    config = ResNetConfig
    former_flags = FORMER_FLAGS

    def validate(self, config: ResNetConfig) -> None:
        """Raise FlagError for a value that breaks a rule."""
        validate(config)

    def print_plan(self, config: ResNetConfig, workers: int, launch: LaunchReport | None) -> None:
        """Print the plan of a training."""
        from gaudi_apps.classification.plan import print_plan

        version = find_version_in(config.run.model_dir, clean=config.run.clean)
        train_config = make_train_config(config, Distribution(RankInfo(size=workers)), version)
        print_plan(train_config, launch, as_json=config.run.json, recipe=self.recipe)

    def choose_recipe(self, config: ResNetConfig, given: frozenset[str], workers: int) -> Recipe:
        """Choose the flags that follow from data and machine."""
        from gaudi_apps.classification.data import open_found
        from gaudi_apps.classification.plan import choose_recipe

        found, host = open_found(config.recipe, config.run.seed), find_host(config.device)
        images = config.data.num_examples_per_epoch or len(found.train)
        return choose_recipe(config, given, workers, images=images, validates=found.val is not None, host=host)

    def open(self, config: ResNetConfig, distribution: Distribution) -> Application:
        """Make the application."""
        from gaudi_apps.classification.application import ClassificationApplication

        return ClassificationApplication(
            self.module, config, partial(make_train_config, distribution=distribution), self.recipe
        )


PROGRAM = ResNetTrain()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments, those of the command line when None, and leave the process."""
    PROGRAM.run(argv)


if __name__ == "__main__":
    main()
