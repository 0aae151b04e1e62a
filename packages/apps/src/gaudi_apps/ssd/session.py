"""What all computing modes of ssd_train share: TensorFlow started as configured, data, model and checkpoints."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gaudi_apps.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint
from gaudi_apps.run_folder import RunFolder
from gaudi_apps.ssd.config import SSDConfig
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.errors import DataError, MissingInputError
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
    from gaudi_datasets.detection.sources import DetectionSource
    from gaudi_datasets.sampling import InputOptions
    from gaudi_models.resnet import PoolPadding

# TensorFlow is imported inside the functions, after `_start_tensorflow` has set what it reads when it is imported.

CHECKPOINTS = "checkpoints"
BEST = "best"


@dataclass(frozen=True)
class Restored:
    """A model from a checkpoint."""

    task: SSDTask
    categories: tuple[Category, ...]
    pool_padding: PoolPadding
    step: int


class Session:
    """One start of the program.

    Args:
        config: validated.
    """

    def __init__(self, config: SSDConfig) -> None:
        self.config = config
        self.model_dir = Path(config.run.model_dir)
        self.folder = RunFolder(self.model_dir, (CHECKPOINTS, BEST))
        self.checkpoints = CheckpointFolder(self.model_dir / CHECKPOINTS, keep=config.report.keep_ckpt_max)
        self.best = CheckpointFolder(self.model_dir / BEST, keep=1)
        self._precision = _start_tensorflow(config)

    @property
    def input_options(self) -> InputOptions:
        """How the pipelines batch."""
        from gaudi_datasets.sampling import InputOptions

        data = self.config.data
        return InputOptions(
            batch_size=data.batch_size,
            seed=self.config.run.seed,
            parallel_calls=data.num_parallel_calls,
            threads=data.threadpool_size or _usable_cpus(self.config),
            flip_probability=data.flip_probability,
            dtype="bfloat16" if self.config.device.dtype == "bf16" else "float32",
        )

    def open_records(self, split: str) -> DetectionSource:
        """The records of a split in --data_dir.

        Raises:
            MissingInputError: there is no --data_dir, or no such records in it.
            DataError: they are damaged.
        """
        from gaudi_datasets.detection.sources import RecordSource

        if self.config.data.data_dir is None:
            raise MissingInputError(f"--data_dir: is not given; it must be a folder with {split} records")
        return RecordSource(self.config.data.data_dir, split)

    def build_task(self, categories: tuple[Category, ...], pool_padding: PoolPadding, *, averages: bool) -> SSDTask:
        """A detector of these classes, with new weights."""
        from gaudi_apps.ssd.task import SSDTask

        return SSDTask(
            len(categories) + 1,
            keras_policy=self._precision.keras_policy,
            weight_decay=self.config.schedule.weight_decay,
            communicator=SingleProcess(),
            pool_padding=pool_padding,
            ema_decay=self.config.weights.ema_decay if averages else 0.0,
        )

    def select_checkpoints(self) -> list[Path]:
        """Folders of the checkpoints that --checkpoint names, in the order of steps.

        Raises:
            MissingInputError: there are none.
        """
        which = self.config.run.checkpoint
        folder = self.best if which == "best" else self.checkpoints
        steps = folder.steps()
        if which.isdecimal():
            steps = [step for step in steps if step == int(which)]
        if not steps:
            raise MissingInputError(
                f"{folder.folder}: has no checkpoint {which}; train first, or give another --model_dir"
            )
        return [folder.path(step) for step in (steps if which == "all" else steps[-1:])]

    def load_selected(self) -> Checkpoint:
        """The one checkpoint that --checkpoint names; the newest that can be read is taken for the newest."""
        if self.config.run.checkpoint == "newest":
            return self.checkpoints.load_newest(report=warn)
        return load_checkpoint(self.select_checkpoints()[0])

    def restore(self, checkpoint: Checkpoint) -> Restored:
        """Build the model of a checkpoint, with the averaged weights where it has them."""
        categories, padding = categories_of(checkpoint), checkpoint.facts.get("pool_padding", "same")
        task = self.build_task(categories, padding, averages=False)
        task.write_weights(checkpoint.tensors)
        return Restored(task, categories, padding, checkpoint.step)


def _start_tensorflow(config: SSDConfig) -> Precision:
    """Choose device and precision, set the environment, and only then import TensorFlow."""
    kind = choose_device(config.device.device, use_hpu=not config.device.no_hpu)
    precision = choose_precision(config.device.dtype, kind, recipe_cache=config.device.recipe_cache)
    # Its log of CPU features and missing CUDA libraries is no news to a user; errors still show.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"), "OPENCV_FFMPEG_LOGLEVEL": "-8"}
    apply_environment({**quiet, **precision.environment})
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


def categories_of(checkpoint: Checkpoint) -> tuple[Category, ...]:
    """The classes of a checkpoint's model.

    Raises:
        DataError: it does not name them.
    """
    try:
        return tuple(Category(**category) for category in checkpoint.facts["categories"])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"checkpoint of step {checkpoint.step}: does not name its classes ({error!r}); use another"
        ) from None


def warn(text: str) -> None:
    """Show a line that is no result."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
