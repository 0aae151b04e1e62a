"""Flags that several programs share: groups to inherit from, several processes, and `--mode parity`.

A program may declare a flag of a group again with another default or a short form; rules and help are the group's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from tyro.conf import arg

from gaudi_apps.cli.flag_rules import Switch, find_aliases, fixed, per_rank, resume_safe, select_flags
from gaudi_apps.runtime.errors import flag_error
from gaudi_apps.runtime.settings import MAX_PARITY_STEPS
from gaudi_datasets.fetching.stores import DEFAULT_GB


class ProgramConfig:
    """Base class of the frozen dataclasses that hold the flags of a program, in groups.

    `gaudi_apps.cli.flag_rules` reads everything that depends on a flag from its declaration there.
    """

    FORMER_WORKERS: ClassVar[int] = 1  # the original's --num_workers_per_hls, which asks for nothing by itself

    run: RunFlags
    data: DataFlags
    use: UseFlags
    distribution: HorovodFlags
    report: ReportFlags
    parity: ParityFlags
    scaling: ScalingFlags


ExportFormat = Literal["saved_model", "onnx", "tflite", "openvino", "safetensors"]
ExportPrecision = Literal["fp32", "fp16", "bf16", "int8"]
SERVED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RuntimeFlag = Literal["tensorflow", "auto", "openvino", "onnxruntime", "litert"]
# Flags that some programs have, each in a group of its own.
EvalSamples = Annotated[
    int,
    resume_safe(minimum=0),
    arg(help="Number of validation images to evaluate, from the first one on; 0: all. The result names the number."),
]
Patience = Annotated[
    int,
    resume_safe(minimum=0, short_run=0),
    arg(help="Stop training after this number of evaluations without a better score; 0: never."),
]
SummarySteps = Annotated[int, resume_safe(minimum=1), arg(help="Steps between two points in TensorBoard.")]


@dataclass(frozen=True)
class RunFlags:
    """Mode, length of training, and folder of the results."""

    mode: Annotated[str, resume_safe(per_command=True)] = "train"
    """Mode of the program."""
    model_dir: Annotated[str, resume_safe(per_side=True)] = "runs"
    """Folder for checkpoints, curves, images and figures, or its URL, such as s3://bucket/run; training continues from
    its newest checkpoint."""
    clean: Annotated[Switch, resume_safe(per_command=True)] = False
    """Remove the run in --model_dir first: what it wrote, and nothing else."""
    checkpoint: Annotated[str | None, resume_safe(per_side=True)] = None
    """Checkpoint to use for eval, predict, export and parity: newest, best, a step, or, for eval, all, in the order of
    steps; by default best for predict and export of a run by --data, otherwise newest."""
    seed: Annotated[int, fixed(minimum=0)] = 0
    """Seed of the initial weights, the order of the data and its augmentation."""
    config: Annotated[str | None, per_rank(per_command=True)] = None
    """YAML file of flags, one `name: value` per line; flags on the command line win."""
    json: Annotated[Switch, resume_safe(per_command=True)] = False
    """Print the plan, or the result of --mode parity, as JSON."""
    debug: Annotated[Switch, per_rank(per_command=True)] = False
    """Show a traceback with each error."""
    callbacks: Annotated[tuple[str, ...], resume_safe(short_run=())] = ()
    """Callbacks of your own to call during training, as package.module:Name, each a subclass of
    gaudi_apps.Callback."""
    log_to: Annotated[tuple[Literal["csv", "mlflow", "wandb"], ...], resume_safe(short_run=())] = ()
    """Trackers to log scalars and scores to, besides the run's own files and TensorBoard. csv: metrics.csv in
    --model_dir; mlflow: MLFLOW_TRACKING_URI, by default the folder mlruns; wandb: Weights & Biases. The last two need
    gaudi-apps[mlflow] and gaudi-apps[wandb]."""
    epochs: Annotated[float, resume_safe(length="epochs", above=0, maximum=1e6)] = 50.0
    """Number of passes over the training images."""
    steps: Annotated[int, resume_safe(length="steps", minimum=0)] = 0
    """Number of steps to train, instead of --epochs; 0: by --epochs."""


@dataclass(frozen=True)
class RecipeFlags:
    """Data as it is, and the flags that follow from it."""

    data: Annotated[str | None, per_rank()] = None
    """Folder or YAML file of a data set in any known layout. Splits are found, or made by --val_share."""
    val_share: Annotated[float, resume_safe(minimum=0, below=1)] = 0.2
    """With --data, share of the images to validate on where the data set has no such split."""
    recipe: Annotated[Literal["auto", "original"], resume_safe()] = "auto"
    """auto: with --data, flags that are not given follow from the data and the machine, as --mode plan shows; original:
    the defaults below, which are those of the original program."""
    minutes: Annotated[float, resume_safe(minimum=0, per_command=True)] = 0.0
    """Minutes from the start of the program to its end; the first steps are measured, and the number of steps follows;
    0: by steps or epochs."""


@dataclass(frozen=True)
class TensorFlowRunFlags(RunFlags):
    """Mode, length of training, and folder of the results, of a program that computes by TensorFlow."""

    kills: Annotated[int, resume_safe()] = 3
    """Number of times that --mode verify-resume kills its run."""
    deterministic: Annotated[Switch, fixed(per_side=True, short_run=True)] = False
    """Compute the same bits in every run on the same machine; slower."""
    export_format: Annotated[tuple[ExportFormat, ...], resume_safe()] = ("saved_model",)
    """One or more formats to export to; onnx needs the extra gaudi-apps[export], and openvino gaudi-apps[openvino],
    too."""
    export_precision: Annotated[tuple[ExportPrecision, ...], resume_safe()] = ("fp32",)
    """One or more precisions to export in; a format is written in those that it has. onnx: fp32, int8; tflite: fp32,
    fp16, int8; openvino: all; the others: fp32."""
    calibration_images: Annotated[int, resume_safe(minimum=1)] = 64
    """Number of training images, drawn by --seed, that int8 is calibrated on."""
    max_ap_drop: Annotated[float, resume_safe(minimum=0, maximum=1)] = 0.01
    """Most that an export may lose of the network's AP (or top-1 accuracy) in validation; one that loses more fails."""
    ema_decay: Annotated[float, fixed(minimum=0, below=1)] = 0.0
    """Decay of a moving average of the weights, such as .9998, which replaces them in use; 0: no average."""


@dataclass(frozen=True)
class DataFlags:
    """Training and validation images."""

    batch_size: Annotated[int, fixed(sets_batch=True, minimum=1)] = 32
    """Images per step and process; with --distribution_strategy, images per step of all processes."""
    flip_probability: Annotated[float, fixed(minimum=0, maximum=1)] = 0.5
    """Share of the training images to mirror; give 0 where left and right matter, as in text."""
    on_bad_image: Annotated[Literal["fail", "skip"], resume_safe()] = "fail"
    """End at a damaged training image, or skip it; each is checked when it is first read. skip: warn, count it, and
    take the next one in its place. Validation images must be whole."""
    verify_data: Annotated[Switch, resume_safe(per_command=True)] = False
    """Read all images before the first step, and compare each with its checksum."""
    cache_dir: Annotated[str | None, per_rank()] = None
    """Folder for copies of what URLs name, shared by a host's ranks; by default in the user's cache."""
    cache_gb: Annotated[float, per_rank(above=0)] = DEFAULT_GB
    """Most GB in --cache_dir; records that nothing reads make room for others."""


@dataclass(frozen=True)
class UseFlags:
    """Use of a trained network."""

    inference: Annotated[tuple[str, ...], resume_safe()] = ()
    """Images, videos, folders, or patterns such as 'in/*.jpg' to predict on, or to check an export with."""
    strict: Annotated[Switch, resume_safe()] = False
    """Stop at the first file that cannot be read, instead of skipping it with a warning."""
    max_frames: Annotated[int, resume_safe(minimum=0)] = 0
    """Number of frames to read of each video, camera or stream, from the first one on; 0: all."""
    output_dir: Annotated[str | None, resume_safe()] = None
    """Folder for the results, or its URL; by default predictions or export in --model_dir."""


GONE_TYPES = {"fp16": "is gone, for bf16 has the range of fp32; give bf16"}
_GONE_STRATEGIES = {
    "one_device": "is gone, for a program without it computes on one device; leave it out",
    "tpu": "is gone, for there is no TPU; give --device",
    "parameter_server": "is gone, for all processes compute and none only stores weights; give multi_worker",
}


@dataclass(frozen=True)
class DeviceFlags:
    """Device, precision, processors and threads."""

    device: Annotated[Literal["auto", "cpu", "gpu", "hpu"], resume_safe(per_side=True)] = "auto"
    """Device to compute on; auto: hpu, else gpu, else cpu."""
    no_hpu: Annotated[Switch, resume_safe()] = False
    """Do not use a Gaudi, even if the machine has one."""
    dtype: Annotated[Literal["fp32", "bf16"], fixed(per_side=True, gone=GONE_TYPES)] = "fp32"
    """Precision of the computation; weights are always float32."""
    max_cpus: Annotated[int, per_rank(minimum=0)] = 16
    """Maximum number of processors to use; 0: all."""
    num_parallel_calls: Annotated[int, per_rank(minimum=1)] = 64
    """Number of images to decode and augment at the same time."""
    threadpool_size: Annotated[int, per_rank(minimum=0)] = 0
    """Number of threads to decode and augment images with; 0: one per processor."""
    recipe_cache: Annotated[str | None, per_rank()] = None
    """Folder for compiled graphs on Gaudi, kept between runs; the environment's TF_RECIPE_CACHE_PATH wins."""
    enable_xla: Annotated[Switch, fixed(per_side=True)] = False
    """Let XLA compile training steps as a whole: a minute at the start, then two to three times the speed on an NVIDIA
    GPU; for one process."""
    recompute: Annotated[Switch, fixed()] = False
    """Keep less of a training step in memory, and compute blocks of the network again for their gradients: for larger
    batches or images, at four fifths of the speed; only rounding may differ."""
    check_static_shapes: Annotated[Switch, resume_safe()] = False
    """Stop, naming the tensor, if a training step has a shape that is not static or is traced again. Always on with
    Gaudi, which compiles every shape anew."""


@dataclass(frozen=True)
class ReportFlags:
    """Evaluation, log and checkpoints."""

    log_steps: Annotated[int, resume_safe(minimum=1, short_run=1)] = 100
    """Steps between two reports of loss and speed."""
    save_checkpoints_steps: Annotated[int, resume_safe(minimum=0, short_run=1)] = 0
    """Steps between two checkpoints, instead of --save_checkpoints_epochs; 0: by --save_checkpoints_epochs."""
    save_checkpoints_minutes: Annotated[float, resume_safe(minimum=0)] = 0.0
    """Minutes between two checkpoints, in addition to those by steps or epochs; 0: none."""
    keep_ckpt_max: Annotated[int, resume_safe(minimum=1, short_run=2)] = 10
    """Number of checkpoints to keep besides the best; older ones are removed."""
    vis_dataloader: Annotated[Switch, resume_safe(short_run=False)] = False
    """Draw the first training images as the network sees them, with their labels or boxes."""
    profile: Annotated[str, resume_safe(short_run="0,0")] = "0,0"
    """First and last step a,b to trace for TensorBoard's profiler; 0,0: none."""


@dataclass(frozen=True)
class HorovodFlags:
    """Ranks that train together by Horovod, one per device; `DistributionFlags` adds tf.distribute."""

    use_horovod: Annotated[Switch, arg(aliases=["-hvd"]), resume_safe()] = False
    """Train together by Horovod, as under gaudi-run; --batch_size is that of one process."""
    hvd_workers: Annotated[int, resume_safe(minimum=0)] = 0
    """Number of processes to start through gaudi-run, if none were launched; 0: those that were launched."""
    num_workers_per_hls: Annotated[int, resume_safe(minimum=0)] = 0
    """Number of processes to start through gaudi-run on each machine of MULTI_HLS_IPS, or on this one, if none were
    launched; 0: 8 with MULTI_HLS_IPS, else --hvd_workers."""
    horovod_hierarchical_allreduce: Annotated[Switch, resume_safe()] = False
    """With Horovod, reduce within each machine first, then between machines."""

    @property
    def has_engine(self) -> bool:
        """Return whether several processes train together."""
        return self.use_horovod

    def to_distribution(self) -> DistributionFlags:
        """Return the same flags beside those of tf.distribute, which is off."""
        return DistributionFlags(**{flag.name: getattr(self, flag.name) for flag in fields(HorovodFlags)})


@dataclass(frozen=True)
class DistributionFlags(HorovodFlags):
    """Several processes that train together, one per device."""

    distribution_strategy: Annotated[
        Literal["off", "multi_worker", "mirrored", "hpu"], arg(aliases=["-ds"]), resume_safe(gone=_GONE_STRATEGIES)
    ] = "off"
    """Train together by tf.distribute; --batch_size is that of all processes. mirrored: start one process per device
    of this machine; hpu: on Gaudi."""
    kubernetes_run: Annotated[Switch, resume_safe()] = False
    """Start no processes here: Kubernetes starts them, as the mpirun of an MPIJob does."""
    num_gpus: Annotated[int, arg(aliases=["-ng"]), resume_safe(minimum=0)] = 0
    """Number of devices of this machine for --distribution_strategy mirrored; 0: all."""
    worker_hosts: Annotated[str | None, resume_safe()] = None
    """host:port of every process, separated by commas, for --distribution_strategy multi_worker without TF_CONFIG."""
    task_index: Annotated[int, per_rank(per_command=True)] = -1
    """Position of this process in --worker_hosts, from 0."""
    global_batch_size: Annotated[int, fixed(sets_batch=True, minimum=0)] = 0
    """Images per step of all processes, instead of --batch_size, so that a run can continue on more or fewer
    processes; 0: by --batch_size."""
    distributed_bn: Annotated[Switch, resume_safe()] = False
    """Compute the statistics of batch norm over the images of all processes, instead of each process by itself."""
    bn_group: Annotated[Literal[0, 2, 4, 8, 16], resume_safe()] = 0
    """With --distributed_bn, size of the groups of processes that share statistics; 0: all processes."""
    commit_steps: Annotated[int, resume_safe(minimum=1)] = 10
    """Steps between two copies of the state in memory, under gaudi-run with hosts that come and go."""
    gradient_compression: Annotated[Literal["none", "fp16", "bf16"], resume_safe()] = "none"
    """Type to send gradients in."""
    fusion_threshold_mb: Annotated[int | None, resume_safe(minimum=0)] = None
    """Maximum size, in MiB, of the gradients that are sent together; 0: send each tensor by itself."""

    @property
    def has_engine(self) -> bool:
        """Return whether several processes train together."""
        return self.use_horovod or self.distribution_strategy != "off"

    def to_distribution(self) -> DistributionFlags:
        """Return these flags."""
        return self


@dataclass(frozen=True)
class ScalingFlags:
    """For --mode plan: predict the cost of a launch of many ranks."""

    plan_ranks: Annotated[int | None, resume_safe(minimum=1, per_command=True)] = None
    """Number of ranks to predict communication, memory, checkpoints, start and efficiency for."""
    bandwidth_gbps: Annotated[float | None, resume_safe(above=0, per_command=True)] = None
    """Gigabits a second, in one direction, that a host sends to others; its ranks share them."""
    host_bandwidth_gbps: Annotated[float | None, resume_safe(above=0, per_command=True)] = None
    """Gigabits a second that a rank sends to another one of its host; by default as --bandwidth_gbps."""
    ranks_per_host: Annotated[int | None, resume_safe(minimum=1, per_command=True)] = None
    """Number of ranks on a host; by default 8, or all."""
    latency_us: Annotated[float | None, resume_safe(minimum=0, per_command=True)] = None
    """Microseconds of a message, besides its bytes; by default 20."""
    step_seconds: Annotated[float | None, resume_safe(above=0, per_command=True)] = None
    """Seconds of a step of one rank alone; by default as a run of one process in --model_dir has measured."""
    disk_mbps: Annotated[float | None, resume_safe(above=0, per_command=True)] = None
    """Megabytes a second that the disk of --model_dir takes; by default 500."""


NOTHING_TO_VALIDATE = "give images to validate on, as by --val_share above 0, or leave both out"
USING = ("predict", "export")  # modes that need no training or validation images


def check_modes(config: Any, mode: str, *, checkpoint: str | None, steps: int, steps_flag: str) -> None:
    """Check flags of a program in TensorFlow that depend on the mode, and those of devices and processes.

    Args:
        config: the flags, in groups of this module or of classes derived from them.
        mode: what is done.
        checkpoint: which one is used.
        steps: that the run has in all; 0 where epochs decide.
        steps_flag: the flag that gives them.

    Raises:
        FlagError: for the first value that breaks a rule.
    """
    run, use, device = config.run, config.use, config.device
    if mode == "predict" and not use.inference:
        raise flag_error("--mode predict: needs --inference with images, videos or a folder")
    if mode not in USING and use.inference:
        raise flag_error(f"--inference {use.inference[0]}: is for --mode predict and export; mode is {mode}")
    recipe = getattr(config, "recipe", RecipeFlags())
    if mode not in USING and recipe.data is None and recipe.val_share != RecipeFlags.val_share:
        raise flag_error(f"--val_share {recipe.val_share:g}: is for --data", "leave it out")
    if run.json and mode not in ("plan", "parity"):
        raise flag_error(f"--json: is for --mode plan and parity; mode is {mode}")
    if mode == "verify-resume" and not 1 <= run.kills < (steps or math.inf):
        raise flag_error(f"--kills {run.kills}: must be at least 1, and below {steps_flag}")
    named = ("newest", "best", "all") if mode == "eval" else ("newest", "best")
    if not (checkpoint is None or checkpoint in named or checkpoint.isdecimal()):
        raise flag_error(f"--checkpoint {checkpoint}: must be {', '.join(named)} or a step, with --mode {mode}")
    if checkpoint not in (None, "newest") and mode not in ("eval", "parity", *USING):
        which = "eval, predict, export and parity"
        raise flag_error(
            f"--checkpoint {checkpoint}: is for --mode {which}; mode is {mode}",
            "give --mode eval, or --weights with a run to begin from" if mode == "train" else None,
        )
    if run.clean and mode not in ("train", "plan"):
        raise flag_error(f"--clean: is for --mode train and plan; mode is {mode}")
    check_distribution(config.distribution, config.FORMER_WORKERS)
    check_steps(config.device, config.distribution, mode)
    check_parity(config.parity, mode, select_flags(type(config), "per_side"), find_aliases(type(config)))
    if device.no_hpu and device.device == "hpu":
        raise flag_error("--no_hpu: contradicts --device hpu", "leave one of them out")


def check_distribution(flags: DistributionFlags, former_workers: int = 1) -> None:
    """Raise FlagError for the first flag that breaks a rule of its own or of another one."""
    strategy = flags.distribution_strategy
    if flags.use_horovod and strategy != "off":
        raise flag_error(f"--use_horovod: contradicts --distribution_strategy {strategy}", "leave one of them out")
    _check_needs(flags, former_workers)
    _check_hosts(flags)
    if flags.num_gpus and flags.hvd_workers not in (0, flags.num_gpus):
        raise flag_error(f"--num_gpus {flags.num_gpus}: contradicts --hvd_workers {flags.hvd_workers}", "leave one out")


def check_steps(device: DeviceFlags, distribution: DistributionFlags, mode: str) -> None:
    """Raise FlagError for a form of training steps that several processes cannot take together, or not in a mode."""
    if device.enable_xla and distribution.has_engine:
        remedy = "leave it out, or train with one process"
        raise flag_error("--enable_xla: XLA compiles nothing that is sent between processes", remedy)
    if device.recompute and (distribution.distributed_bn or mode == "parity"):
        reason = "sends the statistics of --distributed_bn again" if mode != "parity" else "follows no other side"
        raise flag_error(f"--recompute: the second pass {reason}", "leave it out")


def _check_needs(flags: DistributionFlags, former_workers: int) -> None:
    """Raise FlagError for a flag that has an effect only beside another one, which is not given."""
    strategy, is_several = flags.distribution_strategy, flags.has_engine
    several = "--use_horovod or --distribution_strategy"
    rules = (
        ("hvd_workers", flags.hvd_workers > 1, is_several, several),
        ("num_workers_per_hls", flags.num_workers_per_hls not in (0, 1, former_workers), is_several, several),
        ("kubernetes_run", flags.kubernetes_run, is_several, several),
        ("distributed_bn", flags.distributed_bn, is_several, several),
        ("gradient_compression", flags.gradient_compression != "none", is_several, several),
        ("fusion_threshold_mb", flags.fusion_threshold_mb is not None, is_several, several),
        ("horovod_hierarchical_allreduce", flags.horovod_hierarchical_allreduce, flags.use_horovod, "--use_horovod"),
        ("bn_group", flags.bn_group, flags.distributed_bn, "--distributed_bn"),
        ("num_gpus", flags.num_gpus > 1, strategy == "mirrored", "--distribution_strategy mirrored"),
        ("worker_hosts", flags.worker_hosts, strategy == "multi_worker", "--distribution_strategy multi_worker"),
    )
    for name, is_given, is_met, needed in rules:
        if is_given and not is_met:
            raise flag_error(f"--{name}: is for processes that train together", f"give {needed} too, or leave it out")


def _check_hosts(flags: DistributionFlags) -> None:
    if (flags.worker_hosts is None) != (flags.task_index == -1):
        raise flag_error("--worker_hosts and --task_index: give both or none")
    count = len((flags.worker_hosts or "").split(","))
    if flags.worker_hosts is not None and not 0 <= flags.task_index < count:
        raise flag_error(f"--task_index {flags.task_index}: must be a place in --worker_hosts, 0 to {count - 1}")
    if flags.worker_hosts is not None and flags.hvd_workers not in (0, count):
        raise flag_error(f"--hvd_workers {flags.hvd_workers}: contradicts --worker_hosts, which names {count}")


RECORDED = "recorded"


@dataclass(frozen=True)
class ParityFlags:
    """For --mode parity: compute the first training steps in two ways, and name the first tensor that differs."""

    parity_against: Annotated[tuple[str, ...], resume_safe()] = ()
    """Flags of the other side with their values, such as device=cpu checkpoint=best, or recorded=FOLDER."""
    parity_output: Annotated[str | None, resume_safe()] = None
    """New folder to record this side in, to compare it later or on another machine."""
    parity_steps: Annotated[int, resume_safe(minimum=1, maximum=MAX_PARITY_STEPS)] = 2
    """Number of steps to compute, from the first step of a training on."""
    parity_rtol: Annotated[float | None, resume_safe(minimum=0)] = None
    """Tolerated difference, as a share of the largest value of a tensor. By default 1e-6 for initial weights; 1e-4 for
    outputs of layers, .05 if a side is bf16; 1e-3 for gradients and updates, .3 if a side is bf16."""
    parity_atol: Annotated[float | None, resume_safe(minimum=0)] = None
    """Tolerated difference to add to that; by default 1e-6, and 1e-8 for initial weights."""


def check_parity(
    flags: ParityFlags, mode: str, per_side: Sequence[str], aliases: Mapping[str, str] | None = None
) -> None:
    """Raise FlagError for the first flag whose value breaks a rule.

    Args:
        flags: flags of the command line.
        mode: mode of the program.
        per_side: names of the flags that two sides may differ in.
        aliases: former names of flags, each with the name of today.
    """
    if mode != "parity":
        for entry in fields(flags):
            if getattr(flags, entry.name) != entry.default:
                raise flag_error(f"--{entry.name}: is for --mode parity; mode is {mode}")
        return
    if not flags.parity_against and flags.parity_output is None:
        raise flag_error("--mode parity: needs --parity_against, as device=cpu, or --parity_output FOLDER")
    if flags.parity_against and flags.parity_output is not None:
        raise flag_error("--parity_output: records a side by itself, so leave out --parity_against")
    _check_against(flags.parity_against, per_side, aliases or {})


def _check_against(entries: Sequence[str], names: Collection[str], aliases: Mapping[str, str]) -> None:
    seen: set[str] = set()
    for entry in entries:
        name, value = split_side_flag(entry)
        name = aliases.get(name, name)
        if name not in (*names, RECORDED) or not value:
            known = ", ".join(f"{one}=.." for one in names)
            raise flag_error(f"--parity_against {entry}: must be one of {known}, or {RECORDED}=FOLDER")
        if name in seen:
            raise flag_error(f"--parity_against {entry}: {name} is given twice", "leave one of them out")
        seen.add(name)
    if RECORDED in seen and len(seen) > 1:
        raise flag_error(f"--parity_against {RECORDED}=..: what is recorded does not change", "leave the others out")


def split_side_flag(entry: str) -> tuple[str, str]:
    """Return name and value of an entry of --parity_against."""
    name, _, value = entry.partition("=")
    return name.removeprefix("--").replace("-", "_"), value
