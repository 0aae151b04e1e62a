from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gaudi_apps.cli.flags import DistributionFlags
from gaudi_apps.detection.config import (
    DataFlags,
    DeviceFlags,
    ImageFlags,
    NetworkFlags,
    ReportFlags,
    RunFlags,
    ScheduleFlags,
    SSDConfig,
    find_checkpoint,
    find_mode,
    validate,
)
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags

GROUPS: dict[str, Any] = {
    "run": RunFlags,
    "data": DataFlags,
    "network": NetworkFlags,
    "schedule": ScheduleFlags,
    "use": ImageFlags,
    "device": DeviceFlags,
    "report": ReportFlags,
    "distribution": DistributionFlags,
}


def make_config(**groups: dict[str, Any]) -> SSDConfig:
    groups = {"data": {"use_fake_data": True}, **groups}
    return SSDConfig(**{name: GROUPS[name](**values) for name, values in groups.items()})


def test_defaults_are_those_of_the_original() -> None:
    config = SSDConfig()
    assert (config.device.dtype, config.data.batch_size, config.run.epochs, config.run.steps) == (
        "bf16",
        128,
        50,
        0,
    )
    assert (config.schedule.base_lr, config.schedule.weight_decay, config.schedule.k) == (3e-3, 5e-4, 0)
    assert config.schedule.warmup_epochs == 5
    assert (config.report.log_steps, config.report.save_checkpoints_epochs) == (1, 5)
    assert (config.report.keep_ckpt_max, config.report.save_summary_steps) == (20, 1)
    assert (config.device.max_cpus, config.device.num_parallel_calls, config.device.threadpool_size) == (16, 64, 0)
    assert config.report.profile == "0,0"
    assert config.network.weights is None
    assert (config.data.static, config.report.vis_dataloader) == (False, False)


def test_short_forms_are_those_of_the_original() -> None:
    argv = ["-d", "fp32", "-b", "8", "-e", "2.5", "-s", "7", "-f", "-v", "10", "-c", "0.5"]
    config = parse_flags(SSDConfig, argv, prog="ssd_train")
    assert (config.device.dtype, config.data.batch_size, config.run.epochs, config.run.steps) == (
        "fp32",
        8,
        2.5,
        7,
    )
    assert config.data.use_fake_data
    assert (config.report.log_steps, config.report.save_checkpoints_epochs) == (10, 0.5)


def test_good_configurations_pass() -> None:
    validate(make_config())
    validate(make_config(data={"data_dir": "records"}))
    validate(make_config(schedule={"base_lr": float("inf")}))  # training itself stops at it, naming the step
    validate(make_config(data={"data_dir": "static", "static": True}))
    validate(make_config(data={"train_annotations": "a.json", "train_images": "pictures"}))
    validate(make_config(data={}, run={"mode": "predict", "checkpoint": "best"}, use={"inference": ("cat.jpg", "d/")}))
    validate(make_config(data={}, run={"mode": "export", "checkpoint": "300"}))
    validate(make_config(data={"data_dir": "records"}, run={"mode": "eval", "checkpoint": "all"}))
    validate(make_config(data={"data_dir": "d"}, report={"eval_epochs": 0.5, "target": 0.2, "patience": 3}))
    validate(make_config(run={"mode": "verify-resume"}))
    validate(make_config(run={"mode": "verify-resume", "steps": 60, "kills": 20}))
    validate(make_config(data={"num_examples_per_epoch": 5}, run={"mode": "plan", "json": True}))


@pytest.mark.parametrize(
    ("groups", "flag", "named"),
    [
        ({"data": {"use_fake_data": True, "batch_size": 0}}, "--batch_size", "at least 1"),
        ({"run": {"epochs": float("nan")}}, "--epochs", "finite"),
        ({"run": {"steps": -1}}, "--steps", "at least 0"),
        ({"schedule": {"base_lr": 0.0}}, "--base_lr", "above 0"),
        ({"schedule": {"base_lr": float("nan")}}, "--base_lr", "above 0"),
        ({"schedule": {"weight_decay": float("nan")}}, "--weight_decay", "finite"),
        ({"schedule": {"k": -10}}, "--k", "-9 or more"),
        ({"schedule": {"lr_drop_epochs": (50.0, 40.0)}}, "--lr_drop_epochs", "smaller epoch first"),
        ({"device": {"device": "hpu", "no_hpu": True}}, "--no_hpu", "--device hpu"),
        ({"data": {"use_fake_data": True, "data_dir": "d"}}, "--use_fake_data", "--data_dir d"),
        ({"data": {"use_fake_data": True, "flip_probability": 1.5}}, "--flip_probability", "in 0..1"),
        ({"data": {}}, "--mode", "--data_dir"),
        ({"data": {"train_annotations": "a"}}, "--train_annotations", "both or none"),
        (
            {"data": {"data_dir": "d", "val_annotations": "a", "val_images": "i"}},
            "--data_dir",
            "contradicts annotation files",
        ),
        (
            {"data": {"train_annotations": "a", "train_images": "i"}, "run": {"mode": "eval"}},
            "--mode",
            "--data_dir",
        ),
        ({"run": {"mode": "eval"}}, "--mode", "random images"),
        ({"run": {"mode": "predict"}}, "--mode", "--inference"),
        (
            {"use": {"inference": ("cat.jpg",)}, "run": {"mode": "plan"}},
            "--inference",
            "--mode predict",
        ),
        ({"use": {"score_threshold": -0.1}}, "--score_threshold", "in 0..1"),
        ({"schedule": {"box_weight": 0.0}}, "--box_weight", "above 0"),
        ({"run": {"ema_decay": 1.0}}, "--ema_decay", "below 1"),
        ({"run": {"ema_decay": float("nan")}}, "--ema_decay", "finite"),
        ({"report": {"save_checkpoints_minutes": float("inf")}}, "--save_checkpoints_minutes", "finite"),
        ({"report": {"save_checkpoints_steps": -1}}, "--save_checkpoints_steps", "at least 0"),
        ({"report": {"profile": "5,3"}}, "--profile", "smaller one first"),
        ({"device": {"threadpool_size": -1}}, "--threadpool_size", "at least 0"),
        ({"data": {"use_fake_data": True, "static": True}}, "--static", "--data_dir"),
        ({"report": {"target": 0.5}}, "--target", "--eval_epochs"),
        ({"report": {"patience": -1}}, "--patience", "at least 0"),
        ({"report": {"eval_epochs": 1.0}}, "--eval_epochs", "needs records with"),
        ({"run": {"checkpoint": "best"}}, "--checkpoint", "--mode eval"),
        (
            {"data": {"data_dir": "d"}, "run": {"mode": "eval", "checkpoint": "latest"}},
            "--checkpoint",
            "--mode eval",
        ),
        (
            {"data": {}, "run": {"mode": "export", "checkpoint": "all"}},
            "--checkpoint",
            "--mode export",
        ),
        ({"data": {"data_dir": "d"}, "run": {"mode": "eval", "clean": True}}, "--clean", "--mode train"),
        ({"run": {"mode": "verify-resume", "kills": 0}}, "--kills", "--steps"),
        ({"run": {"mode": "verify-resume", "kills": 3, "steps": 3}}, "--kills", "--steps"),
        ({"run": {"json": True}}, "--json", "--mode plan"),
        (
            {"run": {"mode": "predict", "runtime": "openvino"}, "device": {"device": "gpu"}, "use": {"inference": "x"}},
            "--device",
            "--runtime openvino",
        ),
        ({"run": {"mode": "train", "runtime": "auto"}}, "--runtime", "--mode predict and eval"),
        (
            {"data": {"data_dir": "d"}, "run": {"mode": "eval", "runtime": "auto", "checkpoint": "all"}},
            "--checkpoint",
            "--runtime auto",
        ),
        (
            {
                "data": {"data_dir": "d"},
                "run": {"mode": "eval", "runtime": "litert"},
                "distribution": {"use_horovod": True},
            },
            "--runtime",
            "one process",
        ),
    ],
)
def test_a_bad_value_is_named_in_one_line(groups: dict[str, dict[str, Any]], flag: str, named: str) -> None:
    with pytest.raises(FlagError) as caught:
        validate(make_config(**groups))
    assert (caught.value.flag, caught.value.exit_status) == (flag, 64)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "mode"),
    [([], "train"), (["--inference", "a.jpg"], "predict"), (["--inference=a.jpg", "--mode", "export"], "export")],
)
def test_inference_alone_predicts_as_in_the_original(argv: list[str], mode: str) -> None:
    config = parse_flags(SSDConfig, ["--model_dir", "run", *argv], prog="ssd_train")
    assert find_mode(config) == mode
    if mode != "train":
        validate(config)


@pytest.mark.parametrize(
    ("flags", "which"),
    [([], None), (["--mode=eval"], "all"), (["--mode=eval", "--checkpoint=best"], "best")],
)
def test_the_checkpoint_by_default_is_the_original_one(flags: list[str], which: str | None) -> None:
    assert find_checkpoint(parse_flags(SSDConfig, flags, prog="ssd_train").run) == which


def test_configuration_is_frozen() -> None:
    config = SSDConfig()
    with pytest.raises(AttributeError):
        config.data.batch_size = 1  # type: ignore[misc]
    assert replace(config.data, batch_size=1).batch_size == 1


@pytest.mark.parametrize(("runtime", "expected"), [("tensorflow", "all"), ("auto", None), ("litert", None)])
def test_eval_takes_all_checkpoints_unless_an_export_of_one_is_evaluated(runtime: Any, expected: str | None) -> None:
    run = make_config(run={"mode": "eval", "runtime": runtime}, data={"data_dir": "d"}).run
    assert find_checkpoint(run) == expected
