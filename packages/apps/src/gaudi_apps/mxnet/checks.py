"""Rules about the values of ssd_mxnet_train's flags; whatever runs later may rely on them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from gaudi_apps.cli.flags import check_parity
from gaudi_apps.mxnet.config import DataFlags, HorovodFlags, NetworkFlags, RunFlags, SSDMXNetConfig
from gaudi_apps.runtime.profiler import StepRange
from gaudi_datasets.errors import FlagError
from gaudi_distributed.cluster.elastic import is_elastic

TRAINING = ("train", "train_val")
# What two sides of a parity may differ in, besides what they may in any program.
SIDE_FLAGS = ("precision", "data_layout", "pretrained_backbone")
USES = ("predict", "export")  # of a checkpoint, without images of a data set


def validate(config: SSDMXNetConfig) -> None:
    """Raise FlagError for the first flag whose value breaks a rule of its own or of another flag."""
    _check_ranges(config)
    _check_epochs(config)
    _check_data(config.run, config.data)
    _check_modes(config)
    _check_network(config.network)
    _check_processes(config.distribution)
    check_parity(config.parity, config.run.mode, SIDE_FLAGS)
    find_traced(config)


def find_traced(config: SSDMXNetConfig) -> StepRange | None:
    """The steps to trace; None: none.

    Raises:
        FlagError: only one of the two flags is given, or they are no range.
    """
    first, last = config.report.profile_start, config.report.profile_stop
    if first is None and last is None:
        return None
    if first is None or last is None:
        raise FlagError("--profile_start and --profile_stop: give both or none")
    if not 1 <= first <= last:
        raise FlagError(f"--profile_start {first}, --profile_stop {last}: must be at least 1, the smaller one first")
    return StepRange(first, last)


def _check_ranges(config: SSDMXNetConfig) -> None:
    """Numbers that have to be above, at least, or at most a bound, whatever the other flags are."""
    run, data, schedule, validation = config.run, config.data, config.schedule, config.validation
    above_zero: dict[str, float | None] = {
        "epochs": run.epochs,
        "dataset_size": data.dataset_size,
        "eval_dataset_size": data.eval_dataset_size,
        "eval_batch_size": data.eval_batch_size,
        "batch_size": data.batch_size,
        "dali_workers": data.dali_workers,
        "lr": schedule.lr,
        "lr_decay_factor": schedule.lr_decay_factor,
        "fp16_loss_scale": config.network.fp16_loss_scale,
        "save_interval": config.report.save_interval,
        "val_interval": validation.val_interval,
        "nms_topk": validation.nms_topk,
        "post_nms": validation.post_nms,
        "log_interval": config.report.log_interval,
        "keep_ckpt_max": config.report.keep_ckpt_max,
    }
    for flag, value in above_zero.items():
        # An infinite rate is a number that training itself stops at, naming the step.
        if value is not None and not (value > 0 and (math.isfinite(value) or flag == "lr")):
            raise FlagError(f"--{flag} {value:g}: must be a finite number above 0")
    at_least_zero: dict[str, float] = {
        "steps": run.steps,
        "seed": run.seed,
        "lr_warmup_epochs": schedule.lr_warmup_epochs or 0,
        "lr_warmup_factor": schedule.lr_warmup_factor,
        "weight_decay": schedule.weight_decay,
        "save_checkpoints_steps": config.report.save_checkpoints_steps,
        "save_checkpoints_minutes": config.report.save_checkpoints_minutes,
    }
    for flag, value in at_least_zero.items():
        if not (math.isfinite(value) and value >= 0):
            raise FlagError(f"--{flag} {value:g}: must be at least 0")
    _check_shares(
        {
            "flip_probability": (data.flip_probability, 1),
            "momentum": (schedule.momentum, 1),
            "nms_valid_thresh": (validation.nms_valid_thresh, 1),
            "nms_overlap_thresh": (validation.nms_overlap_thresh, 1),
            "score_threshold": (config.use.score_threshold, 1),
            "target_map": (validation.target_map, 100),
        }
    )


def _check_shares(shares: Mapping[str, tuple[float, int]]) -> None:
    for flag, (value, most) in shares.items():
        if not 0 <= value <= most:
            raise FlagError(f"--{flag} {value:g}: must be in 0..{most}")


def _check_epochs(config: SSDMXNetConfig) -> None:
    """Lists of epochs rise, and are of whole epochs from the first one on."""
    for flag, epochs in (
        ("lr_decay_epochs", config.schedule.lr_decay_epochs),
        ("val_epochs", config.validation.val_epochs),
    ):
        if list(epochs) != sorted(set(epochs)) or any(epoch < 1 for epoch in epochs):
            raise FlagError(f"--{flag} {' '.join(map(str, epochs))}: must be epochs of at least 1, in rising order")


def _check_data(run: RunFlags, data: DataFlags) -> None:
    """Images come from one place: files, records, or nowhere."""
    if data.use_tfrecord != (data.tfrecord_root is not None):
        raise FlagError("--use_tfrecord and --tfrecord_root: give both or none")
    named = [name for name in ("coco_root", "tfrecord_root") if getattr(data, name) is not None]
    if len(named) + data.synthetic > 1:
        others = " and ".join(f"--{name}" for name in [*named, *["synthetic"] * data.synthetic])
        raise FlagError(f"{others}: contradict each other; leave one of them out")
    if run.mode == "val" and data.synthetic:
        raise FlagError("--mode val: random images have no truth to score; give --coco_root, not --synthetic")
    sized = run.mode == "plan" and data.dataset_size is not None
    # The images of a submission are named by a variable, which gaudi-run reads.
    if run.mode not in USES and not (named or data.synthetic or sized or run.submission):
        raise FlagError(
            f"--mode {run.mode}: needs images: --coco_root, or --use_tfrecord with --tfrecord_root, a folder of "
            "records, which `gaudi-datasets convert` makes, or --synthetic"
        )


def _check_modes(config: SSDMXNetConfig) -> None:
    """What is for some modes only."""
    run, use = config.run, config.use
    if run.mode == "predict" and not use.inference:
        raise FlagError("--mode predict: needs --inference with images, videos or a folder")
    if run.mode != "predict" and use.inference:
        raise FlagError(f"--inference {use.inference[0]}: is for --mode predict; mode is {run.mode}")
    if run.json and run.mode not in ("plan", "parity"):
        raise FlagError(f"--json: is for --mode plan and parity; mode is {run.mode}")
    named = ("newest", "best", "all") if run.mode == "val" else ("newest", "best")
    if run.checkpoint not in named and not run.checkpoint.isdecimal():
        raise FlagError(f"--checkpoint {run.checkpoint}: must be {', '.join(named)} or a step, with --mode {run.mode}")
    if run.checkpoint != "newest" and run.mode not in ("val", "parity", *USES):
        which = "val, predict, export and parity"
        raise FlagError(f"--checkpoint {run.checkpoint}: is for --mode {which}; mode is {run.mode}")
    for_training = (
        *(("clean", run.clean), ("dry_run", run.dry_run), ("submission", run.submission)),
        ("mlperf", config.mlperf.mlperf),
    )
    for flag, is_given in for_training:
        if is_given and run.mode not in TRAINING:
            raise FlagError(f"--{flag}: is for --mode train and train_val; mode is {run.mode}")
    if run.clean and run.dry_run:
        raise FlagError("--clean: contradicts --dry_run, which writes and removes nothing; leave one of them out")


def _check_network(network: NetworkFlags) -> None:
    if network.fp16_loss_scale != NetworkFlags.fp16_loss_scale and network.precision in ("fp32", "bf16"):
        raise FlagError(f"--fp16_loss_scale {network.fp16_loss_scale:g}: is for fp16; precision is {network.precision}")


def _check_processes(flags: HorovodFlags) -> None:
    if is_elastic(os.environ):
        raise FlagError("--np: ssd_mxnet_train cannot train while hosts come and go; start it by gaudi-run --np N")
    for name, value, least in (
        ("hvd_workers", flags.hvd_workers, 0),
        ("num_workers_per_hls", flags.num_workers_per_hls, 0),
        ("horovod_num_groups", flags.horovod_num_groups, 0),
    ):
        if value < least:
            raise FlagError(f"--{name} {value}: must be at least {least}")
    if not (math.isfinite(flags.gradient_predivide_factor) and flags.gradient_predivide_factor > 0):
        raise FlagError(f"--gradient_predivide_factor {flags.gradient_predivide_factor:g}: must be above 0")
    for name, value in (("hvd_workers", flags.hvd_workers), ("num_workers_per_hls", flags.num_workers_per_hls)):
        if value > 1 and not flags.use_horovod:
            raise FlagError(f"--{name}: is for processes that train together; give --use_horovod too, or leave it out")
