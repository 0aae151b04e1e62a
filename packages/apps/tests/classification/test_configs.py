from __future__ import annotations

from typing import Any

import pytest

from gaudi_apps import resnet_train as resnet_config
from gaudi_apps import resnext_train as resnext_config
from gaudi_apps.classification.flags import TrainConfig
from gaudi_apps.cli.flag_rules import make_short_run
from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags

MODULES: dict[str, Any] = {"resnet": resnet_config, "resnext": resnext_config}
CLASSES = {"resnet": resnet_config.ResNetConfig, "resnext": resnext_config.ResNeXtConfig}


def config_of(program: str, *argv: str) -> TrainConfig:
    config: Any = parse_flags(CLASSES[program], list(argv), prog=program)
    MODULES[program].validate(config)
    found: TrainConfig = MODULES[program].make_train_config(config)
    return found


def test_presets() -> None:
    sgd = config_of("resnet", "--use_synthetic_data")
    assert (sgd.learning.optimizer, sgd.rate.kind, sgd.rate.peak, sgd.rate.warmup_epochs) == (
        "SGD",
        "piecewise",
        0.0125,
        5,
    )
    assert (sgd.learning.label_smoothing, sgd.learning.dropout, sgd.model) == (0, 0, "resnet50")
    lars = config_of("resnet", "--use_synthetic_data", "--optimizer", "LARS", "--label_smoothing", ".2")
    assert (lars.rate.kind, lars.rate.peak, lars.rate.warmup_epochs) == ("polynomial", 2.5, 3)
    assert lars.learning.label_smoothing == 0.2
    for schedule in ("constant", "cosine", "polynomial"):
        adam = config_of("resnet", "--data_dir", "x", "--optimizer", "Adam", "--lr_schedule", schedule, "-bs", "64")
        assert (adam.rate.peak, adam.rate.warmup_epochs) == (1e-3, 0)
    flowers = config_of("resnet", "--data_dir", "x", "--fine_tune", "--pretrained_filepath", "resnet50.pth")
    assert (flowers.learning.optimizer, flowers.rate.kind, flowers.rate.end, flowers.rate.peak) == (
        *("Adam", "cyclical"),
        *(1e-4, 4e-3),
    )
    assert (flowers.learning.label_smoothing, flowers.learning.dropout, flowers.flags.training.fine_tune) == (
        0.1,
        0.2,
        True,
    )
    given = config_of("resnet", "--data_dir", "x", "--fine_tune", "--pretrained_filepath", "y", "--optimizer", "SGD")
    assert given.learning.optimizer == "SGD"


def test_resnext_is_its_own_config() -> None:
    found = config_of("resnext", "--data_dir", "x", "-rs", "50", "-mes", "3")
    assert (found.model, found.min_crop_area, found.eval_images) == (
        "resnext50",
        0.08,
        96,
    )
    assert (found.learning.label_smoothing, found.learning.momentum) == (0.1, 0.875)
    assert config_of("resnext", "--data_dir", "x", "--least_crop_area", ".3").min_crop_area == 0.3
    assert config_of("resnext", "--data_dir", "x", "--model_type", "resnet", "-rs", "18").model == "resnet18"
    assert resnext_config.find_mode(parse_flags(CLASSES["resnext"], ["--eval_only"], prog="x")) == "eval"


# By program: flags that are refused beside --data_dir, the first one by name, and a part of the error.
REFUSED = {
    "resnet": {
        "--batch_size 0": "at least 1",
        "--image_size 16": "at least 32",
        "--model resnet51": "is none of",
        "--fine_tune": "--weights",
        "--base_lr .1 --lr_schedule cyclical": "--maximal_learning_rate",
        "--base_lr 0": "above 0",
        "--maximal_learning_rate 1e-5": "above",
        "--label_smoothing 1": "below 1",
        "--pruning_end_step 0": "--pruning_begin_step",
        "--pruning_method polynomial_decay --ema_decay .9": "--ema_decay",
        "--pruning_initial_sparsity .8 --pruning_method polynomial_decay": "--pruning_final_sparsity",
        "--least_crop_area 0": "above 0",
        "--color_jitter 1.5": "in 0..1",
        "--top 6": "in 1..5",
        "--profile 5": "two steps",
        "--target .7 --skip_eval": "--no_evaluate",
        "--checkpoint best": "--mode eval",
        "--kills 3 --mode verify-resume --train_steps 3": "at least 1",
    },
    "resnext": {
        "--least_crop_area 1.1": "at most 1",
        "--gray_probability -1": "in 0..1",
        "--resnet_size 34": "a resnext has",
        "--eval_only --mode export": "--mode export",
        "--warmup_epochs nan": "finite",
    },
}


@pytest.mark.parametrize(
    ("program", "flags", "named"), [(program, *case) for program, cases in REFUSED.items() for case in cases.items()]
)
def test_a_bad_value_is_refused_by_its_flag(program: str, flags: str, named: str) -> None:
    refuse(program, f"--data_dir x {flags}", flags.split()[0], named)


@pytest.mark.parametrize(
    ("program", "flags", "flag", "named"),
    [
        ("resnet", "", "--mode", "--data_dir"),
        ("resnet", "--data_dir x --use_synthetic_data", "--use_fake_data", "--data_dir x"),
        ("resnet", "--jpeg_data_dir x --use_synthetic_data", "--use_fake_data", "--jpeg_data_dir x"),
        ("resnet", "--use_synthetic_data --mode eval", "--mode", "random images"),
        ("resnet", "--mode predict", "--mode", "--inference"),
        ("resnet", "--data_dir x --epochs_between_evals 0 --patience 3", "--target", "--eval_epochs"),
        ("resnext", "--data_dir x --disable_eval --patience 3", "--target", "--no_evaluate"),
        ("resnext", "--use_synthetic_data --stop_threshold .7", "--target", "--use_fake_data"),
        (
            "resnet",
            "--use_synthetic_data --enable_checkpoint_and_export",
            "--enable_checkpoint_and_export",
            "--data_dir",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(program: str, flags: str, flag: str, named: str) -> None:
    refuse(program, flags, flag, named)


def refuse(program: str, flags: str, flag: str, named: str) -> None:
    with pytest.raises(FlagError) as caught:
        config_of(program, *flags.split())
    assert caught.value.flag == flag
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--hooks ProfilerHook --profile_steps 5,8", (5, 8)),
        ("-hk LoggingTensorHook,profilerhook", (7, 10)),
        ("--profile_steps 5,8", (5, 8)),
        ("--hooks LoggingTensorHook,ExamplesPerSecondHook", None),
        ("", None),
    ],
)
def test_the_original_profiler_hook_traces_steps(flags: str, steps: tuple[int, int] | None) -> None:
    config: Any = parse_flags(CLASSES["resnext"], ["--use_synthetic_data", *flags.split()], prog="x")
    resnext_config.validate(config)
    found = resnext_config.make_train_config(config)
    assert found.run.profiled_steps == (range(0) if steps is None else range(steps[0], steps[1] + 1))
    # Proving that a run resumes traces nothing.
    short = make_short_run(config, 3)
    assert (short["hooks"], short["profile"]) == ("LoggingTensorHook", "0,0")


def test_an_unknown_hook_is_refused() -> None:
    config: Any = parse_flags(
        CLASSES["resnext"], ["--use_synthetic_data", "--hooks", "LoggingTensorHook,Foo"], prog="x"
    )
    with pytest.raises(FlagError, match="--hooks foo"):
        resnext_config.validate(config)
