from __future__ import annotations

from typing import Any

import pytest

from gaudi_apps.classification import resnet as resnet_config
from gaudi_apps.classification import resnext as resnext_config
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
    assert (flowers.learning.label_smoothing, flowers.learning.dropout, flowers.flags.weights.fine_tune) == (
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


@pytest.mark.parametrize(
    ("program", "flags", "flag", "named"),
    [
        ("resnet", "", "--mode", "--data_dir"),
        ("resnet", "--data_dir x --use_synthetic_data", "--use_synthetic_data", "--data_dir x"),
        ("resnet", "--jpeg_data_dir x --use_synthetic_data", "--use_synthetic_data", "--jpeg_data_dir x"),
        ("resnet", "--data_dir x --batch_size 0", "--batch_size", "at least 1"),
        ("resnet", "--data_dir x --image_size 16", "--image_size", "at least 32"),
        ("resnet", "--data_dir x --model resnet51", "--model", "is none of"),
        ("resnet", "--data_dir x --fine_tune", "--fine_tune", "--pretrained_filepath"),
        (
            "resnet",
            "--data_dir x --lr_schedule cyclical --base_learning_rate .1",
            "--base_learning_rate",
            "--maximal_learning_rate",
        ),
        ("resnet", "--data_dir x --base_learning_rate 0", "--base_learning_rate", "above 0"),
        ("resnet", "--data_dir x --maximal_learning_rate 1e-5", "--maximal_learning_rate", "above"),
        ("resnet", "--data_dir x --label_smoothing 1", "--label_smoothing", "below 1"),
        ("resnet", "--data_dir x --pruning_end_step 0", "--pruning_end_step", "--pruning_begin_step"),
        ("resnet", "--data_dir x --pruning_method polynomial_decay --ema_decay .9", "--pruning_method", "--ema_decay"),
        ("resnet", "--data_dir x --least_crop_area 0", "--least_crop_area", "above 0"),
        ("resnext", "--data_dir x --least_crop_area 1.1", "--least_crop_area", "at most 1"),
        ("resnet", "--data_dir x --color_jitter 1.5", "--color_jitter", "in 0..1"),
        ("resnext", "--data_dir x --gray_probability -1", "--gray_probability", "in 0..1"),
        ("resnet", "--data_dir x --top 6", "--top", "in 1..5"),
        ("resnet", "--data_dir x --profile_steps 5", "--profile_steps", "two steps"),
        ("resnet", "--use_synthetic_data --mode eval", "--mode", "random images"),
        ("resnet", "--mode predict", "--mode", "--inference"),
        ("resnet", "--data_dir x --epochs_between_evals 0 --patience 3", "--stop_threshold", "--epochs_between_evals"),
        ("resnet", "--data_dir x --skip_eval --stop_threshold .7", "--stop_threshold", "--skip_eval"),
        ("resnext", "--data_dir x --disable_eval --patience 3", "--stop_threshold", "--disable_eval"),
        ("resnext", "--use_synthetic_data --stop_threshold .7", "--stop_threshold", "--use_synthetic_data"),
        ("resnet", "--data_dir x --checkpoint best", "--checkpoint", "--mode eval"),
        ("resnet", "--data_dir x --mode verify-resume --train_steps 3", "--kills", "at least 1"),
        (
            "resnet",
            "--use_synthetic_data --enable_checkpoint_and_export",
            "--enable_checkpoint_and_export",
            "--data_dir",
        ),
        ("resnext", "--data_dir x -rs 34", "--resnet_size", "a resnext has"),
        ("resnext", "--data_dir x --eval_only --mode export", "--eval_only", "--mode export"),
        ("resnext", "--data_dir x --warmup_epochs nan", "--warmup_epochs", "at least 0"),
    ],
)
def test_what_contradicts_itself_is_refused(program: str, flags: str, flag: str, named: str) -> None:
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
    assert found.run.traced == (range(0) if steps is None else range(steps[0], steps[1] + 1))
    # Proving that a run resumes traces nothing.
    short = make_short_run(config, 3)
    assert (short["hooks"], short["profile_steps"]) == ("LoggingTensorHook", "0,0")


def test_an_unknown_hook_is_refused() -> None:
    config: Any = parse_flags(
        CLASSES["resnext"], ["--use_synthetic_data", "--hooks", "LoggingTensorHook,Foo"], prog="x"
    )
    with pytest.raises(FlagError, match="--hooks foo"):
        resnext_config.validate(config)
