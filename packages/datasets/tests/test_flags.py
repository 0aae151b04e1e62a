from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from gaudi_datasets.errors import FlagError
from gaudi_datasets.flags import parse_flags


@dataclass(frozen=True)
class Schedule:
    """The learning rate."""

    base_lr: float = 1e-3
    """rate of the first step"""


@dataclass(frozen=True)
class Train:
    """Train something."""

    data_dir: str
    """folder of the records"""
    schedule: Schedule = field(default_factory=Schedule)
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])] = 8
    """images a step"""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """precision"""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")


@dataclass(frozen=True)
class Score:
    """Score something."""

    detections: str = ""
    """file"""


Command: Any = Annotated[Train, tyro.conf.subcommand("train")] | Annotated[Score, tyro.conf.subcommand("score")]


def error_of(config_class: Any, *argv: str) -> str:
    with pytest.raises(FlagError) as error:
        parse_flags(config_class, argv, prog="prog")
    message = str(error.value)
    assert "\n" not in message
    assert re.search(r"see prog( \w+)? --help", message)
    return message


def test_flags_have_underscores_or_hyphens_short_forms_and_no_prefix() -> None:
    argv = ["--data-dir", "x", "--base_lr", "2e-3", "-b", "16", "--dtype", "fp32"]
    assert parse_flags(Train, argv, prog="prog") == Train("x", Schedule(2e-3), 16, "fp32")


def test_an_unknown_flag_is_named_with_the_nearest() -> None:
    assert error_of(Train, "--data_dir", "x", "--bach_size", "4").startswith(
        "unknown flag --bach_size; did you mean --batch_size?"
    )


def test_a_misspelt_required_flag_is_named_with_the_nearest() -> None:
    assert error_of(Train, "--datadir", "x").startswith("unknown flag --datadir; did you mean --data_dir?")


def test_an_unknown_flag_like_no_other_is_named_alone() -> None:
    assert error_of(Train, "--data_dir", "x", "--zzz").startswith("unknown flag --zzz (see")


def test_a_missing_flag_is_named() -> None:
    assert error_of(Train).startswith("required and not")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--batch_size", "four"], ["--batch_size", "four"]),
        (["--dtype", "fp8"], ["--dtype", "fp8", "fp32", "bf16"]),
        (["--batch_size"], ["--batch_size", "value"]),
        (["--batch_size", "0"], ["batch_size is 0"]),
        (["stray"], ["unknown argument 'stray'"]),
    ],
)
def test_a_value_that_is_not_taken_is_named(argv: list[str], parts: list[str]) -> None:
    message = error_of(Train, "--data_dir", "x", *argv)
    assert all(part in message for part in parts), message


def test_subcommands_are_named() -> None:
    assert parse_flags(Command, ["score", "--detections", "x"], prog="prog") == Score("x")
    assert "train, score" in error_of(Command)
    assert error_of(Command, "trian").startswith("unknown argument 'trian'")
    assert error_of(Command, "score", "--batch_size", "4").startswith("unknown flag --batch_size")


def test_help_ends_well_and_shows_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_flags(Train, ["--help"], prog="prog")
    assert end.value.code in (0, None)
    out = capsys.readouterr().out
    assert "--base_lr" in out
    assert "schedule" in out


def test_importing_flags_imports_nothing_heavy() -> None:
    code = (
        "import sys, gaudi_datasets.cli, gaudi_datasets.flags, gaudi_datasets.program;"
        "print([name for name in ('numpy', 'tensorflow', 'PIL', 'cv2', 'pycocotools') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@dataclass(frozen=True)
class _Training:
    image_size: int = 300
    base_lr: float = 0.1
    batch_size: int = 8
    epochs: float = 1.0
    data_dir: str = ""
    weights: str = ""
    model_dir: str = ""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    optimizer_name: Literal["SGD", "Adam"] = "SGD"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--imgsz=640", "--image_size"),
        ("--lr=.1", "--base_lr"),
        ("--lr0=.1", "--base_lr"),
        ("--batch=4", "--batch_size"),
        ("--num_epochs=3", "--epochs"),
        ("--data-path=x", "--data_dir"),
        ("--pretrained=x", "--weights"),
        ("--name=x", "--model_dir"),
        ("--project=x", "--model_dir"),
    ],
)
def test_names_of_other_libraries_get_a_suggestion_that_works(given: str, meant: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse_flags(_Training, [given], prog="x")
    assert f"did you mean {meant}?" in str(caught.value)
    parse_flags(_Training, [meant + given[given.index("=") :]], prog="x")


def test_an_error_points_to_the_help_of_its_command() -> None:
    from gaudi_datasets.cli import parse_arguments

    with pytest.raises(FlagError) as caught:
        parse_arguments(["convert", "yolo", "--dta", "x"])
    assert "gaudi-datasets convert yolo --help" in str(caught.value)
    with pytest.raises(FlagError) as caught:
        parse_arguments(["convert", "--dta", "x"])
    assert "gaudi-datasets convert --help" in str(caught.value)


@pytest.mark.parametrize(
    "given", ["--resume", "--iou=.5", "--conf=.3", "--optimizer=adam", "--model=yolov8n.pt", "--val"]
)
def test_names_of_other_libraries_without_a_flag_get_no_wrong_suggestion(given: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse_flags(_Training, [given], prog="x")
    assert "did you mean" not in str(caught.value)
    assert caught.value.flag == given.partition("=")[0]
    if given == "--resume":
        assert "--model_dir" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--device=0", "gpu"),
        ("--device=cuda:0", "gpu"),
        ("--device=0,1", "gpu"),
        ("--device=CPU", "cpu"),
        ("--optimizer_name=adam", "Adam"),
    ],
)
def test_values_of_other_libraries_get_a_suggestion_that_works(given: str, meant: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse_flags(_Training, [given], prog="x")
    assert f"did you mean {meant}?" in str(caught.value)
    assert caught.value.flag == given.partition("=")[0]
    parse_flags(_Training, [f"{given.partition('=')[0]}={meant}"], prog="x")


@dataclass(frozen=True)
class _Placed:
    image: tyro.conf.Positional[Path]
    side: int
    """size"""


def test_missing_arguments_that_are_told_by_their_place_are_named() -> None:
    for argv, missing in (([], "--side, image"), (["--side", "3"], "image"), (["a.jpg"], "--side")):
        with pytest.raises(FlagError) as caught:
            parse_flags(_Placed, argv, prog="x")
        assert f": {missing} (" in str(caught.value)
