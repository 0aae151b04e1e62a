"""What all computing modes share: TensorFlow started as configured, the folder of the run, and its checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gaudi_apps.application import Application, Facts, Restored, TrainableTask
from gaudi_apps.checkpoints import Checkpoint, CheckpointFolder, load_checkpoint
from gaudi_apps.run_folder import RunFolder
from gaudi_apps.settings import DeviceSettings
from gaudi_datasets.errors import MissingInputError
from gaudi_distributed import Precision, apply_environment, choose_device, choose_precision, open_device

# TensorFlow is imported inside the functions, after `start_tensorflow` has set what it reads when it is imported.

CHECKPOINTS = "checkpoints"
BEST = "best"
# What a checkpoint notes of the run; all else that it notes is of the model.
RUN_FACTS = ("settings", "position", "image_sequence", "early_stop")


class Session:
    """One start of a program.

    Args:
        app: the program, with validated flags.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        self.settings = app.settings
        self.model_dir = app.settings.model_dir
        self.folder = RunFolder(self.model_dir, (CHECKPOINTS, BEST))
        self.checkpoints = CheckpointFolder(self.model_dir / CHECKPOINTS, keep=app.settings.keep_checkpoints)
        self.best = CheckpointFolder(self.model_dir / BEST, keep=1)
        self.precision = start_tensorflow(app.settings.device)

    def build_task(self, facts: Facts, *, averages: bool) -> TrainableTask:
        """A network as the facts describe it, with new weights."""
        return self.app.build_task(facts, self.precision.keras_policy, averages=averages)

    def select_checkpoints(self) -> list[Path]:
        """Folders of the checkpoints that --checkpoint names, in the order of steps.

        Raises:
            MissingInputError: there are none.
        """
        which = self.settings.checkpoint
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
        if self.settings.checkpoint == "newest":
            return self.checkpoints.load_newest(report=warn)
        return load_checkpoint(self.select_checkpoints()[0])

    def restore_newest(self) -> Restored:
        """Build the network of the newest checkpoint that can be read."""
        return self.restore(self.checkpoints.load_newest(report=warn))

    def restore_selected(self) -> Restored:
        """Build the network of the one checkpoint that --checkpoint names."""
        return self.restore(self.load_selected())

    def restore(self, checkpoint: Checkpoint) -> Restored:
        """Build the network of a checkpoint, with the averaged weights where it has them."""
        facts = model_facts(checkpoint)
        task = self.build_task(facts, averages=False)
        task.write_weights(checkpoint.tensors)
        return Restored(task, facts, checkpoint.step)


def model_facts(checkpoint: Checkpoint) -> Facts:
    """What a checkpoint notes of its network."""
    return {name: value for name, value in checkpoint.facts.items() if name not in RUN_FACTS}


def start_tensorflow(settings: DeviceSettings) -> Precision:
    """Choose device and precision, set the environment, and only then import TensorFlow."""
    kind = choose_device(settings.device, use_hpu=settings.use_hpu)
    precision = choose_precision(settings.dtype, kind, recipe_cache=settings.recipe_cache)
    # Its log of CPU features and missing CUDA libraries is no news to a user; errors still show.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"), "OPENCV_FFMPEG_LOGLEVEL": "-8"}
    apply_environment({**quiet, **precision.environment})
    import tensorflow as tf

    from gaudi_ops.tf.keras_api import keras

    tf.config.threading.set_intra_op_parallelism_threads(settings.intra_threads or settings.usable_cpus)
    tf.config.threading.set_inter_op_parallelism_threads(settings.inter_threads or settings.usable_cpus)
    open_device(kind, or_cpu=settings.device == "auto")
    keras.utils.set_random_seed(settings.seed)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
        # It joins additions of two into additions of many, whose order changes from run to run even so.
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    return precision


def warn(text: str) -> None:
    """Show a line that is no result."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
