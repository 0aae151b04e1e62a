"""Flags that resnet_train and resnext_train share, by the names, short forms and defaults of the originals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from gaudi_apps.settings import ThreadFlag

Switch = FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class RunFlags:
    """What to do, and where its results go."""

    mode: Literal["train", "eval", "predict", "export", "plan", "verify-resume", "parity"] = "train"
    """eval: score checkpoints; predict: name what is on pictures; export: for deployment; plan: print what train would
    do; verify-resume: prove on a few steps of this configuration that a killed run ends as an uninterrupted one;
    parity: compute the first steps in two ways, and name the first tensor that differs."""
    model_dir: Annotated[str, arg(aliases=["-md"])] = "runs/classifier"
    """Folder of checkpoints, curves, pictures and figures; training continues from its newest checkpoint."""
    clean: Switch = False
    """Remove the run in --model_dir first: what it wrote, and nothing else."""
    checkpoint: str = "newest"
    """Which one eval, predict, export and parity take: newest, best, a step, or for eval all, in the order of steps."""
    kills: int = 3
    """How often verify-resume kills its run."""
    seed: Annotated[int, arg(aliases=["--global_seed"])] = 0
    """Where weights, data order and augmentation start from."""
    deterministic: Switch = False
    """Same bits at every run on the same machine; slower."""
    config: str | None = None
    """YAML file of flags (name: value); flags of the command line win."""
    json: Switch = False
    """Print the plan, or what parity found, as JSON."""
    debug: Switch = False
    """Show a traceback with an error."""


@dataclass(frozen=True)
class DataFlags:
    """Training and validation images."""

    data_dir: Annotated[str | None, arg(aliases=["-dd"])] = None
    """Folder of records (train-*, validation-*), or of folders train/ and validation/ (or img_train/ and img_val/) with
    records or with a folder for each class."""
    train_splits: tuple[str, ...] = ("train",)
    """Records or folders in --data_dir to train on, one or more."""
    eval_split: str = "validation"
    """Records or folder in --data_dir to evaluate on; validation and val mean each other."""
    jpeg_data_dir: Annotated[str | None, arg(aliases=["-jpdd"])] = None
    """Folder of JPEG files, train/ and val/ with a folder for each class: read in place of --data_dir where that is not
    given. The media loader of Gaudi2 does not read them: it is not part of this version, and a run says so."""
    use_synthetic_data: Annotated[Switch, arg(aliases=["-synth"])] = False
    """Random images in place of a data set, to measure speed."""
    batch_size: Annotated[int, arg(aliases=["-bs"])] = 32
    """Images a step: of one process; of all with --distribution_strategy."""
    image_size: int = 224
    """Side of the square that the network sees, in pixels."""
    num_examples_per_epoch: int = 0
    """Training images an epoch; 0: as many as there are (1281167 with --use_synthetic_data)."""
    least_crop_area: float | None = None
    """Least share of an image that a training crop shows; by default .05, and .08 of a resnext. Crops that show less
    than .1 are drawn again in any case."""
    flip_probability: float = 0.5
    """Share of the training images that are mirrored; 0 where left and right matter, as in text."""
    color_jitter: float = 0.0
    """Brightness, contrast and saturation of training images are multiplied by 1 minus to 1 plus this, and the hue is
    turned by up to as many quarter turns; for small data sets whose classes are not told by colour."""
    gray_probability: float = 0.0
    """Share of the training images that lose all colour."""
    training_dataset_cache: Switch = False
    """Keep encoded images in memory, if all of them fit into half of what is free."""
    cache_decoded_image: Switch = False
    """Keep decoded images in memory, as many as fit into half of what is free."""
    data_loader_image_type: Annotated[Literal["fp32", "bf16"], arg(aliases=["-dlit"])] = "fp32"
    """Precision of the images that the input pipeline gives."""
    dataset_parallel_calls: int = 64
    """Images decoded and augmented at once."""
    datasets_num_private_threads: int = 0
    """Threads that do it; 0: as many as processors."""


@dataclass(frozen=True)
class WeightFlags:
    """Where weights come from, what of them is trained, and their average."""

    padding: Literal["same", "symmetric", "symmetric_stem", "same_pool"] | None = None
    """How strided layers pad; by default as the weights that are loaded, or as the original."""
    zero_gamma: Switch = False
    """Begin with every residual block as the identity."""
    fine_tune: Annotated[Switch, arg(aliases=["-ft"])] = False
    """Train only a new head on the features of loaded weights."""
    dropout: float | None = None
    """Share of the pooled features that is dropped in training; by default 0."""
    ema_decay: float = 0.0
    """Average the weights over the steps with this decay, as .9998, and use the average; 0: no average."""
    mixup_alpha: float = 0.0
    """Mix pairs of training images by shares drawn from Beta(alpha, alpha), as .2; 0: none."""


@dataclass(frozen=True)
class EvaluationFlags:
    """Scoring during and after training."""

    epochs_between_evals: Annotated[float, arg(aliases=["-ebe"])] = 1.0
    """Epochs between two evaluations during training; 0: none. The best checkpoint by top-1 is kept."""
    eval_samples: int = 0
    """Validation images to evaluate; 0: all. Fewer are the first ones, and the result says how many of how many."""
    stop_threshold: Annotated[float, arg(aliases=["-st"])] = 0.0
    """End training when an evaluation reaches this top-1 accuracy, in 0..1; 0: no threshold."""
    patience: int = 0
    """End training after so many evaluations without a better accuracy; 0: never."""


@dataclass(frozen=True)
class PruningFlags:
    """Pruning by magnitude, on a schedule of sparsity."""

    pruning_method: Literal["polynomial_decay"] | None = None
    """polynomial_decay: set the smallest weights of each layer to zero, more and more of them; by default none."""
    pruning_initial_sparsity: float = 0.0
    """Share of zeros at the first of the steps."""
    pruning_final_sparsity: float = 0.5
    """Share of zeros from the last of the steps on."""
    pruning_begin_step: int = 0
    """The first step."""
    pruning_end_step: int = 100000
    """The last step."""
    pruning_frequency: int = 100
    """Steps between two changes of which weights are zero."""


@dataclass(frozen=True)
class UseFlags:
    """Pictures for --mode predict, and --mode export."""

    inference: tuple[str, ...] = ()
    """Pictures, videos, folders, or patterns such as 'in/*.jpg', to predict on, or to check an export on."""
    top: int = 5
    """Classes to list of a picture, the likeliest first, 5 at most."""
    strict: Switch = False
    """End with the first file that cannot be read, in place of naming and skipping it."""
    output_dir: str | None = None
    """Folder of the results; predictions or export in --model_dir when not given."""
    export_format: tuple[Literal["saved_model", "onnx", "tflite", "safetensors"], ...] = ("saved_model",)
    """One or more formats; onnx needs the extra gaudi-apps[export]."""
    export_features: Switch = False
    """Export the network without its head besides, which gives the pooled features."""


@dataclass(frozen=True)
class DeviceFlags:
    """Device, precision and processors."""

    device: Literal["auto", "cpu", "gpu", "hpu"] = "auto"
    """auto: hpu, else gpu, else cpu."""
    no_hpu: Switch = False
    """Do not use Gaudi even where there is one."""
    dtype: Annotated[Literal["fp32", "bf16"], arg(aliases=["-dt"])] = "fp32"
    """Precision of the computation; weights are float32 in both."""
    max_cpus: Annotated[int, arg(aliases=["-mc"])] = 16
    """Processors the program may use at most; 0: all."""
    recipe_cache: str | None = None
    """Folder of compiled graphs on Gaudi, kept between runs; TF_RECIPE_CACHE_PATH of the environment wins."""
    check_static_shapes: Switch = False
    """End, naming the tensor, where a training step has a shape that is not static or is traced again; always on
    Gaudi, which compiles anew for every shape."""
    grouped_convolution: Literal["auto", "native", "split", "block_diagonal"] = "auto"
    """Form of convolutions in groups: native, TensorFlow's own; split, one for each group; block_diagonal, dense ones
    of neighbouring groups; auto: what suits the device."""
    intra_op_parallelism_threads: Annotated[ThreadFlag, arg(aliases=["-intra"])] = 0
    """Threads of TensorFlow within an operation; 0: as many as processors; auto: the fastest on this machine, measured
    once, for some seconds."""
    inter_op_parallelism_threads: Annotated[ThreadFlag, arg(aliases=["-inter"])] = 0
    """Threads of TensorFlow between operations; 0: as many as processors; auto: as above."""


@dataclass(frozen=True)
class ReportFlags:
    """Log and checkpoints."""

    save_checkpoint_steps: Annotated[int, arg(aliases=["-cs"])] = 0
    """Steps between two checkpoints; 0: an epoch."""
    save_checkpoints_minutes: float = 0.0
    """Minutes between two checkpoints, besides those by epochs or steps; 0: none."""
    keep_ckpt_max: int = 10
    """Checkpoints to keep besides the best; older ones are removed."""
    profile_steps: str = "0,0"
    """Steps a,b: trace them, both included, for TensorBoard's profiler; 0,0: none."""
    vis_dataloader: Switch = False
    """Draw what the network sees of the first training images, with their labels."""
