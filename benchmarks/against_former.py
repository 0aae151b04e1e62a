"""Compare what programs do with a former commit: `python -m benchmarks.against_former CHECKOUT`.

Steps, input, conversion, checkpoints and starts are compared. CHECKOUT is a worktree of the former commit. Both
versions are run by this Python, each in a process of its own with the packages and the benchmarks of its own checkout,
and take turns, of which the first does not count. A figure is the median time of this version over that of the former
one; it must be at most `--most`. Steps of TensorFlow are in bf16 where the processor has instructions for it, and in
fp32 elsewhere, where one in bf16 takes minutes. `--clock processor` compares the time of all its threads on processors,
which other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 12
MOST = 1.03
READY = "ready"
THREADS = len(os.sched_getaffinity(0))
BATCH, MXNET_BATCH = 16, 8  # of steps, in both versions
INPUT_BATCHES = 40  # of a turn
CONVERSIONS = 8  # of a turn: one is over before the processor has settled
CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def choose_dtype() -> str:
    """Return the precision of TensorFlow's steps on this processor."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    return "bf16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "fp32"


def build_ssd_step() -> Callable[[], object]:
    """Return a step of ssd_train."""
    from benchmarks.ssd_step import build_ours

    return build_ours(choose_dtype(), BATCH)[0]


def build_resnet_step() -> Callable[[], object]:
    """Return a step of a ResNet-50."""
    from benchmarks.resnet_step import build_ours, make_batch

    dtype = choose_dtype()
    step, _ = build_ours("resnet50", dtype)
    images, labels = make_batch(BATCH, dtype)
    return lambda: float(step(images, labels))


def build_mxnet_step() -> Callable[[], object]:
    """Return a step of ssd_mxnet_train, in float32."""
    its: Any = importlib.import_module("benchmarks.mxnet_step")
    its.BATCH = MXNET_BATCH
    step: Callable[[], object] = its.build_ours("fp32")
    return step


def build_detection_input() -> Callable[[], object]:
    """Return the reading of some batches of photographs with boxes."""
    from benchmarks.detection_input import BATCH_SIZE, RepeatedSource, repeat, write_photographs
    from gaudi_datasets.detection.pipeline import train_dataset
    from gaudi_datasets.sampling import InputOptions

    source = RepeatedSource(write_photographs(Path("records")), 1000)
    return repeat(train_dataset(source, InputOptions(BATCH_SIZE, threads=THREADS)))


def build_mxnet_input() -> Callable[[], object]:
    """Return the reading of some batches of photographs with boxes, without TensorFlow."""
    from benchmarks.detection_input import RepeatedSource, write_photographs
    from gaudi_datasets.detection.batches import train_batches
    from gaudi_datasets.sampling import InputOptions

    source = RepeatedSource(write_photographs(Path("records")), 1000)

    def read() -> None:
        batches = train_batches(source, InputOptions(32, threads=THREADS))
        for _ in range(INPUT_BATCHES // 2):
            next(batches)
        batches.close()

    return read


def build_classification_input() -> Callable[[], object]:
    """Return the reading of some batches of photographs with classes."""
    from benchmarks.measurement import data_folder
    from gaudi_datasets.classification.pipeline import train_dataset
    from gaudi_datasets.sampling import InputOptions

    # By the benchmark of the same checkout, which knows where they are.
    its: Any = importlib.import_module("benchmarks.classification_input")
    images = its.FolderSource(data_folder() / "clothing" / "train")
    its.write_records(images, Path("records"), "train", shards=4, processes=1)
    options = InputOptions(its.BATCH, image_size=its.SIDE, parallel_calls=8, threads=THREADS)
    dataset: Any = train_dataset(its.RecordSource(Path("records"), "train"), options)

    def read() -> None:
        for _ in dataset.take(4 * INPUT_BATCHES):
            pass

    return read


def build_conversion() -> Callable[[], object]:
    """Return the writing, some times, of records of a thousand photographs, which are in one folder for each class."""
    from benchmarks.measurement import data_folder

    its: Any = importlib.import_module("benchmarks.classification_input")
    images = its.FolderSource(data_folder() / "clothing" / "train")

    def write() -> None:
        for _ in range(CONVERSIONS):
            with tempfile.TemporaryDirectory(dir=".") as folder:
                its.write_records(images, Path(folder) / "records", "train", shards=4, processes=1)

    return write


def build_checkpoint() -> Callable[[], object]:
    """Return the writing of a checkpoint of the size of SSD-ResNet34 with its momentum, and the reading of it."""
    import numpy as np

    from gaudi_apps.training.checkpoint import CheckpointFolder

    folder, random = CheckpointFolder(Path("checkpoints")), np.random.default_rng(0)
    tensors = {f"kernel_{number}": random.standard_normal((512, 512, 3, 3), np.float32) for number in range(18)}
    steps = itertools.count(1)

    def save() -> None:
        folder.save(next(steps), tensors, {})
        folder.load_newest()

    return save


TURNS: Mapping[str, Callable[[], Callable[[], object]]] = {
    "ssd_step": build_ssd_step,
    "resnet_step": build_resnet_step,
    "mxnet_step": build_mxnet_step,
    "detection_input": build_detection_input,
    "mxnet_input": build_mxnet_input,
    "classification_input": build_classification_input,
    "conversion": build_conversion,
    "checkpoint": build_checkpoint,
}
OF_TENSORFLOW = ("ssd_step", "resnet_step")  # in the precision that the processor computes fast
# Commands, and the line that ends the measurement; none: the end of the process does.
_TRAIN = ("--use_fake_data", "--batch_size", "8", "--steps", "1000", "--no_evaluate", "--model_dir", "run")
STARTS: Mapping[str, tuple[Sequence[str], str]] = {
    "help": (("gaudi_apps.ssd_train", "--help"), ""),
    "plan": (("gaudi_apps.ssd_train", "--mode", "plan", "--use_fake_data"), ""),
    "first_step": (("gaudi_apps.ssd_train", *_TRAIN), "step 1/"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each figure; returns 1 where one is above what it may be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against_former", description=__doc__)
    parser.add_argument("checkout", type=Path, nargs="?", help="a worktree of the former commit")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[*TURNS, *STARTS], help="some figures")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of each version that count")
    parser.add_argument("--most", type=float, default=MOST, help="what a ratio may be")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="what is compared: seconds, or of processors")
    parser.add_argument("--json", type=Path, default=Path("runs/against_former.json"), help="file for all seconds")
    parser.add_argument("--serve", choices=TURNS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(TURNS[options.serve], CLOCKS[options.clock], sys.stdin, sys.stdout)
        os._exit(0)  # at once: a tf.data iterator that is still there can wait for threads that are gone
    if options.checkout is None or not (options.checkout / "packages").is_dir():
        parser.error(f"{options.checkout}: give a worktree of the former commit")
    checkouts = {"former": options.checkout.resolve(), "this": ROOT}
    measured: dict[str, dict[str, list[float]]] = {}
    ratios = {}
    for name in options.only or [*TURNS, *STARTS]:
        with ExitStack() as stack:
            candidates = {
                each: stack.enter_context(open_candidate(name, checkout, options.clock))
                for each, checkout in checkouts.items()
            }
            measured[name] = take_turns(candidates, options.rounds)
        ratios[name] = compare(measured[name])
        label = f"{name} ({choose_dtype()})" if name in OF_TENSORFLOW else name
        print(describe(label, measured[name], options.most, options.clock), flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return 1 if any(ratio > options.most for ratio in ratios.values()) else 0


def take_turns(candidates: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each turn of each candidate; who begins changes with each round, the first is left out."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name in list(candidates)[:: 1 if number % 2 else -1]:
            taken = candidates[name]()
            if number:
                seconds[name].append(taken)
    return seconds


def compare(seconds: Mapping[str, Sequence[float]]) -> float:
    """Return the median of this version over that of the former one."""
    return statistics.median(seconds["this"]) / statistics.median(seconds["former"])


def describe(name: str, seconds: Mapping[str, Sequence[float]], most: float, clock: str = "wall") -> str:
    """Return the line of a figure: the ratio, both medians, and the spread of this version's turns."""
    this, former = statistics.median(seconds["this"]), statistics.median(seconds["former"])
    spread = (max(seconds["this"]) - min(seconds["this"])) / this
    ratio = compare(seconds)
    verdict = "yes" if ratio <= most else "NO"
    return (
        f"{name}: {ratio:.3f} x by {clock} (this {this:.4g} s, former {former:.4g} s, {len(seconds['this'])} turns, "
        f"spread {spread:.2f}), at most {most:g}: {verdict}"
    )


@contextmanager
def open_candidate(name: str, checkout: Path, clock: str) -> Iterator[Callable[[], float]]:
    """Give a function that takes a turn with the packages of a checkout, and returns its seconds."""
    sources = [str(checkout), *(str(path) for path in sorted(checkout.glob("packages/*/src")))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles anew
    with tempfile.TemporaryDirectory() as folder:
        if name in STARTS:
            yield lambda: measure_start(*STARTS[name], environ=environ, clock=clock)
            return
        command = [sys.executable, __file__, "--serve", name, "--clock", clock]
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            yield lambda: ask(process)
        finally:
            process.kill()
            process.wait()


def ask(process: subprocess.Popen[str]) -> float:
    """Have a process take a turn, and return its seconds.

    Raises:
        RuntimeError: the process has ended.
    """
    if process.stdin is not None and process.stdout is not None:
        process.stdin.write("\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(READY):
                return float(line.split()[1])
    raise RuntimeError(f"{process.args!r} ended with {process.wait()}")


def serve(
    build: Callable[[], Callable[[], object]], read_clock: Callable[[], float], requests: IO[str], answers: IO[str]
) -> None:
    """Take a turn for each line that comes, and answer with its seconds."""
    turn = build()
    for _ in requests:
        started = read_clock()
        turn()
        answers.write(f"{READY} {read_clock() - started!r}\n")
        answers.flush()


def measure_start(words: Sequence[str], line: str, *, environ: Mapping[str, str], clock: str = "wall") -> float:
    """Run a module as a program, and return the seconds to a line of its output, or to its end.

    By the clock of processors, they are those of the whole process, which is killed at the line.

    Raises:
        RuntimeError: the program ended without the line, or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        command = [sys.executable, "-m", *words]
        process = subprocess.Popen(
            command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        is_there = False
        try:
            for written in process.stdout or ():
                if line and written.startswith(line):
                    is_there = True
                    break
        finally:
            if is_there or sys.exc_info()[0]:
                os.kill(process.pid, signal.SIGKILL)  # Popen's own would take its times away
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        taken = time.perf_counter() - started
        if not is_there and (line or process.returncode):
            raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
        return used.ru_utime + used.ru_stime if clock == "processor" else taken


if __name__ == "__main__":
    sys.exit(main())
