"""A run that an earlier release began goes on as it began, whatever the same flags train now."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_datasets.documents import seal

Program = Callable[..., Any]
Earlier = Callable[[], AbstractContextManager[None]]
RISING = ("--lr_schedule", "piecewise", "--base_learning_rate", 3.2, "--warmup_epochs", 2)


@pytest.fixture
def train(run_classifier: Program, folders: Path) -> Program:
    def run(folder: Path, *flags: object, program: str = "resnet_train") -> Any:
        no_evaluation = {"resnet_train": "--skip_eval", "resnext_train": "--disable_eval"}[program]
        given = ("--data_dir", folders, "--model_dir", folder, "--image_size", 32, "--batch_size", 4, no_evaluation)
        return run_classifier(*given, *flags, program=program)

    return run


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Earlier:
    """Within, this is the release that knew the first version alone, and noted none."""

    @contextmanager
    def enter() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr("gaudi_apps.training.plan.CURRENT", 1)
            yield

    return enter


def load(folder: Path) -> Any:
    return CheckpointFolder(folder / "checkpoints").load_newest().tensors


def settings_of(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "run.json").read_text())["settings"]
    return settings


def find_difference(one: Any, other: Any) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.slow
def test_a_run_keeps_its_version(train: Program, earlier: Earlier, tmp_path: Path) -> None:
    whole, broken, fresh = (tmp_path / name for name in ("whole", "broken", "fresh"))
    with earlier():
        assert train(whole, "--train_steps", 6, *RISING).status == 0
        assert train(broken, "--train_steps", 2, *RISING).status == 0
    assert "recipe_version" not in settings_of(broken)
    done = train(broken, "--train_steps", 6, *RISING)
    assert done.status == 0, done.err
    assert find_difference(load(broken), load(whole)) < 1e-6
    assert train(fresh, "--train_steps", 6, *RISING).status == 0
    assert settings_of(fresh)["recipe_version"] == 2
    assert find_difference(load(fresh), load(whole)) > 1e-4


@pytest.mark.slow
def test_defaults_that_changed_do_not_end_a_run(train: Program, earlier: Earlier, tmp_path: Path) -> None:
    """ResNeXt's base rate was .256 in any case, and a default that follows from others was a number."""
    flags = ("--no_use_cosine_lr", "--model_type", "resnet", "-rs", "18")
    with earlier():
        assert train(tmp_path, "-mts", 1, *flags, program="resnext_train").status == 0
    record = json.loads((tmp_path / "run.json").read_text())
    record["settings"]["base_learning_rate"] = record["settings"].pop("base_lr")  # its name then
    (tmp_path / "run.json").write_text(json.dumps(seal(record)))
    settings = settings_of(tmp_path)
    assert (settings["base_learning_rate"], settings["warmup_epochs"]) == (0.256, 8.0)
    done = train(tmp_path, "-mts", 2, *flags, program="resnext_train")
    assert done.status == 0, done.err
    assert CheckpointFolder(tmp_path / "checkpoints").load_newest().step == 2
    assert settings_of(tmp_path) == settings
    done = train(tmp_path, "-mts", 2, *flags, "--clean", program="resnext_train")
    assert done.status == 0, done.err
    assert settings_of(tmp_path)["base_lr"] == 0.128


@pytest.mark.costly
def test_a_plan_is_of_the_run_that_is_there(train: Program, earlier: Earlier, tmp_path: Path) -> None:
    plan = ("--mode", "plan", "--json", "--lr_schedule", "piecewise")
    with earlier():
        assert train(tmp_path, "--train_steps", 1, "--lr_schedule", "piecewise").status == 0
    assert json.loads(train(tmp_path, *plan).out)["momentum_form"] == "tensorflow1"
    assert json.loads(train(tmp_path / "new", *plan).out)["momentum_form"] == "keras"


@pytest.mark.costly
def test_a_run_of_a_newer_release_is_refused(train: Program, tmp_path: Path) -> None:
    assert train(tmp_path, "--train_steps", 1).status == 0
    record = json.loads((tmp_path / "run.json").read_text())
    record["settings"]["recipe_version"] = 99
    (tmp_path / "run.json").write_text(json.dumps(seal(record)))
    done = train(tmp_path, "--train_steps", 2)
    assert done.status == 78
    assert "recipe_version 99" in done.err
    assert done.err.count("\n") == 1
