"""The program `ssd_train`: train, evaluate and use SSD-ResNet34, or plan a training.

TensorFlow is imported only once the flags are found good and there is something to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from gaudi_apps.cli.program import Program
from gaudi_apps.detection.config import FORMER_FLAGS, SSDConfig, find_mode, open_found, validate
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.recipe import Recipe, find_host

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application


class SSDTrain(Program):
    """Train and use SSD-ResNet34."""

    prog = "ssd_train"
    description = "Train and evaluate SSD-ResNet34 on records of images with boxes, on Gaudi, GPU or CPU."
    config = SSDConfig
    former_flags = FORMER_FLAGS

    def validate(self, config: SSDConfig) -> None:
        """Raise FlagError for a value that breaks a rule."""
        validate(config)

    def find_mode(self, config: SSDConfig) -> str:
        """Return the mode that flags choose."""
        return find_mode(config)

    def print_plan(self, config: SSDConfig, workers: int, launch: LaunchReport | None) -> None:
        """Print the plan of a training."""
        from gaudi_apps.detection.plan import print_plan

        emphasis = None
        if config.data.repeat_factor or config.data.class_weights != "none":
            from gaudi_apps.detection.data import describe_emphasis

            emphasis = describe_emphasis(config)
        print_plan(config, workers, launch, emphasis=emphasis, recipe=self.recipe)

    def choose_recipe(self, config: SSDConfig, given: frozenset[str], workers: int) -> Recipe:
        """Choose the flags that follow from data and machine."""
        from gaudi_apps.detection.plan import choose_recipe

        found, host = open_found(config), find_host(config.device, workers)
        images = config.data.num_examples_per_epoch or len(found.train)
        return choose_recipe(config, given, workers, images=images, validates=found.val is not None, host=host)

    def open(self, config: SSDConfig, distribution: Distribution) -> Application:
        """Make the application."""
        from gaudi_apps.detection.application import SSDApplication

        return SSDApplication(config, distribution, self.recipe)


PROGRAM = SSDTrain()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments, those of the command line when None, and leave the process."""
    PROGRAM.run(argv)


if __name__ == "__main__":
    main()
