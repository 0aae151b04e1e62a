"""A training step of ResNeXt-101 32x4d on a GPU, bf16: ours, by XLA and without, against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.card import open_card
from benchmarks.gpu.resnet_step import compete
from benchmarks.gpu.steps import Contest
from benchmarks.measurement import Figure, main

BATCH = 128


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure all in turns."""
    open_card()
    yield from compete(Contest("ResNeXt-101", "resnext101", BATCH, "bf16", steps=4), budget_seconds)


if __name__ == "__main__":
    main(run)
