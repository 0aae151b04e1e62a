"""ssd_mxnet_train trains as the submission did, whose update rule and rate are written here in NumPy.

Source: DellEMC's SSD in MLPerf training v0.7, `lr_scheduler.py`, `trainer.py` and `model.py` (train_epoch), and MXNet's
sgd_mom_update. The network is a small one; its gradients are MXNet's, of a twin whose weights are those of the NumPy
side.
"""

from __future__ import annotations

import runpy
from bisect import bisect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.ssd_mxnet_train import PROGRAM
from gaudi_datasets.detection.batches import synthetic_batches
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess
from gaudi_distributed.cluster.rank_info import RankInfo

STEPS, BATCH, PER_EPOCH = 50, 2, 8
# Eight steps an epoch: warm-up of 12 steps, and drops after 24 and 40.
FLAGS = ("--synthetic", "--batch-size", str(BATCH), "--lr-warmup-epochs", "1.5", "--lr-decay-epochs", "3", "5")


class MLPerfRate:
    """MLPerfLearningRateScheduler, and what counts epochs and iterations for it, both from 1."""

    def __init__(
        self, images: int, batch: int, warmup_epochs: float = 1.5, factor: float = 0.0, lr: float = 2.5e-3
    ) -> None:
        self.images, self.batch, self.factor = images, batch, factor
        self.warmup = int(warmup_epochs * images / batch)
        self.lr = 2.5e-3 * max(1, round(lr / 2.5e-3 * batch / 32))

    def __call__(self, step: int) -> float:
        iteration, epoch = step + 1, step * self.batch // self.images + 1
        rate: float = self.lr * 0.1 ** bisect((3, 5), epoch - 1)
        if self.warmup > iteration:
            rate -= (self.warmup - iteration) * rate / (self.warmup * 2**self.factor)
        return rate


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_program = runpy.run_path(str(Path(__file__).parents[1] / "small_ssd_mxnet.py"))
    monkeypatch.setattr("gaudi_apps.mxnet.task.build_ssd", small_program["build_small_ssd"])
    monkeypatch.setenv("OPENCV_FFMPEG_LOGLEVEL", "-8")


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Any]]:
    found = (synthetic_batches(InputOptions(batch_size=BATCH, seed=seed), num_classes=3) for seed in range(3))
    return [next(one) for one in found]


def open_app(*flags: str, workers: int = 1) -> Any:
    return PROGRAM.open(PROGRAM.parse([*FLAGS, *flags]), Distribution(RankInfo(size=workers)))


def build_task(app: Any) -> Any:
    app.framework.start(app.settings.device)
    config = {"categories": [{"id": number, "name": f"{number}"} for number in (1, 2)]}
    return app.build_task(config, averages=False, communicator=SingleProcess(), reduce_statistics=None)


def train_in_numpy(batches: list[dict[str, Any]], rate: MLPerfRate, weight_decay: float, inside: bool = True) -> Any:
    """Train by MXNet's SGD, whose decay is of every parameter that is trained."""
    twin = build_task(open_app())
    weights = {name: values.astype(np.float64) for name, values in twin.read_weights().items()}
    velocities: dict[str, Any] = {}
    for step in range(STEPS):
        twin.write_weights({name: values.astype(np.float32) for name, values in weights.items()})
        twin.compute_gradients(batches[step % len(batches)])
        for name, gradient in twin.read_gradients().items():
            total = gradient.astype(np.float64) + weight_decay * weights[name]
            kept = 0.9 * velocities.get(name, np.zeros_like(total))
            velocities[name] = kept + total * (rate(step) if inside else 1)
            weights[name] = weights[name] - velocities[name] * (1 if inside else rate(step))
    return {name: weights[name] for name in velocities}


def find_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    return max(
        float(np.abs(found[name] - values).max() / max(1.0, np.abs(values).max())) for name, values in expected.items()
    )


@pytest.mark.costly
def test_weights_after_fifty_steps(batches: list[dict[str, Any]]) -> None:
    app = open_app()
    task, planned = build_task(app), app.make_plan(BATCH * PER_EPOCH).learning_rate
    for step in range(STEPS):
        assert task.train_step(batches[step % len(batches)], planned(step))["finite"]
    rate = MLPerfRate(BATCH * PER_EPOCH, BATCH)
    found, expected = task.read_state(), train_in_numpy(batches, rate, 5e-4)
    assert find_difference(found, expected) < 1e-6
    # Other forms would be noticed.
    assert find_difference(train_in_numpy(batches, rate, 1e-3), expected) > 5e-6
    assert find_difference(train_in_numpy(batches, rate, 5e-4, inside=False), expected) > 5e-6


@pytest.mark.parametrize(
    ("per_epoch", "workers", "factor", "lr"), [(8, 1, 0, None), (7, 8, 2, 5.84e-3), (2, 16, 0, 3.2e-3)]
)
def test_the_rate(per_epoch: int, workers: int, factor: float, lr: float | None) -> None:
    images = per_epoch * BATCH * workers
    flags = ["--use_horovod", "--lr-warmup-factor", str(factor), *(["--lr", str(lr)] if lr else [])]
    plan = open_app(*flags, workers=workers).make_plan(images)
    expected = MLPerfRate(images, BATCH * workers, factor=factor, lr=lr or 2.5e-3)
    assert [plan.learning_rate(step) for step in range(STEPS)] == pytest.approx(
        [expected(step) for step in range(STEPS)]
    )


def test_the_step_that_ends_an_epoch_belongs_to_it() -> None:
    plan = open_app("--epochs", "6").make_plan(15)  # 7.5 steps an epoch
    rate = MLPerfRate(15, BATCH)
    assert (plan.drop_steps, plan.total_steps) == ((23, 38), 45)
    assert [plan.learning_rate(step) for step in range(45)] == pytest.approx([rate(step) for step in range(45)])
