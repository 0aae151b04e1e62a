"""Flags that resnet_train and resnext_train share, the TrainConfig that they make, and flags of both originals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from tyro.conf import arg

from gaudi_apps.cli import flag_rules, flags
from gaudi_apps.cli.flag_rules import Switch, check_bounds, fixed, per_rank, require_alone, resume_safe
from gaudi_apps.cli.flags import USING, DistributionFlags, ParityFlags, RecipeFlags, ScalingFlags, check_modes
from gaudi_apps.runtime.errors import flag_error
from gaudi_apps.runtime.settings import Distribution, RunSettings, ThreadFlag, make_device_settings, make_run_settings
from gaudi_datasets.arguments import OFF, ON, FormerFlag

IMAGENET_TRAIN_IMAGES = 1281167
IMAGENET_CLASSES = 1000
PROBABILITIES = "probabilities"  # the output of an export
_PRUNING = ("pruning_method", ("polynomial_decay",))
LISTED = 5  # classes of an image that are listed at most, and that top-5 accuracy counts

RateKind = Literal["piecewise", "polynomial", "constant", "cosine", "cyclical"]
OptimizerKind = Literal["SGD", "LARS", "Adam"]
MomentumForm = Literal["keras", "tensorflow1"]
DecayForm = Literal["l2", "half_squares"]
NumberKind = Literal["fp32", "bf16"]
GroupedForm = Literal["auto", "native", "split", "block_diagonal"]


@dataclass(frozen=True)
class RunFlags(flags.TensorFlowRunFlags):
    """Mode, length of training, and folder of the results."""

    mode: Literal["train", "eval", "predict", "export", "plan", "verify-resume", "parity"] = "train"
    """eval: evaluate checkpoints; predict: classify images; export: export for deployment; plan: print what train would
    do; verify-resume: check on a few steps of this configuration that a killed run ends like an uninterrupted one;
    parity: compute the first steps in two ways, and name the first tensor that differs."""
    # Those of resnet_train; resnext_train declares its own again.
    model_dir: Annotated[str, arg(aliases=["-md"])] = "runs/resnet_train"
    seed: Annotated[int, arg(aliases=["--global_seed"])] = 0
    epochs: Annotated[float, arg(aliases=["--train_epochs", "-te"])] = 1.0
    steps: Annotated[int, arg(aliases=["--train_steps"])] = 0


@dataclass(frozen=True)
class DataFlags(flags.DataFlags):
    """Training and validation images."""

    data_dir: Annotated[str | None, arg(aliases=["-dd"]), per_rank()] = None
    """Folder or URL of records (train-*, validation-*), or a folder of train/ and validation/ (or img_train/ and
    img_val/) that hold records or one folder per class."""
    train_splits: Annotated[tuple[str, ...], fixed()] = ("train",)
    """One or more names of records or folders in --data_dir to train on."""
    eval_split: Annotated[str, resume_safe()] = "validation"
    """Name of the records or the folder in --data_dir to evaluate on; validation and val mean each other."""
    jpeg_data_dir: Annotated[str | None, arg(aliases=["-jpdd"]), per_rank()] = None
    """Folder of JPEG files, train/ and val/ with one folder per class, to read if --data_dir is not given. This version
    reads them without the media loader of Gaudi2, and says so."""
    use_fake_data: Annotated[Switch, arg(aliases=["--use_synthetic_data", "-synth"]), fixed()] = False
    """Train on random images instead of a data set, to measure speed."""
    batch_size: Annotated[int, arg(aliases=["-bs"])] = 32
    image_size: Annotated[int, fixed(minimum=32, of_network=True)] = 224
    """Side of the square images that the network sees, in pixels."""
    num_examples_per_epoch: Annotated[int, fixed(minimum=0)] = 0
    """Number of training images per epoch; 0: all (1281167 with --use_fake_data)."""
    least_crop_area: Annotated[float | None, fixed(above=0, maximum=1)] = None
    """Minimum share of an image that a training crop shows; by default .05, and .08 for a resnext. Crops that show less
    than .1 are drawn again in any case."""
    color_jitter: Annotated[float, fixed(minimum=0, maximum=1)] = 0.0
    """Strength of color changes: multiply brightness, contrast and saturation of training images by 1 minus to 1 plus
    this, and turn the hue by up to this number of quarter turns. For small data sets of classes that color does not
    tell apart."""
    gray_probability: Annotated[float, fixed(minimum=0, maximum=1)] = 0.0
    """Share of the training images to turn gray."""
    training_dataset_cache: Annotated[Switch, resume_safe()] = False
    """Keep encoded images in memory if all of them fit into half of the free memory."""
    cache_decoded_image: Annotated[Switch, fixed()] = False
    """Keep decoded images in memory, up to half of the free memory."""
    data_loader_image_type: Annotated[NumberKind, arg(aliases=["-dlit"]), fixed(gone=flags.GONE_TYPES)] = "fp32"
    """Precision of the images from the input pipeline."""

    @property
    def folder(self) -> str | None:
        """Return the folder of the images; None with random images."""
        return self.data_dir or self.jpeg_data_dir or None


@dataclass(frozen=True)
class TrainingFlags:
    """Flags of initial weights, training and regularization that both programs have."""

    padding: Annotated[Literal["same", "symmetric", "symmetric_stem", "same_pool"] | None, fixed()] = None
    """Padding of strided layers; by default that of the loaded weights, or of the original."""
    zero_gamma: Annotated[Switch, fixed()] = False
    """Initialize every residual block as the identity."""
    fine_tune: Annotated[Switch, arg(aliases=["-ft"]), fixed()] = False
    """Train only a new head on the features of loaded weights."""
    dropout: Annotated[float | None, fixed(minimum=0, below=1)] = None
    """Share of the pooled features to drop in training; by default 0."""
    mixup_alpha: Annotated[float, fixed(minimum=0)] = 0.0
    """Mix pairs of training images by shares drawn from Beta(alpha, alpha), with an alpha such as .2; 0: do not mix."""


@dataclass(frozen=True)
class PruningFlags:
    """Pruning by magnitude, with a schedule of the sparsity."""

    pruning_method: Annotated[Literal["polynomial_decay"] | None, fixed()] = None
    """polynomial_decay: set a growing share of the smallest weights of each layer to zero; by default none."""
    pruning_initial_sparsity: Annotated[float, fixed(minimum=0, below=1, needs=_PRUNING)] = 0.0
    """Share of zeros at --pruning_begin_step."""
    pruning_final_sparsity: Annotated[float, fixed(minimum=0, below=1, needs=_PRUNING)] = 0.5
    """Share of zeros from --pruning_end_step on."""
    pruning_begin_step: Annotated[int, fixed(minimum=0, needs=_PRUNING)] = 0
    """First step of pruning."""
    pruning_end_step: Annotated[int, fixed(needs=_PRUNING)] = 100000
    """Step from which the sparsity stays the same."""
    pruning_frequency: Annotated[int, fixed(minimum=1, needs=_PRUNING)] = 100
    """Steps between two choices of the weights to set to zero."""


@dataclass(frozen=True)
class UseFlags(flags.UseFlags):
    """Images for --mode predict, and --mode export."""

    top: Annotated[int, resume_safe(minimum=1, maximum=LISTED)] = 5
    """Number of classes to list for each image, the most likely first; at most 5."""
    save: Annotated[tuple[Literal["images", "json", "csv"], ...], resume_safe()] = ("images", "json")
    """Results to write. images: images and videos with their class above; json: the classes of each; csv: a table."""
    export_features: Annotated[Switch, resume_safe()] = False
    """Also export the network without its head, which returns the pooled features."""


@dataclass(frozen=True)
class DeviceFlags(flags.DeviceFlags):
    """Device, precision, processors and threads."""

    dtype: Annotated[NumberKind, arg(aliases=["-dt"])] = "fp32"
    max_cpus: Annotated[int, arg(aliases=["-mc"])] = 16
    num_parallel_calls: Annotated[int, arg(aliases=["--dataset_parallel_calls"])] = 64
    threadpool_size: Annotated[int, arg(aliases=["--datasets_num_private_threads"])] = 0
    grouped_convolution: Annotated[GroupedForm, resume_safe(per_side=True)] = "auto"
    """Form of grouped convolutions. native: TensorFlow's own; split: one convolution per group; block_diagonal: dense
    convolutions of neighboring groups; auto: the fastest for the device."""
    intra_op_parallelism_threads: Annotated[ThreadFlag, arg(aliases=["-intra"]), per_rank(minimum=0)] = 0
    """Number of TensorFlow's threads within an operation; 0: one per processor; auto: the fastest number on this
    machine, measured once, for some seconds."""
    inter_op_parallelism_threads: Annotated[ThreadFlag, arg(aliases=["-inter"]), per_rank(minimum=0)] = 0
    """Number of TensorFlow's threads between operations; 0: one per processor; auto: as above."""


@dataclass(frozen=True)
class ReportFlags(flags.ReportFlags):
    """Evaluation, log and checkpoints."""

    eval_samples: flags.EvalSamples = 0
    patience: flags.Patience = 0
    no_evaluate: Annotated[Switch, resume_safe(short_run=True)] = False
    """Do not evaluate, neither during training nor after it."""
    eval_epochs: Annotated[
        float, arg(aliases=["--epochs_between_evals", "-ebe"]), resume_safe(minimum=0, maximum=1e6, short_run=0.0)
    ] = 1.0
    """Epochs between two evaluations during training; 0: none. The checkpoint with the best top-1 accuracy is kept."""
    target: Annotated[
        float, arg(aliases=["--stop_threshold", "-st"]), resume_safe(minimum=0, maximum=1, short_run=0.0)
    ] = 0.0
    """Stop training when an evaluation reaches this top-1 accuracy, in 0..1; 0: no threshold."""
    save_checkpoints_steps: Annotated[int, arg(aliases=["--save_checkpoint_steps", "-cs"])] = 0
    """Steps between two checkpoints; 0: one epoch."""
    profile: Annotated[str, arg(aliases=["--profile_steps"])] = "0,0"


@dataclass(frozen=True)
class ClassifierConfig(flags.ProgramConfig):
    """Everything a run depends on; each program has some groups of its own."""

    run: RunFlags = field(default_factory=RunFlags)
    data: DataFlags = field(default_factory=DataFlags)
    training: TrainingFlags = field(default_factory=TrainingFlags)
    pruning: PruningFlags = field(default_factory=PruningFlags)
    use: UseFlags = field(default_factory=UseFlags)
    device: DeviceFlags = field(default_factory=DeviceFlags)
    distribution: DistributionFlags = field(default_factory=DistributionFlags)
    report: ReportFlags = field(default_factory=ReportFlags)
    parity: ParityFlags = field(default_factory=ParityFlags)
    scaling: ScalingFlags = field(default_factory=ScalingFlags)


@dataclass(frozen=True)
class ScheduleConfig:
    """Configure the learning rate and the length of training.

    Attributes:
        kind: of the curve after the warm-up.
        peak: the rate it begins with; of a cyclical one the highest.
        end: of a polynomial; of a cyclical one the lowest.
        warmup_epochs: of linear rise.
        epochs: of training.
        steps: of training in place of epochs; 0: by the epochs.
        half_cycle: steps from the lowest to the highest rate of a cyclical one.
        whole_epochs: whether an epoch is a whole number of steps, so that warm-up and training are multiples of it.
        drop_epochs: where a piecewise rate drops.
        drop_delay: steps from a drop epoch to the first lower rate.
        cycle_decay: height of a cycle as a share of the one before.
        fractional_decay: whether a polynomial ends within a step, where that is where the last epoch ends.
    """

    kind: RateKind
    peak: float
    end: float
    warmup_epochs: float
    epochs: float
    steps: int
    half_cycle: int
    whole_epochs: bool
    drop_epochs: tuple[float, ...] = (30, 60, 80)
    drop_delay: int = 1
    cycle_decay: float = 0.5
    fractional_decay: bool = True

    def for_version(self, version: int) -> ScheduleConfig:
        """Return the rate by a version of the rules, see `gaudi_apps.training.plan`."""
        return self if version > 1 else replace(self, drop_delay=0, cycle_decay=1.0, fractional_decay=False)


@dataclass(frozen=True)
class LearningConfig:
    """Configure loss and optimizer.

    Attributes:
        optimizer: by name.
        momentum: share of the velocity that is kept.
        weight_decay: coefficient of the squares of the weights.
        lars_epsilon: see `gaudi_ops.tf.LarsSGD`.
        single_l2: whether the weight decay is a term of the loss.
        label_smoothing: share of the truth that goes to all classes alike.
        dropout: share of the features that are dropped.
        mixup_alpha: see `gaudi_ops.tf.mixup`.
        ema_decay: of the average of the weights; 0: there is none.
        pruning: if there is any.
        momentum_form: of SGD: ``"keras"`` has the rate inside of the velocity, ``"tensorflow1"`` outside of it.
        decay_form: of SGD and Adam: ``"l2"`` is Keras' L2 on kernels and the head, a gradient of twice the weight;
            ``"half_squares"`` is of all variables but batch norm's, a gradient of once the weight.
    """

    optimizer: OptimizerKind
    momentum: float
    weight_decay: float
    lars_epsilon: float
    single_l2: bool
    label_smoothing: float
    dropout: float
    mixup_alpha: float
    ema_decay: float
    pruning: PruningFlags | None
    momentum_form: MomentumForm
    decay_form: DecayForm


@dataclass(frozen=True)
class TrainConfig:
    """Configure a run of a classifier: the flags, and what follows from them.

    Attributes:
        flags: with the values of those whose default follows from others.
        run: what the machinery has to know.
        model: name of the network.
        rate: learning rate and length of training.
        learning: loss and optimizer.
        global_batch: images a step of all processes.
        min_crop_area: of a training crop, as a share of the image.
        eval_images: to evaluate; 0: all.
        checkpoint_steps: between two checkpoints; 0: an epoch; None: only at the end.
        eval_epochs: between two evaluations during training; 0: none.
        export_at_end: folder to export a SavedModel into after training, if it is to be exported.
        recipe: the data set as it is, and the time that the length is fitted to.
        idle: a line for each flag that is given, and has no effect without another one.
    """

    flags: ClassifierConfig
    run: RunSettings
    model: str
    rate: ScheduleConfig
    learning: LearningConfig
    global_batch: int
    min_crop_area: float
    eval_images: int
    checkpoint_steps: int | None
    eval_epochs: float
    export_at_end: str | None
    recipe: RecipeFlags = field(default_factory=RecipeFlags)
    idle: tuple[str, ...] = ()

    @property
    def own_batch(self) -> int:
        """Return the images a step of one process."""
        return self.global_batch // self.run.distribution.rank_info.size


def make_settings(
    config: ClassifierConfig, distribution: Distribution, *, summary_every: int, profile: str, **others: Any
) -> RunSettings:
    """Make the settings of a run of the flags of both programs, and of others by the names of the settings."""
    device, report = config.device, config.report
    intra, inter = device.intra_op_parallelism_threads, device.inter_op_parallelism_threads
    return make_run_settings(
        config,
        make_device_settings(config, distribution, intra_threads=intra, inter_threads=inter),
        distribution,
        checkpoint=config.run.checkpoint,
        summary_every=summary_every,
        profiled_steps=flag_rules.parse_step_range(profile, "profile"),
        target=report.target,
        patience=report.patience,
        evaluates=not (report.no_evaluate or config.data.use_fake_data),
        reports_scores=not report.no_evaluate,
        kills=config.run.kills,
        **others,
    )


def check_common(config: ClassifierConfig, mode: str, found: str | None = None) -> None:
    """Check the groups of flags that both programs have.

    Args:
        config: of either program.
        mode: what is done.
        found: the data set as it is, if one is given.

    Raises:
        FlagError: for the first value that breaks a rule of its own or of another flag.
    """
    pruning, report = config.pruning, config.report
    check_bounds(config)
    _check_pruning(pruning)
    if pruning.pruning_method and config.run.ema_decay:
        reason = "the average of --ema_decay would keep what is pruned"
        raise flag_error(f"--pruning_method: {reason}", "leave one of them out")
    if config.device.enable_xla and (config.training.mixup_alpha or pruning.pruning_method):
        fault = "is slow at --pruning_method" if pruning.pruning_method else "cannot draw for --mixup_alpha"
        raise flag_error(f"--enable_xla: XLA {fault}", "leave one of them out")
    _check_data(config.data, mode, found)
    check_modes(config, mode, checkpoint=config.run.checkpoint, steps=config.run.steps, steps_flag="--steps")
    for name in ("max_frames", "save"):
        if mode != "predict" and getattr(config.use, name) != getattr(UseFlags, name):
            raise flag_error(f"--{name}: is for --mode predict; mode is {mode}")
    if not config.use.save:
        raise flag_error("--save: names nothing to write", "give images, json or csv")
    skips_evaluation = "no_evaluate" if report.no_evaluate else None
    if config.data.use_fake_data:
        skips_evaluation = "use_fake_data"
    if report.target or report.patience:
        remedy = f"leave out --{skips_evaluation}" if found is None else flags.NOTHING_TO_VALIDATE
        remedy = "" if skips_evaluation is None else remedy
        if report.eval_epochs == 0 and not (found and skips_evaluation):
            remedy = "give --eval_epochs above 0"
        if remedy:
            raise flag_error("--target and --patience: need evaluations", remedy)
    flag_rules.parse_step_range(config.report.profile, "profile")


def _check_pruning(given: PruningFlags) -> None:
    """Check that steps and sparsities rise."""
    if given.pruning_end_step <= given.pruning_begin_step:
        raise flag_error(f"--pruning_end_step {given.pruning_end_step}: must be above --pruning_begin_step")
    if given.pruning_method and given.pruning_initial_sparsity > given.pruning_final_sparsity:
        sparsity = f"--pruning_initial_sparsity {given.pruning_initial_sparsity:g}"
        raise flag_error(f"{sparsity}: is above --pruning_final_sparsity")


def _check_data(data: DataFlags, mode: str, found: str | None) -> None:
    """Check that images come from one place, which the mode has a use for."""
    if found is not None:
        names = ("data_dir", "jpeg_data_dir", "use_fake_data", "train_splits", "eval_split")
        require_alone("data", found, {n: getattr(data, n) for n in names if getattr(data, n) != getattr(DataFlags, n)})
        return
    folders = {"data_dir": data.data_dir, "jpeg_data_dir": data.jpeg_data_dir}
    given = next((f"--{flag} {folder}" for flag, folder in folders.items() if folder is not None), "")
    if data.use_fake_data and given:
        raise flag_error(f"--use_fake_data: contradicts {given}", "leave one of them out")
    if not data.train_splits:
        raise flag_error("--train_splits: names nothing", "give one or more, as train")
    if mode == "eval" and data.use_fake_data:
        raise flag_error("--mode eval: random images have no truth", "give --data_dir, not --use_fake_data")
    sized = mode == "plan" and data.num_examples_per_epoch > 0
    if mode not in USING and not (given or data.use_fake_data or sized):
        raise flag_error(f"--mode {mode}: needs --data or --data_dir, with records or folders of classes")


_SEED = "give --seed, the one seed of a run"
_MEASUREMENTS = "history.jsonl in --model_dir and TensorBoard have all measurements; leave it out"
INNER_SWITCH = "is an inner switch of TensorFlow that no result depends on; leave it out"

FORMER_FLAGS = (
    FormerFlag("--loss_scale", "bf16 and fp32 need no scaling of the loss; leave it out", "-ls", "none"),
    FormerFlag(
        "--all_reduce_alg", "TensorFlow chooses: NCCL between GPUs, a ring elsewhere; leave it out", "-ara", "none"
    ),
    FormerFlag(
        "--num_packs",
        "give --fusion_threshold_mb, the MiB of gradients that travel together",
        default="1",
        meant=("1",),
    ),
    FormerFlag(
        "--tf_gpu_thread_mode", "set the environment variable TF_GPU_THREAD_MODE to the same value", "-gt_mode", "none"
    ),
    FormerFlag(
        "--per_gpu_thread_count",
        "set the environment variable TF_GPU_THREAD_COUNT to the same value",
        "-pgtc",
        "0",
        meant=("0",),
    ),
    FormerFlag("--tf_data_experimental_slack", "batches are made ahead of the step; leave it out", meant=(OFF,)),
    FormerFlag("--benchmark_logger_type", _MEASUREMENTS, default="BaseBenchmarkLogger", meant=("BaseBenchmarkLogger",)),
    FormerFlag("--benchmark_test_id", _MEASUREMENTS, "-bti", "none"),
    FormerFlag("--benchmark_log_dir", _MEASUREMENTS, "-bld", "none"),
    FormerFlag("--gcp_project", _MEASUREMENTS, "-gp", "none"),
    FormerFlag("--bigquery_data_set", _MEASUREMENTS, "-bds", "test_benchmark", meant=("test_benchmark",)),
    FormerFlag("--bigquery_run_table", _MEASUREMENTS, "-brt", "benchmark_run", meant=("benchmark_run",)),
    FormerFlag(
        "--bigquery_run_status_table", _MEASUREMENTS, "-brst", "benchmark_run_status", meant=("benchmark_run_status",)
    ),
    FormerFlag("--bigquery_metric_table", _MEASUREMENTS, "-bmt", "benchmark_metric", meant=("benchmark_metric",)),
    FormerFlag(
        "--data_format",
        "it is the one format that every device computes; leave it out",
        "-df",
        "channels_last",
        meant=("channels_last",),
    ),
    FormerFlag("--enable_scoped_allocator", f"it {INNER_SWITCH}", meant=(OFF,)),
    FormerFlag(
        "--bf16_config_path",
        "`--dtype bf16` is Keras' mixed precision, which has no list of operations; leave it out",
        default="none",
    ),
    FormerFlag(
        "--experimental_preloading",
        "two batches wait in the memory of the machine, none on the device; leave it out",
        default=ON,
        meant=(OFF,),
    ),
    FormerFlag("--shuffle_seed", _SEED, default="none"),
    FormerFlag("--sample_distorted_bounding_box_seed", _SEED, default="0", meant=("0",)),
    FormerFlag("--random_flip_left_right_seed", _SEED, default="none"),
    FormerFlag(
        "--interleave_cycle_length",
        "the order of images does not depend on files; --num_parallel_calls says how many are read at once",
        default="10",
        meant=("10",),
    ),
    *(FormerFlag(f"--help{kind}", "give --help", replace=lambda _: ["--help"]) for kind in ("full", "short")),
)
