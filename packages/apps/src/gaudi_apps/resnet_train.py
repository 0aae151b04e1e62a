"""The program `resnet_train`: train, evaluate and use ResNets, or plan a training.

TensorFlow is imported only once the flags are found good and there is something to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from gaudi_apps.classification.flags import RESNET
from gaudi_apps.classification.resnet import ResNetConfig, make_train_config, validate
from gaudi_apps.cli.program import Launch
from gaudi_apps.runtime.process_group import Distribution
from gaudi_apps.training.plan import find_version_in
from gaudi_distributed.cluster.rank_info import RankInfo

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments (those of the command line when None) and leave the process."""
    PROGRAM.main(argv)


def _print_plan(config: ResNetConfig, workers: int, launch: LaunchReport | None) -> None:
    from gaudi_apps.classification.plan import print_plan

    train_config = make_train_config(
        config, Distribution(RankInfo(size=workers)), find_version_in(config.run.model_dir)
    )
    print_plan(train_config, launch, as_json=config.run.json)


def _open(config: ResNetConfig, distribution: Distribution) -> Application:
    from gaudi_apps.classification.application import ClassificationApplication

    return ClassificationApplication(PROGRAM.program, config, partial(make_train_config, config, distribution))


PROGRAM = Launch(
    prog="resnet_train",
    program=("-m", "gaudi_apps.resnet_train"),
    description="Train and evaluate image classifiers on ImageNet or folders of classes, on Gaudi, GPU or CPU.",
    config=ResNetConfig,
    validate=validate,
    print_plan=_print_plan,
    open=_open,
    former_flags=RESNET,
)

if __name__ == "__main__":
    main()
