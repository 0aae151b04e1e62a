"""A training step of the detector on a GPU: ours, by XLA and without, against plain Keras and PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.detection_targets import CLASSES
from benchmarks.gpu.card import open_card, use_tf32
from benchmarks.gpu.steps import POLICIES, Contest, Step, list_precisions, measure
from benchmarks.matrix_peak import count_operations
from benchmarks.measurement import Figure, main
from benchmarks.ssd_step import WEIGHT_DECAY, make_batch

BATCH = 128


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure each precision."""
    open_card()
    for dtype in (precisions := list_precisions()):
        use_tf32(dtype != "fp32")
        contest = Contest("SSD", "ssd", BATCH, dtype, steps=10 if dtype == "bf16" else 4)
        yield from compete(contest, budget_seconds / len(precisions))


def compete(contest: Contest, budget_seconds: float) -> Iterator[Figure]:
    """Compare all steps of one precision."""
    dtype, batch = contest.dtype, contest.batch
    given = make_batch(dtype, batch)
    tasks = [make_task(dtype) for _ in range(2)]
    builders = {
        "ours": lambda: build_ours(tasks[0], given, xla=True),
        "ours without XLA": lambda: build_ours(tasks[1], given, xla=False),
        "keras": lambda: build_plain(dtype, given, xla=False),
        "keras by XLA": lambda: build_plain(dtype, given, xla=True),
    }
    yield from measure(contest, builders, count_operations(tasks[0].model), budget_seconds)


def make_task(dtype: str) -> Any:
    """Make what ssd_train trains."""
    from gaudi_apps.detection.detector import SSDTask
    from gaudi_distributed import SingleProcess

    return SSDTask(CLASSES, keras_policy=POLICIES[dtype], weight_decay=WEIGHT_DECAY, communicator=SingleProcess())


def build_ours(task: Any, given: Any, *, xla: bool) -> Step:
    """Make the step of the program."""
    if xla:
        task.compile_by_xla()
    return lambda: task.train_step(given, 1e-3)["loss"]


def build_plain(dtype: str, given: Any, *, xla: bool) -> Callable[[], Any]:
    """Make the step of plain Keras."""
    from benchmarks.plain_keras_ssd import build_plain_ssd, build_plain_step

    step = build_plain_step(build_plain_ssd(CLASSES, POLICIES[dtype]), WEIGHT_DECAY, xla=xla)
    targets = tuple(given[name] for name in ("classes", "offsets", "num_matched"))
    return lambda: step(given["images"], targets)


if __name__ == "__main__":
    main(run)
