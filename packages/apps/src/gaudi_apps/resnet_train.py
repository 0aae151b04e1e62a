"""The program `resnet_train`: train, evaluate and use ResNets, or plan a training.

TensorFlow is imported only once the flags are found good and there is something to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, NoReturn

from tyro.conf import arg

from gaudi_apps.classification import flags
from gaudi_apps.classification.flags import (
    INNER_SWITCH,
    ClassifierConfig,
    DecayForm,
    LearningConfig,
    OptimizerKind,
    RateKind,
    ScheduleConfig,
    TrainConfig,
    check_common,
    make_settings,
)
from gaudi_apps.cli.flag_rules import Switch, fixed, list_idle, resume_safe
from gaudi_apps.cli.flags import RecipeFlags
from gaudi_apps.cli.launch import choose_batch, share_batch
from gaudi_apps.cli.program import Program
from gaudi_apps.runtime.errors import flag_error
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.plan import CURRENT, find_version_in
from gaudi_apps.training.recipe import (
    COSINE,
    Choice,
    Host,
    Recipe,
    choose_average,
    choose_evaluations,
    choose_steps,
    choose_type,
    find_host,
)
from gaudi_datasets.arguments import OFF, ON, FormerFlag, rename
from gaudi_datasets.fetching.stores import find_copy
from gaudi_datasets.program import count_things
from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_models.architectures import CLASSIFIERS, RESNETS, list_convolutions
from gaudi_ops.schedules import lars_defaults

if TYPE_CHECKING:
    from gaudi_apps.cli.launch import LaunchReport
    from gaudi_apps.training.application import Application

SAME_MODELS = {"resnet50_v1.5": "resnet50"}
IMAGES_OF_BASE_RATE = 256


class Preset(NamedTuple):
    """Defaults of flags, chosen by another flag."""

    optimizer: OptimizerKind
    lr_schedule: RateKind
    warmup_epochs: float
    label_smoothing: float = 0.0
    dropout: float = 0.0


PRESETS = {
    "SGD": Preset("SGD", "piecewise", 5),
    "LARS": Preset("LARS", "polynomial", 3, label_smoothing=0.1),
    "Adam": Preset("Adam", "constant", 0),
    # The transfer to another data set, as of flowers.
    "fine_tune": Preset("Adam", "cyclical", 0, label_smoothing=0.1, dropout=0.2),
}
LARS_RATE, LARS_RATE_OF_SEVERAL = 2.5, 9.5  # by the number of devices
ADAM_RATE = 1e-3


_CYCLICAL = ("lr_schedule", ("cyclical",))


@dataclass(frozen=True)
class TrainingFlags(flags.TrainingFlags):
    """Network, initial weights, optimizer, learning rate, weight decay and loss.

    --optimizer LARS and --fine_tune are presets, which set the defaults of other flags.
    """

    model: Annotated[str, fixed(of_network=True, same=SAME_MODELS)] = "resnet50_v1.5"
    """Network: resnet18, 34, 50, 101, 152, resnext50, 101, 152, or one of keras.applications, such as
    resnet50v2_keras."""
    weights: Annotated[str | None, arg(aliases=["--pretrained_filepath"]), fixed(per_side=True)] = None
    """File of initial weights: torchvision .pth, Keras .h5, .npz, .safetensors, TensorFlow checkpoint, or a checkpoint
    of this program, or a URL. Weights that fit are loaded, the others are named."""
    optimizer: Annotated[Literal["SGD", "LARS", "Adam"] | None, fixed()] = None
    """Optimizer; by default SGD with momentum, and Adam with --fine_tune."""
    lr_schedule: Annotated[Literal["piecewise", "polynomial", "constant", "cosine", "cyclical"] | None, fixed()] = None
    """Learning rate after warm-up; by default piecewise, polynomial for LARS, cyclical with --fine_tune."""
    base_lr: Annotated[float | None, arg(aliases=["--base_learning_rate"]), fixed(above=0, finite=False)] = None
    """Learning rate for 256 images per step, by default .1. For a polynomial, LARS and Adam, learning rate of the run,
    by default 2.5 for LARS (9.5 on several processes), .001 for Adam, and by the batch size for a polynomial."""
    warmup_epochs: Annotated[float | None, fixed(minimum=0, maximum=1e6)] = None
    """Number of epochs of linear warm-up; by default 5, 3 for LARS, 0 for Adam."""
    end_learning_rate: Annotated[float, fixed(minimum=0, needs=("lr_schedule", ("polynomial",)))] = 1e-4
    """Learning rate at the end of a polynomial schedule."""
    initial_learning_rate: Annotated[float, fixed(minimum=0, needs=_CYCLICAL)] = 1e-4
    """Lowest learning rate of a cyclical schedule."""
    maximal_learning_rate: Annotated[float, fixed(above=0, needs=_CYCLICAL)] = 4e-3
    """Highest learning rate of a cyclical schedule."""
    step_size: Annotated[int, fixed(minimum=1, needs=_CYCLICAL)] = 40
    """Number of steps from the lowest to the highest learning rate of a cyclical schedule."""
    momentum: Annotated[float, fixed(minimum=0, below=1, needs=("optimizer", ("SGD", "LARS")))] = 0.9
    """Momentum of SGD and LARS; the learning rate is part of the velocity, as in Keras."""
    weight_decay: Annotated[float, fixed(minimum=0)] = 1e-4
    """Factor of the weight decay. For SGD and --fine_tune it is Keras' L2: the sum of the squares of kernels and head,
    whose gradient is twice the weight. For Adam and --single_l2_loss_op it is half the sum of the squares of all
    weights except those of batch norm."""
    single_l2_loss_op: Annotated[Switch, fixed()] = False
    """Add the weight decay to the loss as one term, which is reported as part of it."""
    lars_epsilon: Annotated[float, fixed(minimum=0, needs=("optimizer", ("LARS",)))] = 0.0
    """Number to add to the norms that LARS divides by; 0: 1e-7."""
    label_smoothing: Annotated[float | None, fixed(minimum=0, below=1)] = None
    """Share of each label to spread over all classes; by default 0, and .1 for LARS and with --fine_tune."""


@dataclass(frozen=True)
class ReportFlags(flags.ReportFlags):
    """Evaluation, log and checkpoints."""

    no_evaluate: Annotated[Switch, arg(aliases=["--skip_eval"])] = False
    log_steps: int = 100
    """Steps between two reports of loss and speed, and between two points in TensorBoard."""
    steps_per_loop: Annotated[int, resume_safe(minimum=1)] = 1
    """Number of steps to compute in one call, with all of their batches in memory; signals are answered between
    calls."""
    enable_checkpoint_and_export: Annotated[Switch, resume_safe(short_run=False)] = False
    """Export a SavedModel at the end of training."""


@dataclass(frozen=True)
class ResNetConfig(ClassifierConfig):
    """Everything a run of resnet_train depends on."""

    recipe: RecipeFlags = field(default_factory=RecipeFlags)
    training: TrainingFlags = field(default_factory=TrainingFlags)
    report: ReportFlags = field(default_factory=ReportFlags)


def validate(config: ResNetConfig) -> None:
    """Raise FlagError for the first flag whose value breaks a rule of its own or of another flag."""
    run, training = config.run, config.training
    if training.base_lr is not None and _find_schedule(config) == "cyclical":
        raise flag_error("--base_lr: a cyclical schedule has none", "give --maximal_learning_rate instead")
    if not training.maximal_learning_rate > training.initial_learning_rate:
        raise flag_error(
            f"--maximal_learning_rate {training.maximal_learning_rate:g}: must be above --initial_learning_rate, "
            f"{training.initial_learning_rate:g}"
        )
    if SAME_MODELS.get(training.model, training.model) not in CLASSIFIERS:
        raise flag_error(f"--model {training.model}: is none of {', '.join([*SAME_MODELS, *CLASSIFIERS])}")
    if training.fine_tune and run.mode == "train" and not training.weights:
        raise flag_error("--fine_tune: needs --weights, the weights that give the features")
    if config.report.enable_checkpoint_and_export and config.data.use_fake_data:
        raise flag_error("--enable_checkpoint_and_export: an export is checked on images, so give --data_dir")
    check_common(config, run.mode, config.recipe.data)


def make_train_config(
    config: ResNetConfig, distribution: Distribution | None = None, version: int = CURRENT
) -> TrainConfig:
    """Make the TrainConfig of validated flags, for one of the processes that train together."""
    distribution = distribution or Distribution()
    run, training, report = config.run, config.training, config.report
    workers = distribution.rank_info.size
    preset = _find_preset(config)
    smoothing, dropout = training.label_smoothing, training.dropout
    optimizer = training.optimizer or preset.optimizer
    global_batch = share_batch(config.distribution, config.data.batch_size, workers)
    return TrainConfig(
        flags=config,
        run=make_settings(
            config,
            distribution,
            summary_every=report.log_steps,
            profile=report.profile,
            weights=training.weights,
            steps_per_call=report.steps_per_loop,
            minutes=config.recipe.minutes,
            reports_best=config.recipe.data is not None,
        ),
        recipe=config.recipe,
        model=SAME_MODELS.get(training.model, training.model),
        rate=_make_rate(config, preset, global_batch, workers).for_version(version),
        learning=LearningConfig(
            optimizer=optimizer,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            lars_epsilon=training.lars_epsilon,
            single_l2=training.single_l2_loss_op,
            label_smoothing=preset.label_smoothing if smoothing is None else smoothing,
            dropout=preset.dropout if dropout is None else dropout,
            mixup_alpha=training.mixup_alpha,
            ema_decay=run.ema_decay,
            pruning=config.pruning if config.pruning.pruning_method else None,
            momentum_form="keras" if version > 1 else "tensorflow1",
            decay_form=_find_decay_form(config) if version > 1 else "half_squares",
        ),
        global_batch=global_batch,
        min_crop_area=config.data.least_crop_area or 0.05,
        eval_images=config.report.eval_samples,
        checkpoint_steps=report.save_checkpoints_steps,
        eval_epochs=0.0 if report.no_evaluate else report.eval_epochs,
        export_at_end=f"{find_copy(run.model_dir)}/export" if report.enable_checkpoint_and_export else None,
        idle=tuple(list_idle(config, optimizer=optimizer, lr_schedule=_find_schedule(config))),
    )


def _find_decay_form(config: ResNetConfig) -> DecayForm:
    """Find the form of the weight decay; Adam without --fine_tune is not in the original program."""
    is_original = config.training.fine_tune or config.training.optimizer != "Adam"
    return "l2" if is_original and not config.training.single_l2_loss_op else "half_squares"


def _find_preset(config: ResNetConfig) -> Preset:
    return PRESETS["fine_tune" if config.training.fine_tune else config.training.optimizer or "SGD"]


def _find_schedule(config: ResNetConfig) -> RateKind:
    return config.training.lr_schedule or _find_preset(config).lr_schedule


def _make_rate(config: ResNetConfig, preset: Preset, batch: int, workers: int) -> ScheduleConfig:
    """Return the learning rate for a global batch and a number of ranks."""
    training, kind = config.training, _find_schedule(config)
    own_rates = {"LARS": LARS_RATE if workers == 1 else LARS_RATE_OF_SEVERAL, "Adam": ADAM_RATE}
    optimizer = training.optimizer or preset.optimizer
    base, warmup = training.base_lr, preset.warmup_epochs
    if kind == "cyclical":
        peak = training.maximal_learning_rate
    elif optimizer in own_rates:
        peak = base or own_rates[optimizer]
    elif kind == "polynomial":
        # Not of 256 images, but of the run.
        peak, warmup = lars_defaults(batch)
        peak = base or peak
    else:
        peak = (base or 0.1) * batch / IMAGES_OF_BASE_RATE
    return ScheduleConfig(
        kind=kind,
        peak=peak,
        end=training.initial_learning_rate if kind == "cyclical" else training.end_learning_rate,
        warmup_epochs=warmup if training.warmup_epochs is None else training.warmup_epochs,
        epochs=config.run.epochs,
        steps=config.run.steps,
        half_cycle=training.step_size,
        whole_epochs=True,
    )


SMALL_SET, LARGE_SET = 2000, 20000  # images
# What has time for fewer images than FEWEST_IMAGES learns more from steps of 8, though an image costs 1 / .7 in them.
EPOCHS, FEWEST_STEPS, SMALL_BATCH, FEWEST_IMAGES = 50, 2000, 32, 6400
# Images of 128 pixels a second to plan with: of a processor with bf16, AVX-512, and neither, and of an accelerator.
ASSUMED_SPEEDS = (56.0, 28.0, 12.0, 1500.0)
# A large data set has ResNet-50 and 224 pixels where there is time for so many epochs and images of it, by a guess.
LARGE_EPOCHS, LARGE_IMAGES = 5, 1000000
# Others learn most from the largest size of which there is time for enough images, or from the smallest one.
ENOUGH_IMAGES, SIZES = 20000, (128, 96, 64)
OF_SIZES = {224: "details of a large data set", SIZES[0]: "fast, and enough for few images or little time"}
NO_WEIGHTS = (
    "starts from random weights, from which a classifier learns more slowly than from those of ImageNet; "
    "`gaudi-datasets fetch weights resnet50` fetches these, and --weights with --model resnet50 takes them"
)


def choose_recipe(
    config: ResNetConfig, given: frozenset[str], workers: int, *, images: int, validates: bool, host: Host
) -> Recipe:
    """Choose the flags of a training by the size of the data and the machine; they were found on photos of clothes."""
    from gaudi_apps.classification.plan import WARMUP_REASON, choose_warmup

    on_cpu = host.device == "cpu"
    # Each rank has an accelerator of its own; processors are those of all.
    speed = host.assume_speed(*ASSUMED_SPEEDS) * (1 if on_cpu else workers)
    choose_length = partial(choose_steps, config, given, epochs=EPOCHS)
    sizes = SIZES[:1] if "weights" in given else SIZES

    def has_time(images: int, model: str, size: int) -> bool:
        rate = speed * compare_speed(model, size, on_cpu=on_cpu)
        return not config.recipe.minutes or int(choose_length(rate, 1, fewest=0).value) >= images

    is_large = images >= LARGE_SET and has_time(max(LARGE_EPOCHS * images, LARGE_IMAGES), "resnet50", 224)
    is_deep = is_large or (images >= LARGE_SET and "weights" in given)  # whose weights these are likely to be
    model = config.training.model if "model" in given else "resnet50_v1.5" if is_deep else "resnet18"
    size = 224 if is_large else next((one for one in sizes if has_time(ENOUGH_IMAGES, model, one)), sizes[-1])
    pixels = config.data.image_size if "image_size" in given else size
    wanted = 128 if images >= SMALL_SET and not on_cpu else SMALL_BATCH if has_time(FEWEST_IMAGES, model, pixels) else 8
    own_batch, batch = choose_batch(config, given, wanted, workers)
    per_epoch = max(1, images // batch)
    speed *= compare_speed(model, pixels, on_cpu=on_cpu) * (0.7 if batch <= 8 else 1)
    fewest = min(FEWEST_STEPS, max(1, FEWEST_STEPS * SMALL_BATCH // batch))
    length = choose_length(speed / batch, per_epoch, fewest=fewest)
    steps = int(length.value)
    choices = [
        *([] if {"steps", "epochs"} & given else [length]),
        Choice("model", model, "details of a large data set" if is_deep else "few images or little time"),
        Choice("image_size", size, OF_SIZES.get(size, "little time: more of smaller images fit")),
        Choice("batch_size", own_batch, f"for {count_things(images, 'image')} and the time, on {host.describe()}"),
        choose_type(host),
        Choice("optimizer", "Adam", "needs no search for a rate"),
        COSINE,
        Choice("warmup_epochs", choose_warmup(steps, per_epoch), WARMUP_REASON),
        Choice("label_smoothing", 0.1, "against overconfidence"),
        Choice("zero_gamma", True, "residual blocks begin as the identity"),
        *([] if config.pruning.pruning_method else [choose_average(steps)]),  # it would keep what is pruned
        Choice("training_dataset_cache", True, "reads each file once, if all fit into memory"),
    ]
    if not is_large:
        choices += [
            Choice("least_crop_area", 0.4, "few images or little time: crops that show the object"),
            Choice("color_jitter", 0.2, "few images or little time; give 0 where color tells the classes"),
            Choice("gray_probability", 0.2, "few images or little time; give 0 where color tells the classes"),
        ]
    choices += choose_evaluations(given, steps, per_epoch, validates=validates)
    choices.append(Choice("log_steps", 10, "a line every few seconds"))
    notes = () if config.training.weights else (NO_WEIGHTS,)
    return Recipe(tuple(choices), given, notes, config.recipe.minutes)


def compare_speed(model: str, size: int, *, on_cpu: bool) -> float:
    """Return the speed of a network with images of a size, in that of ResNet-18 with 128 pixels; it is about right.

    On processors 1.6, 2.7 and .2 were measured for 96 and 64 pixels, and ResNet-50 with 224; others are guessed.
    """
    name = SAME_MODELS.get(model, model).removesuffix("_keras").removesuffix("v2")
    known = name if name in RESNETS else "resnet50"  # an unknown one is refused later
    usual, work = (
        sum(unit.count_weights(channels) * side**2 for unit, channels, side in list_convolutions(RESNETS[name], pixels))
        for name, pixels in (("resnet18", SIZES[0]), (known, size))
    )
    return float((usual / work) ** (0.8 if on_cpu else 0.3))


_NO_USE = "it did nothing in the original either; give --base_lr, --lr_schedule and --optimizer"
FORMER_FLAGS = (
    *flags.FORMER_FLAGS,
    FormerFlag("--run_eagerly", "it was for debugging the original in TensorFlow; leave it out", meant=(OFF,)),
    FormerFlag(
        "--fp16_implementation",
        "there is no fp16, for bf16 has the range of fp32; give `--dtype bf16`",
        default="keras",
        meant=("keras",),
    ),
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
        "it sped up GPUs, as the environment variable TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1 does; leave it out",
        default=ON,
        meant=(ON, OFF),
    ),
    FormerFlag("--enable_get_next_as_optional", f"it {INNER_SWITCH}", meant=(OFF,)),
    FormerFlag("--tpu", "there is no TPU; give --device", default="none", meant=("",)),
    FormerFlag(
        "--use_tf_while_loop",
        "steps of one call are always a loop in TensorFlow; `--steps_per_loop 1` makes each step a call",
        default=ON,
        meant=(ON,),
    ),
    FormerFlag("--initial_learning_rate_per_sample", _NO_USE, default="7e-05", meant=("7e-05",)),
    FormerFlag("--lr_decay_factor", _NO_USE, default="0.94", meant=("0.94",)),
    FormerFlag("--num_epochs_per_decay", _NO_USE, default="2.5", meant=("2.5",)),
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
    FormerFlag("--checkpoint_path", "give --weights with --fine_tune", default="none"),
    FormerFlag("--do_data_augmentation", "training images are always augmented; leave it out", meant=(ON,)),
    FormerFlag("--new_batch_size", "give --batch_size", "-nbs", "16", replace=rename("--batch_size")),
)


class ResNetTrain(Program):
    """Train and use ResNets."""

    prog = "resnet_train"
    description = "Train and evaluate image classifiers on ImageNet or folders of classes, on Gaudi, GPU or CPU."
    config = ResNetConfig
    former_flags = FORMER_FLAGS

    def validate(self, config: ResNetConfig) -> None:
        """Raise FlagError for a value that breaks a rule."""
        validate(config)

    def print_plan(self, config: ResNetConfig, workers: int, launch: LaunchReport | None) -> None:
        """Print the plan of a training."""
        from gaudi_apps.classification.plan import print_plan

        version = find_version_in(config.run.model_dir, clean=config.run.clean)
        train_config = make_train_config(config, Distribution(RankInfo(size=workers)), version)
        print_plan(train_config, launch, as_json=config.run.json, recipe=self.recipe)

    def choose_recipe(self, config: ResNetConfig, given: frozenset[str], workers: int) -> Recipe:
        """Choose the flags that follow from data and machine."""
        from gaudi_apps.classification.data import open_found

        found, host = open_found(config.recipe, config.run.seed), find_host(config.device, workers)
        images = config.data.num_examples_per_epoch or len(found.train)
        return choose_recipe(config, given, workers, images=images, validates=found.val is not None, host=host)

    def open(self, config: ResNetConfig, distribution: Distribution) -> Application:
        """Make the application."""
        from gaudi_apps.classification.application import ClassificationApplication

        return ClassificationApplication(
            self.module, config, partial(make_train_config, distribution=distribution), self.recipe
        )


PROGRAM = ResNetTrain()


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments, those of the command line when None, and leave the process."""
    PROGRAM.run(argv)


if __name__ == "__main__":
    main()
