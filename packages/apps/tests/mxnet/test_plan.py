from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.cli.flag_rules import parse_config
from gaudi_apps.mxnet.config import SYSTEMS, ReportFlags, RunFlags, ScheduleFlags, SSDMXNetConfig
from gaudi_apps.mxnet.plan import make_plan

COCO = 117266


def plan(batch: int = 32, images: int = 320, **flags: Any) -> Any:
    config = SSDMXNetConfig(schedule=ScheduleFlags(**flags))
    return make_plan(replace(config, data=replace(config.data, batch_size=batch)), images)


@pytest.mark.parametrize(
    ("system", "batch", "rate", "warmup_steps"),
    [
        ("DSS8440", 1024, 0.1875, 572),
        ("C4140", 512, 0.0475, 1202),
        ("2xC4140", 1024, 0.1875, 601),
        ("4xC4140", 896, 0.09, 654),
    ],
)
def test_the_systems_have_the_rates_and_steps_of_the_submission(
    ssd_mxnet_train: Callable[..., Any], tmp_path: Path, system: str, batch: int, rate: float, warmup_steps: int
) -> None:
    flags = ("--mode", "plan", "--json", "--dataset-size", COCO, "--system", system, "--model_dir", tmp_path / "run")
    # The batch of one process is the system's.
    done = ssd_mxnet_train(*flags, "--batch-size", SYSTEMS[system]["batch_size"], data=False)
    found = json.loads(done.out)
    assert found["peak_learning_rate"] == rate
    assert (found["global_batch"], found["warmup_steps"], found["images"]) == (batch, warmup_steps, COCO)
    assert found["drop_steps"] == [math.ceil(epoch * COCO / batch) for epoch in (44, 55)]
    assert found["evaluated_steps"] == [math.ceil(e * COCO / batch) for e in (40, 50, 55, 60, 65, 70, 75, 80)]
    assert found["total_steps"] == math.ceil(80 * COCO / batch)
    assert not (tmp_path / "run").exists()


def test_flags_win_over_those_of_a_system(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    flags = ("--mode", "plan", "--json", "--synthetic", "--batch-size", 64)
    config = tmp_path / "run.yaml"
    config.write_text("system: C4140\nlr: 0.005\n")
    found = json.loads(ssd_mxnet_train(*flags, "--config", config, data=False).out)
    assert (found["global_batch"], found["workers"]) == (256, 4)
    assert found["peak_learning_rate"] == 2.5e-3 * 16
    assert found["warmup_steps"] == int(5.25 * COCO / 256)
    done = ssd_mxnet_train(*flags, "--system", "C4141", data=False)
    assert (done.status, done.error.flag) == (64, "--system")
    assert "one of DSS8440" in done.err


def test_systems_have_their_own_threads() -> None:
    def threads(*argv: str) -> int:
        config = parse_config(SSDMXNetConfig, argv, prog="x", description="")
        return config.data.threadpool_size

    assert [threads("--system", system) for system in SYSTEMS] == [6, 6, 6, 3]
    assert threads("--system", "4xC4140", "-j", "5") == 5


def test_rates_are_whole_multiples() -> None:
    assert [plan(batch).peak_learning_rate for batch in (8, 32, 47, 49, 1024)] == [2.5e-3 * n for n in (1, 1, 1, 2, 32)]
    assert plan(64, base_lr=4e-3).peak_learning_rate == 2.5e-3 * 3
    assert any("less than half" in text for text in plan(8, base_lr=4e-3).warnings)


def test_the_rate_rises_and_drops() -> None:
    found = plan(warmup_epochs=0.45, lr_drop_epochs=(1, 2, 3), lr_decay_factor=0.5)
    # The submission counts from 1: the first of four steps has a quarter of the rate.
    rates = [2.5e-3 / 4, 2.5e-3 * 2 / 4, 2.5e-3 * 3 / 4, 2.5e-3, 2.5e-3]
    assert [found.learning_rate(step) for step in (0, 1, 2, 3, 9)] == pytest.approx(rates)
    assert [found.learning_rate(step) for step in (10, 20, 30)] == [2.5e-3 / 2, 2.5e-3 / 4, 2.5e-3 / 8]
    assert [change.reason for change in found.rate_changes][2:5] == ["drop to 0.5", "drop to 0.25", "drop to 0.125"]
    # With a factor f, the step i of W, counted from 1, is at lr - (W - i) lr / (W 2 ** f).
    found = plan(warmup_epochs=0.4, lr_warmup_factor=2)
    for step in range(4):
        assert found.learning_rate(step) == pytest.approx(2.5e-3 * (1 - (3 - step) / (4 * 2**2)))


def test_a_run_of_an_earlier_release_keeps_its_steps() -> None:
    config = SSDMXNetConfig(RunFlags(epochs=5), schedule=ScheduleFlags(warmup_epochs=1.5, lr_drop_epochs=(1, 3)))
    found = make_plan(replace(config, data=replace(config.data, batch_size=2)), 9, version=1)
    assert (found.drop_steps, found.total_steps) == ((4, 13), 22)
    assert [found.learning_rate(step) for step in (0, 1)] == [0, 2.5e-3 / 6]


def test_validations() -> None:
    def steps(mode: str = "train_val", **flags: Any) -> tuple[int, ...]:
        config = SSDMXNetConfig(RunFlags(mode=mode, epochs=6), report=ReportFlags(**flags))
        return make_plan(config, 80).evaluated_steps

    assert steps() == (15,)  # all epochs of the submission are past the end, which is validated
    assert steps(val_epochs=(1, 3, 6, 9)) == (3, 8, 15)
    assert steps(eval_epochs=2) == (5, 10, 15)
    assert steps("train", eval_epochs=2) == ()


def test_the_plan_is_a_table_too(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    done = ssd_mxnet_train("--mode", "Plan", "--epochs", 2, "--val-interval", 1, "--model_dir", tmp_path / "run")
    assert done.status == 0
    assert "images       5" in done.out
    assert "after steps 3, 5" in done.out
