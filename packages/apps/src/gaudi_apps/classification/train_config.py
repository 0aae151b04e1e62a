"""Configure the training of a classifier, in one form for programs whose flags differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gaudi_apps.runtime.process_group import Distribution, share_batch
from gaudi_apps.runtime.profiler import parse_step_range
from gaudi_apps.runtime.settings import RunSettings, make_device_settings

if TYPE_CHECKING:
    from gaudi_apps.inference.exporter import ExportFormat

IMAGENET_TRAIN_IMAGES = 1281167
IMAGENET_CLASSES = 1000
LISTED = 5  # classes of an image that are listed at most, and that top-5 accuracy counts

RateKind = Literal["piecewise", "polynomial", "constant", "cosine", "cyclical"]
OptimizerKind = Literal["SGD", "LARS", "Adam"]
MomentumForm = Literal["keras", "tensorflow1"]
DecayForm = Literal["l2", "half_squares"]


@dataclass(frozen=True)
class DataConfig:
    """Configure the images.

    Attributes:
        data_dir: folder of records or of class folders, such as that of JPEG files; None with random images.
        train_splits, eval_split: names in it.
        jpeg_data_dir: as given, for it asked for hardware media loading.
        batch_size: images a step of one process.
        global_batch: images a step of all processes.
        image_size: pixels.
        least_area: of a training crop, as a share of the image.
        flip_probability: of a training image.
        color_jitter, gray_probability: see `gaudi_datasets.classification.augmentation.ColorRange`.
        caches_encoded: whether encoded images are kept in memory, if they fit.
        caches_decoded: whether decoded images are kept in memory.
        dtype: of the images, ``"float32"`` or ``"bfloat16"``.
        parallel_calls, threads: of the pipeline; 0 threads: as many as processors.
        num_images: of an epoch; 0: all.
        eval_images: to evaluate; 0: all.
    """

    data_dir: str | None
    train_splits: tuple[str, ...]
    eval_split: str
    jpeg_data_dir: str | None
    batch_size: int
    global_batch: int
    image_size: int
    least_area: float
    flip_probability: float
    color_jitter: float
    gray_probability: float
    caches_encoded: bool
    caches_decoded: bool
    dtype: str
    parallel_calls: int
    threads: int
    num_images: int
    eval_images: int


@dataclass(frozen=True)
class NetworkConfig:
    """The network: name, padding (None: as the original or the weights), what is trained, and forms of its parts."""

    name: str
    padding: Any
    zero_gamma: bool
    head_only: bool
    grouped_convolution: Any


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

    @property
    def needs_length(self) -> bool:
        """Tell whether the rate depends on the last step, so that a run cannot be prolonged."""
        return self.kind in ("cosine", "polynomial")


@dataclass(frozen=True)
class PruningConfig:
    """Configure pruning, see `gaudi_ops.tf.MagnitudePruning`."""

    initial_sparsity: float
    final_sparsity: float
    begin_step: int
    end_step: int
    frequency: int


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
    pruning: PruningConfig | None
    momentum_form: MomentumForm
    decay_form: DecayForm


@dataclass(frozen=True)
class UseConfig:
    """Configure predictions and exports."""

    inference: tuple[str, ...]
    top: int
    strict: bool
    output_dir: str | None
    export_format: tuple[ExportFormat, ...]
    export_features: bool
    export_at_end: str | None


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run of a classifier depends on, whatever a program calls its flags.

    Attributes:
        run: what the machinery has to know.
        checkpoint_steps: between two checkpoints; 0: an epoch; None: only at the end.
        eval_epochs: between two evaluations during training; 0: none.
        config: the flags, with the values of those whose default follows from others.
    """

    run: RunSettings
    data: DataConfig
    model: NetworkConfig
    rate: ScheduleConfig
    learning: LearningConfig
    use: UseConfig
    checkpoint_steps: int | None
    eval_epochs: float
    config: Any


def make_data_config(config: Any, distribution: Distribution, *, least_area: float, eval_steps: int = 0) -> DataConfig:
    """Make the configuration of the images, from the group `data`."""
    data, workers = config.data, distribution.rank_info.size
    whole = share_batch(config.distribution, data.batch_size, workers)
    return DataConfig(
        data_dir=data.data_dir or data.jpeg_data_dir,
        train_splits=data.train_splits,
        eval_split=data.eval_split,
        jpeg_data_dir=data.jpeg_data_dir,
        batch_size=whole // workers,
        global_batch=whole,
        image_size=data.image_size,
        least_area=data.least_crop_area or least_area,
        flip_probability=data.flip_probability,
        color_jitter=data.color_jitter,
        gray_probability=data.gray_probability,
        caches_encoded=data.training_dataset_cache,
        caches_decoded=data.cache_decoded_image,
        dtype="bfloat16" if data.data_loader_image_type == "bf16" else "float32",
        parallel_calls=data.dataset_parallel_calls,
        threads=data.datasets_num_private_threads,
        num_images=data.num_examples_per_epoch,
        eval_images=eval_steps * whole or config.evaluation.eval_samples,
    )


def run_settings(
    config: Any,
    distribution: Distribution,
    *,
    log_every: int,
    summary_every: int,
    profile_steps: str,
    weights: str | None,
    evaluates: bool,
    steps: int,
    steps_per_call: int = 1,
) -> RunSettings:
    """Make the settings of a run."""
    run, device, report = config.run, config.device, config.report
    return RunSettings(
        device=make_device_settings(
            config,
            distribution,
            intra_threads=device.intra_op_parallelism_threads,
            inter_threads=device.inter_op_parallelism_threads,
        ),
        model_dir=Path(run.model_dir),
        clean=run.clean,
        checkpoint=run.checkpoint,
        keep_checkpoints=report.keep_ckpt_max,
        checkpoint_minutes=report.save_checkpoints_minutes,
        log_every=log_every,
        summary_every=summary_every,
        traced=parse_step_range(profile_steps, "profile_steps"),
        draws_input=report.vis_dataloader,
        weights=weights,
        target=config.evaluation.stop_threshold,
        patience=config.evaluation.patience,
        scores=evaluates and not config.data.use_synthetic_data,
        reports=evaluates,
        steps=steps,
        kills=run.kills,
        steps_per_call=steps_per_call,
        distribution=distribution,
        callbacks=config.run.callbacks,
    )


def make_network_config(config: Any, name: str) -> NetworkConfig:
    """Make the configuration of the network, from the groups `weights` and `device`."""
    weights = config.weights
    return NetworkConfig(
        name=name,
        padding=weights.padding,
        zero_gamma=weights.zero_gamma,
        head_only=weights.fine_tune,
        grouped_convolution=config.device.grouped_convolution,
    )


def for_version(rate: ScheduleConfig, version: int) -> ScheduleConfig:
    """Return a rate as a version of the rules has it, see `gaudi_apps.training.plan`."""
    return rate if version > 1 else replace(rate, drop_delay=0, cycle_decay=1.0, fractional_decay=False)


def make_pruning_config(config: Any) -> PruningConfig | None:
    """Make the configuration of pruning, from the group of its name; None without a method."""
    pruning = config.pruning
    if pruning.pruning_method is None:
        return None
    return PruningConfig(
        initial_sparsity=pruning.pruning_initial_sparsity,
        final_sparsity=pruning.pruning_final_sparsity,
        begin_step=pruning.pruning_begin_step,
        end_step=pruning.pruning_end_step,
        frequency=pruning.pruning_frequency,
    )


def make_use_config(config: Any, *, export_at_end: str | None) -> UseConfig:
    """Make the configuration of predictions and exports, from the group `use`."""
    use = config.use
    return UseConfig(
        use.inference,
        use.top,
        use.strict,
        use.output_dir,
        use.export_format,
        use.export_features,
        export_at_end,
    )
