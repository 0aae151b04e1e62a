"""What `--mode plan` prints: the plan, what the data holds, and what the run needs of disk and memory."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from gaudi_apps.plan_report import print_json, print_tables
from gaudi_apps.recipe_version import find_version_in
from gaudi_apps.ssd.plan_report import (
    COCO_CLASSES,
    COCO_TRAIN_IMAGES,
    Needs,
    TrainingSet,
    describe_annotations,
    describe_records,
)
from gaudi_apps.ssd_mxnet.config import SSDMXNetConfig
from gaudi_apps.ssd_mxnet.files import find_coco_files
from gaudi_apps.ssd_mxnet.plan import make_plan
from gaudi_apps.starting import LaunchReport

# What a plan for a GPU or a CPU would be is not known before MXNet was asked, so auto counts as the larger of the two.
_BYTES_PER_VALUE = {"bf16": 2, "fp16": 2, "amp": 2, "fp32": 4, "auto": 4}


def print_plan(
    config: SSDMXNetConfig, workers: int = 1, launch: LaunchReport | None = None, console: Console | None = None
) -> None:
    """Print what training by this configuration on so many processes would do, as tables or (--json) as JSON."""
    training_set = describe_training_set(config)
    plan = make_plan(config, training_set.images, workers, find_version_in(config.run.model_dir))
    decay, bytes_per_value = config.schedule.weight_decay, _BYTES_PER_VALUE[config.network.precision]
    needs = Needs(training_set, plan, config.report.keep_ckpt_max, bytes_per_value, decay)
    if config.run.json:
        print_json(needs.as_json(), launch, console)
        return
    facts = list(needs.list_facts())
    if plan.evaluated_steps:
        facts.append(("validations", f"after steps {', '.join(map(str, plan.evaluated_steps))}"))
    print_tables(config.run.model_dir, facts, plan, launch, console)


def describe_training_set(config: SSDMXNetConfig) -> TrainingSet:
    """Number of images and classes: of the records or files, and of COCO where there are none.

    Raises:
        MissingInputError, DataError: as by `gaudi_apps.ssd.plan_report.describe_training_set`.
    """
    data, given = config.data, config.data.dataset_size or 0
    if data.tfrecord_root is not None:
        return describe_records(Path(data.tfrecord_root), given)
    if data.coco_root is not None:
        return describe_annotations(*find_coco_files(data.coco_root, data.dataset, "train"), given)
    return TrainingSet(given or COCO_TRAIN_IMAGES, COCO_CLASSES)
