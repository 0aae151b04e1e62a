"""The modes of ssd_train that compute: train, eval, predict."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_apps.checkpoints import Checkpoint, CheckpointFolder
from gaudi_apps.coco_table import print_scores, write_evaluation, write_json
from gaudi_apps.curves import plot_curves
from gaudi_apps.history import HistoryWriter, read_history
from gaudi_apps.ssd.config import SSDConfig
from gaudi_apps.ssd.plan import Plan, make_plan
from gaudi_apps.ssd.plan_report import describe_training_set
from gaudi_datasets.coco import Category
from gaudi_datasets.coco_categories import COCO_CATEGORIES
from gaudi_datasets.errors import DataError
from gaudi_distributed import (
    Precision,
    SingleProcess,
    apply_environment,
    choose_device,
    choose_precision,
    open_device,
)

if TYPE_CHECKING:
    from gaudi_apps.ssd.task import SSDTask
    from gaudi_datasets.detection_input import InputOptions
    from gaudi_datasets.sources import DetectionSource

# TensorFlow is imported inside the functions, after `_start_tensorflow` has set what it reads when it is imported.


def run(config: SSDConfig) -> int:
    """Do what the validated configuration says; returns the exit status."""
    precision = _start_tensorflow(config)
    mode = {"train": _train, "eval": _evaluate, "predict": _predict}[config.run.mode]
    mode(config, precision)
    return 0


def _start_tensorflow(config: SSDConfig) -> Precision:
    """Choose device and precision, set the environment, and only then import TensorFlow."""
    kind = choose_device(config.device.device, use_hpu=not config.device.no_hpu)
    precision = choose_precision(config.device.dtype, kind)
    # Its log of CPU features and missing CUDA libraries is no news to a user; errors still show.
    apply_environment({"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"), **precision.environment})
    import tensorflow as tf

    from gaudi_ops.tf.keras_api import keras

    threads = config.device.threads or _usable_cpus(config)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    open_device(kind, or_cpu=config.device.device == "auto")
    keras.utils.set_random_seed(config.run.seed)
    if config.run.deterministic:
        tf.config.experimental.enable_op_determinism()
        # It joins additions of two into additions of many, whose order changes from run to run even so.
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    return precision


def _usable_cpus(config: SSDConfig) -> int:
    available = len(os.sched_getaffinity(0))
    return min(available, config.device.max_cpus or available)


def _input_options(config: SSDConfig) -> InputOptions:
    from gaudi_datasets.detection_input import InputOptions

    return InputOptions(
        batch_size=config.data.batch_size,
        seed=config.run.seed,
        parallel_calls=config.data.num_parallel_calls,
        threads=_usable_cpus(config),
        flip_probability=config.data.flip_probability,
        dtype="bfloat16" if config.device.dtype == "bf16" else "float32",
    )


def _open_records(config: SSDConfig, split: str) -> DetectionSource | None:
    from gaudi_datasets.sources import RecordSource

    return None if config.data.data_dir is None else RecordSource(config.data.data_dir, split)


def _build_task(config: SSDConfig, precision: Precision, categories: tuple[Category, ...]) -> SSDTask:
    from gaudi_apps.ssd.task import SSDTask

    return SSDTask(
        len(categories) + 1,
        keras_policy=precision.keras_policy,
        weight_decay=config.schedule.weight_decay,
        communicator=SingleProcess(),
    )


def _checkpoints(config: SSDConfig) -> CheckpointFolder:
    return CheckpointFolder(Path(config.run.model_dir) / "checkpoints", keep=config.report.keep_ckpt_max)


def _train(config: SSDConfig, precision: Precision) -> None:
    source = _open_records(config, "train")
    # Opened before training, so that missing validation records are no surprise after hours.
    evaluates = source is not None and not config.run.no_evaluate
    val_source = _open_records(config, "val") if evaluates else None
    categories = COCO_CATEGORIES if source is None else source.categories
    plan = make_plan(config, describe_training_set(config).images)
    task = _build_task(config, precision, categories)
    start_step = _resume(task, _checkpoints(config), categories)
    if start_step < plan.total_steps:
        _run_loop(
            config,
            plan,
            task,
            _batches(config, source, start_step, len(categories) + 1),
            categories,
            start_step,
        )
    else:
        print(f"{config.run.model_dir}: its checkpoint has {start_step} of {plan.total_steps} steps; nothing to train")
    plot_curves(read_history(_history_path(config)), Path(config.run.model_dir) / "curves.png")
    if val_source is not None:
        _score(config, task, val_source, step=max(start_step, plan.total_steps))


def _batches(
    config: SSDConfig, source: DetectionSource | None, start_step: int, num_classes: int
) -> Iterator[Mapping[str, Any]]:
    from gaudi_datasets.detection_input import fake_dataset, read_batches, train_dataset

    options = _input_options(config)
    if source is None:
        return iter(fake_dataset(options, num_classes=num_classes))
    return read_batches(train_dataset(source, options, first_step=start_step))


def _resume(task: SSDTask, checkpoints: CheckpointFolder, categories: tuple[Category, ...]) -> int:
    """Go on from the newest checkpoint, if there is one; returns the steps done."""
    if not checkpoints.steps():
        return 0
    checkpoint = checkpoints.load_newest()
    if _categories_of(checkpoint) != categories:
        raise DataError(
            f"{checkpoints.folder}: holds a model of other classes than the data set; give another --model_dir"
        )
    task.write_state(checkpoint.tensors)
    print(f"{checkpoints.path(checkpoint.step)}: continuing after step {checkpoint.step}")
    return checkpoint.step


def _categories_of(checkpoint: Checkpoint) -> tuple[Category, ...]:
    try:
        return tuple(Category(**category) for category in checkpoint.facts["categories"])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"checkpoint of step {checkpoint.step}: does not name its classes ({error!r}); use another"
        ) from None


def _history_path(config: SSDConfig) -> Path:
    return Path(config.run.model_dir) / "history.jsonl"


def _run_loop(
    config: SSDConfig,
    plan: Plan,
    task: SSDTask,
    batches: Iterator[Mapping[str, Any]],
    categories: tuple[Category, ...],
    start_step: int,
) -> None:
    from gaudi_apps.loop import LoopOptions, Reporters, require_finite_state, train
    from gaudi_apps.progress import TrainingProgress
    from gaudi_apps.summaries import SummaryWriter

    model_dir = Path(config.run.model_dir)
    model_dir.mkdir(parents=True, exist_ok=True)
    checkpoints = _checkpoints(config)
    facts = {"categories": [asdict(category) for category in categories]}
    progress = TrainingProgress(
        total_steps=plan.total_steps,
        steps_per_epoch=plan.steps_per_epoch,
        batch_size=plan.global_batch,
        start_step=start_step,
        log_every=config.report.log_step_count_steps,
    )
    options = LoopOptions(
        total_steps=plan.total_steps,
        log_every=config.report.log_step_count_steps,
        summary_every=config.report.save_summary_steps,
        checkpoint_every=plan.checkpoint_steps,
    )
    with (
        progress,
        HistoryWriter(_history_path(config), resume_step=start_step) as history,
        SummaryWriter(model_dir / "summaries") as summaries,
    ):

        def save(step: int) -> None:
            state = task.read_state()
            require_finite_state(state, step)
            progress.note(f"checkpoint {checkpoints.save(step, state, facts)}")

        reporters = Reporters(progress, history, summaries)
        train(task, batches, plan.learning_rate, options, reporters, save, start_step=start_step)


def _restore(config: SSDConfig, precision: Precision) -> tuple[SSDTask, tuple[Category, ...], int]:
    """The model of the newest checkpoint, its classes, and its step."""
    checkpoint = _checkpoints(config).load_newest()
    categories = _categories_of(checkpoint)
    task = _build_task(config, precision, categories)
    task.write_state(checkpoint.tensors)
    return task, categories, checkpoint.step


def _evaluate(config: SSDConfig, precision: Precision) -> None:
    task, categories, step = _restore(config, precision)
    source = _open_records(config, "val")
    if source is None or source.categories != categories:
        raise DataError(f"{config.data.data_dir}: has other classes than the model in {config.run.model_dir}")
    _score(config, task, source, step=step)


def _score(config: SSDConfig, task: SSDTask, source: DetectionSource, *, step: int) -> None:
    """Evaluate, print the figures, and leave them and pictures in the folder of the run."""
    from gaudi_apps.ssd.detector import Detector
    from gaudi_apps.ssd.evaluation import evaluate
    from gaudi_apps.ssd.report import draw_comparisons

    model_dir = Path(config.run.model_dir)
    detector = Detector(task.model)
    limit = config.data.eval_samples or None
    scores, detections = evaluate(detector, source, _input_options(config), num_images=limit)
    write_json(model_dir / "detections.json", detections)
    path = model_dir / "evaluation.json"
    write_evaluation(path, scores, step=step)
    pictures = draw_comparisons(model_dir, source, detections, num_images=scores.images)
    print_scores(scores)
    print(f"figures: {path}\npictures: {pictures[0].parent} ({len(pictures)}), {model_dir / 'curves.png'}")


def _predict(config: SSDConfig, precision: Precision) -> None:
    from gaudi_apps.ssd.detector import Detector
    from gaudi_apps.ssd.predict import find_pictures, predict

    pictures = find_pictures(Path(config.run.inference or ""))
    task, categories, _ = _restore(config, precision)
    output_dir = Path(config.run.model_dir) / "predictions"
    for line in predict(Detector(task.model), pictures, categories, output_dir):
        print(line)
    print(f"{len(pictures)} pictures with their detections: {output_dir}")
