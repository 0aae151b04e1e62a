"""TensorFlow as framework."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_apps.runtime.settings import DeviceSettings
from gaudi_apps.runtime.threads import find_threads
from gaudi_distributed import (
    ConfigurationError,
    Precision,
    apply_environment,
    choose_device,
    choose_precision,
    open_device,
    polling_environment,
)
from gaudi_distributed.devices.habana import module_environment

if TYPE_CHECKING:
    from gaudi_apps.training.parity.record import ReplaySteps


# TensorFlow is imported inside the functions, after `start_tensorflow` has set what it reads when it is imported.


class TensorFlow:
    """The framework TensorFlow, see `gaudi_apps.training.application.Framework`.

    Attributes:
        distributions: names of the packages whose versions must be equal on all ranks.
        precision: that of the device, once started.
    """

    distributions: tuple[str, ...] = ("tensorflow", "tensorflow-cpu", "tf-keras", "habana-tensorflow")

    def __init__(self) -> None:
        self.precision = Precision("fp32", "float32")

    def start(self, settings: DeviceSettings) -> None:
        """Start TensorFlow, see `start_tensorflow`."""
        self.precision = start_tensorflow(settings)

    @property
    def precision_name(self) -> str:
        """Return "fp32" or "bf16"."""
        return self.precision.name

    def list_devices(self) -> list[str]:
        """List the kinds of the devices in use, such as ``["CPU"]``."""
        import tensorflow as tf

        return sorted({device.device_type for device in tf.config.get_visible_devices()})

    def needs_static_shapes(self) -> bool:
        """Return True on a Gaudi, where each new shape takes long to compile."""
        from gaudi_ops.tf import hpu

        return hpu.has_hpu()

    @property
    def replay_steps(self) -> ReplaySteps:
        """Return the function of `gaudi_apps.training.parity.keras_steps`."""
        from gaudi_apps.training.parity.keras_steps import replay_steps

        return replay_steps

    def start_trace(self, folder: Path) -> None:
        """Start TensorFlow's profiler, which writes into `plugins/profile` below a folder."""
        import tensorflow as tf

        folder.mkdir(parents=True, exist_ok=True)
        tf.profiler.experimental.start(str(folder))

    def trace_step(self, step: int) -> Any:
        """Mark a step in the trace, by which TensorBoard finds the time that a step takes."""
        import tensorflow as tf

        return tf.profiler.experimental.Trace("train", step_num=step, _r=1)

    def stop_trace(self) -> None:
        """Write the trace."""
        import tensorflow as tf

        tf.test.experimental.sync_devices()  # the last step may still be running on its device
        tf.profiler.experimental.stop()


def start_tensorflow(settings: DeviceSettings) -> Precision:
    """Choose device and precision, set the environment, and only then import TensorFlow."""
    kind = choose_device(settings.device, use_hpu=settings.use_hpu)
    precision = choose_precision(settings.dtype, kind, recipe_cache=settings.recipe_cache)
    # Its log of CPU features and missing CUDA libraries is no news to a user; errors still show.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"), "OPENCV_FFMPEG_LOGLEVEL": "-8"}
    if "tensorflow" in sys.modules:  # a program in Python has imported it, and its log is written
        quiet = {}
    # A process that trains alone takes whichever Gaudi is free, or the one that the user names.
    module = module_environment(settings.local_rank, os.environ) if kind == "hpu" and settings.is_rank else {}
    polling = polling_environment(os.environ) if kind == "cpu" and settings.is_rank else {}
    apply_environment({**quiet, **precision.environment, **module, **polling})
    threads = find_threads(
        settings.intra_threads,
        settings.inter_threads,
        settings.usable_cpus,
        dtype="bfloat16" if settings.dtype == "bf16" else "float32",
        on_cpu=kind == "cpu",
    )
    import tensorflow as tf

    from gaudi_ops.tf.keras_api import keras

    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads.intra)
        tf.config.threading.set_inter_op_parallelism_threads(threads.inter)
    except RuntimeError:  # it has computed already, which only a program in Python can do before
        raise ConfigurationError(
            "TensorFlow has computed in this process already, with other threads",
            remedy="open the training before a network is used, or in a new process",
        ) from None
    if quiet:
        tf.get_logger().setLevel("ERROR")  # nor is its advice on functions that are traced again
    open_device(kind, or_cpu=settings.device == "auto", local_rank=settings.local_rank)
    keras.utils.set_random_seed(settings.seed)
    if settings.deterministic:
        tf.config.experimental.enable_op_determinism()
        # It joins additions of two into additions of many, whose order changes from run to run even so.
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
    return precision
