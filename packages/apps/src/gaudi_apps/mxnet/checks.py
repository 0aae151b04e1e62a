"""Rules about the values of ssd_mxnet_train's flags; whatever runs later may rely on them."""

from __future__ import annotations

import os

from gaudi_apps.cli.flag_rules import check_bounds, list_per_side
from gaudi_apps.cli.flags import check_parity
from gaudi_apps.mxnet.config import DataFlags, MXNetHorovodFlags, NetworkFlags, RunFlags, SSDMXNetConfig
from gaudi_apps.runtime.profiler import StepRange
from gaudi_datasets.errors import FlagError
from gaudi_distributed.cluster.elastic import is_elastic

TRAINING = ("train", "train_val")
USES = ("predict", "export")  # of a checkpoint, without images of a data set


def validate(config: SSDMXNetConfig) -> None:
    """Raise FlagError for the first flag whose value breaks a rule of its own or of another flag."""
    check_bounds(config)
    _check_epochs(config)
    _check_data(config.run, config.data)
    _check_modes(config)
    _check_network(config.network)
    _check_processes(config.distribution)
    check_parity(config.parity, config.run.mode, list_per_side(SSDMXNetConfig))
    find_traced(config)


def find_traced(config: SSDMXNetConfig) -> StepRange | None:
    """Return the steps to trace; None if there are none.

    Raises:
        FlagError: only one of the two flags is given, or they are no range.
    """
    first, last = config.report.profile_start, config.report.profile_stop
    if first is None and last is None:
        return None
    if first is None or last is None:
        raise FlagError("--profile_start and --profile_stop: give both or none", flag="--profile_start")
    if not 1 <= first <= last:
        raise FlagError(
            f"--profile_start {first}, --profile_stop {last}: must be at least 1, the smaller one first",
            flag="--profile_start",
        )
    return StepRange(first, last)


def _check_epochs(config: SSDMXNetConfig) -> None:
    """Check that lists of epochs rise, from the first epoch on."""
    for flag, epochs in (
        ("lr_decay_epochs", config.schedule.lr_decay_epochs),
        ("val_epochs", config.validation.val_epochs),
    ):
        if list(epochs) != sorted(set(epochs)) or any(epoch < 1 for epoch in epochs):
            raise FlagError(
                f"--{flag} {' '.join(map(str, epochs))}: must be epochs of at least 1, in rising order",
                flag=f"--{flag}",
            )


def _check_data(run: RunFlags, data: DataFlags) -> None:
    """Check that images come from one place: files, records, or nowhere."""
    if data.use_tfrecord != (data.tfrecord_root is not None):
        raise FlagError("--use_tfrecord and --tfrecord_root: give both or none", flag="--use_tfrecord")
    roots = (("coco_root", data.coco_root), ("tfrecord_root", data.tfrecord_root))
    named = [f"--{name}" for name, root in roots if root is not None]
    if len(named) + data.synthetic > 1:
        others = [*named, "--synthetic"] if data.synthetic else named
        raise FlagError(
            f"{' and '.join(others)}: contradict each other", flag=others[0], remedy="leave one of them out"
        )
    if run.mode == "val" and data.synthetic:
        raise FlagError(
            "--mode val: random images have no truth to score",
            flag="--mode",
            remedy="give --coco_root, not --synthetic",
        )
    sized = run.mode == "plan" and data.dataset_size is not None
    # The images of a submission are named by a variable, which gaudi-run reads.
    if run.mode not in USES and not (named or data.synthetic or sized or run.submission):
        raise FlagError(
            f"--mode {run.mode}: needs images: --coco_root, or --use_tfrecord with --tfrecord_root, a folder of "
            "records, which `gaudi-datasets convert` makes, or --synthetic",
            flag="--mode",
        )


def _check_modes(config: SSDMXNetConfig) -> None:
    """Check the flags that are for some modes only."""
    run, use = config.run, config.use
    if run.mode == "predict" and not use.inference:
        raise FlagError("--mode predict: needs --inference with images, videos or a folder", flag="--mode")
    if run.mode != "predict" and use.inference:
        raise FlagError(
            f"--inference {use.inference[0]}: is for --mode predict; mode is {run.mode}", flag="--inference"
        )
    if run.json and run.mode not in ("plan", "parity"):
        raise FlagError(f"--json: is for --mode plan and parity; mode is {run.mode}", flag="--json")
    named = ("newest", "best", "all") if run.mode == "val" else ("newest", "best")
    if run.checkpoint not in named and not run.checkpoint.isdecimal():
        raise FlagError(
            f"--checkpoint {run.checkpoint}: must be {', '.join(named)} or a step, with --mode {run.mode}",
            flag="--checkpoint",
        )
    if run.checkpoint != "newest" and run.mode not in ("val", "parity", *USES):
        which = "val, predict, export and parity"
        raise FlagError(
            f"--checkpoint {run.checkpoint}: is for --mode {which}; mode is {run.mode}", flag="--checkpoint"
        )
    for_training = (
        *(("clean", run.clean), ("dry_run", run.dry_run), ("submission", run.submission)),
        ("mlperf", config.mlperf.mlperf),
    )
    for flag, is_given in for_training:
        if is_given and run.mode not in TRAINING:
            raise FlagError(f"--{flag}: is for --mode train and train_val; mode is {run.mode}", flag=f"--{flag}")
    if run.clean and run.dry_run:
        raise FlagError(
            "--clean: contradicts --dry_run, which writes and removes nothing",
            flag="--clean",
            remedy="leave one of them out",
        )


def _check_network(network: NetworkFlags) -> None:
    if network.fp16_loss_scale != NetworkFlags.fp16_loss_scale and network.precision in ("fp32", "bf16"):
        raise FlagError(
            f"--fp16_loss_scale {network.fp16_loss_scale:g}: is for fp16; precision is {network.precision}",
            flag="--fp16_loss_scale",
        )


def _check_processes(flags: MXNetHorovodFlags) -> None:
    if is_elastic(os.environ):
        raise FlagError(
            "--np: ssd_mxnet_train cannot train while hosts come and go",
            flag="--np",
            remedy="start it by gaudi-run --np N",
        )
    for name, value in (("hvd_workers", flags.hvd_workers), ("num_workers_per_hls", flags.num_workers_per_hls)):
        if value > 1 and not flags.use_horovod:
            raise FlagError(
                f"--{name}: is for processes that train together",
                flag=f"--{name}",
                remedy="give --use_horovod too, or leave it out",
            )
