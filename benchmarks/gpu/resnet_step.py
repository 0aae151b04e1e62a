"""A training step of ResNet-50 on a GPU: ours, by XLA and without, against keras.applications and PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.card import open_card, use_tf32
from benchmarks.gpu.steps import POLICIES, Contest, Step, list_precisions, measure
from benchmarks.matrix_peak import count_operations
from benchmarks.measurement import Figure, main
from benchmarks.resnet_step import CLASSES, MOMENTUM, SIZE, build_plain, make_batch

BATCHES = {"bf16": 256, "tf32": 128, "fp32": 128}


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure each precision."""
    open_card()
    for dtype in (precisions := list_precisions()):
        use_tf32(dtype != "fp32")
        contest = Contest("ResNet-50", "resnet50", BATCHES[dtype], dtype, steps=10 if dtype == "bf16" else 4)
        yield from compete(contest, budget_seconds / len(precisions))


def compete(contest: Contest, budget_seconds: float) -> Iterator[Figure]:
    """Compare all steps of one precision."""
    batch = make_batch(contest.batch, contest.dtype)
    given = dict(zip(("images", "labels"), batch, strict=True))
    tasks = [make_task(contest.network, contest.dtype) for _ in range(2)]
    builders = {
        "ours": lambda: build_ours(tasks[0], given, xla=True),
        "ours without XLA": lambda: build_ours(tasks[1], given, xla=False),
    }
    if contest.network == "resnet50":
        builders["keras"] = lambda: bind(build_plain(contest.dtype, xla=False), batch)
        builders["keras by XLA"] = lambda: bind(build_plain(contest.dtype, xla=True), batch)
    yield from measure(contest, builders, count_operations(tasks[0].model), budget_seconds)


def bind(step: Any, batch: tuple[Any, Any]) -> Step:
    """Return the step on a batch."""
    return lambda: step(*batch)


def make_task(network: str, dtype: str, size: int = SIZE, *, zero_gamma: bool = False) -> Any:
    """Make what resnet_train and resnext_train train."""
    from gaudi_apps.classification.flags import LearningConfig
    from gaudi_apps.classification.task import ClassificationTask
    from gaudi_distributed import SingleProcess
    from gaudi_models.classifiers import build_classifier

    config = LearningConfig(
        optimizer="SGD",
        momentum=MOMENTUM,
        weight_decay=1e-4,
        lars_epsilon=0.0,
        single_l2=False,
        label_smoothing=0.1,
        dropout=0.0,
        mixup_alpha=0.0,
        ema_decay=0.0,
        pruning=None,
        momentum_form="keras",
        decay_form="half_squares",
    )
    model = build_classifier(network, CLASSES, dtype=POLICIES[dtype], image_size=size, zero_gamma=zero_gamma)
    return ClassificationTask(model, config, seed=0, head_only=False, communicator=SingleProcess(), averages=False)


def build_ours(task: Any, given: Any, *, xla: bool) -> Step:
    """Make the step of the program."""
    if xla:
        task.compile_by_xla()
    return lambda: task.train_step(given, 0.1)["loss"]


if __name__ == "__main__":
    main(run)
