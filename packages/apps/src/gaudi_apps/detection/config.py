"""Flags of ssd_train as frozen dataclasses, by the names, short forms and defaults of the original program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

from tyro.conf import FlagCreatePairsOff, arg

from gaudi_apps.cli.flag_rules import check_bounds, fixed, list_per_side, per_rank, resume_safe
from gaudi_apps.cli.flags import DistributionFlags, ParityFlags, check_distribution, check_parity
from gaudi_apps.runtime.profiler import parse_step_range
from gaudi_apps.runtime.settings import ThreadFlag
from gaudi_datasets.arguments import ON, FormerFlag
from gaudi_datasets.errors import FlagError

Switch = FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class ImageFlags:
    """Images for --mode predict, and --mode export."""

    inference: Annotated[tuple[str, ...], resume_safe()] = ()
    """Images, videos, folders, or patterns such as 'in/*.jpg', to predict on, or to check an export on."""
    score_threshold: Annotated[float, resume_safe(minimum=0, maximum=1)] = 0.3
    """Least score of a detection that is drawn and listed."""
    strict: Annotated[Switch, resume_safe()] = False
    """End with the first file that cannot be read, in place of naming and skipping it."""
    output_dir: Annotated[str | None, resume_safe()] = None
    """Folder of the results; predictions or export in --model_dir when not given."""


Mode: TypeAlias = Literal["train", "eval", "predict", "export", "plan", "verify-resume", "parity"]

USING = ("predict", "export")  # modes that need no training or validation images


@dataclass(frozen=True)
class RunFlags:
    """What to do, and where its results go."""

    mode: Annotated[Mode, resume_safe(per_command=True)] = "train"
    """eval: score checkpoints; predict: draw detections; export: for deployment; plan: print what train would
    do; verify-resume: prove on a few steps of this configuration that a killed run ends as an uninterrupted one;
    parity: compute the first steps in two ways, and name the first tensor that differs."""
    model_dir: Annotated[str, resume_safe(per_side=True)] = "runs/ssd_train"
    """Folder of checkpoints, curves, images and figures; training continues from its newest checkpoint."""
    clean: Annotated[Switch, resume_safe(per_command=True)] = False
    """Remove the run in --model_dir first: what it wrote, and nothing else."""
    checkpoint: Annotated[str | None, resume_safe(per_side=True)] = None
    """Which one eval, predict, export and parity take: newest, best, a step, or for eval all, in the order of steps;
    by default all for eval, and the newest else."""
    epochs: Annotated[float, arg(aliases=["-e"]), resume_safe(length="epochs", above=0)] = 50.0
    """Passes over the training images."""
    steps: Annotated[int, arg(aliases=["-s"]), resume_safe(length="steps", minimum=0)] = 0
    """Steps in all, in place of --epochs; 0: as many as --epochs needs."""
    kills: Annotated[int, resume_safe()] = 3
    """How often verify-resume kills its run."""
    seed: Annotated[int, fixed(minimum=0)] = 0
    """Where weights, data order and augmentation start from."""
    deterministic: Annotated[Switch, fixed(per_side=True, short_run=True)] = False
    """Same bits at every run on the same machine; slower."""
    config: Annotated[str | None, per_rank(per_command=True)] = None
    """YAML file of flags (name: value); flags of the command line win."""
    json: Annotated[Switch, resume_safe(per_command=True)] = False
    """Print the plan, or what parity found, as JSON."""
    debug: Annotated[Switch, per_rank(per_command=True)] = False
    """Show a traceback with an error."""


@dataclass(frozen=True)
class DataFlags:
    """Training and validation images."""

    data_dir: Annotated[str | None, per_rank()] = None
    """Folder of records (train-*, val-*) made by gaudi-datasets."""
    train_annotations: Annotated[str | None, per_rank()] = None
    """COCO annotation file of the training images, read without records; needs --train_images."""
    train_images: Annotated[str | None, per_rank()] = None
    """Folder of the images that --train_annotations names."""
    val_annotations: Annotated[str | None, per_rank()] = None
    """COCO annotation file of the validation images; needs --val_images."""
    val_images: Annotated[str | None, per_rank()] = None
    """Folder of the images that --val_annotations names."""
    use_fake_data: Annotated[Switch, arg(aliases=["-f"]), fixed()] = False
    """Random images in place of records, to measure speed."""
    static: Annotated[Switch, fixed()] = False
    """--data_dir holds static batches, worker_R/, made by gaudi-datasets make-static-batches."""
    batch_size: Annotated[int, arg(aliases=["-b"]), fixed(sets_batch=True, minimum=1)] = 128
    """Images a step: of one process; of all with --distribution_strategy."""
    num_examples_per_epoch: Annotated[int, fixed(minimum=0)] = 0
    """Training images an epoch; 0: as many as the records hold (117266 with --use_fake_data)."""
    eval_samples: Annotated[int, resume_safe(minimum=0)] = 0
    """Validation images to evaluate; 0: all. Fewer are the first ones, and the result says how many of how many."""
    flip_probability: Annotated[float, fixed(minimum=0, maximum=1)] = 0.5
    """Share of the training images that are mirrored; 0 where left and right matter, as in text."""
    cache: Annotated[Literal["auto", "off"], resume_safe()] = "auto"
    """auto: keep encoded training images in memory, if all of them fit into half of what is free."""
    num_parallel_calls: Annotated[int, per_rank(minimum=1)] = 64
    """Images decoded and augmented at once."""
    threadpool_size: Annotated[int, per_rank(minimum=0)] = 0
    """Threads that do it; 0: as many as processors."""


@dataclass(frozen=True)
class WeightFlags:
    """Where weights come from, and their average."""

    resnet_checkpoint: Annotated[str | None, fixed(per_side=True)] = None
    """Weights to begin with: TensorFlow checkpoint, torchvision .pth, .npz, .pickle, .safetensors, or a checkpoint of
    this program; what fits is loaded, and the rest is named."""
    ema_decay: Annotated[float, fixed(minimum=0, below=1)] = 0.0
    """Average the weights over the steps with this decay, as .9998, and use the average; 0: no average."""


@dataclass(frozen=True)
class EvaluationFlags:
    """Scoring during and after training."""

    eval_epochs: Annotated[float, resume_safe(minimum=0, short_run=0.0)] = 0.0
    """Epochs between two evaluations during training; 0: none. The best checkpoint by AP is kept."""
    target_ap: Annotated[float, resume_safe(minimum=0, maximum=1, short_run=0.0)] = 0.0
    """End training when an evaluation reaches this AP, in 0..1; 0: no target."""
    patience: Annotated[int, resume_safe(minimum=0, short_run=0)] = 0
    """End training after so many evaluations without a better AP; 0: never."""
    no_evaluate: Annotated[Switch, resume_safe(short_run=True)] = False
    """Do not evaluate after training."""


@dataclass(frozen=True)
class UseFlags(ImageFlags):
    """Images for --mode predict, and --mode export."""

    export_format: Annotated[tuple[Literal["saved_model", "onnx", "tflite", "safetensors"], ...], resume_safe()] = (
        "saved_model",
    )
    """One or more formats; onnx needs the extra gaudi-apps[export]."""


@dataclass(frozen=True)
class ScheduleFlags:
    """Learning rate and weight decay. The rate of a run is base_lr times the images of a step / 32."""

    base_lr: Annotated[float, fixed(above=0, finite=False)] = 3e-3
    """Learning rate of 32 images a step."""
    lr_schedule: Annotated[Literal["piecewise", "cosine"], fixed()] = "piecewise"
    """After warm-up: piecewise, times .1 and .01 from the two --lr_drop_epochs; cosine, down to 0 at the end."""
    lr_warmup_epoch: Annotated[float, fixed(minimum=0)] = 5.0
    """Epochs of linear warm-up."""
    lr_warmup_steps: Annotated[int, fixed(minimum=0)] = 0
    """Steps of linear warm-up, in place of --lr_warmup_epoch; 0: from the epochs."""
    lr_drop_epochs: Annotated[tuple[float, float], fixed()] = (40.0, 50.0)
    """Epochs of the two drops, before --k stretches them."""
    k: Annotated[int, fixed()] = 0
    """Stretches the drop epochs by 1 + k/10."""
    weight_decay: Annotated[float, fixed(minimum=0)] = 5e-4
    """Times the sum of half squares of all trainable variables, in the gradient."""


@dataclass(frozen=True)
class DeviceFlags:
    """Device, precision and processors."""

    device: Annotated[Literal["auto", "cpu", "gpu", "hpu"], resume_safe(per_side=True)] = "auto"
    """auto: hpu, else gpu, else cpu."""
    no_hpu: Annotated[Switch, resume_safe()] = False
    """Do not use Gaudi even where there is one."""
    dtype: Annotated[Literal["bf16", "fp32"], arg(aliases=["-d"]), fixed(per_side=True)] = "bf16"
    """Precision of the computation; weights are float32 in both."""
    max_cpus: Annotated[int, per_rank(minimum=0)] = 16
    """Processors the program may use at most; 0: all."""
    recipe_cache: Annotated[str | None, per_rank()] = None
    """Folder of compiled graphs on Gaudi, kept between runs; TF_RECIPE_CACHE_PATH of the environment wins."""
    check_static_shapes: Annotated[Switch, resume_safe()] = False
    """End, naming the tensor, where a training step has a shape that is not static or is traced again; always on
    Gaudi, which compiles anew for every shape."""
    cross_entropy: Annotated[Literal["auto", "mme", "plain"], resume_safe(per_side=True)] = "auto"
    """Form of the loss's cross entropy: mme, sums on the matrix engine; plain, a softmax; auto: mme on Gaudi."""
    threads: Annotated[ThreadFlag, per_rank(minimum=0)] = 0
    """Threads of TensorFlow within and between operations; 0: as many as processors; auto: the fastest on this machine,
    measured once, for some seconds."""


@dataclass(frozen=True)
class ReportFlags:
    """Log, summaries and checkpoints."""

    log_step_count_steps: Annotated[int, arg(aliases=["-v"]), resume_safe(minimum=1, short_run=1)] = 1
    """Steps between two reports of loss and speed."""
    save_summary_steps: Annotated[int, resume_safe(minimum=1)] = 1
    """Steps between two points in TensorBoard."""
    save_checkpoints_epochs: Annotated[float, arg(aliases=["-c"]), resume_safe(above=0)] = 5.0
    """Epochs between two checkpoints."""
    save_checkpoints_steps: Annotated[int, resume_safe(minimum=0, short_run=1)] = 0
    """Steps between two checkpoints, in place of --save_checkpoints_epochs; 0: from the epochs."""
    save_checkpoints_minutes: Annotated[float, resume_safe(minimum=0)] = 0.0
    """Minutes between two checkpoints, besides; 0: none."""
    keep_ckpt_max: Annotated[int, resume_safe(minimum=1, short_run=2)] = 20
    """Checkpoints to keep besides the best; older ones are removed."""
    profile: Annotated[str, resume_safe(short_run="0,0")] = "0,0"
    """Steps a,b: trace them, both included, for TensorBoard's profiler; 0,0: none."""
    vis_dataloader: Annotated[Switch, resume_safe(short_run=False)] = False
    """Draw what the network sees of the first training images, with the boxes that the targets stand for."""


@dataclass(frozen=True)
class SSDConfig:
    """Everything a run of ssd_train depends on."""

    run: RunFlags = field(default_factory=RunFlags)
    data: DataFlags = field(default_factory=DataFlags)
    weights: WeightFlags = field(default_factory=WeightFlags)
    schedule: ScheduleFlags = field(default_factory=ScheduleFlags)
    evaluation: EvaluationFlags = field(default_factory=EvaluationFlags)
    use: UseFlags = field(default_factory=UseFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)
    distribution: DistributionFlags = field(default_factory=DistributionFlags)
    report: ReportFlags = field(default_factory=ReportFlags)
    parity: ParityFlags = field(default_factory=ParityFlags)


def find_mode(config: SSDConfig) -> Mode:
    """Return what is done: --inference alone predicts, as in the original."""
    return "predict" if config.run.mode == "train" and config.use.inference else config.run.mode


def find_checkpoint(run: RunFlags) -> str:
    """Return which checkpoint is taken: as the flag says, else as in the original, whose eval scores all."""
    return run.checkpoint or ("all" if run.mode == "eval" else "newest")


def validate(config: SSDConfig) -> None:
    """Raise FlagError for the first flag whose value breaks a rule of its own or of another flag."""
    config = replace(config, run=replace(config.run, mode=find_mode(config)))
    check_bounds(config)
    _check_schedule(config.schedule)
    _check_inputs(config)
    check_distribution(config.distribution)
    check_parity(config.parity, config.run.mode, list_per_side(SSDConfig))
    if config.device.no_hpu and config.device.device == "hpu":
        raise FlagError("--no_hpu: contradicts --device hpu; leave one of them out")


def _check_schedule(schedule: ScheduleFlags) -> None:
    first, second = schedule.lr_drop_epochs
    if not (0 < first <= second < math.inf):
        raise FlagError(f"--lr_drop_epochs {first:g} {second:g}: must be above 0, the smaller epoch first")
    if schedule.k <= -10:
        raise FlagError(f"--k {schedule.k}: 1 + k/10 must stay above 0; give -9 or more")


def _check_inputs(config: SSDConfig) -> None:
    """What each mode needs to read, and what only some modes read."""
    run, data, use = config.run, config.data, config.use
    _check_data(run, data)
    if run.mode == "predict" and not use.inference:
        raise FlagError("--mode predict: needs --inference with images, videos or a folder")
    if run.mode not in USING and use.inference:
        raise FlagError(f"--inference {use.inference[0]}: is for --mode predict and export; mode is {run.mode}")
    if run.json and run.mode not in ("plan", "parity"):
        raise FlagError(f"--json: is for --mode plan and parity; mode is {run.mode}")
    _check_checkpoint(run)
    _check_evaluation(config)
    parse_step_range(config.report.profile)


def _check_data(run: RunFlags, data: DataFlags) -> None:
    """Images come from one place: records, COCO files, or nowhere."""
    for split in ("train", "val"):
        annotations, images = (getattr(data, f"{split}_{what}") for what in ("annotations", "images"))
        if (annotations is None) != (images is None):
            raise FlagError(f"--{split}_annotations and --{split}_images: give both or none")
    has_files = data.train_annotations is not None or data.val_annotations is not None
    if data.data_dir is not None and has_files:
        raise FlagError(f"--data_dir {data.data_dir}: contradicts annotation files; leave one of them out")
    if data.use_fake_data and (data.data_dir is not None or has_files):
        named = f"--data_dir {data.data_dir}" if data.data_dir is not None else "annotation files"
        raise FlagError(f"--use_fake_data: contradicts {named}; leave one of them out")
    if run.mode == "eval" and data.use_fake_data:
        raise FlagError("--mode eval: random images have no truth to score; give --data_dir, not --use_fake_data")
    if data.static and not data.data_dir:
        raise FlagError("--static: needs --data_dir with static batches; gaudi-datasets make-static-batches makes them")
    if run.mode in USING:
        return
    split = "val" if run.mode == "eval" else "train"
    annotations = data.val_annotations if split == "val" else data.train_annotations
    sized = run.mode == "plan" and data.num_examples_per_epoch > 0
    if not (data.data_dir or annotations or data.use_fake_data or sized):
        raise FlagError(
            f"--mode {run.mode}: needs --data_dir, a folder of records, which `gaudi-datasets convert coco` makes,"
            f" or --{split}_annotations with --{split}_images"
        )


def _check_checkpoint(run: RunFlags) -> None:
    if run.mode == "verify-resume" and not 1 <= run.kills < (run.steps or math.inf):
        raise FlagError(f"--kills {run.kills}: must be at least 1, and below --steps")
    named = ("newest", "best", "all") if run.mode == "eval" else ("newest", "best")
    which = find_checkpoint(run)
    if which not in named and not which.isdecimal():
        raise FlagError(f"--checkpoint {which}: must be {', '.join(named)} or a step, with --mode {run.mode}")
    if which != "newest" and run.mode not in (*USING, "eval", "parity"):
        raise FlagError(f"--checkpoint {which}: is for --mode eval, predict, export and parity; mode is {run.mode}")
    if run.clean and run.mode != "train":
        raise FlagError(f"--clean: is for --mode train; mode is {run.mode}")


def _check_evaluation(config: SSDConfig) -> None:
    """Scores during training need images that have a truth, and what depends on scores needs them."""
    flags = config.evaluation
    if not flags.eval_epochs and (flags.target_ap or flags.patience):
        raise FlagError("--target_ap and --patience: need --eval_epochs, which says how often to evaluate")
    if flags.eval_epochs and (config.data.use_fake_data or config.data.static):
        raise FlagError("--eval_epochs: needs records with a truth; random and static batches have none")


FORMER_FLAGS = (
    FormerFlag(
        "--use_cocoeval_cc",
        "the scorer is always a fast one, with pycocotools' figures; leave it out",
        meant=(ON,),
    ),
)
