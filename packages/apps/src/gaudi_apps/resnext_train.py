"""The program `resnext_train`: train, evaluate and use ResNeXts, or plan a training.

TensorFlow is imported only once the flags are found good and there is something to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

from tyro.conf import arg

from gaudi_apps.classification import flags
from gaudi_apps.classification.flags import (
    ClassifierConfig,
    LearningConfig,
    RateKind,
    ScheduleConfig,
    TrainConfig,
    check_common,
    make_settings,
)
from gaudi_apps.cli.flag_rules import Switch, fixed, list_idle, resume_safe
from gaudi_apps.cli.flags import SummarySteps
from gaudi_apps.cli.launch import share_batch
from gaudi_apps.cli.program import Program
from gaudi_apps.runtime.errors import flag_error
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.plan import CURRENT, find_version_in
from gaudi_datasets.arguments import OFF, ON, FormerFlag
from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_models.architectures import CLASSIFIERS

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application

IMAGES_OF_BASE_RATE = 256
COSINE_RATE, WARMED_UP_RATE, COLD_RATE = 0.256, 0.128, 0.1
MOST_OF_WARMED_UP_RATE = 16  # processes; with more, the original found .1 the better rate
WARMUP_EPOCHS = 8.0
DROP_EPOCHS = (30, 60, 80, 90)
# The original's hooks. But for the profiler, what they did is always done.
PROFILER_HOOK, HOOK_STEPS = "ProfilerHook", "7,10"
HOOKS = ("LoggingTensorHook", PROFILER_HOOK, "ExamplesPerSecondHook", "LoggingMetricHook", "StepCounterHook")
_LARS, _SGD = ("enable_lars", (True,)), ("enable_lars", (False,))
_GONE_SIZES = {"200": "is gone, for there are no weights of it; give 152"}


@dataclass(frozen=True)
class RunFlags(flags.RunFlags):
    """Mode, length of training, and folder of the results."""

    model_dir: Annotated[str, arg(aliases=["-md"])] = "runs/resnext_train"
    epochs: Annotated[
        float, arg(aliases=["--train_epochs", "-te"]), resume_safe(length="epochs", above=0, maximum=1e6, needs=_SGD)
    ] = 10.0
    steps: Annotated[int, arg(aliases=["--max_train_steps", "-mts"])] = 0
    eval_only: Annotated[Switch, resume_safe(short_run=False)] = False
    """The same as --mode eval."""


@dataclass(frozen=True)
class TrainingFlags(flags.TrainingFlags):
    """Network, initial weights, optimizer, learning rate, weight decay and loss."""

    model_type: Annotated[Literal["resnet", "resnext"], fixed(of_network=True)] = "resnext"
    """Network with groups of channels (resnext), or without (resnet)."""
    resnet_size: Annotated[
        Literal["18", "34", "50", "101", "152"], arg(aliases=["-rs"]), fixed(of_network=True, gone=_GONE_SIZES)
    ] = "101"
    """Number of layers; 50, 101 or 152 for a resnext."""
    weights: Annotated[
        str | None, arg(aliases=["--pretrained_model_checkpoint_path", "-pmcp"]), fixed(per_side=True)
    ] = None
    """File of initial weights: torchvision .pth, .npz, .safetensors, TensorFlow checkpoint, or a checkpoint of this
    program, or a URL. Weights that fit are loaded, the others are named."""
    base_lr: Annotated[
        float | None, arg(aliases=["--base_learning_rate"]), fixed(above=0, finite=False, needs=_SGD)
    ] = None
    """Learning rate for 256 images per step; by default .256 with a cosine; without, .128, or .1 without warm-up and on
    more than 16 processes."""
    use_cosine_lr: Annotated[bool, fixed()] = True
    """Lower the learning rate to 0 at the end by half a cosine; else times .1, .01, .001 and .0001 after epochs 30, 60,
    80 and 90."""
    warmup_epochs: Annotated[float | None, fixed(minimum=0, maximum=1e6)] = None
    """Number of epochs of linear warm-up; by default 8, and 0 with --fine_tune."""
    disable_warmup: Annotated[Switch, fixed()] = False
    """Train without warm-up."""
    momentum: Annotated[float, fixed(minimum=0, below=1)] = 0.875
    """Momentum of SGD and LARS; the learning rate is not part of the velocity, as in TensorFlow 1."""
    weight_decay: Annotated[float, fixed(minimum=0)] = 6.103515625e-05
    """Factor of the weight decay: half the sum of the squares of all weights except those of batch norm, in the
    gradient."""
    label_smoothing: Annotated[float, fixed(minimum=0, below=1)] = 0.1
    """Share of each label to spread over all classes."""
    enable_lars: Annotated[Switch, fixed()] = False
    """Train by LARS with a polynomial learning rate instead of SGD."""
    epochs_for_lars: Annotated[float, fixed(above=0, maximum=1e6, needs=_LARS)] = 38.0
    """Number of epochs to train by LARS, instead of --epochs."""
    start_learning_rate: Annotated[float, fixed(above=0, finite=False, needs=_LARS)] = 9.5
    """Highest learning rate of a run by LARS."""


@dataclass(frozen=True)
class ReportFlags(flags.ReportFlags):
    """Evaluation, log and checkpoints."""

    max_eval_steps: Annotated[int, arg(aliases=["-mes"]), resume_safe(minimum=0)] = 0
    """Number of global batches to evaluate, instead of --eval_samples; 0: by --eval_samples."""
    no_evaluate: Annotated[Switch, arg(aliases=["--disable_eval"])] = False
    save_summary_steps: SummarySteps = 100
    log_steps: Annotated[int, arg(aliases=["--display_steps", "-dis"])] = 100
    disable_checkpoints: Annotated[Switch, resume_safe(short_run=False)] = False
    """Save a checkpoint only at the end."""
    export_dir: Annotated[str | None, arg(aliases=["-ed"]), resume_safe(short_run=None)] = None
    """Folder to export a SavedModel into at the end of training."""
    hooks: Annotated[str, arg(aliases=["-hk"]), resume_safe(short_run="LoggingTensorHook")] = "LoggingTensorHook"
    """Hooks of the original program, separated by commas. ProfilerHook sets --profile to 7,10 if it is not given;
    the reports of the others are always made."""


@dataclass(frozen=True)
class ResNeXtConfig(ClassifierConfig):
    """Everything a run of resnext_train depends on."""

    run: RunFlags = field(default_factory=RunFlags)
    training: TrainingFlags = field(default_factory=TrainingFlags)
    report: ReportFlags = field(default_factory=ReportFlags)


def find_profile_steps(report: ReportFlags) -> str:
    """Return the steps to trace: as --profile says, else those of the original's ProfilerHook."""
    is_asked = PROFILER_HOOK.lower() in _list_hooks(report)
    return HOOK_STEPS if is_asked and report.profile == ReportFlags.profile else report.profile


def _list_hooks(report: ReportFlags) -> list[str]:
    """Return the hooks by name, in small letters."""
    return [name.strip().lower() for name in report.hooks.split(",")]


def find_mode(config: ResNeXtConfig) -> str:
    """Return the mode: by --mode, or by --eval_only."""
    return "eval" if config.run.eval_only else config.run.mode


def validate(config: ResNeXtConfig) -> None:
    """Raise FlagError for the first flag whose value breaks a rule of its own or of another flag."""
    run, training, report = config.run, config.training, config.report
    mode = find_mode(config)
    if run.eval_only and run.mode not in ("train", "eval"):
        raise flag_error(f"--eval_only: contradicts --mode {run.mode}", "leave one of them out")
    for name in {*_list_hooks(report)} - {"", *map(str.lower, HOOKS)}:
        raise flag_error(f"--hooks {name}: must be among {', '.join(HOOKS)}")
    if f"{training.model_type}{training.resnet_size}" not in CLASSIFIERS:
        raise flag_error(f"--resnet_size {training.resnet_size}: a resnext has 50, 101 or 152")
    if training.fine_tune and mode == "train" and not training.weights:
        raise flag_error("--fine_tune: needs --weights, whose features the head is trained on")
    if report.export_dir is not None and config.data.use_fake_data:
        raise flag_error("--export_dir: an export is checked on images, so give --data_dir")
    check_common(config, mode)


def make_train_config(
    config: ResNeXtConfig, distribution: Distribution | None = None, version: int = CURRENT
) -> TrainConfig:
    """Make the TrainConfig of validated flags, for one of the processes that train together."""
    distribution = distribution or Distribution()
    run, training, report = config.run, config.training, config.report
    workers = distribution.rank_info.size
    global_batch = share_batch(config.distribution, config.data.batch_size, workers)
    warmup_epochs = _find_warmup(config, version)
    base_rate = _find_base_rate(config, warmup_epochs, workers, version)
    peak = base_rate * global_batch / IMAGES_OF_BASE_RATE
    resolved = replace(training, base_lr=base_rate, warmup_epochs=warmup_epochs)
    return TrainConfig(
        flags=replace(config, training=resolved),
        run=make_settings(
            config,
            distribution,
            summary_every=report.save_summary_steps,
            profile=find_profile_steps(report),
            weights=training.weights,
        ),
        model=f"{training.model_type}{training.resnet_size}",
        rate=_make_rate(config, peak, warmup_epochs, version).for_version(version),
        learning=LearningConfig(
            optimizer="LARS" if training.enable_lars else "SGD",
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            lars_epsilon=0.0,
            single_l2=False,
            label_smoothing=training.label_smoothing,
            dropout=training.dropout or 0.0,
            mixup_alpha=training.mixup_alpha,
            ema_decay=run.ema_decay,
            pruning=config.pruning if config.pruning.pruning_method else None,
            momentum_form="tensorflow1",
            decay_form="half_squares",
        ),
        global_batch=global_batch,
        min_crop_area=config.data.least_crop_area or 0.08,
        eval_images=report.max_eval_steps * global_batch or report.eval_samples,
        checkpoint_steps=None if report.disable_checkpoints else report.save_checkpoints_steps,
        eval_epochs=0.0 if report.no_evaluate else report.eval_epochs,
        export_at_end=report.export_dir,
        idle=tuple(list_idle(config)),
    )


def _find_warmup(config: ResNeXtConfig, version: int) -> float:
    """Find --warmup_epochs: where a head is trained on features that are there, the original has no warm-up."""
    given = config.training.warmup_epochs
    if given is not None:
        return given
    return 0.0 if config.training.fine_tune and version > 1 else WARMUP_EPOCHS


def _find_base_rate(config: ResNeXtConfig, warmup_epochs: float, workers: int, version: int) -> float:
    """Find --base_lr, by the rules of the original."""
    training = config.training
    if training.base_lr is not None:
        return training.base_lr
    if training.use_cosine_lr or version == 1:
        return COSINE_RATE
    is_warmed_up = warmup_epochs > 0 and not training.disable_warmup
    return WARMED_UP_RATE if is_warmed_up and workers <= MOST_OF_WARMED_UP_RATE else COLD_RATE


def _make_rate(config: ResNeXtConfig, peak: float, warmup_epochs: float, version: int) -> ScheduleConfig:
    """Make the rate with a peak, which LARS has of its own."""
    training = config.training
    after: RateKind = "cosine" if training.use_cosine_lr else "piecewise"
    return ScheduleConfig(
        kind="polynomial" if training.enable_lars else after,
        peak=training.start_learning_rate if training.enable_lars else peak,
        end=1e-4,
        warmup_epochs=0.0 if training.disable_warmup else warmup_epochs,
        epochs=training.epochs_for_lars if training.enable_lars else config.run.epochs,
        steps=config.run.steps,
        half_cycle=0,
        whole_epochs=False,
        drop_epochs=DROP_EPOCHS if version > 1 else DROP_EPOCHS[:3],
    )


FORMER_FLAGS = (
    *flags.FORMER_FLAGS,
    FormerFlag("--dummy_epoch", "it ran two steps before the training was timed; leave it out", meant=(OFF,)),
    FormerFlag("--train_offset", "a run that goes on knows its step; leave it out", default="0", meant=("0",)),
    FormerFlag(
        "--resnet_version", "version 1 is the recipe's, and the one there is; leave it out", "-rv", "1", meant=("1",)
    ),
    FormerFlag("--return_before_eval", "give --no_evaluate", "-rbv", meant=(OFF,)),
    FormerFlag(
        "--image_bytes_as_serving_input",
        "a SavedModel has a signature for encoded images and one for pixels; leave it out",
        meant=(ON,),
    ),
    FormerFlag("--use_train_and_evaluate", "it was of Estimator; --eval_epochs says when to evaluate", meant=(OFF,)),
    FormerFlag(
        "--mini_imagenet",
        "make such records by `gaudi-datasets convert mini-imagenet`, and name their folder by --data_dir",
        meant=(OFF,),
    ),
)


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
