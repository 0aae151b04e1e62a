"""Flags of ssd_train as frozen dataclasses, by the names, short forms and defaults of the program it replaces.

Every rule about their values is in `validate`; whatever runs later may rely on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from gaudi_datasets.errors import FlagError

Switch = FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class RunFlags:
    """What to do, and where its results go."""

    mode: Literal["train", "eval", "predict", "plan"] = "train"
    """train; eval: score the newest checkpoint; predict: draw detections on pictures; plan: print what
    train would do."""
    model_dir: str = "runs/ssd_train"
    """Folder of checkpoints, curves, pictures and figures; training continues from its newest checkpoint."""
    epochs: Annotated[float, arg(aliases=["-e"])] = 50.0
    """Passes over the training images."""
    steps: Annotated[int, arg(aliases=["-s"])] = 0
    """Steps in all, in place of --epochs; 0: as many as --epochs needs."""
    no_evaluate: Switch = False
    """Do not evaluate after training."""
    inference: str | None = None
    """A picture, or a folder of pictures, for --mode predict."""
    seed: int = 0
    """Where weights, data order and augmentation start from."""
    deterministic: Switch = False
    """Same bits at every run on the same machine; slower."""
    config: str | None = None
    """YAML file of flags (name: value); flags of the command line win."""
    json: Switch = False
    """Print the plan as JSON."""
    debug: Switch = False
    """Show a traceback with an error."""


@dataclass(frozen=True)
class DataFlags:
    """Training and validation images."""

    data_dir: str | None = None
    """Folder of records (train-*, val-*) made by gaudi-datasets."""
    use_fake_data: Annotated[Switch, arg(aliases=["-f"])] = False
    """Random images in place of records, to measure speed."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 128
    """Images a step."""
    num_examples_per_epoch: int = 0
    """Training images an epoch; 0: as many as the records hold (117266 with --use_fake_data)."""
    eval_samples: int = 0
    """Validation images to evaluate; 0: all. Fewer are the first ones, and the result says how many of how many."""
    flip_probability: float = 0.5
    """Share of the training images that are mirrored; 0 where left and right matter, as in text."""
    num_parallel_calls: int = 64
    """Images decoded and augmented at once."""


@dataclass(frozen=True)
class ScheduleFlags:
    """Learning rate and weight decay. The rate of a run is base_lr times batch_size / 32."""

    base_lr: float = 3e-3
    """Learning rate of 32 images a step."""
    lr_schedule: Literal["piecewise", "cosine"] = "piecewise"
    """After warm-up: piecewise, times .1 and .01 from the two --lr_drop_epochs; cosine, down to 0 at the end."""
    lr_warmup_epoch: float = 5.0
    """Epochs of linear warm-up."""
    lr_warmup_steps: int = 0
    """Steps of linear warm-up, in place of --lr_warmup_epoch; 0: from the epochs."""
    lr_drop_epochs: tuple[float, float] = (40.0, 50.0)
    """Epochs of the two drops, before --k stretches them."""
    k: int = 0
    """Stretches the drop epochs by 1 + k/10."""
    weight_decay: float = 5e-4
    """Times the sum of half squares of all trainable variables, in the gradient."""


@dataclass(frozen=True)
class DeviceFlags:
    """Device, precision and processors."""

    device: Literal["auto", "cpu", "gpu", "hpu"] = "auto"
    """auto: hpu, else gpu, else cpu."""
    no_hpu: Switch = False
    """Do not use Gaudi even where there is one."""
    dtype: Annotated[Literal["bf16", "fp32"], arg(aliases=["-d"])] = "bf16"
    """Precision of the computation; weights are float32 in both."""
    max_cpus: int = 16
    """Processors the program may use at most; 0: all."""
    threads: int = 0
    """Threads of TensorFlow within and between operations; 0: as many as processors."""


@dataclass(frozen=True)
class ReportFlags:
    """Log, summaries and checkpoints."""

    log_step_count_steps: Annotated[int, arg(aliases=["-v"])] = 1
    """Steps between two reports of loss and speed."""
    save_summary_steps: int = 1
    """Steps between two points in TensorBoard."""
    save_checkpoints_epochs: Annotated[float, arg(aliases=["-c"])] = 5.0
    """Epochs between two checkpoints."""
    keep_ckpt_max: int = 20
    """Checkpoints to keep; older ones are removed."""


@dataclass(frozen=True)
class SSDConfig:
    """Everything a run of ssd_train depends on."""

    run: RunFlags = field(default_factory=RunFlags)
    data: DataFlags = field(default_factory=DataFlags)
    schedule: ScheduleFlags = field(default_factory=ScheduleFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)
    report: ReportFlags = field(default_factory=ReportFlags)


def validate(config: SSDConfig) -> None:
    """Raise FlagError for the first flag whose value breaks a rule of its own or of another flag."""
    _check_ranges(config)
    _check_flip(config.data.flip_probability)
    _check_schedule(config.schedule)
    _check_inputs(config)
    if config.device.no_hpu and config.device.device == "hpu":
        raise FlagError("--no_hpu: contradicts --device hpu; leave one of them out")


def _check_ranges(config: SSDConfig) -> None:
    """Numbers that have to be above, or at least, a bound whatever the other flags are."""
    run, data, schedule, device, report = (
        config.run,
        config.data,
        config.schedule,
        config.device,
        config.report,
    )
    above_zero: dict[str, float] = {
        "epochs": run.epochs,
        "base_lr": schedule.base_lr,
        "save_checkpoints_epochs": report.save_checkpoints_epochs,
    }
    for flag, value in above_zero.items():
        if not (math.isfinite(value) and value > 0):
            raise FlagError(f"--{flag} {value:g}: must be a finite number above 0")
    at_least: dict[str, tuple[float, int]] = {
        "batch_size": (data.batch_size, 1),
        "num_parallel_calls": (data.num_parallel_calls, 1),
        "log_step_count_steps": (report.log_step_count_steps, 1),
        "save_summary_steps": (report.save_summary_steps, 1),
        "keep_ckpt_max": (report.keep_ckpt_max, 1),
        "steps": (run.steps, 0),
        "seed": (run.seed, 0),
        "num_examples_per_epoch": (data.num_examples_per_epoch, 0),
        "eval_samples": (data.eval_samples, 0),
        "lr_warmup_epoch": (schedule.lr_warmup_epoch, 0),
        "lr_warmup_steps": (schedule.lr_warmup_steps, 0),
        "weight_decay": (schedule.weight_decay, 0),
        "max_cpus": (device.max_cpus, 0),
        "threads": (device.threads, 0),
    }
    for flag, (value, least) in at_least.items():
        if not (math.isfinite(value) and value >= least):
            raise FlagError(f"--{flag} {value:g}: must be at least {least}")


def _check_flip(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise FlagError(f"--flip_probability {probability:g}: must be in 0..1")


def _check_schedule(schedule: ScheduleFlags) -> None:
    first, second = schedule.lr_drop_epochs
    if not (0 < first <= second < math.inf):
        raise FlagError(f"--lr_drop_epochs {first:g} {second:g}: must be above 0, the smaller epoch first")
    if schedule.k <= -10:
        raise FlagError(f"--k {schedule.k}: 1 + k/10 must stay above 0; give -9 or more")


def _check_inputs(config: SSDConfig) -> None:
    """What each mode needs to read, and what only one mode reads."""
    run, data = config.run, config.data
    if data.use_fake_data and data.data_dir is not None:
        raise FlagError(f"--use_fake_data: contradicts --data_dir {data.data_dir}; leave one of them out")
    if run.mode == "predict" and run.inference is None:
        raise FlagError("--mode predict: needs --inference with a picture or a folder of pictures")
    if run.mode != "predict" and run.inference is not None:
        raise FlagError(f"--inference {run.inference}: is for --mode predict; mode is {run.mode}")
    if run.json and run.mode != "plan":
        raise FlagError(f"--json: is for --mode plan; mode is {run.mode}")
    if run.mode == "eval" and data.use_fake_data:
        raise FlagError("--mode eval: random images have no truth to score; give --data_dir, not --use_fake_data")
    sized = run.mode == "plan" and data.num_examples_per_epoch > 0
    if run.mode != "predict" and not (data.data_dir or data.use_fake_data or sized):
        raise FlagError(
            f"--mode {run.mode}: needs --data_dir, a folder of records; `gaudi-datasets convert-coco` makes one"
        )
