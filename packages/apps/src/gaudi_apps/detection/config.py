"""Flags of ssd_train as frozen dataclasses, by the names, short forms and defaults of the original program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from importlib import util
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from tyro.conf import arg

from gaudi_apps.cli import flag_rules, flags
from gaudi_apps.cli.flag_rules import Switch, check_bounds, fixed, per_rank, require_alone, resume_safe
from gaudi_apps.cli.flags import (
    NOTHING_TO_VALIDATE,
    USING,
    DistributionFlags,
    ParityFlags,
    RecipeFlags,
    ScalingFlags,
    UseFlags,
    check_modes,
)
from gaudi_apps.runtime.settings import SMALLEST_TILE, ThreadFlag
from gaudi_apps.training.recipe import open_once
from gaudi_datasets.arguments import ON, FormerFlag
from gaudi_datasets.errors import FlagError, MissingExtraError

if TYPE_CHECKING:
    from gaudi_datasets.detection.layouts import DetectionData

# Of the training images of COCO 2017 that have boxes.
COCO_TRAIN_IMAGES, COCO_CLASSES = 117266, 80

SaveFlag: TypeAlias = Literal["images", "json", "txt", "csv", "crops"]
TileFlag: TypeAlias = Literal["off", "auto"] | int
# Of the two programs that train detectors.
WeightDecay = Annotated[
    float,
    fixed(minimum=0),
    arg(help="Factor of the weight decay: half the sum of the squares of all trainable variables, in the gradient."),
]

Mode: TypeAlias = Literal["train", "eval", "predict", "export", "plan", "verify-resume", "parity"]


@dataclass(frozen=True)
class ImageFlags(UseFlags):
    """Images for --mode predict, and --mode export."""

    score_threshold: Annotated[float, resume_safe(minimum=0, maximum=1)] = 0.3
    """Minimum score of a detection to draw and list it."""
    max_boxes: Annotated[int, resume_safe(minimum=1)] = 50
    """Maximum number of boxes to draw in an image, the best ones; the number of the others is written into it."""
    classes: Annotated[tuple[str, ...], resume_safe()] = ()
    """Classes to detect, by name or by category id; by default all."""
    agnostic_nms: Annotated[Switch, resume_safe()] = False
    """Keep only the best of boxes that overlap by half or more, whatever their classes."""
    tiles: Annotated[TileFlag, resume_safe(minimum=SMALLEST_TILE)] = "off"
    """Look at photos larger than this number of pixels in windows of this side, too, for small objects; auto: twice the
    side of the network's input; off: as a whole only."""
    track: Annotated[Switch, resume_safe()] = False
    """Number the objects of a video, the same object by the same number in all frames; needs the extra
    gaudi-apps[supervision]."""
    save: Annotated[tuple[SaveFlag, ...], resume_safe()] = ("images", "json")
    """Results to write. images: drawn images and videos; json: COCO results and the list of the files; txt: YOLO
    labels; csv: a table; crops: an image of each object."""


@dataclass(frozen=True)
class RunFlags(flags.TensorFlowRunFlags):
    """Mode, length of training, and folder of the results."""

    mode: Mode = "train"
    """eval: evaluate checkpoints; predict: draw detections; export: export for deployment; plan: print what train would
    do; verify-resume: check on a few steps of this configuration that a killed run ends like an uninterrupted one;
    parity: compute the first steps in two ways, and name the first tensor that differs."""
    model_dir: str = "runs/ssd_train"
    checkpoint: str | None = None
    """Checkpoint to use for eval, predict, export and parity: newest, best, a step, or, for eval, all, in the order of
    steps; by default all for eval, best for predict and export of a run by --data, otherwise newest."""
    runtime: Annotated[flags.RuntimeFlag, resume_safe(per_command=True)] = "tensorflow"
    """Runtime of --mode predict and eval: the network in TensorFlow, or the fastest export in export/ of --model_dir
    that was evaluated for the same checkpoint, without TensorFlow; auto: the fastest of all that is installed."""
    epochs: Annotated[float, arg(aliases=["-e"])] = 50.0
    steps: Annotated[int, arg(aliases=["-s"])] = 0


@dataclass(frozen=True)
class DataFlags(flags.DataFlags):
    """Training and validation images, and the weight of rare classes."""

    data_dir: Annotated[str | None, per_rank()] = None
    """Folder of records (train-*, val-*) made by gaudi-datasets, or its URL, such as s3://bucket/records."""
    train_annotations: Annotated[str | None, per_rank()] = None
    """COCO annotation file of the training images, or its URL, to read them without records; needs --train_images."""
    train_images: Annotated[str | None, per_rank()] = None
    """Folder of the images that --train_annotations names."""
    val_annotations: Annotated[str | None, per_rank()] = None
    """COCO annotation file of the validation images, or its URL; needs --val_images."""
    val_images: Annotated[str | None, per_rank()] = None
    """Folder of the images that --val_annotations names."""
    use_fake_data: Annotated[Switch, arg(aliases=["-f"]), fixed()] = False
    """Train on random images instead of records, to measure speed."""
    static: Annotated[Switch, fixed()] = False
    """Read static batches, made by gaudi-datasets make-static-batches, from worker_R/ in --data_dir."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 128
    num_examples_per_epoch: Annotated[int, fixed(minimum=0)] = 0
    """Number of training images per epoch; 0: all that the records hold (117266 with --use_fake_data)."""
    cache: Annotated[Literal["auto", "off"], resume_safe()] = "auto"
    """auto: keep encoded training images in memory if all of them fit into half of the free memory."""
    repeat_factor: Annotated[float, fixed(minimum=0, maximum=1)] = 0.0
    """Repeat images of a class that less than this share of the images has, such as .1, within an epoch: by the root of
    this share over the class's; 0: every image once. Records are read through for it."""
    class_weights: Annotated[Literal["none", "balanced"], fixed()] = "none"
    """Weights of objects in the loss of the classes. balanced: the mean number of objects of a class over the number of
    the object's, so that all classes count alike."""


@dataclass(frozen=True)
class NetworkFlags:
    """Network and initial weights. Checkpoints and exports name the network, and modes other than train and plan build
    what they name.
    """

    backbone: Annotated[
        Literal["resnet18", "resnet18_half", "resnet18_quarter", "resnet34", "resnet50"], fixed(of_network=True)
    ] = "resnet34"
    """Network up to its third stage, before the levels of the detector; --weights has to be of the same. resnet18_half,
    resnet18_quarter: ResNet-18 with a half or a quarter of the filters, in the levels, too, for trainings of minutes.
    """
    image_size: Annotated[Literal[300, 512], fixed(of_network=True)] = 300
    """Side in pixels that images are resized to. 512: a level more, 24564 default boxes for 8732, and about three times
    the work; for small objects."""
    freeze: Annotated[Literal["none", "backbone"], fixed()] = "none"
    """Part of the network to keep as --weights has it, with the statistics of its batch norms; a frozen
    backbone trains faster, for few images that look like those of its training."""
    weights: Annotated[str | None, arg(aliases=["--resnet_checkpoint"]), fixed(per_side=True)] = None
    """File of initial weights: TensorFlow checkpoint, torchvision .pth, .npz, .pickle, .safetensors, or a checkpoint of
    this program, or a URL. Weights that fit are loaded, the others are named."""
    box_voting: Annotated[Switch, fixed(of_network=True)] = False
    """Move each detected box to the mean of those of the 600 best of its class that overlap it by more than half, by
    score and overlap, and look at 400 of a class, not 200; in evaluations, predictions and exports of the run."""


@dataclass(frozen=True)
class AugmentationFlags:
    """Augmentation of the training images, besides mirroring. Each draw depends on seed, epoch and image alone."""

    zoom_in: Annotated[float, fixed(above=0, maximum=1)] = 0.3
    """Smallest side of a crop, as a share of the image's; 1: no crop is smaller than the image."""
    zoom_out: Annotated[float, fixed(minimum=1, maximum=16)] = 1.0
    """Largest side of a blank canvas that half of the images are put on before the crop, in sides of the image; 4 as in
    the SSD's paper, for small objects; 1: no canvas."""
    mosaic: Annotated[float, fixed(minimum=0, maximum=1)] = 0.0
    """Share of the images that are composed with crops of three others; 0: none."""


@dataclass(frozen=True)
class ScheduleFlags:
    """Learning rate, weight decay, and weight of a loss. The learning rate of a run is --base_lr times the global
    batch / 32.
    """

    weight_decay: WeightDecay = 5e-4
    box_weight: Annotated[float, fixed(above=0)] = 1.0
    """Factor of the loss of the boxes, beside that of the classes."""
    base_lr: Annotated[float, fixed(above=0, finite=False)] = 3e-3
    """Learning rate for 32 images per step."""
    lr_schedule: Annotated[Literal["piecewise", "cosine"], fixed()] = "piecewise"
    """Learning rate after warm-up. piecewise: times .1 and .01 from the two --lr_drop_epochs; cosine: down to 0 at the
    end."""
    warmup_epochs: Annotated[float, arg(aliases=["--lr_warmup_epoch"]), fixed(minimum=0, maximum=1e6)] = 5.0
    """Number of epochs of linear warm-up."""
    lr_warmup_steps: Annotated[int, fixed(minimum=0)] = 0
    """Number of steps of linear warm-up, instead of --warmup_epochs; 0: by --warmup_epochs."""
    lr_drop_epochs: Annotated[tuple[float, float], fixed(maximum=1e6)] = (40.0, 50.0)
    """Epochs of the two drops, before --k stretches them."""
    k: Annotated[int, fixed()] = 0
    """Stretch the drop epochs by 1 + k/10."""


@dataclass(frozen=True)
class DeviceFlags(flags.DeviceFlags):
    """Device, precision, processors and threads."""

    dtype: Annotated[Literal["bf16", "fp32"], arg(aliases=["-d"])] = "bf16"
    cross_entropy: Annotated[Literal["auto", "mme", "plain"], resume_safe(per_side=True)] = "auto"
    """Form of the cross entropy in the loss. mme: sums on the matrix engine; plain: a softmax; auto: mme on Gaudi."""
    threads: Annotated[ThreadFlag, per_rank(minimum=0)] = 0
    """Number of TensorFlow's threads within and between operations; 0: one per processor; auto: the fastest number on
    this machine, measured once, for some seconds."""
    loader_processes: Annotated[ThreadFlag, per_rank(minimum=0)] = "auto"
    """Number of processes to make training images with; 0: threads do it, at most four; auto: on a GPU or a Gaudi two
    less than --threadpool_size, if that leaves more than one, else 0."""


@dataclass(frozen=True)
class ReportFlags(flags.ReportFlags):
    """Evaluation, log, summaries and checkpoints."""

    eval_samples: flags.EvalSamples = 0
    patience: flags.Patience = 0
    eval_epochs: Annotated[float, resume_safe(minimum=0, maximum=1e6, short_run=0.0)] = 0.0
    """Epochs between two evaluations during training; 0: none. The checkpoint with the best AP is kept."""
    target: Annotated[float, arg(aliases=["--target_ap"]), resume_safe(minimum=0, maximum=1, short_run=0.0)] = 0.0
    """Stop training when an evaluation reaches this AP, in 0..1; 0: no target."""
    no_evaluate: Annotated[Switch, resume_safe(short_run=True)] = False
    """Do not evaluate after training."""
    log_steps: Annotated[int, arg(aliases=["--log_step_count_steps", "-v"])] = 1
    save_summary_steps: flags.SummarySteps = 1
    save_checkpoints_epochs: Annotated[float, arg(aliases=["-c"]), resume_safe(above=0, maximum=1e6)] = 5.0
    """Epochs between two checkpoints."""
    keep_ckpt_max: int = 20


@dataclass(frozen=True)
class SSDConfig(flags.ProgramConfig):
    """Everything a run of ssd_train depends on."""

    FORMER_WORKERS: ClassVar[int] = 8
    run: RunFlags = field(default_factory=RunFlags)
    recipe: RecipeFlags = field(default_factory=RecipeFlags)
    data: DataFlags = field(default_factory=DataFlags)
    network: NetworkFlags = field(default_factory=NetworkFlags)
    augmentation: AugmentationFlags = field(default_factory=AugmentationFlags)
    schedule: ScheduleFlags = field(default_factory=ScheduleFlags)
    use: ImageFlags = field(default_factory=ImageFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)
    distribution: DistributionFlags = field(default_factory=DistributionFlags)
    report: ReportFlags = field(default_factory=ReportFlags)
    parity: ParityFlags = field(default_factory=ParityFlags)
    scaling: ScalingFlags = field(default_factory=ScalingFlags)


def find_mode(config: SSDConfig) -> Mode:
    """Return what is done: --inference alone predicts, as in the original."""
    return "predict" if config.run.mode == "train" and config.use.inference else config.run.mode


def find_checkpoint(run: RunFlags) -> str | None:
    """Return which checkpoint is taken: as the flag says, else as in the original, whose eval scores all.

    An export is of one checkpoint, so with --runtime eval takes that of predict.
    """
    return run.checkpoint or ("all" if run.mode == "eval" and run.runtime == "tensorflow" else None)


def validate(config: SSDConfig) -> None:
    """Raise FlagError for the first flag whose value breaks a rule of its own or of another flag."""
    run = replace(config.run, mode=find_mode(config))
    first, second = config.schedule.lr_drop_epochs
    check_bounds(config)
    if not (0 < first <= second < math.inf):
        raise FlagError(
            f"--lr_drop_epochs {first:g} {second:g}: must be above 0, the smaller epoch first", flag="--lr_drop_epochs"
        )
    if (k := config.schedule.k) <= -10:
        raise FlagError(f"--k {k}: 1 + k/10 must stay above 0", flag="--k", remedy="give -9 or more")
    _check_data(run, config.data, config.recipe.data)
    _check_options(run, config)
    check_modes(config, run.mode, checkpoint=find_checkpoint(run), steps=run.steps, steps_flag="--steps")
    check_use(config.use, run.mode)
    _check_runtime(run, config)
    report = config.report
    if not report.eval_epochs and (report.target or report.patience):
        no_images = config.recipe.data is not None and report.no_evaluate
        raise FlagError(
            "--target and --patience: need --eval_epochs, which says how often to evaluate",
            flag="--target",
            remedy=NOTHING_TO_VALIDATE if no_images else None,
        )
    if report.eval_epochs and (config.data.use_fake_data or config.data.static):
        raise FlagError(
            "--eval_epochs: needs records with a truth; random and static batches have none", flag="--eval_epochs"
        )
    flag_rules.parse_step_range(config.report.profile)


def _check_runtime(run: RunFlags, config: SSDConfig) -> None:
    """Check that an export can do what is asked for: it is of one checkpoint, and computes on the CPU, in a process."""
    if run.runtime == "tensorflow":
        return
    given = f"--runtime {run.runtime}"
    if run.mode not in ("predict", "eval"):
        raise FlagError(f"{given}: is for --mode predict and eval; mode is {run.mode}", flag="--runtime")
    if run.checkpoint == "all":
        raise FlagError(
            f"--checkpoint all: an export is of one checkpoint, and {given} uses one",
            flag="--checkpoint",
            remedy="name a checkpoint, or leave out --runtime",
        )
    if config.distribution.has_engine:
        raise FlagError(f"{given}: is for one process", flag="--runtime", remedy="leave out the flags of several")
    if run.runtime != "auto" and config.device.device not in ("auto", "cpu"):
        device = f"--device {config.device.device}"
        raise FlagError(f"{device}: {given} computes on the CPU", flag="--device", remedy="leave it out")


def check_use(use: ImageFlags, mode: str) -> None:
    """Check flags that are for predictions only.

    Raises:
        FlagError: one of them is given, and the mode is another.
        MissingExtraError: --track needs supervision, which is not installed.
    """
    named = ("classes", "agnostic_nms", "tiles", "track", "max_frames", "save")
    for entry in fields(ImageFlags):
        if entry.name in named and mode != "predict" and getattr(use, entry.name) != entry.default:
            raise FlagError(f"--{entry.name}: is for --mode predict; mode is {mode}", flag=f"--{entry.name}")
    if not use.save:
        raise FlagError("--save: names nothing to write", flag="--save", remedy="give images, json, txt, csv or crops")
    if use.track and util.find_spec("supervision") is None:
        raise MissingExtraError(
            "--track: needs supervision, which is not installed",
            flag="--track",
            remedy="pip install 'gaudi-apps[supervision]'",
        )


def _check_data(run: RunFlags, data: DataFlags, found: str | None) -> None:
    """Check that images come from one place: a data set as it is, records, COCO files, or nowhere."""
    for split in ("train", "val"):
        annotations, images = (getattr(data, f"{split}_{what}") for what in ("annotations", "images"))
        if (annotations is None) != (images is None):
            raise FlagError(
                f"--{split}_annotations and --{split}_images: give both or none", flag=f"--{split}_annotations"
            )
    has_files = data.train_annotations is not None or data.val_annotations is not None
    if found is not None:
        names = ("data_dir", "train_annotations", "val_annotations", "use_fake_data", "static")
        require_alone("data", found, {name: getattr(data, name) for name in names})
        return
    if data.data_dir is not None and has_files:
        raise FlagError(
            f"--data_dir {data.data_dir}: contradicts annotation files",
            flag="--data_dir",
            remedy="leave one of them out",
        )
    if data.use_fake_data and (data.data_dir is not None or has_files):
        named = f"--data_dir {data.data_dir}" if data.data_dir is not None else "annotation files"
        raise FlagError(f"--use_fake_data: contradicts {named}", flag="--use_fake_data", remedy="leave one of them out")
    if run.mode == "eval" and data.use_fake_data:
        raise FlagError(
            "--mode eval: random images have no truth to score",
            flag="--mode",
            remedy="give --data_dir, not --use_fake_data",
        )
    if data.static and not data.data_dir:
        raise FlagError(
            "--static: needs --data_dir with static batches; gaudi-datasets make-static-batches makes them",
            flag="--static",
        )
    if run.mode in USING:
        return
    split = "val" if run.mode == "eval" else "train"
    annotations = data.val_annotations if split == "val" else data.train_annotations
    sized = run.mode == "plan" and data.num_examples_per_epoch > 0
    if not (data.data_dir or annotations or data.use_fake_data or sized):
        raise FlagError(
            f"--mode {run.mode}: needs --data, a folder or YAML file of images with boxes, or --data_dir, a folder of"
            f" records, or --{split}_annotations with --{split}_images",
            flag="--mode",
        )


def _check_options(run: RunFlags, config: SSDConfig) -> None:
    """Check that what is frozen was trained before, and that there are objects to count."""
    if run.mode in (*USING, "eval"):
        return
    data = config.data
    if config.network.freeze == "backbone" and config.network.weights is None and not data.use_fake_data:
        raise FlagError(
            "--freeze backbone: keeps random weights without --weights",
            flag="--freeze",
            remedy="give the weights of the backbone",
        )
    given = [("--repeat_factor", data.repeat_factor > 0), ("--class_weights", data.class_weights != "none")]
    given.append(("--loader_processes", config.device.loader_processes not in (0, "auto")))
    drawn, plain = config.augmentation, AugmentationFlags()
    given += [(f"--{each.name}", getattr(drawn, each.name) != getattr(plain, each.name)) for each in fields(plain)]
    for flag, is_given in given:
        if is_given and (data.use_fake_data or data.static):
            kind = "static batches, which are made already" if data.static else "random images"
            raise FlagError(f"{flag}: has no effect on {kind}", flag=flag, remedy="leave one of the two out")


def open_found(config: SSDConfig) -> DetectionData:
    """Open the data set of --data, see `gaudi_apps.training.recipe.open_once`."""
    from gaudi_datasets.detection.layouts import open_data

    flags, skips = config.recipe, config.data.on_bad_image
    found: DetectionData = open_once(open_data, flags.data or "", flags.val_share, config.run.seed, on_bad_image=skips)
    return found


FORMER_FLAGS = (
    FormerFlag(
        "--use_cocoeval_cc", "the scorer is always a fast one, with pycocotools' figures; leave it out", meant=(ON,)
    ),
)
