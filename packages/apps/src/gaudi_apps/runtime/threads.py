"""Choose the threads of TensorFlow: those that the user gives, or the fastest by measurement.

`python -m gaudi_apps.runtime.threads INTRA INTER DTYPE` measures one choice and prints seconds. TensorFlow takes the
numbers once in a process, so each choice has a process of its own.
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
from typing import Any, NamedTuple, TypeAlias

from gaudi_apps.runtime.errors import ThreadTrialError
from gaudi_apps.runtime.settings import ThreadFlag
from gaudi_datasets.output_files import write_json
from gaudi_distributed.devices.machine import Machine, gather_processor

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
        print(f"threads: {_describe(plain)}; they are measured on a CPU only", flush=True)
        return plain
    processor = gather_processor(Machine(), os.sched_getaffinity(0))
    versions = "-".join(find_version(name) for name in ("tensorflow", "tensorflow-cpu"))
    machine = f"{processor.model}, {processors} processors, {processor.cores} cores, TensorFlow {versions}, {dtype}"
    choices = list_choices(processors, processor.cores, intra, inter)
    key = f"{machine}, {intra} within, {inter} between"
    fastest, text = choose_fastest(choices, lambda threads: measure(threads, dtype), cache_file(os.environ), key)
    print(f"threads: {text}", flush=True)
    return fastest


def measure(threads: Threads, dtype: str) -> float:
    """Measure the seconds of a choice in a process of its own.

    Raises:
        ThreadTrialError: the process failed.
    """
    command = [sys.executable, "-m", "gaudi_apps.runtime.threads", str(threads.intra), str(threads.inter), dtype]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return float(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1]
        raise ThreadTrialError(f"threads auto: {_describe(threads)}: {last}; give numbers in place of auto") from error


def cache_file(environ: Mapping[str, str]) -> Path:
    """Return the file of earlier results, in the user's cache."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gaudi" / FILE


def _describe(threads: Threads) -> str:
    return f"{threads.intra} within and {threads.inter} between operations"


def _read_answers(path: Path) -> dict[str, tuple[int, int]]:
    """Return the results in the file that have the right form."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
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
        print(f"threads: not kept: {path}: {error.strerror}", flush=True)


def find_version(distribution: str) -> str:
    """Return the version of a distribution, ``"none"`` if it is not installed."""
    from importlib import metadata  # 30 ms, which --help does not need

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


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

    @tf.function
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
    print(run_trial(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
