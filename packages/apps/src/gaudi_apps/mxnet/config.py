"""Declare the flags of ssd_mxnet_train as frozen dataclasses, their rules, its systems, and the original flags."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from tyro.conf import arg
from tyro.constructors import PrimitiveConstructorSpec

from gaudi_apps.cli import flag_rules, flags
from gaudi_apps.cli.flag_rules import Switch, check_bounds, find_aliases, fixed, per_rank, resume_safe, select_flags
from gaudi_apps.cli.flags import DistributionFlags, HorovodFlags, ParityFlags, ScalingFlags, check_parity
from gaudi_apps.detection.config import AugmentationFlags, ImageFlags, WeightDecay, check_use
from gaudi_apps.runtime.errors import flag_error
from gaudi_datasets.arguments import OFF, ON, FormerFlag
from gaudi_distributed.cluster.rendezvous import is_elastic


def choose_among(*choices: str, former: Mapping[str, str] | None = None) -> PrimitiveConstructorSpec[str]:
    """Return the reader of one of some values, in upper or lower case, for tyro.

    Args:
        choices: the values.
        former: values by the name that the original had for them.
    """
    by_folded = {choice.casefold(): choice for choice in choices} | dict(former or {})

    def read(words: Sequence[str]) -> str:
        found = by_folded.get(words[0].casefold()) if words else None
        if found is None:
            raise ValueError(f"{words[0] if words else 'it has no value'}: must be one of {', '.join(choices)}")
        return found

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(choices) + "}",
        instance_from_str=read,
        is_instance=lambda value: value in choices,
        str_from_instance=lambda value: [value],
    )


Mode = Annotated[
    str, choose_among("train_val", "train", "eval", "predict", "export", "plan", "parity", former={"val": "eval"})
]


@dataclass(frozen=True)
class RunFlags(flags.RunFlags):
    """Mode, length of training, and folder of the results."""

    mode: Mode = "train_val"
    """train_val: train, and evaluate at some epochs; train: train without evaluation; eval, or val: evaluate
    checkpoints; predict: draw detections; export: write the weights for MXNet and TensorFlow; plan: print what
    train_val would do; parity: compute the first steps in two ways, and name the first tensor that differs."""
    model_dir: str = "runs/ssd_mxnet_train"
    dry_run: Annotated[Switch, resume_safe()] = False
    """Do all that train does up to the end of its first step, and write nothing."""
    submission: Annotated[Switch, resume_safe()] = False
    """Run the experiments of the submission by the variables of its scripts (SYSTEM, ...), like gaudi-run
    --submission."""
    checkpoint: str = "newest"
    epochs: Annotated[float, resume_safe(length="epochs", minimum=1, maximum=1e6)] = 80


@dataclass(frozen=True)
class DataFlags(flags.DataFlags):
    """Training and validation images."""

    dataset: Annotated[str, choose_among("coco2017", "plain"), resume_safe()] = "coco2017"
    """Names in --coco_root. coco2017: annotations/instances_train2017.json and train2017/; plain: without the year."""
    coco_root: Annotated[str | None, per_rank()] = None
    """Folder of annotations and image files."""
    use_tfrecord: Annotated[Switch, resume_safe()] = False
    """Of the original: the same as --data_dir, which it needs."""
    data_dir: Annotated[str | None, arg(aliases=["--tfrecord_root"]), per_rank()] = None
    """Folder or URL of records (train-*, val-*) made by gaudi-datasets, in place of --coco_root."""
    use_fake_data: Annotated[Switch, arg(aliases=["--synthetic"]), fixed()] = False
    """Train on random images, to measure speed."""
    num_examples_per_epoch: Annotated[int | None, arg(aliases=["--dataset_size"]), fixed(minimum=1)] = None
    """Number of training images per epoch; by default all."""
    eval_samples: Annotated[int | None, arg(aliases=["--eval_dataset_size"]), resume_safe(minimum=1)] = None
    """Number of validation images to evaluate, from the first one on; by default all."""
    batch_size: int = 32
    """Images per step and process."""
    eval_batch_size: Annotated[int | None, resume_safe(minimum=1)] = None
    """Images per step and process in validation; by default --batch_size."""
    threadpool_size: Annotated[int, arg(aliases=["--dali_workers", "-j"]), per_rank(minimum=1)] = 6
    """Number of threads to decode and augment images with."""


@dataclass(frozen=True)
class DeviceFlags:
    """Device, precision and layout."""

    device: Annotated[Literal["auto", "cpu", "gpu"], resume_safe(per_side=True)] = "auto"
    """Device to compute on; auto: gpu, else cpu."""
    precision: Annotated[str, choose_among("auto", "fp32", "bf16", "fp16", "amp"), fixed(per_side=True)] = "auto"
    """Precision of the computation. auto: fp16 on a GPU, else fp32; amp: fp16 on a GPU, else bf16. Weights are always
    float32."""
    fp16_loss_scale: Annotated[float, fixed(above=0)] = 128.0
    """Factor of the loss before the backward pass in fp16."""
    data_layout: Annotated[str, choose_among("auto", "NHWC", "NCHW"), fixed(per_side=True)] = "auto"
    """Order of the dimensions of images. auto: NHWC on a GPU, else NCHW."""

    @property
    def no_hpu(self) -> bool:
        """Return True: MXNet computes on no HPU."""
        return True


# Flags of the submission on its systems: images of a rank and step, ranks, ranks of a host, epochs of warm-up, rate (of
# 32 images), weight decay, threads that decode.
_NAMES = (
    "batch_size",
    "hvd_workers",
    "num_workers_per_hls",
    "warmup_epochs",
    "base_lr",
    "weight_decay",
    "threadpool_size",
)
SYSTEMS: Mapping[str, Mapping[str, float]] = {
    name: {"use_horovod": True, **dict(zip(_NAMES, values, strict=True))}
    for name, values in {
        "DSS8440": (128, 8, 8, 5, 5.84e-3, 1.6e-4, 6),
        "C4140": (128, 4, 4, 5.25, 2.92e-3, 1.6e-4, 6),
        "2xC4140": (128, 8, 4, 5.25, 5.84e-3, 1.6e-4, 6),
        "4xC4140": (56, 16, 4, 5, 3.2e-3, 1.3e-4, 3),
    }.items()
}


@dataclass(frozen=True)
class ScheduleFlags:
    """Initial weights, learning rate and optimizer.

    The rate of a run is 2.5e-3 max(1, round(base_lr / 2.5e-3 * images per step / 32)).
    """

    weight_decay: WeightDecay = 5e-4
    weights: Annotated[str | None, arg(aliases=["--pretrained_backbone"]), fixed(per_side=True)] = None
    """File of initial weights: torchvision .pth, .pickle, .npz, .safetensors, or a checkpoint of this program or of
    ssd_train, or a URL. Weights that fit are loaded, the others are named."""
    system: Annotated[str | None, resume_safe(presets=SYSTEMS)] = None
    """DSS8440, C4140, 2xC4140 or 4xC4140: use the batch size, processes, warm-up, learning rate, weight decay and
    threads of the submission on it, where no other flag gives them."""
    base_lr: Annotated[float | None, arg(aliases=["--lr"]), fixed(above=0, finite=False)] = None
    """Learning rate for 32 images per step; by default 2.5e-3."""
    lr_decay_factor: Annotated[float, fixed(above=0, maximum=1)] = 0.1
    """Factor of the learning rate at each of --lr_drop_epochs."""
    lr_drop_epochs: Annotated[tuple[int, ...], arg(aliases=["--lr_decay_epochs"]), fixed(maximum=1e6)] = (44, 55)
    """Epochs after which the learning rate is multiplied by --lr_decay_factor."""
    warmup_epochs: Annotated[float | None, arg(aliases=["--lr_warmup_epochs"]), fixed(minimum=0, maximum=1e6)] = None
    """Number of epochs of linear warm-up; by default no warm-up."""
    lr_warmup_factor: Annotated[float, fixed(minimum=0)] = 0.0
    """Start warm-up at base_lr (1 - 1 / 2 ** factor)."""
    momentum: Annotated[float, fixed(minimum=0, maximum=1)] = 0.9
    """Momentum of SGD."""


@dataclass(frozen=True)
class MXNetHorovodFlags(HorovodFlags):
    """Ranks that train together by Horovod, one per device."""

    use_horovod: Annotated[Switch, arg(aliases=["-hvd"])] = False
    """Train together; processes that were launched together do so without it, too."""
    bn_group: Annotated[Literal[1, 2, 4, 8, 16], resume_safe()] = 1
    """Size of the groups of ranks that share the statistics of batch norm."""
    gradient_predivide_factor: Annotated[float, resume_safe(above=0)] = 1.0
    """Divide gradients by this before they are summed over the ranks, and by the rest afterwards."""
    horovod_num_groups: Annotated[int, resume_safe(minimum=0)] = 1
    """Number of groups to send gradients in; 0: send each tensor by itself."""

    def to_distribution(self) -> DistributionFlags:
        """Return the same flags by the names of the programs in TensorFlow."""
        if self.bn_group == 1:
            return super().to_distribution()
        return replace(super().to_distribution(), distributed_bn=True, bn_group=self.bn_group)


@dataclass(frozen=True)
class ReportFlags(flags.ReportFlags):
    """Evaluation, log and checkpoints."""

    val_epochs: Annotated[tuple[int, ...], resume_safe(maximum=1e6)] = (40, 50, 55, 60, 65, 70, 75, 80)
    """Epochs after which train_val validates."""
    eval_epochs: Annotated[int | None, arg(aliases=["--val_interval"]), resume_safe(minimum=1, maximum=1e6)] = None
    """Epochs between two validations, instead of --val_epochs."""
    async_val: Annotated[Switch, resume_safe()] = False
    """Validate in a process of its own while training continues."""
    target_map: Annotated[float, arg(aliases=["-t"]), resume_safe(minimum=0, maximum=100)] = 23.0
    """Stop training when a validation reaches this AP, in percent; 0: no target."""
    nms_valid_thresh: Annotated[float, resume_safe(minimum=0, maximum=1)] = 0.0
    """Score that a detection has to exceed."""
    nms_overlap_thresh: Annotated[float, resume_safe(minimum=0, maximum=1)] = 0.5
    """IoU with a better box of the same class from which on a box is dropped."""
    nms_topk: Annotated[int, resume_safe(minimum=1)] = 200
    """Number of the best scores of each class to consider."""
    post_nms: Annotated[int, resume_safe(minimum=1)] = 200
    """Maximum number of detections per image."""
    log_steps: Annotated[int, arg(aliases=["--log_interval"])] = 1
    save_checkpoints_epochs: Annotated[
        int | None, arg(aliases=["--save_interval"]), resume_safe(minimum=1, maximum=1e6)
    ] = None
    """Epochs between two checkpoints; by default 1."""
    keep_ckpt_max: int = 20
    profile_start: Annotated[int | None, resume_safe()] = None
    """First step to trace, counted from 1; the same as --profile with --profile_stop."""
    profile_stop: Annotated[int | None, resume_safe()] = None
    """Last step to trace."""


@dataclass(frozen=True)
class MLPerfFlags:
    """MLPerf's log, on standard output and as mlperf.log in --model_dir; needs gaudi-apps[mlperf]."""

    mlperf: Annotated[Switch, resume_safe()] = False
    """Write the log."""
    mlperf_org: Annotated[str, resume_safe()] = "none"
    """Organization that submits."""
    mlperf_platform: Annotated[str, resume_safe()] = "none"
    """Name of the machine."""
    mlperf_division: Annotated[Literal["open", "closed"], resume_safe()] = "open"
    """Division of the submission."""
    mlperf_status: Annotated[Literal["research", "preview", "onprem", "cloud"], resume_safe()] = "research"
    """Category of the system."""


@dataclass(frozen=True)
class SSDMXNetConfig(flags.ProgramConfig):
    """Everything a run of ssd_mxnet_train depends on."""

    run: RunFlags = field(default_factory=RunFlags)
    data: DataFlags = field(default_factory=DataFlags)
    augmentation: AugmentationFlags = field(default_factory=AugmentationFlags)
    schedule: ScheduleFlags = field(default_factory=ScheduleFlags)
    use: ImageFlags = field(default_factory=ImageFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)
    distribution: MXNetHorovodFlags = field(default_factory=MXNetHorovodFlags)
    report: ReportFlags = field(default_factory=ReportFlags)
    mlperf: MLPerfFlags = field(default_factory=MLPerfFlags)
    parity: ParityFlags = field(default_factory=ParityFlags)
    scaling: ScalingFlags = field(default_factory=ScalingFlags)


_DALI = "it was of DALI, in whose place OpenCV decodes on the CPU; leave it out"
_NOT_FUSED = "MXNet 1.9.1 has no fused operator, so nothing is fused; leave it out"

FORMER_FLAGS = (
    FormerFlag(
        "--backbone",
        "ResNet-34 up to its third stage is the one backbone; leave it out",
        default="resnet34_mlperf",
        meant=("resnet34_mlperf",),
    ),
    FormerFlag("--bn-fp16", "the statistics of batch norm are float32 in every precision; leave it out", meant=(OFF,)),
    FormerFlag("--no-fuse-bn-add-relu", _NOT_FUSED, meant=(ON,)),
    FormerFlag("--no-fuse-bn-relu", _NOT_FUSED, meant=(ON,)),
    FormerFlag("--input-jpg-decode", _DALI, default="gpu", meant=("cpu",)),
    FormerFlag("--hw-decoder-load", _DALI, default="0.0", meant=("0",)),
    FormerFlag("--data-shape", "300 is the one size of this network; leave it out", default="300", meant=("300",)),
    FormerFlag("--input-batch-multiplier", _DALI, default="1", meant=("1",)),
    FormerFlag(
        "--resume-from",
        "the same command with the same --model_dir goes on from its newest checkpoint; --pretrained-backbone begins a "
        "new run with a checkpoint's weights, and --checkpoint names one for `--mode eval`",
        default="none",
    ),
    FormerFlag("--start-epoch", "a checkpoint knows its step; leave it out", default="1", meant=("1",)),
    FormerFlag("--cocoapi-threads", "scoring takes the threads that it needs; leave it out", default="1", meant=("1",)),
    FormerFlag("--bulk-last-wgrad", "it was of the submission's own build of MXNet; leave it out", meant=(OFF,)),
    FormerFlag(
        "--results", "each validation at the end leaves detections.json in --model_dir; leave it out", default="none"
    ),
    FormerFlag("--log-level", "there is one level; --debug shows tracebacks", default="INFO", meant=("INFO",)),
    FormerFlag(
        "--log-local-ranks",
        "rank 0 shows, and others write `worker_R/log.txt` in --model_dir; leave it out",
        default="0",
        meant=("0",),
    ),
    FormerFlag("--profile-no-horovod", "MXNet's profiler traces each process by itself; leave it out", meant=(ON,)),
    FormerFlag(
        "--test-initialization", "give --dry_run, which does all up to the first step, and this step", meant=(OFF,)
    ),
    FormerFlag("--test-anchors", "the default boxes are tested in gaudi-ops; leave it out", meant=(OFF,)),
)


TRAINING = ("train", "train_val")
USES = ("predict", "export")  # of a checkpoint, without images of a data set


def validate(config: SSDMXNetConfig) -> None:
    """Raise FlagError for the first flag whose value breaks a rule of its own or of another flag."""
    check_bounds(config)
    lists = {"lr_drop_epochs": config.schedule.lr_drop_epochs, "val_epochs": config.report.val_epochs}
    for flag, epochs in lists.items():
        if list(epochs) != sorted(set(epochs)) or min(epochs, default=1) < 1:
            raise flag_error(f"--{flag} {' '.join(map(str, epochs))}: must be epochs of at least 1, in rising order")
    _check_data(config.run, config.data)
    _check_modes(config)
    _check_mlperf(config)
    for entry in fields(AugmentationFlags) if config.data.use_fake_data else ():
        if getattr(config.augmentation, entry.name) != entry.default:
            raise flag_error(f"--{entry.name}: has no effect on random images")
    check_use(config.use, config.run.mode)
    network = config.device
    if network.fp16_loss_scale != DeviceFlags.fp16_loss_scale and network.precision in ("fp32", "bf16"):
        raise flag_error(
            f"--fp16_loss_scale {network.fp16_loss_scale:g}: is for fp16; precision is {network.precision}"
        )
    _check_processes(config.distribution)
    check_parity(config.parity, config.run.mode, select_flags(SSDMXNetConfig, "per_side"), find_aliases(SSDMXNetConfig))
    find_profiled_steps(config)


def find_profiled_steps(config: SSDMXNetConfig) -> range:
    """Return the steps to trace, counted from 1.

    Raises:
        FlagError: only one of --profile_start and --profile_stop is given, they are no range, or --profile is another.
    """
    first, last = config.report.profile_start, config.report.profile_stop
    steps = flag_rules.parse_step_range(config.report.profile)
    if first is None and last is None:
        return steps
    if first is None or last is None:
        raise flag_error("--profile_start and --profile_stop: give both or none")
    if not 1 <= first <= last:
        raise flag_error(f"--profile_start {first}, --profile_stop {last}: must be at least 1, the smaller one first")
    if steps and steps != range(first, last + 1):
        raise flag_error(
            f"--profile {config.report.profile}: contradicts --profile_start {first} and --profile_stop {last}",
            "leave one of them out",
        )
    return range(first, last + 1)


def _check_data(run: RunFlags, data: DataFlags) -> None:
    """Check that images come from one place: files, records, or nowhere."""
    if data.use_tfrecord and data.data_dir is None:
        raise flag_error("--use_tfrecord: needs --data_dir, the folder of records", "give --data_dir")
    given = {
        "--coco_root": data.coco_root is not None,
        "--data_dir": data.data_dir is not None,
        "--use_fake_data": data.use_fake_data,
    }
    named = [flag for flag, is_given in given.items() if is_given]
    if len(named) > 1:
        raise flag_error(f"{' and '.join(named)}: contradict each other", "leave one of them out")
    if run.mode == "eval" and data.use_fake_data:
        raise flag_error(
            "--mode eval: random images have no truth to score", "give --coco_root or --data_dir, not --use_fake_data"
        )
    sized = run.mode == "plan" and data.num_examples_per_epoch is not None
    # The images of a submission are named by a variable, which gaudi-run reads.
    if run.mode not in USES and not (named or sized or run.submission):
        raise flag_error(
            f"--mode {run.mode}: needs images: --coco_root, or --data_dir, a folder of records, "
            "which `gaudi-datasets convert` makes, or --use_fake_data"
        )


def _check_modes(config: SSDMXNetConfig) -> None:
    """Check the flags that are for some modes only."""
    run, use = config.run, config.use
    if run.mode == "predict" and not use.inference:
        raise flag_error("--mode predict: needs --inference with images, videos or a folder")
    if run.mode != "predict" and use.inference:
        raise flag_error(f"--inference {use.inference[0]}: is for --mode predict; mode is {run.mode}")
    if run.json and run.mode not in ("plan", "parity"):
        raise flag_error(f"--json: is for --mode plan and parity; mode is {run.mode}")
    named = ("newest", "best", "all") if run.mode == "eval" else ("newest", "best")
    if run.checkpoint not in named and not run.checkpoint.isdecimal():
        raise flag_error(f"--checkpoint {run.checkpoint}: must be {', '.join(named)} or a step, with --mode {run.mode}")
    if run.checkpoint != "newest" and run.mode not in ("eval", "parity", *USES):
        which = "eval, predict, export and parity"
        raise flag_error(f"--checkpoint {run.checkpoint}: is for --mode {which}; mode is {run.mode}")
    if run.clean and run.mode not in (*TRAINING, "plan"):
        raise flag_error(f"--clean: is for --mode train, train_val and plan; mode is {run.mode}")
    for_training = {"--dry_run": run.dry_run, "--submission": run.submission, "--mlperf": config.mlperf.mlperf}
    for flag, is_given in for_training.items():
        if is_given and run.mode not in TRAINING:
            raise flag_error(f"{flag}: is for --mode train and train_val; mode is {run.mode}")
    if run.clean and run.dry_run:
        raise flag_error("--clean: contradicts --dry_run, which writes and removes nothing", "leave one of them out")


def _check_mlperf(config: SSDMXNetConfig) -> None:
    """Check that what MLPerf's log says is given only where it is written, as by a submission."""
    for entry in fields(MLPerfFlags):
        is_given = getattr(config.mlperf, entry.name) != entry.default
        if is_given and not (config.mlperf.mlperf or config.run.submission):
            raise flag_error(f"--{entry.name}: is for the log of --mlperf", "give --mlperf too, or leave it out")


def _check_processes(flags: MXNetHorovodFlags) -> None:
    if is_elastic(os.environ):
        raise flag_error("--np: ssd_mxnet_train cannot train while hosts come and go", "start it by gaudi-run --np N")
    for name, value in (("hvd_workers", flags.hvd_workers), ("num_workers_per_hls", flags.num_workers_per_hls)):
        if value > 1 and not flags.use_horovod:
            raise flag_error(
                f"--{name}: is for processes that train together", "give --use_horovod too, or leave it out"
            )
