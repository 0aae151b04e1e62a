"""Flags that resnet_train and resnext_train share, the rules about their values, and those of the originals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from gaudi_apps.classification.train_config import LISTED
from gaudi_apps.cli.flag_rules import check_bounds, fixed, list_per_side, per_rank, resume_safe
from gaudi_apps.cli.flags import check_distribution, check_parity
from gaudi_apps.runtime.profiler import parse_step_range
from gaudi_apps.runtime.settings import ThreadFlag
from gaudi_datasets.arguments import OFF, ON, FormerFlag, rename
from gaudi_datasets.errors import FlagError

Switch = FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class RunFlags:
    """What to do, and where its results go."""

    mode: Annotated[
        Literal["train", "eval", "predict", "export", "plan", "verify-resume", "parity"], resume_safe(per_command=True)
    ] = "train"
    """eval: score checkpoints; predict: name what is on images; export: for deployment; plan: print what train would
    do; verify-resume: prove on a few steps of this configuration that a killed run ends as an uninterrupted one;
    parity: compute the first steps in two ways, and name the first tensor that differs."""
    model_dir: Annotated[str, arg(aliases=["-md"]), resume_safe(per_side=True)] = "runs/classifier"
    """Folder of checkpoints, curves, images and figures; training continues from its newest checkpoint."""
    clean: Annotated[Switch, resume_safe(per_command=True)] = False
    """Remove the run in --model_dir first: what it wrote, and nothing else."""
    checkpoint: Annotated[str, resume_safe(per_side=True)] = "newest"
    """Which one eval, predict, export and parity take: newest, best, a step, or for eval all, in the order of steps."""
    kills: Annotated[int, resume_safe()] = 3
    """How often verify-resume kills its run."""
    seed: Annotated[int, arg(aliases=["--global_seed"]), fixed(minimum=0)] = 0
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

    data_dir: Annotated[str | None, arg(aliases=["-dd"]), per_rank()] = None
    """Folder of records (train-*, validation-*), or of folders train/ and validation/ (or img_train/ and img_val/) with
    records or with a folder for each class."""
    train_splits: Annotated[tuple[str, ...], fixed()] = ("train",)
    """Records or folders in --data_dir to train on, one or more."""
    eval_split: Annotated[str, resume_safe()] = "validation"
    """Records or folder in --data_dir to evaluate on; validation and val mean each other."""
    jpeg_data_dir: Annotated[str | None, arg(aliases=["-jpdd"]), per_rank()] = None
    """Folder of JPEG files, train/ and val/ with a folder for each class: read in place of --data_dir where that is not
    given. The media loader of Gaudi2 does not read them: it is not part of this version, and a run says so."""
    use_synthetic_data: Annotated[Switch, arg(aliases=["-synth"]), fixed()] = False
    """Random images in place of a data set, to measure speed."""
    batch_size: Annotated[int, arg(aliases=["-bs"]), fixed(sets_batch=True, minimum=1)] = 32
    """Images a step: of one process; of all with --distribution_strategy."""
    image_size: Annotated[int, fixed(minimum=32)] = 224
    """Side of the square that the network sees, in pixels."""
    num_examples_per_epoch: Annotated[int, fixed(minimum=0)] = 0
    """Training images an epoch; 0: as many as there are (1281167 with --use_synthetic_data)."""
    least_crop_area: Annotated[float | None, fixed(above=0, maximum=1)] = None
    """Least share of an image that a training crop shows; by default .05, and .08 of a resnext. Crops that show less
    than .1 are drawn again in any case."""
    flip_probability: Annotated[float, fixed(minimum=0, maximum=1)] = 0.5
    """Share of the training images that are mirrored; 0 where left and right matter, as in text."""
    color_jitter: Annotated[float, fixed(minimum=0, maximum=1)] = 0.0
    """Brightness, contrast and saturation of training images are multiplied by 1 minus to 1 plus this, and the hue is
    turned by up to as many quarter turns; for small data sets whose classes are not told by colour."""
    gray_probability: Annotated[float, fixed(minimum=0, maximum=1)] = 0.0
    """Share of the training images that lose all colour."""
    training_dataset_cache: Annotated[Switch, resume_safe()] = False
    """Keep encoded images in memory, if all of them fit into half of what is free."""
    cache_decoded_image: Annotated[Switch, fixed()] = False
    """Keep decoded images in memory, as many as fit into half of what is free."""
    data_loader_image_type: Annotated[Literal["fp32", "bf16"], arg(aliases=["-dlit"]), fixed()] = "fp32"
    """Precision of the images that the input pipeline gives."""
    dataset_parallel_calls: Annotated[int, per_rank(minimum=1)] = 64
    """Images decoded and augmented at once."""
    datasets_num_private_threads: Annotated[int, per_rank(minimum=0)] = 0
    """Threads that do it; 0: as many as processors."""


@dataclass(frozen=True)
class WeightFlags:
    """Where weights come from, what of them is trained, and their average."""

    padding: Annotated[Literal["same", "symmetric", "symmetric_stem", "same_pool"] | None, fixed()] = None
    """How strided layers pad; by default as the weights that are loaded, or as the original."""
    zero_gamma: Annotated[Switch, fixed()] = False
    """Begin with every residual block as the identity."""
    fine_tune: Annotated[Switch, arg(aliases=["-ft"]), fixed()] = False
    """Train only a new head on the features of loaded weights."""
    dropout: Annotated[float | None, fixed(minimum=0, below=1)] = None
    """Share of the pooled features that is dropped in training; by default 0."""
    ema_decay: Annotated[float, fixed(minimum=0, below=1)] = 0.0
    """Average the weights over the steps with this decay, as .9998, and use the average; 0: no average."""
    mixup_alpha: Annotated[float, fixed(minimum=0)] = 0.0
    """Mix pairs of training images by shares drawn from Beta(alpha, alpha), as .2; 0: none."""


@dataclass(frozen=True)
class EvaluationFlags:
    """Scoring during and after training."""

    epochs_between_evals: Annotated[float, arg(aliases=["-ebe"]), resume_safe(minimum=0, short_run=0.0)] = 1.0
    """Epochs between two evaluations during training; 0: none. The best checkpoint by top-1 is kept."""
    eval_samples: Annotated[int, resume_safe(minimum=0)] = 0
    """Validation images to evaluate; 0: all. Fewer are the first ones, and the result says how many of how many."""
    stop_threshold: Annotated[float, arg(aliases=["-st"]), resume_safe(minimum=0, maximum=1, short_run=0.0)] = 0.0
    """End training when an evaluation reaches this top-1 accuracy, in 0..1; 0: no threshold."""
    patience: Annotated[int, resume_safe(minimum=0, short_run=0)] = 0
    """End training after so many evaluations without a better accuracy; 0: never."""


@dataclass(frozen=True)
class PruningFlags:
    """Pruning by magnitude, on a schedule of sparsity."""

    pruning_method: Annotated[Literal["polynomial_decay"] | None, fixed()] = None
    """polynomial_decay: set the smallest weights of each layer to zero, more and more of them; by default none."""
    pruning_initial_sparsity: Annotated[float, fixed(minimum=0, below=1)] = 0.0
    """Share of zeros at the first of the steps."""
    pruning_final_sparsity: Annotated[float, fixed(minimum=0, below=1)] = 0.5
    """Share of zeros from the last of the steps on."""
    pruning_begin_step: Annotated[int, fixed(minimum=0)] = 0
    """The first step."""
    pruning_end_step: Annotated[int, fixed()] = 100000
    """The last step."""
    pruning_frequency: Annotated[int, fixed(minimum=1)] = 100
    """Steps between two changes of which weights are zero."""


@dataclass(frozen=True)
class UseFlags:
    """Images for --mode predict, and --mode export."""

    inference: Annotated[tuple[str, ...], resume_safe()] = ()
    """Images, videos, folders, or patterns such as 'in/*.jpg', to predict on, or to check an export on."""
    top: Annotated[int, resume_safe(minimum=1, maximum=LISTED)] = 5
    """Classes to list of an image, the likeliest first, 5 at most."""
    strict: Annotated[Switch, resume_safe()] = False
    """End with the first file that cannot be read, in place of naming and skipping it."""
    output_dir: Annotated[str | None, resume_safe()] = None
    """Folder of the results; predictions or export in --model_dir when not given."""
    export_format: Annotated[tuple[Literal["saved_model", "onnx", "tflite", "safetensors"], ...], resume_safe()] = (
        "saved_model",
    )
    """One or more formats; onnx needs the extra gaudi-apps[export]."""
    export_features: Annotated[Switch, resume_safe()] = False
    """Export the network without its head besides, which gives the pooled features."""


@dataclass(frozen=True)
class DeviceFlags:
    """Device, precision and processors."""

    device: Annotated[Literal["auto", "cpu", "gpu", "hpu"], resume_safe(per_side=True)] = "auto"
    """auto: hpu, else gpu, else cpu."""
    no_hpu: Annotated[Switch, resume_safe()] = False
    """Do not use Gaudi even where there is one."""
    dtype: Annotated[Literal["fp32", "bf16"], arg(aliases=["-dt"]), fixed(per_side=True)] = "fp32"
    """Precision of the computation; weights are float32 in both."""
    max_cpus: Annotated[int, arg(aliases=["-mc"]), per_rank(minimum=0)] = 16
    """Processors the program may use at most; 0: all."""
    recipe_cache: Annotated[str | None, per_rank()] = None
    """Folder of compiled graphs on Gaudi, kept between runs; TF_RECIPE_CACHE_PATH of the environment wins."""
    check_static_shapes: Annotated[Switch, resume_safe()] = False
    """End, naming the tensor, where a training step has a shape that is not static or is traced again; always on
    Gaudi, which compiles anew for every shape."""
    grouped_convolution: Annotated[Literal["auto", "native", "split", "block_diagonal"], resume_safe(per_side=True)] = (
        "auto"
    )
    """Form of convolutions in groups: native, TensorFlow's own; split, one for each group; block_diagonal, dense ones
    of neighbouring groups; auto: what suits the device."""
    intra_op_parallelism_threads: Annotated[ThreadFlag, arg(aliases=["-intra"]), per_rank(minimum=0)] = 0
    """Threads of TensorFlow within an operation; 0: as many as processors; auto: the fastest on this machine, measured
    once, for some seconds."""
    inter_op_parallelism_threads: Annotated[ThreadFlag, arg(aliases=["-inter"]), per_rank(minimum=0)] = 0
    """Threads of TensorFlow between operations; 0: as many as processors; auto: as above."""


@dataclass(frozen=True)
class ReportFlags:
    """Log and checkpoints."""

    save_checkpoint_steps: Annotated[int, arg(aliases=["-cs"]), resume_safe(minimum=0, short_run=1)] = 0
    """Steps between two checkpoints; 0: an epoch."""
    save_checkpoints_minutes: Annotated[float, resume_safe(minimum=0)] = 0.0
    """Minutes between two checkpoints, besides those by epochs or steps; 0: none."""
    keep_ckpt_max: Annotated[int, resume_safe(minimum=1, short_run=2)] = 10
    """Checkpoints to keep besides the best; older ones are removed."""
    profile_steps: Annotated[str, resume_safe(short_run="0,0")] = "0,0"
    """Steps a,b: trace them, both included, for TensorBoard's profiler; 0,0: none."""
    vis_dataloader: Annotated[Switch, resume_safe(short_run=False)] = False
    """Draw what the network sees of the first training images, with their labels."""


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
        raise FlagError("--pruning_method: the average of --ema_decay would keep what is pruned; leave one of them out")
    _check_inputs(mode, config.run, data, config.use)
    _check_checkpoint(mode, config.run, steps)
    _check_stopping(evaluation, "use_synthetic_data" if data.use_synthetic_data else skips_evaluation)
    check_distribution(config.distribution)
    check_parity(config.parity, mode, list_per_side(type(config)))
    if device.no_hpu and device.device == "hpu":
        raise FlagError("--no_hpu: contradicts --device hpu; leave one of them out")
    parse_step_range(config.report.profile_steps, "profile_steps")


def _check_stopping(evaluation: EvaluationFlags, skips: str | None) -> None:
    if not (evaluation.stop_threshold or evaluation.patience):
        return
    if evaluation.epochs_between_evals == 0:
        raise FlagError("--stop_threshold and --patience: need evaluations; give --epochs_between_evals above 0")
    if skips is not None:
        raise FlagError(f"--stop_threshold and --patience: need evaluations; leave out --{skips}")


def _check_pruning(pruning: PruningFlags) -> None:
    if pruning.pruning_end_step <= pruning.pruning_begin_step:
        raise FlagError(f"--pruning_end_step {pruning.pruning_end_step}: must be above --pruning_begin_step")


def _check_inputs(mode: str, run: RunFlags, data: DataFlags, use: UseFlags) -> None:
    """What each mode needs to read, and what only some modes read."""
    folders = {"data_dir": data.data_dir, "jpeg_data_dir": data.jpeg_data_dir}
    given = next((f"--{flag} {folder}" for flag, folder in folders.items() if folder is not None), "")
    if data.use_synthetic_data and given:
        raise FlagError(f"--use_synthetic_data: contradicts {given}; leave one of them out")
    if not data.train_splits:
        raise FlagError("--train_splits: names nothing; give one or more, as train")
    if mode == "predict" and not use.inference:
        raise FlagError("--mode predict: needs --inference with images, videos or a folder")
    if mode not in ("predict", "export") and use.inference:
        raise FlagError(f"--inference {use.inference[0]}: is for --mode predict and export; mode is {mode}")
    if run.json and mode not in ("plan", "parity"):
        raise FlagError(f"--json: is for --mode plan and parity; mode is {mode}")
    if mode == "eval" and data.use_synthetic_data:
        raise FlagError("--mode eval: random images have no truth; give --data_dir, not --use_synthetic_data")
    sized = mode == "plan" and data.num_examples_per_epoch > 0
    if mode not in ("predict", "export") and not (given or data.use_synthetic_data or sized):
        raise FlagError(f"--mode {mode}: needs --data_dir, with records or folders of classes")


def _check_checkpoint(mode: str, run: RunFlags, steps: int) -> None:
    if mode == "verify-resume" and not 1 <= run.kills < (steps or math.inf):
        raise FlagError(f"--kills {run.kills}: must be at least 1, and below the steps of the run")
    named = ("newest", "best", "all") if mode == "eval" else ("newest", "best")
    if run.checkpoint not in named and not run.checkpoint.isdecimal():
        raise FlagError(f"--checkpoint {run.checkpoint}: must be {', '.join(named)} or a step, with --mode {mode}")
    if run.checkpoint != "newest" and mode not in ("eval", "predict", "export", "parity"):
        which = "eval, predict, export and parity"
        raise FlagError(f"--checkpoint {run.checkpoint}: is for --mode {which}; mode is {mode}")
    if run.clean and mode != "train":
        raise FlagError(f"--clean: is for --mode train; mode is {mode}")


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
