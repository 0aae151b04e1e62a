from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps import resnet_train as resnet_config
from gaudi_apps import resnext_train as resnext_config
from gaudi_apps.classification.plan import make_plan
from gaudi_apps.training.plan import Plan
from gaudi_datasets.flags import parse_flags

IMAGENET = 1281167


def plan_of(program: str, *argv: object, images: int = IMAGENET) -> Plan:
    module: Any = {"resnet": resnet_config, "resnext": resnext_config}[program]
    config_class = {"resnet": resnet_config.ResNetConfig, "resnext": resnext_config.ResNeXtConfig}[program]
    config: Any = parse_flags(
        config_class, ["--num_examples_per_epoch", "1", "--mode", "plan", *map(str, argv)], prog="x"
    )
    module.validate(config)
    return make_plan(module.make_train_config(config), images)


def print_plan(program: str, *argv: str) -> Any:
    """Return the program's own answer, in a process that must not import TensorFlow for it."""
    code = f"import sys\nfrom gaudi_apps.{program} import PROGRAM\nsys.modules['tensorflow'] = None\nPROGRAM.run()"
    command = [sys.executable, "-c", code, "--mode", "plan", "--json", "--use_synthetic_data", *argv]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_the_golden_plan_of_sgd() -> None:
    plan = print_plan("resnet_train", "--batch_size", "256", "--train_epochs", "90")
    assert (plan["steps_per_epoch"], plan["warmup_steps"], plan["total_steps"]) == (5004, 25020, 450360)
    assert plan["drop_steps"] == [150120, 300240, 400320]
    assert plan["peak_learning_rate"] == 0.1
    assert plan["parameters"] == 25557032
    assert (plan["decay_form"], plan["momentum_form"]) == ("l2", "keras")
    # TensorFlow's piecewise constant counts a boundary to what is before it.
    assert [one["step"] for one in plan["rate_changes"]][2:5] == [150121, 300241, 400321]
    rates = {one["reason"]: one["learning_rate"] for one in plan["rate_changes"]}
    assert rates["warm-up ends"] == pytest.approx(0.1)
    assert [rates[f"drop to {factor}"] for factor in ("0.1", "0.01", "0.001")] == pytest.approx([1e-2, 1e-3, 1e-4])


def test_the_golden_plan_of_lars() -> None:
    plan = print_plan("resnet_train", "-bs", "2048", "-te", "40", "--optimizer", "LARS")
    assert (plan["steps_per_epoch"], plan["total_steps"], plan["warmup_steps"]) == (625, 25000, 1875)
    assert plan["decay_steps"] == 23126
    assert (plan["peak_learning_rate"], plan["lr_schedule"], plan["label_smoothing"]) == (2.5, "polynomial", 0.1)
    rate = plan_of("resnet", "-bs", 2048, "-te", 40, "--optimizer", "LARS").learning_rate
    for step in (1875, 10000, 24999):
        share = (step - 1875) / 23126
        assert rate(step) == pytest.approx((2.5 - 1e-4) * (1 - share) ** 2 + 1e-4)
    assert rate(750) == pytest.approx(1.0)


def test_the_golden_plan_of_resnext() -> None:
    plan = print_plan("resnext_train", "-bs", "128", "-te", "90")
    assert (plan["peak_learning_rate"], plan["warmup_steps"], plan["total_steps"]) == (0.128, 80072, 900820)
    assert (plan["parameters"], plan["weight_decay"], plan["momentum"]) == (44177704, 6.103515625e-05, 0.875)
    rate = plan_of("resnext", "-bs", 128, "-te", 90).learning_rate
    assert rate(40036) == pytest.approx(0.064)
    for step in (80072, 450410, 900819):
        assert rate(step) == pytest.approx(0.064 * (1 + math.cos(math.pi * step / 900820)))


@pytest.mark.parametrize(("batch", "peak", "warmup"), [(8192, 10, 5), (16384, 25, 5), (32768, 31.2, 25)])
def test_a_polynomial_without_a_rate_goes_by_the_batch(batch: int, peak: float, warmup: int) -> None:
    plan = plan_of("resnet", "-bs", batch, "-te", 90, "--lr_schedule", "polynomial")
    assert (plan.peak_learning_rate, plan.warmup_steps) == (peak, warmup * (IMAGENET // batch))


def test_other_schedules() -> None:
    constant = plan_of("resnet", "-bs", 512, "-te", 1, "--lr_schedule", "constant", "--warmup_epochs", 0)
    assert {constant.learning_rate(step) for step in (0, 7, 2000)} == {0.2}
    flowers = plan_of("resnet", "--fine_tune", "-te", 2, images=3200)
    assert [flowers.learning_rate(step) for step in (0, 20, 40, 60, 80)] == pytest.approx(
        [1e-4, 2.05e-3, 4e-3, 2.05e-3, 1e-4]
    )
    lars = plan_of("resnext", "-bs", 1024, "--enable_lars")
    assert (lars.lr_schedule, lars.peak_learning_rate, lars.total_steps) == ("polynomial", 9.5, 47543)
    piecewise = plan_of("resnext", "-bs", 256, "-te", 90, "--no_use_cosine_lr", "--disable_warmup")
    assert (piecewise.learning_rate(0), piecewise.warmup_steps) == (0.1, 0)
    assert piecewise.drop_steps == (150136, 300273, 400364, 450410)
    assert piecewise.warnings == ()


def test_steps_replace_epochs_and_small_sets_have_an_epoch() -> None:
    plan = plan_of("resnet", "--train_steps", 7, "-cs", 3, images=20)
    assert (plan.total_steps, plan.steps_per_epoch, plan.checkpoint_steps) == (7, 1, 3)
    assert {"32", "20"} <= set(re.findall(r"\d+", plan.warnings[0]))
    assert plan_of("resnext", "-mts", 9, "--disable_checkpoints").checkpoint_steps == 9


def test_pruning_that_does_not_end_is_told() -> None:
    plan = plan_of("resnet", "--train_steps", 50, "--warmup_epochs", 0, "--lr_schedule", "constant")
    assert plan.warnings == ()
    plan = plan_of("resnet", "--train_steps", 50, "--lr_schedule", "constant", "--pruning_method", "polynomial_decay")
    assert "at step 100000" in plan.warnings[-1]


@pytest.mark.parametrize(("end", "is_told"), [(49, False), (50, True)])
def test_the_last_pruning_is_one_of_the_run(end: int, is_told: bool) -> None:
    flags = ("--pruning_method", "polynomial_decay", "--pruning_end_step", end)
    plan = plan_of("resnet", "--train_steps", 50, "--warmup_epochs", 0, "--lr_schedule", "constant", *flags)
    assert bool(plan.warnings) == is_told


@pytest.mark.parametrize(
    ("program", "flags", "named"),
    [
        (
            "resnext",
            ["--start_learning_rate", 9, "--epochs_for_lars", 3],
            ["--start_learning_rate", "--epochs_for_lars"],
        ),
        ("resnet", ["--optimizer", "Adam", "--momentum", 0.5], ["--momentum"]),
        ("resnet", ["--optimizer", "LARS", "--momentum", 0.5], []),
        ("resnext", ["--enable_lars", "--base_learning_rate", 0.5], ["--base_lr"]),
        ("resnext", ["--enable_lars", "--base_learning_rate", 0.256], ["--base_lr"]),
        ("resnext", ["--pruning_final_sparsity", 0.7], ["--pruning_final_sparsity"]),
        ("resnext", ["--enable_lars", "--start_learning_rate", 9, "--epochs_for_lars", 30], []),
        ("resnext", ["--enable_lars", "--no_use_cosine_lr"], []),
        ("resnet", ["--maximal_learning_rate", 0.5, "--step_size", 9], ["--maximal_learning_rate", "--step_size"]),
        ("resnet", ["--initial_learning_rate", 1e-5], ["--initial_learning_rate"]),
        ("resnet", ["--lars_epsilon", 1e-5, "--end_learning_rate", 0], ["--lars_epsilon", "--end_learning_rate"]),
        ("resnet", ["--optimizer", "LARS", "--lars_epsilon", 1e-5, "--end_learning_rate", 0], []),
        ("resnet", ["--lr_schedule", "cyclical", "--step_size", 9, "--initial_learning_rate", 1e-5], []),
    ],
)
def test_flags_that_are_not_read_are_told(program: str, flags: list[object], named: list[str]) -> None:
    is_lars = "--enable_lars" in flags  # which has epochs of its own
    warnings = plan_of(program, "-te", 90, *flags).warnings
    assert sorted(text.partition(" ")[0] for text in warnings) == sorted([*named, *["--epochs"] * is_lars])


@pytest.mark.costly
def test_the_plan_of_folders_counts_them(folders: Path) -> None:
    flags = ["--mode", "plan", "--data_dir", str(folders), "--train_splits", "train", "more", "--model", "resnet18"]
    command = [sys.executable, "-m", "gaudi_apps.resnet_train", *flags]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in ("images       18", "classes      3", "resnet18, 11178051 parameters"):
        assert part in text
