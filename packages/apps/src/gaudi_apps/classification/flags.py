"""Flags that resnet_train and resnext_train share, the rules about their values, and those of the originals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from gaudi_apps.classification.train_config import LISTED
from gaudi_apps.cli import flags
from gaudi_apps.cli.flag_rules import Switch, check_bounds, fixed, list_per_side, per_rank, resume_safe
from gaudi_apps.cli.flags import check_distribution, check_parity
from gaudi_apps.runtime.profiler import parse_step_range
from gaudi_apps.runtime.settings import ThreadFlag
from gaudi_datasets.arguments import OFF, ON, FormerFlag, rename
from gaudi_datasets.errors import FlagError


@dataclass(frozen=True)
class RunFlags(flags.TensorFlowRunFlags):
    """Mode, length of training, and folder of the results."""

    mode: Literal["train", "eval", "predict", "export", "plan", "verify-resume", "parity"] = "train"
    """eval: evaluate checkpoints; predict: classify images; export: export for deployment; plan: print what train would
    do; verify-resume: check on a few steps of this configuration that a killed run ends like an uninterrupted one;
    parity: compute the first steps in two ways, and name the first tensor that differs."""
    model_dir: Annotated[str, arg(aliases=["-md"])] = "runs/classifier"
    checkpoint: str = "newest"
    """Checkpoint to use for eval, predict, export and parity: newest, best, a step, or, for eval, all, in the order of
    steps."""
    seed: Annotated[int, arg(aliases=["--global_seed"])] = 0
    train_epochs: Annotated[float, arg(aliases=["-te"]), resume_safe(length="epochs", above=0)] = 1.0
    """Number of passes over the training images."""


@dataclass(frozen=True)
class DataFlags(flags.DataFlags):
    """Training and validation images."""

    data_dir: Annotated[str | None, arg(aliases=["-dd"]), per_rank()] = None
    """Folder of records (train-*, validation-*), or of folders train/ and validation/ (or img_train/ and img_val/) that
    hold records or one folder per class."""
    train_splits: Annotated[tuple[str, ...], fixed()] = ("train",)
    """One or more names of records or folders in --data_dir to train on."""
    eval_split: Annotated[str, resume_safe()] = "validation"
    """Name of the records or the folder in --data_dir to evaluate on; validation and val mean each other."""
    jpeg_data_dir: Annotated[str | None, arg(aliases=["-jpdd"]), per_rank()] = None
    """Folder of JPEG files, train/ and val/ with one folder per class, to read if --data_dir is not given. This version
    reads them without the media loader of Gaudi2, and says so."""
    use_synthetic_data: Annotated[Switch, arg(aliases=["-synth"]), fixed()] = False
    """Train on random images instead of a data set, to measure speed."""
    batch_size: Annotated[int, arg(aliases=["-bs"])] = 32
    image_size: Annotated[int, fixed(minimum=32)] = 224
    """Side of the square images that the network sees, in pixels."""
    num_examples_per_epoch: Annotated[int, fixed(minimum=0)] = 0
    """Number of training images per epoch; 0: all (1281167 with --use_synthetic_data)."""
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
    data_loader_image_type: Annotated[Literal["fp32", "bf16"], arg(aliases=["-dlit"]), fixed()] = "fp32"
    """Precision of the images from the input pipeline."""
    dataset_parallel_calls: Annotated[int, per_rank(minimum=1)] = 64
    """Number of images to decode and augment at the same time."""
    datasets_num_private_threads: Annotated[int, per_rank(minimum=0)] = 0
    """Number of threads to decode and augment images with; 0: one per processor."""


@dataclass(frozen=True)
class WeightFlags(flags.WeightFlags):
    """Initial weights, which of them are trained, and the average of the weights."""

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
class EvaluationFlags(flags.EvaluationFlags):
    """Evaluation during and after training."""

    epochs_between_evals: Annotated[float, arg(aliases=["-ebe"]), resume_safe(minimum=0, short_run=0.0)] = 1.0
    """Epochs between two evaluations during training; 0: none. The checkpoint with the best top-1 accuracy is kept."""
    stop_threshold: Annotated[float, arg(aliases=["-st"]), resume_safe(minimum=0, maximum=1, short_run=0.0)] = 0.0
    """Stop training when an evaluation reaches this top-1 accuracy, in 0..1; 0: no threshold."""


@dataclass(frozen=True)
class PruningFlags:
    """Pruning by magnitude, with a schedule of the sparsity."""

    pruning_method: Annotated[Literal["polynomial_decay"] | None, fixed()] = None
    """polynomial_decay: set a growing share of the smallest weights of each layer to zero; by default none."""
    pruning_initial_sparsity: Annotated[float, fixed(minimum=0, below=1)] = 0.0
    """Share of zeros at --pruning_begin_step."""
    pruning_final_sparsity: Annotated[float, fixed(minimum=0, below=1)] = 0.5
    """Share of zeros from --pruning_end_step on."""
    pruning_begin_step: Annotated[int, fixed(minimum=0)] = 0
    """First step of pruning."""
    pruning_end_step: Annotated[int, fixed()] = 100000
    """Step from which the sparsity stays the same."""
    pruning_frequency: Annotated[int, fixed(minimum=1)] = 100
    """Steps between two choices of the weights to set to zero."""


@dataclass(frozen=True)
class UseFlags(flags.ExportFlags):
    """Images for --mode predict, and --mode export."""

    top: Annotated[int, resume_safe(minimum=1, maximum=LISTED)] = 5
    """Number of classes to list for each image, the most likely first; at most 5."""
    export_features: Annotated[Switch, resume_safe()] = False
    """Also export the network without its head, which returns the pooled features."""


@dataclass(frozen=True)
class DeviceFlags(flags.DeviceFlags):
    """Device, precision and processors."""

    dtype: Annotated[Literal["fp32", "bf16"], arg(aliases=["-dt"])] = "fp32"
    max_cpus: Annotated[int, arg(aliases=["-mc"])] = 16
    grouped_convolution: Annotated[Literal["auto", "native", "split", "block_diagonal"], resume_safe(per_side=True)] = (
        "auto"
    )
    """Form of grouped convolutions. native: TensorFlow's own; split: one convolution per group; block_diagonal: dense
    convolutions of neighboring groups; auto: the fastest for the device."""
    intra_op_parallelism_threads: Annotated[ThreadFlag, arg(aliases=["-intra"]), per_rank(minimum=0)] = 0
    """Number of TensorFlow's threads within an operation; 0: one per processor; auto: the fastest number on this
    machine, measured once, for some seconds."""
    inter_op_parallelism_threads: Annotated[ThreadFlag, arg(aliases=["-inter"]), per_rank(minimum=0)] = 0
    """Number of TensorFlow's threads between operations; 0: one per processor; auto: as above."""


@dataclass(frozen=True)
class ReportFlags(flags.ReportFlags):
    """Log and checkpoints."""

    save_checkpoint_steps: Annotated[int, arg(aliases=["-cs"]), resume_safe(minimum=0, short_run=1)] = 0
    """Steps between two checkpoints; 0: one epoch."""
    profile_steps: Annotated[str, resume_safe(short_run="0,0")] = "0,0"
    """First and last step a,b to trace for TensorBoard's profiler; 0,0: none."""


def check_common(config: Any, *, steps: int, mode: str, skips_evaluation: str | None) -> None:
    """Check the groups of flags that both programs have.

    Args:
        config: of either program.
        steps: that the run has in all; 0 where epochs decide.
        mode: what is done.
        skips_evaluation: the flag that is given to evaluate nothing, if it is.

    Raises:
        FlagError: for the first value that breaks a rule of its own or of another flag.
    """
    data, evaluation, device = config.data, config.evaluation, config.device
    check_bounds(config)
    _check_pruning(config.pruning)
    if config.pruning.pruning_method and config.weights.ema_decay:
        raise FlagError(
            "--pruning_method: the average of --ema_decay would keep what is pruned",
            flag="--pruning_method",
            remedy="leave one of them out",
        )
    _check_inputs(mode, config.run, data, config.use)
    _check_checkpoint(mode, config.run, steps)
    _check_stopping(evaluation, "use_synthetic_data" if data.use_synthetic_data else skips_evaluation)
    check_distribution(config.distribution)
    check_parity(config.parity, mode, list_per_side(type(config)))
    if device.no_hpu and device.device == "hpu":
        raise FlagError("--no_hpu: contradicts --device hpu", flag="--no_hpu", remedy="leave one of them out")
    parse_step_range(config.report.profile_steps, "profile_steps")


def _check_stopping(evaluation: EvaluationFlags, skips: str | None) -> None:
    if not (evaluation.stop_threshold or evaluation.patience):
        return
    if evaluation.epochs_between_evals == 0:
        raise FlagError(
            "--stop_threshold and --patience: need evaluations",
            flag="--stop_threshold",
            remedy="give --epochs_between_evals above 0",
        )
    if skips is not None:
        raise FlagError(
            "--stop_threshold and --patience: need evaluations", flag="--stop_threshold", remedy=f"leave out --{skips}"
        )


def _check_pruning(pruning: PruningFlags) -> None:
    if pruning.pruning_end_step <= pruning.pruning_begin_step:
        raise FlagError(
            f"--pruning_end_step {pruning.pruning_end_step}: must be above --pruning_begin_step",
            flag="--pruning_end_step",
        )


def _check_inputs(mode: str, run: RunFlags, data: DataFlags, use: UseFlags) -> None:
    """Check that the input of the mode is given, and no input of other modes."""
    folders = {"data_dir": data.data_dir, "jpeg_data_dir": data.jpeg_data_dir}
    given = next((f"--{flag} {folder}" for flag, folder in folders.items() if folder is not None), "")
    if data.use_synthetic_data and given:
        raise FlagError(
            f"--use_synthetic_data: contradicts {given}", flag="--use_synthetic_data", remedy="leave one of them out"
        )
    if not data.train_splits:
        raise FlagError("--train_splits: names nothing", flag="--train_splits", remedy="give one or more, as train")
    if mode == "predict" and not use.inference:
        raise FlagError("--mode predict: needs --inference with images, videos or a folder", flag="--mode")
    if mode not in ("predict", "export") and use.inference:
        raise FlagError(
            f"--inference {use.inference[0]}: is for --mode predict and export; mode is {mode}", flag="--inference"
        )
    if run.json and mode not in ("plan", "parity"):
        raise FlagError(f"--json: is for --mode plan and parity; mode is {mode}", flag="--json")
    if mode == "eval" and data.use_synthetic_data:
        raise FlagError(
            "--mode eval: random images have no truth",
            flag="--mode",
            remedy="give --data_dir, not --use_synthetic_data",
        )
    sized = mode == "plan" and data.num_examples_per_epoch > 0
    if mode not in ("predict", "export") and not (given or data.use_synthetic_data or sized):
        raise FlagError(f"--mode {mode}: needs --data_dir, with records or folders of classes", flag="--mode")


def _check_checkpoint(mode: str, run: RunFlags, steps: int) -> None:
    if mode == "verify-resume" and not 1 <= run.kills < (steps or math.inf):
        raise FlagError(f"--kills {run.kills}: must be at least 1, and below the steps of the run", flag="--kills")
    named = ("newest", "best", "all") if mode == "eval" else ("newest", "best")
    if run.checkpoint not in named and not run.checkpoint.isdecimal():
        raise FlagError(
            f"--checkpoint {run.checkpoint}: must be {', '.join(named)} or a step, with --mode {mode}",
            flag="--checkpoint",
        )
    if run.checkpoint != "newest" and mode not in ("eval", "predict", "export", "parity"):
        which = "eval, predict, export and parity"
        raise FlagError(f"--checkpoint {run.checkpoint}: is for --mode {which}; mode is {mode}", flag="--checkpoint")
    if run.clean and mode != "train":
        raise FlagError(f"--clean: is for --mode train; mode is {mode}", flag="--clean")


_SEED = "give --seed, the one seed of a run"
_MEASUREMENTS = "history.jsonl in --model_dir and TensorBoard have all measurements; leave it out"
_INNER_SWITCH = "is an inner switch of TensorFlow that no result depends on; leave it out"
_NO_USE = "it did nothing in the original either; give --base_learning_rate, --lr_schedule and --optimizer"

_BOTH = (
    FormerFlag("--loss_scale", "bf16 and fp32 need no scaling of the loss; leave it out", "-ls", "none"),
    FormerFlag(
        "--all_reduce_alg", "TensorFlow chooses: NCCL between GPUs, a ring elsewhere; leave it out", "-ara", "none"
    ),
    FormerFlag("--num_packs", "give --fusion_threshold_mb, the MiB of gradients that travel together", default="1"),
    FormerFlag(
        "--tf_gpu_thread_mode", "set the environment variable TF_GPU_THREAD_MODE to the same value", "-gt_mode", "none"
    ),
    FormerFlag(
        "--per_gpu_thread_count", "set the environment variable TF_GPU_THREAD_COUNT to the same value", "-pgtc", "0"
    ),
    FormerFlag("--tf_data_experimental_slack", "batches are made ahead of the step; leave it out", meant=(OFF,)),
    FormerFlag("--benchmark_logger_type", _MEASUREMENTS, default="BaseBenchmarkLogger", meant=("BaseBenchmarkLogger",)),
    FormerFlag("--benchmark_test_id", _MEASUREMENTS, "-bti", "none"),
    FormerFlag("--benchmark_log_dir", _MEASUREMENTS, "-bld", "none"),
    FormerFlag("--gcp_project", _MEASUREMENTS, "-gp", "none"),
    FormerFlag("--bigquery_data_set", _MEASUREMENTS, "-bds", "test_benchmark"),
    FormerFlag("--bigquery_run_table", _MEASUREMENTS, "-brt", "benchmark_run"),
    FormerFlag("--bigquery_run_status_table", _MEASUREMENTS, "-brst", "benchmark_run_status"),
    FormerFlag("--bigquery_metric_table", _MEASUREMENTS, "-bmt", "benchmark_metric"),
    FormerFlag(
        "--data_format",
        "it is the one format that every device computes; leave it out",
        "-df",
        "channels_last",
        meant=("channels_last",),
    ),
    FormerFlag("--enable_scoped_allocator", f"it {_INNER_SWITCH}", meant=(OFF,)),
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
    FormerFlag("--sample_distorted_bounding_box_seed", _SEED, default="0"),
    FormerFlag("--random_flip_left_right_seed", _SEED, default="none"),
    FormerFlag(
        "--interleave_cycle_length",
        "the order of images does not depend on files; --dataset_parallel_calls says how many are read at once",
        default="10",
    ),
    FormerFlag("--helpfull", "give --help", replace=lambda values: ["--help"]),
    FormerFlag("--helpshort", "give --help", replace=lambda values: ["--help"]),
)

RESNET = (
    *_BOTH,
    FormerFlag("--run_eagerly", "it was for debugging the original in TensorFlow; leave it out", meant=(OFF,)),
    FormerFlag(
        "--fp16_implementation",
        "there is no fp16, for bf16 has the range of fp32; give `--dtype bf16`",
        default="keras",
    ),
    FormerFlag("--enable_xla", "set the environment variable TF_XLA_FLAGS=--tf_xla_auto_jit=2", meant=(OFF,)),
    FormerFlag("--enable_eager", "TensorFlow 2 is eager wherever it is not compiled; leave it out", meant=(ON,)),
    FormerFlag(
        "--set_learning_phase_to_train",
        "training and evaluation tell the network which they are; leave it out",
        default=ON,
        meant=(ON,),
    ),
    FormerFlag("--explicit_gpu_placement", "give `--device gpu`", meant=(OFF,)),
    FormerFlag("--use_trivial_model", "it measured the loader, which `gaudi-datasets bench` does", meant=(OFF,)),
    FormerFlag("--report_accuracy_metrics", "accuracy is always reported; leave it out", default=ON, meant=(ON,)),
    FormerFlag("--use_tensor_lr", "the rate is given to each step as a tensor; leave it out", default=ON, meant=(ON,)),
    FormerFlag(
        "--enable_tensorboard",
        "its files are always written, into `summaries/` of --model_dir; leave it out",
        meant=(ON,),
    ),
    FormerFlag(
        "--batchnorm_spatial_persistent",
        "set the environment variable TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1",
        default=ON,
    ),
    FormerFlag("--enable_get_next_as_optional", f"it {_INNER_SWITCH}", meant=(OFF,)),
    FormerFlag("--tpu", "there is no TPU; give --device", default="none", meant=("",)),
    FormerFlag(
        "--use_tf_while_loop",
        "steps of one call are always a loop in TensorFlow; `--steps_per_loop 1` makes each step a call",
        default=ON,
        meant=(ON,),
    ),
    FormerFlag("--initial_learning_rate_per_sample", _NO_USE, default="7e-05"),
    FormerFlag("--lr_decay_factor", _NO_USE, default="0.94"),
    FormerFlag("--num_epochs_per_decay", _NO_USE, default="2.5"),
    FormerFlag("--use_tf_function", "steps are always compiled; leave it out", default=ON, meant=(ON,)),
    FormerFlag("--use_distributed_eval", "each process always scores its part; leave it out", meant=(ON,)),
    FormerFlag(
        "--use_keras_mixed_precision", "`--dtype bf16` is always Keras' mixed precision; leave it out", meant=(ON,)
    ),
    FormerFlag("--dump_config", "config.yaml in --model_dir has all flags of a run; leave it out", default="none"),
    # Of the launcher demo_resnet_keras.py.
    FormerFlag(
        "--keras_applications_model",
        "give --model with the name in small letters and _keras behind it, as `--model resnet50v2_keras`",
        default="none",
        replace=lambda values: ["--model", *(f"{name.lower()}_keras" for name in values)],
    ),
    # Of tfhub_export.py and transfer_learning_demo.py.
    FormerFlag("--model_path", "give --model_dir with `--mode export`", default="none"),
    FormerFlag("--export_path", "give --output_dir with `--mode export`", default="none"),
    FormerFlag("--checkpoint_path", "give --pretrained_filepath with --fine_tune", default="none"),
    FormerFlag("--do_data_augmentation", "training images are always augmented; leave it out", meant=(ON,)),
    FormerFlag("--new_batch_size", "give --batch_size", "-nbs", "16", replace=rename("--batch_size")),
)

RESNEXT = (
    *_BOTH,
    FormerFlag("--dummy_epoch", "it ran two steps before the training was timed; leave it out", meant=(OFF,)),
    FormerFlag("--log_steps", "give --display_steps", default="100"),
    FormerFlag("--train_offset", "a run that goes on knows its step; leave it out", default="0", meant=("0",)),
    FormerFlag(
        "--resnet_version", "version 1 is the recipe's, and the one there is; leave it out", "-rv", "1", meant=("1",)
    ),
    FormerFlag("--return_before_eval", "give --disable_eval", "-rbv", meant=(OFF,)),
    FormerFlag(
        "--image_bytes_as_serving_input",
        "a SavedModel has a signature for encoded images and one for pixels; leave it out",
        meant=(ON,),
    ),
    FormerFlag(
        "--use_train_and_evaluate", "it was of Estimator; --epochs_between_evals says when to evaluate", meant=(OFF,)
    ),
    FormerFlag(
        "--mini_imagenet",
        "make such records by `gaudi-datasets convert mini-imagenet`, and name their folder by --data_dir",
        meant=(OFF,),
    ),
)
