"""TensorFlow as framework: device, precision, profiler and threads, those that the user gives or the fastest measured.

`python -m gaudi_apps.runtime.tensorflow INTRA INTER DTYPE` measures one choice of threads and prints seconds.
TensorFlow takes the numbers once in a process, so each choice has a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from gaudi_apps.runtime.errors import ThreadTrialError, warn
from gaudi_apps.runtime.settings import DeviceSettings, ThreadFlag, find_version
from gaudi_datasets.output_files import find_user_cache, write_json
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
from gaudi_distributed.devices.machine import Machine, Processor, gather_processor
from gaudi_ops.files import read_text
from gaudi_ops.lazy import use_onednn
from gaudi_ops.program import importing, say

if TYPE_CHECKING:
    from gaudi_apps.training.recording import ReplaySteps


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
        """Return the function of `gaudi_apps.training.keras_task`."""
        from gaudi_apps.training.keras_task import replay_steps

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
    if kind == "cpu" and settings.dtype == "bf16" and not settings.local_rank:
        warn_of_bf16(gather_processor(Machine(), os.sched_getaffinity(0)))
    # Its log of CPU features and missing CUDA libraries is no news to a user; errors still show.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"), "OPENCV_FFMPEG_LOGLEVEL": "-8"}
    if "tensorflow" in sys.modules:  # a program in Python has imported it, and its log is written
        quiet = {}
    # A process that trains alone takes whichever Gaudi is free, or the one that the user names.
    module = module_environment(settings.local_rank, os.environ) if kind == "hpu" and settings.is_rank else {}
    polling = polling_environment(os.environ) if kind == "cpu" and settings.is_rank else {}
    apply_environment({**quiet, **precision.environment, **module, **polling})
    use_onednn()
    threads = find_threads(
        settings.intra_threads,
        settings.inter_threads,
        settings.usable_cpus,
        dtype="bfloat16" if settings.dtype == "bf16" else "float32",
        on_cpu=kind == "cpu",
    )
    with importing("tensorflow", deferred="pandas"):  # which Keras asks whether data are its tables
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


def warn_of_bf16(processor: Processor) -> None:
    """Warn where bf16 is slower than fp32: with AVX-512 alone by half, without it some 18 times (3x3 convolutions)."""
    if processor.flags and not processor.bf16_by:
        times = "longer than fp32" if "avx512f" in processor.flags else "more than ten times as long as fp32"
        warn(f"--dtype bf16 takes {times} on this processor, which has no instructions for it; give --dtype fp32")


FILE = "threads.json"
_MOST, _SECONDS = 4096, 120


class Threads(NamedTuple):
    """Threads of TensorFlow: `intra` within an operation and `inter` between operations."""

    intra: int
    inter: int


# Measures one choice, in seconds.
Measure: TypeAlias = Callable[[Threads], float]


def list_choices(processors: int, cores: int, intra: ThreadFlag = "auto", inter: ThreadFlag = "auto") -> list[Threads]:
    """List the choices to measure where the user gives no number.

    Within an operation there is a thread for each processor or for each core, between operations one to all of them.
    """
    within = sorted({processors, min(cores, processors)}, reverse=True) if intra == "auto" else [intra or processors]
    between = sorted({1, min(2, processors), processors}) if inter == "auto" else [inter or processors]
    return [Threads(each, other) for each in within for other in between]


def choose_fastest(choices: list[Threads], measure: Measure, cache: Path, key: str) -> tuple[Threads, str]:
    """Return the fastest choice, and a sentence about it.

    Args:
        choices: to measure.
        measure: returns the seconds of a choice.
        cache: file of earlier results; a result is used only if it is one of `choices`.
        key: of this machine and all else that the result depends on.
    """
    answers = _read_answers(cache)
    if (known := answers.get(key)) is not None and Threads(*known) in choices:
        threads = Threads(*known)
        return threads, f"{_describe(threads)}, the fastest by an earlier measurement ({cache})"
    seconds = {threads: measure(threads) for threads in choices}
    fastest = min(choices, key=lambda threads: seconds[threads])
    gain = max(seconds.values()) / seconds[fastest]
    _write_answers(cache, {**answers, key: (fastest.intra, fastest.inter)})
    return fastest, (
        f"{_describe(fastest)}, the fastest of {len(choices)} measured choices, {gain:.2f} times as fast "
        f"as the slowest (kept in {cache})"
    )


def find_threads(intra: ThreadFlag, inter: ThreadFlag, processors: int, *, dtype: str, on_cpu: bool) -> Threads:
    """Return the threads that the flags stand for, and print a choice that was measured.

    Args:
        intra: flag of the user, within operations.
        inter: flag of the user, between operations.
        processors: number of processors that may be used.
        dtype: of the computation.
        on_cpu: the CPU computes; with an accelerator nothing is measured.

    Raises:
        ThreadTrialError: a choice could not be measured.
    """
    plain = Threads(*(processors if flag == "auto" else flag or processors for flag in (intra, inter)))
    if "auto" not in (intra, inter):
        return plain
    if not on_cpu:
        say(f"threads: {_describe(plain)}; they are measured on a CPU only")
        return plain
    processor = gather_processor(Machine(), os.sched_getaffinity(0))
    versions = "-".join(find_version(name) for name in ("tensorflow", "tensorflow-cpu"))
    machine = f"{processor.model}, {processors} processors, {processor.cores} cores, TensorFlow {versions}, {dtype}"
    choices = list_choices(processors, processor.cores, intra, inter)
    key = f"{machine}, {intra} within, {inter} between"
    fastest, text = choose_fastest(choices, lambda threads: measure(threads, dtype), cache_file(os.environ), key)
    say(f"threads: {text}")
    return fastest


def measure(threads: Threads, dtype: str) -> float:
    """Measure the seconds of a choice in a process of its own.

    Raises:
        ThreadTrialError: the process failed.
    """
    command = [sys.executable, "-m", "gaudi_apps.runtime.tensorflow", str(threads.intra), str(threads.inter), dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return float(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise ThreadTrialError(f"threads auto: {_describe(threads)}: {last}; give numbers in place of auto") from error


def cache_file(environ: Mapping[str, str]) -> Path:
    """Return the file of earlier results, in the user's cache."""
    return find_user_cache(environ) / FILE


def _describe(threads: Threads) -> str:
    return f"{threads.intra} within and {threads.inter} between operations"


def _read_answers(path: Path) -> dict[str, tuple[int, int]]:
    """Return the results in the file that have the right form."""
    try:
        found = json.loads(read_text(path))
    except (OSError, ValueError):
        return {}
    answers = found.items() if isinstance(found, dict) else ()
    return {
        key: (value[0], value[1])
        for key, value in answers
        if isinstance(value, list) and len(value) == 2 and all(type(n) is int and 0 < n <= _MOST for n in value)
    }


def _write_answers(path: Path, answers: Mapping[str, tuple[int, int]]) -> None:
    """Replace the file in one step; a folder that cannot be written costs the next run the measurement."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, answers)
    except OSError as error:
        say(f"threads: not kept: {path}: {error.strerror}")


# A layer of a residual network at the size that both the detector and the classifiers have.
BATCH, SIDE, CHANNELS = 8, 56, 64
LAYERS, WARM_UPS, REPEATS = 4, 2, 7


def run_trial(intra: int, inter: int, dtype: str) -> float:
    """Return the median seconds of convolutions with batch norm, forward and backward."""
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    images = tf.random.stateless_normal([BATCH, SIDE, SIDE, CHANNELS], [0, 0])
    filters = [
        tf.Variable(tf.random.stateless_normal([3, 3, CHANNELS, CHANNELS], [0, i]) / 24) for i in range(2 * LAYERS)
    ]

    @tf.function(autograph=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            branches = [_stack_layers(tf.cast(images, dtype), part) for part in (filters[:LAYERS], filters[LAYERS:])]
            loss = tf.reduce_mean(tf.add_n([tf.cast(each, tf.float32) for each in branches]))
        for variable, gradient in zip(filters, tape.gradient(loss, filters), strict=True):
            variable.assign_sub(0.0 * gradient)
        return loss

    return statistics.median([_time_step(step) for _ in range(WARM_UPS + REPEATS)][WARM_UPS:])


def _stack_layers(x: Any, filters: list[Any]) -> Any:
    import tensorflow as tf

    ones, zeros = tf.ones([CHANNELS]), tf.zeros([CHANNELS])
    for each in filters:
        x = tf.nn.conv2d(x, tf.cast(each, x.dtype), 1, "SAME")
        x = tf.nn.relu(tf.compat.v1.nn.fused_batch_norm(x, ones, zeros)[0])
    return x


def _time_step(step: Any) -> float:
    begun = time.perf_counter()
    step().numpy()
    return time.perf_counter() - begun


if __name__ == "__main__":
    say(run_trial(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
