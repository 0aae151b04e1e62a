"""Flags of ssd_mxnet_train as frozen dataclasses, by the names, short forms and defaults of the submission's program.

`gaudi_apps.ssd_mxnet.checks` has the rules about their values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from tyro.conf import FlagCreatePairsOff, arg

from gaudi_apps.parity.flags import ParityFlags
from gaudi_apps.ssd.picture_flags import PictureFlags
from gaudi_apps.ssd_mxnet.choices import choose_among

Switch = FlagCreatePairsOff[bool]
Mode = Annotated[str, choose_among("train_val", "train", "val", "predict", "export", "plan", "parity")]


@dataclass(frozen=True)
class RunFlags:
    """What to do, and where its results go."""

    mode: Mode = "train_val"
    """train_val: train, and validate at some epochs; train: without that; val: score checkpoints; predict: draw
    detections; export: write the weights for either framework; plan: print what train_val would do;
    parity: compute the first steps in two ways, and name the first tensor that differs."""
    model_dir: str = "runs/ssd_mxnet_train"
    """Folder of checkpoints, curves, pictures and figures; training continues from its newest checkpoint."""
    clean: Switch = False
    """Remove the run in --model_dir first: what it wrote, and nothing else."""
    dry_run: Switch = False
    """Do all that train does up to its first step, and this step too, and write nothing."""
    submission: Switch = False
    """Run the submission's experiments by its scripts' variables (SYSTEM, ...), as does gaudi-run --submission."""
    checkpoint: str = "newest"
    """Which one val, predict, export and parity take: newest, best, a step, or for val all, in the order of steps."""
    epochs: int = 80
    """Passes over the training images."""
    steps: int = 0
    """Steps in all, in place of --epochs; 0: as many as --epochs needs."""
    seed: int = 0
    """Where weights, data order and augmentation start from."""
    config: str | None = None
    """YAML file of flags (name: value); flags of the command line win."""
    json: Switch = False
    """Print the plan, or what parity found, as JSON."""
    debug: Switch = False
    """Show a traceback with an error."""


@dataclass(frozen=True)
class DataFlags:
    """Training and validation images."""

    dataset: Annotated[str, choose_among("coco2017", "plain")] = "coco2017"
    """Names in --coco_root: annotations/instances_train2017.json and train2017/, or without the year."""
    coco_root: str | None = None
    """Folder of annotations and image files."""
    use_tfrecord: Switch = False
    """Read the records in --tfrecord_root in place of --coco_root."""
    tfrecord_root: str | None = None
    """Folder of records (train-*, val-*) made by gaudi-datasets."""
    synthetic: Switch = False
    """Random images, to measure speed."""
    dataset_size: int | None = None
    """Training images an epoch; none: as many as there are."""
    eval_dataset_size: int | None = None
    """Validation images to score, the first ones; none: all."""
    batch_size: int = 32
    """Images of a process in a step."""
    eval_batch_size: int | None = None
    """Images of a process in a step of validation; none: --batch_size."""
    flip_probability: float = 0.5
    """Share of the training images that are mirrored; 0 where left and right matter, as in text."""
    dali_workers: Annotated[int, arg(aliases=["-j"])] = 6
    """Threads that decode and augment."""


@dataclass(frozen=True)
class NetworkFlags:
    """The network, its precision, and where its weights come from."""

    precision: Annotated[str, choose_among("auto", "fp32", "bf16", "fp16", "amp")] = "auto"
    """auto: fp16 on a GPU, else fp32; amp: fp16 on a GPU, else bf16. Weights are float32 in all."""
    fp16_loss_scale: float = 128.0
    """The loss is multiplied by it before the backward pass in fp16."""
    data_layout: Annotated[str, choose_among("auto", "NHWC", "NCHW")] = "auto"
    """auto: NHWC on a GPU, else NCHW."""
    pretrained_backbone: str | None = None
    """Weights to begin with: torchvision .pth, .pickle, .npz, .safetensors, or a checkpoint of this program or of
    ssd_train; what fits is loaded, and the rest is named."""


@dataclass(frozen=True)
class DeviceFlags:
    """Device."""

    device: Literal["auto", "cpu", "gpu"] = "auto"
    """auto: gpu, else cpu."""

    no_hpu: ClassVar[bool] = True  # MXNet never had one


@dataclass(frozen=True)
class ScheduleFlags:
    """Learning rate and optimizer. The rate of a run is 2.5e-3 max(1, round(lr / 2.5e-3 * images of a step / 32))."""

    system: str | None = None
    """DSS8440, C4140, 2xC4140 or 4xC4140: batch size, processes, warm-up, rate, weight decay and threads of the
    submission on it, where no other flag gives them."""
    lr: float | None = None
    """Learning rate of 32 images a step; none: 2.5e-3."""
    lr_decay_factor: float = 0.1
    """The rate is multiplied by it at each of --lr_decay_epochs."""
    lr_decay_epochs: tuple[int, ...] = (44, 55)
    """Epochs after which it is."""
    lr_warmup_epochs: float | None = None
    """Epochs of linear warm-up; none: no warm-up."""
    lr_warmup_factor: float = 0.0
    """Warm-up begins at lr (1 - 1 / 2 ** factor)."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 5e-4
    """Times the sum of half squares of all trainable variables, in the gradient."""


@dataclass(frozen=True)
class ValidationFlags:
    """Scoring during and after training."""

    val_epochs: tuple[int, ...] = (40, 50, 55, 60, 65, 70, 75, 80)
    """Epochs after which train_val validates."""
    val_interval: int | None = None
    """Epochs between two validations, in place of --val_epochs."""
    async_val: Switch = False
    """Validate in a process of its own while training goes on."""
    target_map: Annotated[float, arg(aliases=["-t"])] = 23.0
    """End training when a validation reaches this AP, in percent; 0: no target."""
    nms_valid_thresh: float = 0.0
    """Only scores above it count as detections."""
    nms_overlap_thresh: float = 0.5
    """A box that overlaps a better one of its class by this IoU or more is dropped."""
    nms_topk: int = 200
    """How many of the best scores of a class are looked at."""
    post_nms: int = 200
    """Detections of an image at most."""


@dataclass(frozen=True)
class HorovodFlags:
    """Several processes that train together by Horovod, one for each device.

    By its attributes it is `gaudi_apps.distribution_flags.DistributionFlags` without tf.distribute.
    """

    use_horovod: Annotated[Switch, arg(aliases=["-hvd"])] = False
    """Train together; so do, without it, processes that were launched together."""
    hvd_workers: int = 0
    """Processes in all, which are started through gaudi-run where none were launched; 0: those that were launched."""
    num_workers_per_hls: int = 0
    """Processes on each machine of MULTI_HLS_IPS, or on this one, started through gaudi-run where none were
    launched; 0: 8 with MULTI_HLS_IPS, else as --hvd_workers says."""
    bn_group: Literal[1, 2, 4, 8, 16] = 1
    """Batch norm over the images of groups of so many processes."""
    gradient_predivide_factor: float = 1.0
    """Gradients are divided by it before they are summed over the processes, and by the rest after."""
    horovod_num_groups: int = 1
    """In how many groups gradients travel; 0: each by itself."""
    horovod_hierarchical_allreduce: Switch = False
    """Within each machine first, then between machines."""

    distribution_strategy: ClassVar[str] = "off"
    kubernetes_run: ClassVar[bool] = False
    num_gpus: ClassVar[int] = 0
    worker_hosts: ClassVar[str | None] = None
    global_batch_size: ClassVar[int] = 0
    gradient_compression: ClassVar[str] = "none"
    fusion_threshold_mb: ClassVar[int | None] = None

    @property
    def has_engine(self) -> bool:
        """Whether processes are to train together."""
        return self.use_horovod

    @property
    def distributed_bn(self) -> bool:
        """Whether batch norm goes over several processes."""
        return self.bn_group > 1


@dataclass(frozen=True)
class ReportFlags:
    """Log and checkpoints."""

    log_interval: int = 100
    """Steps between two reports of loss and speed."""
    save_interval: int | None = None
    """Epochs between two checkpoints; none: each epoch."""
    save_checkpoints_steps: int = 0
    """Steps between two checkpoints, in place of --save_interval; 0: from the epochs."""
    save_checkpoints_minutes: float = 0.0
    """Minutes between two checkpoints, besides; 0: none."""
    keep_ckpt_max: int = 20
    """Checkpoints to keep besides the best; older ones are removed."""
    profile_start: int | None = None
    """First step to trace, counted from 1."""
    profile_stop: int | None = None
    """Last step to trace."""
    vis_dataloader: Switch = False
    """Draw what the network sees of the first training images, with the boxes that the targets stand for."""


@dataclass(frozen=True)
class MLPerfFlags:
    """A log as MLPerf wants it, on standard output and as mlperf.log in --model_dir; needs gaudi-apps[mlperf]."""

    mlperf: Switch = False
    """Write it."""
    mlperf_org: str = "none"
    """Who submits."""
    mlperf_platform: str = "none"
    """On what."""
    mlperf_division: Literal["open", "closed"] = "open"
    """In which division."""
    mlperf_status: Literal["research", "preview", "onprem", "cloud"] = "research"
    """In which category."""


@dataclass(frozen=True)
class SSDMXNetConfig:
    """Everything a run of ssd_mxnet_train depends on."""

    run: RunFlags = field(default_factory=RunFlags)
    data: DataFlags = field(default_factory=DataFlags)
    network: NetworkFlags = field(default_factory=NetworkFlags)
    schedule: ScheduleFlags = field(default_factory=ScheduleFlags)
    validation: ValidationFlags = field(default_factory=ValidationFlags)
    use: PictureFlags = field(default_factory=PictureFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)
    distribution: HorovodFlags = field(default_factory=HorovodFlags)
    report: ReportFlags = field(default_factory=ReportFlags)
    mlperf: MLPerfFlags = field(default_factory=MLPerfFlags)
    parity: ParityFlags = field(default_factory=ParityFlags)
