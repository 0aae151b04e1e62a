"""Recipes: flags that follow from data and machine, and the length that follows from a time."""

from __future__ import annotations

import contextlib
import json
import math
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gaudi_apps import resnet_train, ssd_train
from gaudi_apps.cli.flag_rules import find_rules, list_flags, replace_flags
from gaudi_apps.detection.application import SSDApplication
from gaudi_apps.detection.config import SSDConfig
from gaudi_apps.detection.plan import choose_recipe, make_plan
from gaudi_apps.resnet_train import ResNetConfig
from gaudi_apps.runtime.errors import RunChangedError
from gaudi_apps.runtime.session import Session
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.plan import count_steps
from gaudi_apps.training.recipe import (
    END_SECONDS,
    MOST_EVALUATIONS,
    NO_RECIPE,
    Choice,
    Host,
    Recipe,
    Speed,
    choose_average,
    count_epochs,
    count_processors_of_all,
    fit_length,
    read_recipe,
)
from gaudi_apps.training.run import run_evaluation
from gaudi_datasets.errors import DataError, FlagError, MissingInputError
from gaudi_datasets.fetching.weights_table import WEIGHTS
from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.comm.opening import ENGINE_VARIABLE

run_ranks = runpy.run_path(str(Path(__file__).parents[1] / "ranks_in_threads.py"))["run_ranks"]
CPU = Host("cpu", 2, has_bf16=True)
KINDS = ((True, True), (False, True), (False, False))  # of processors: with bf16, with AVX-512, with neither
SECONDS = st.floats(0.01, 100)


@given(st.floats(60, 36000), SECONDS, st.floats(0.1, 100), st.floats(0, 100), st.integers(1, 500))
def test_a_fitted_training_ends_in_time(
    seconds: float, step: float, evaluation: float, report: float, per_epoch: int
) -> None:
    if seconds < step + evaluation + report + END_SECONDS + 1:
        return
    steps, every = fit_length(seconds, Speed(step, evaluation, report), per_epoch)
    evaluations = -(-steps // every)
    needed = steps * step + evaluations * evaluation + report + END_SECONDS
    assert 1 <= evaluations <= MOST_EVALUATIONS
    assert needed <= seconds + 1e-6
    assert needed > seconds - step - MOST_EVALUATIONS * evaluation


def test_evaluations_take_a_tenth_of_the_time_and_not_more_than_one_an_epoch() -> None:
    assert fit_length(600 + END_SECONDS, Speed(1.0, 6.0, 0.0), 10) == (540, 54)
    assert fit_length(600 + END_SECONDS, Speed(1.0, 30.0, 0.0), 10) == (540, 270)
    assert fit_length(600 + END_SECONDS, Speed(1.0, 6.0, 0.0), 200) == (588, 294)
    assert fit_length(600 + END_SECONDS, Speed(1.0, 0.0, 60.0), 10) == (540, 0)


def test_evaluations_at_given_steps_are_reckoned_with() -> None:
    assert fit_length(600 + END_SECONDS, Speed(1.0, 10.0, 0.0), 10, evaluation_steps=20) == (393, 20)
    assert fit_length(600 + END_SECONDS, Speed(1.0, 10.0, 20.0), 10, evaluation_steps=0) == (580, 0)


def test_a_time_without_room_for_a_step_is_an_error_of_the_flag() -> None:
    with pytest.raises(FlagError) as caught:
        fit_length(9, Speed(2.0, 1.0, 1.0), 10)
    assert (caught.value.flag, caught.value.exit_status) == ("--minutes", 64)
    assert str(caught.value.remedy).endswith("1 minute more")
    with pytest.raises(FlagError) as caught:
        fit_length(-30, Speed(80.0, 10.0, 10.0), 10)
    assert str(caught.value.remedy).endswith("3 minutes more")
    with pytest.raises(FlagError) as caught:
        fit_length(30, Speed(1.0, 10.0, 1.0), 1, evaluation_steps=1)
    assert str(caught.value.remedy).endswith("1 minute more")


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_epochs_become_the_steps_that_they_stand_for(steps: int, per_epoch: int) -> None:
    assert count_steps(count_epochs(steps, per_epoch), per_epoch) == steps


@pytest.mark.parametrize(
    ("rank", "own", "workers", "most", "found"),
    [
        (RankInfo(), 4, 1, 0, 4),
        (RankInfo(), 4, 2, 1, 2),  # to be launched
        (RankInfo(), 4, 8, 16, 4),
        (RankInfo(0, 4, 0, 4), 1, 4, 16, 4),  # each bound to one
        (RankInfo(0, 4, 0, 4), 4, 4, 16, 4),  # not bound
        (RankInfo(0, 8, 0, 4), 1, 8, 16, 8),  # two hosts
        (RankInfo(0, 2, 0, 2), 2, 2, 1, 2),
    ],
)
def test_processors_are_those_of_all_ranks(
    rank: RankInfo, own: int, workers: int, most: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4 if process else own)))
    monkeypatch.setattr("gaudi_distributed.devices.machine.read_processor_quota", lambda machine: None)
    assert count_processors_of_all(rank, workers, most) == found


def test_averages_remember_more_of_longer_runs() -> None:
    decays = [choose_average(steps).value for steps in (10, 560, 1200, 20000, 10**6)]
    assert decays == [0.99, 0.995, 0.998, 0.9995, 0.9998]


def choose(*given_flags: str, images: int = 205, host: Host = CPU, validates: bool = True, **flags: Any) -> Recipe:
    config = replace_flags(SSDConfig(), {"data": "cells", **flags})
    return choose_recipe(config, frozenset(given_flags), 1, images=images, validates=validates, host=host)


def test_a_detector_of_few_images_on_processors() -> None:
    values = {flag: value for flag, value, _ in choose("steps", steps=546).choices}
    assert (values["batch_size"], values["base_lr"], values["lr_warmup_steps"]) == (8, 0.096, 98)
    assert (values["lr_schedule"], values["ema_decay"], values["dtype"]) == ("cosine", 0.995, "bf16")
    assert (values["zoom_in"], values["box_weight"], values["box_voting"]) == (0.8, 2.0, True)
    assert (values["save_checkpoints_minutes"], values["save_checkpoints_steps"]) == (10.0, 546)
    config = replace_flags(SSDConfig(), {"steps": 546, **values})
    plan = make_plan(config, 205)
    assert (plan.total_steps, plan.warmup_steps, plan.evaluation_steps) == (546, 98, 69)
    assert plan.peak_learning_rate == pytest.approx(0.024)
    assert plan.warnings == ()


def test_a_detector_of_little_time_has_a_small_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = Host("cpu", 1, has_bf16=True)
    chosen = {}
    for minutes in (2.0, 10.0, 20.0, 60.0):
        values = {flag: value for flag, value, _ in choose(minutes=minutes, host=one).choices}
        chosen[minutes] = (values["backbone"], values["steps"], values["batch_size"])
    assert chosen == {
        2.0: ("resnet18_quarter", 2733, 2),
        10.0: ("resnet18_quarter", 4100, 8),
        20.0: ("resnet18_half", 3462, 8),
        60.0: ("resnet18", 3763, 8),
    }
    of_512 = dict(choice[:2] for choice in choose("image_size", minutes=60.0, host=one, image_size=512).choices)
    assert (of_512["backbone"], of_512["steps"]) == ("resnet18_half", 3584)  # a third of as many images in the time
    assert choose(minutes=5.0, host=one).notes == ()  # nobody published weights of it
    assert "fetch weights resnet18`" in choose(minutes=60.0, host=one).notes[0]
    card = partial(choose, images=5000, host=Host("gpu", 16, has_bf16=True))
    assert ("backbone", "resnet18") in [(choice.flag, choice.value) for choice in card(minutes=0.1).choices]
    assert not card(minutes=4.0).chooses("backbone")
    assert choose(minutes=10.0, host=one).chooses("backbone")
    assert choose(minutes=10.0).chooses("backbone")
    assert not choose(minutes=120.0, host=one).chooses("backbone")
    assert not choose("steps", steps=100, host=one).chooses("backbone")
    assert not choose("backbone", minutes=5.0, host=one, backbone="resnet34").chooses("backbone")
    assert not choose("weights", minutes=5.0, host=one, weights="own.npz").chooses("backbone")


def test_the_batch_that_is_given_does_not_choose_the_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pair = Host("cpu", 2, has_bf16=True)
    chosen = [choose("batch_size", minutes=20.0, batch_size=size, host=pair).choices for size in (1, 2, 8, 32)]
    found = [choice.value for choices in chosen for choice in choices if choice.flag == "backbone"]
    assert found == ["resnet18_half"] * 4


@pytest.mark.parametrize("minutes", [2.0, 5.0, 10.0, 200.0])
def test_to_name_the_backbone_that_is_chosen_changes_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float
) -> None:
    monkeypatch.chdir(tmp_path)
    slow = Host("cpu", 1, has_bf16=False, has_avx512=False)
    chosen = {flag: value for flag, value, _ in choose(minutes=minutes, host=slow).choices}
    backbone = chosen.pop("backbone")
    named = choose("backbone", minutes=minutes, host=slow, backbone=backbone)
    assert {flag: value for flag, value, _ in named.choices} == chosen


def test_fetched_weights_of_a_smaller_backbone_are_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = WEIGHTS["resnet18"].files[0]
    path = tmp_path / "weights" / file.name
    path.parent.mkdir()
    with path.open("wb") as whole:
        whole.truncate(file.size)
    values = {flag: value for flag, value, _ in choose(minutes=5.0, host=Host("cpu", 1, has_bf16=True)).choices}
    assert (values["backbone"], values["weights"]) == ("resnet18", str(path))


@pytest.mark.parametrize(
    ("minutes", "workers", "batch", "steps"),
    [
        (2.0, 1, 2, 607),
        (5.0, 1, 2, 1620),
        (10.0, 1, 4, 1822),
        (20.0, 1, 8, 1923),
        (60.0, 1, 8, 5973),
        (2.0, 2, 4, 303),
        (5.0, 2, 4, 810),
        (5.0, 3, 6, 540),
    ],
)
def test_a_detector_of_little_time_makes_more_steps_of_fewer_images(
    minutes: float, workers: int, batch: int, steps: int
) -> None:
    slow, config = Host("cpu", 1, has_bf16=False, has_avx512=False), SSDConfig()
    config = replace_flags(config, {"data": "cells", "minutes": minutes, "use_horovod": workers > 1})
    recipe = choose_recipe(config, frozenset(), workers, images=205, validates=True, host=slow)
    values = {flag: value for flag, value, _ in recipe.choices}
    assert (values["batch_size"] * workers, values["steps"]) == (batch, steps)
    assert values["base_lr"] == pytest.approx(0.096 * math.sqrt(8 / batch), abs=1e-6)
    given = choose("batch_size", minutes=minutes, host=slow, batch_size=8)
    assert [choice.value for choice in given.choices if choice.flag == "batch_size"] == [8]


def test_a_detector_without_a_time_learns_for_epochs() -> None:
    values = {flag: value for flag, value, _ in choose().choices}
    assert values["steps"] == 50 * 26
    assert values["base_lr"] == 0.096
    assert "zoom_in" not in values
    assert {flag: value for flag, value, _ in choose(images=20).choices}["steps"] == 800


def test_a_detector_on_another_machine() -> None:
    slow = {flag: value for flag, value, _ in choose(host=Host("cpu", 2, has_bf16=False)).choices}
    assert slow["dtype"] == "fp32"
    speeds = [Host("cpu", 3, is_new, is_new or is_wide).assume_speed(4, 2, 1, 9) for is_new, is_wide in KINDS]
    assert speeds == [12, 6, 3]
    fast = {flag: value for flag, value, _ in choose(images=5000, host=Host("gpu", 16, has_bf16=True)).choices}
    assert (fast["batch_size"], fast["base_lr"]) == (32, 0.048)


def test_fetched_weights_are_begun_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "resnet34" in choose().notes[0]
    file = WEIGHTS["resnet34"].files[0]
    path = tmp_path / "weights" / file.name
    path.parent.mkdir()
    path.write_bytes(b"cut")
    assert choose().notes
    with path.open("wb") as whole:
        whole.truncate(file.size)
    recipe = choose()
    assert [choice.value for choice in recipe.effective if choice.flag == "weights"] == [str(path)]
    assert not choose(minutes=1.0).chooses("backbone")
    assert recipe.notes == ()
    assert not choose("weights", weights="own.npz").chooses("weights")


def test_a_backbone_that_is_added_needs_no_weights_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(cast(dict[str, Any], WEIGHTS), "resnet50")
    recipe = choose("backbone", backbone="resnet50")
    assert recipe.notes == ()
    assert not recipe.chooses("weights")


def test_without_validation_nothing_is_evaluated() -> None:
    values = {flag: value for flag, value, _ in choose(validates=False).choices}
    assert values["no_evaluate"] is True
    assert "eval_epochs" not in values


@pytest.mark.parametrize(("minutes", "seconds"), [(1.0, 45), (2.0, 90), (4.0, 180), (10.0, 540)])
def test_a_short_time_is_not_all_taken_by_the_start(minutes: float, seconds: int) -> None:
    recipe = choose("backbone", "batch_size", minutes=minutes, batch_size=2)
    steps = int(recipe.effective[0].value)
    assert steps == int(seconds * 0.9 * 9 / 2)  # of 9 images a second
    assert make_plan(replace_flags(SSDConfig(), {c.flag: c.value for c in recipe.choices}), 205).warnings == ()


def test_flags_of_the_user_shape_the_rest() -> None:
    recipe = choose("steps", "batch_size", steps=100, batch_size=4)
    assert recipe.effective[0].flag == "dtype"
    values = {flag: value for flag, value, _ in recipe.choices}
    assert "steps" not in values
    assert (values["lr_warmup_steps"], values["save_checkpoints_steps"]) == (18, 100)
    assert [row for row in recipe.list_rows() if row[0] == "batch_size"] == [("batch_size", "as given", "")]
    assert [word for word in recipe.to_arguments() if "batch_size" in word] == []


def test_each_choice_is_a_flag_with_a_reason() -> None:
    rules = find_rules(SSDConfig)
    for flag, _, reason in choose(minutes=10.0).choices:
        assert flag in rules
        assert reason


def test_a_recipe_is_read_as_it_was_written(tmp_path: Path) -> None:
    recipe = Recipe((Choice("steps", 9, "measured"), Choice("zero_gamma", True, "so")), minutes=10.0)
    fitted = recipe.replace_values([Choice("steps", 7, "fitted"), Choice("base_lr", 0.1, "not chosen before")])
    assert fitted.choices == (Choice("steps", 7, "fitted"), Choice("zero_gamma", True, "so"))
    (tmp_path / "recipe.json").write_text(json.dumps(fitted.to_document()))
    assert read_recipe(tmp_path, frozenset({"seed"}), 10.0) == replace(fitted, given=frozenset({"seed"}))
    assert fitted.to_arguments() == ["--steps=7", "--zero_gamma"]


def test_a_run_without_a_recipe_has_none(tmp_path: Path) -> None:
    assert read_recipe(tmp_path, frozenset(), 0.0) is None
    (tmp_path / "file").touch()
    assert read_recipe(tmp_path / "file" / "run", frozenset(), 0.0) is None  # what is written there meets the fault
    (tmp_path / "recipe.json").mkdir()
    with pytest.raises(IsADirectoryError):
        read_recipe(tmp_path, frozenset(), 0.0)


def test_a_run_that_was_fitted_to_another_time_is_refused(tmp_path: Path) -> None:
    document = Recipe((Choice("steps", 9, "measured"),), minutes=10.0).to_document()
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    with pytest.raises(RunChangedError) as caught:
        read_recipe(tmp_path, frozenset(), 5.0)
    assert (caught.value.field, caught.value.exit_status) == ("minutes", 78)
    assert "--minutes 10" in str(caught.value.remedy)
    assert read_recipe(tmp_path, frozenset(), None) is not None
    (tmp_path / "recipe.json").write_text(json.dumps(document | {"minutes": 1.0}))
    with pytest.raises(RunChangedError, match=r"1 minute,.* --steps") as caught:
        read_recipe(tmp_path, frozenset({"steps"}), 0.0, 5)
    assert "--minutes 1," in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("flags", "length"), [({"steps": 6}, "--steps 6"), ({"steps": 0, "epochs": 2.5}, "--epochs 2.5")]
)
def test_a_run_of_fixed_length_goes_on_by_that(tmp_path: Path, flags: dict[str, Any], length: str) -> None:
    document = Recipe((Choice("base_lr", 0.1, "so"),)).to_document()
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    (tmp_path / "run.json").write_text(json.dumps({"settings": flags}))
    with pytest.raises(RunChangedError) as caught:
        read_recipe(tmp_path, frozenset({"minutes"}), 5.0)
    assert length in str(caught.value.remedy)
    assert "0 minutes" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "another"},
        {"version": 9},
        {"choices": [{"flag": "--steps 3", "value": 1, "reason": ""}]},
        {"choices": [{"flag": "steps", "value": [1], "reason": ""}]},
        {"choices": 3},
        {"minutes": "many"},
    ],
)
def test_a_damaged_recipe_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    document = Recipe((Choice("steps", 9, "measured"),)).to_document() | change
    (tmp_path / "recipe.json").write_text(json.dumps(document))
    with pytest.raises(DataError) as caught:
        read_recipe(tmp_path, frozenset(), 0.0)
    assert (caught.value.path, caught.value.exit_status) == (str(tmp_path / "recipe.json"), 65)


def test_flags_are_replaced_by_name_in_their_groups() -> None:
    config = replace_flags(SSDConfig(), {"steps": 3, "base_lr": 0.5})
    assert (config.run.steps, config.schedule.base_lr) == (3, 0.5)
    changed = {name for (name, one), (_, other) in zip(list_flags(config), list_flags(SSDConfig())) if one != other}  # noqa: B905
    assert changed == {"steps", "base_lr"}
    with pytest.raises(KeyError):
        replace_flags(SSDConfig(), {"stepps": 3})


def parse(*arguments: str | Path) -> SSDConfig:
    config: SSDConfig = ssd_train.PROGRAM.parse([str(one) for one in arguments])
    return config


def test_the_program_takes_its_recipe_from_the_data(records: Path, tmp_path: Path) -> None:
    config = parse("--data", records, "--model_dir", tmp_path / "run", "-b", "2", "--max_cpus", "1", "--device", "cpu")
    assert config.data.batch_size == 2
    assert config.run.steps == 800
    assert config.schedule.lr_schedule == "cosine"
    assert config.report.save_checkpoints_minutes == 10
    assert config.report.eval_epochs > 0
    recipe = ssd_train.PROGRAM.recipe
    assert recipe.given == {"data", "model_dir", "batch_size", "max_cpus", "device"}
    for flag, value, _ in recipe.effective:
        assert dict(list_flags(config))[flag] == value


def test_the_original_recipe_has_the_defaults(records: Path) -> None:
    config = parse("--data", records, "--recipe", "original")
    assert replace_flags(config, {"data": None, "recipe": "auto"}) == SSDConfig()
    assert ssd_train.PROGRAM.recipe == Recipe()


def test_a_run_goes_on_by_its_own_recipe(records: Path, tmp_path: Path) -> None:
    recipe = Recipe((Choice("steps", 77, "fitted"), Choice("batch_size", 3, "so")), minutes=10.0, is_fitted=True)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_document()))
    config = parse("--data", records, "--model_dir", tmp_path, "--minutes", "10")
    assert (config.run.steps, config.data.batch_size) == (77, 3)
    assert ssd_train.PROGRAM.recipe.is_fitted
    config = parse("--data", records, "--model_dir", tmp_path, "--minutes", "10", "--clean")
    assert config.data.batch_size in (2, 4, 8)  # by the speed of this machine
    assert not ssd_train.PROGRAM.recipe.is_fitted
    config = parse("--data", records, "--model_dir", tmp_path, "--mode", "eval")
    assert config.data.batch_size == 3


@pytest.mark.parametrize("mode", ["predict", "export", "eval"])
def test_a_flag_that_contradicts_the_network_of_the_run_is_refused(tmp_path: Path, mode: str) -> None:
    settings = {"backbone": "resnet18", "image_size": 512, "box_voting": True}
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
    inputs = {"predict": ["--inference", "a.jpg"], "eval": ["--data_dir", "x"]}
    flags = ["--mode", mode, "--model_dir", str(tmp_path), *inputs.get(mode, [])]
    parse(*flags)  # by defaults nothing is contradicted
    parse(*flags, "--backbone", "resnet18", "--image_size", "512", "--box_voting")
    for name, value in (("image_size", "300"), ("backbone", "resnet34")):
        with pytest.raises(RunChangedError) as refused:
            parse(*flags, f"--{name}", value)
        assert (refused.value.field, refused.value.path, refused.value.exit_status) == (name, str(tmp_path), 78)
        assert f"{name} {settings[name]!r}" in str(refused.value.args[0])


@pytest.mark.parametrize(
    ("trained", "flags", "is_taken"),
    [
        ("resnet50_v1.5", ["--model", "resnet50"], True),
        ("resnet50", ["--model", "resnet50_v1.5"], True),
        ("resnet50_v1.5", ["--model", "resnet101"], False),
        ("resnet50_v1.5", ["--keras_applications_model", "ResNet50V2"], False),
    ],
)
def test_a_network_is_known_by_each_of_its_names(
    tmp_path: Path, trained: str, flags: list[str], is_taken: bool
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"model": trained}}))
    refused = contextlib.nullcontext() if is_taken else pytest.raises(RunChangedError)
    with refused as caught:
        resnet_train.PROGRAM.parse(["--mode", "export", "--model_dir", str(tmp_path), *flags])
    assert caught is None or caught.value.field == "model"


def test_a_batch_by_its_former_name_is_given(clothes: Path) -> None:
    former, named = (resnet_train.PROGRAM.parse(["--data", str(clothes), *f]) for f in (["-nbs", "4"], ["-bs", "4"]))
    assert former == named


def test_an_evaluation_of_other_data_uses_the_type_of_the_run(
    clothes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gaudi_apps.cli.program.find_host", lambda flags: Host("cpu", 2, has_bf16=True))
    monkeypatch.setattr("gaudi_apps.training.recipe.find_host", lambda flags: Host("cpu", 2, has_bf16=True))
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"dtype": "fp32"}}))
    for mode in ("eval", "export"):
        config = resnet_train.PROGRAM.parse(["--mode", mode, "--model_dir", str(tmp_path), "--data", str(clothes)])
        assert (mode, config.device.dtype) == (mode, "fp32")


@pytest.mark.parametrize("mode", ["predict", "export", "eval"])
@pytest.mark.parametrize(
    ("trained", "has_bf16", "used"),
    [("fp32", True, "fp32"), ("bf16", True, "bf16"), ("bf16", False, "fp32"), ("fp64", True, "bf16")],
)
def test_a_run_is_used_in_the_type_that_it_was_trained_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, trained: str, has_bf16: bool, used: str
) -> None:
    monkeypatch.setattr("gaudi_apps.cli.program.find_host", lambda flags: Host("cpu", 2, has_bf16))
    (tmp_path / "config.yaml").write_text(f"dtype: {trained}\nepochs: 3\n")
    flags: list[str | Path] = ["--mode", mode, "--model_dir", tmp_path]
    flags += ["--inference", "a.jpg"] if mode == "predict" else []
    if mode == "eval":
        flags += ["--data_dir", tmp_path]
    assert parse(*flags).device.dtype == used
    assert parse(*flags, "--dtype", "bf16").device.dtype == "bf16"
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"dtype": trained}}))
    (tmp_path / "config.yaml").unlink()
    assert parse(*flags).device.dtype == used
    (tmp_path / "run.json").unlink()
    assert parse(*flags).device.dtype == "bf16"


def test_the_checkpoint_to_use_is_not_guessed(tmp_path: Path) -> None:
    flags = ("--mode", "export", "--model_dir", tmp_path)
    path = tmp_path / "config.yaml"
    assert SSDApplication(parse(*flags)).find_used_checkpoint() == "newest"
    CheckpointFolder(tmp_path / "best").save(1, {"a": np.zeros(3)}, {})
    for text, which in (("data: a", "best"), ("data: null", "newest"), ("seed: 0", "newest")):
        path.write_text(text)
        assert SSDApplication(parse(*flags)).find_used_checkpoint() == which
    for damage in (lambda: path.write_text("data: [a"), path.unlink):
        damage()
        with pytest.raises(DataError) as caught:
            SSDApplication(parse(*flags)).find_used_checkpoint()
        assert caught.value.path == str(path)
        assert SSDApplication(parse(*flags, "--checkpoint", "best")).find_used_checkpoint() == "best"


def test_processes_of_gaudi_run_share_the_batch_of_the_recipe(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with --use_horovod or --distribution_strategy, which name the engine themselves."""
    arguments: list[str | Path] = [
        "--data",
        records,
        "--model_dir",
        tmp_path / "run",
        "--device",
        "cpu",
        "--max_cpus",
        "1",
    ]
    for name, value in (("RANK", "0"), ("SIZE", "4"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "4")):
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    monkeypatch.setenv(ENGINE_VARIABLE, "horovod")
    assert parse(*arguments).data.batch_size == 2
    assert parse(*arguments, "--use_horovod").data.batch_size == 2
    monkeypatch.setenv(ENGINE_VARIABLE, "multi_worker")
    assert parse(*arguments).data.batch_size == 8


@pytest.mark.parametrize(
    ("flags", "workers", "batch"),
    [({"use_horovod": True}, 3, 2), ({"distribution_strategy": "multi_worker"}, 3, 6), ({}, 1, 8)],
)
def test_the_batch_of_the_recipe_is_a_multiple_of_the_processes(
    flags: dict[str, Any], workers: int, batch: int
) -> None:
    config = replace_flags(SSDConfig(), {"data": "cells", **flags})
    recipe = choose_recipe(config, frozenset(), workers, images=205, validates=True, host=CPU)
    assert {flag: value for flag, value, _ in recipe.choices}["batch_size"] == batch


def test_a_run_of_minutes_with_the_original_defaults_goes_on(records: Path, tmp_path: Path) -> None:
    fitted = Recipe((Choice("steps", 77, "fitted"),), minutes=10.0, is_fitted=True)
    (tmp_path / "recipe.json").write_text(json.dumps(fitted.to_document()))
    flags = ("--data", records, "--model_dir", tmp_path, "--recipe", "original")
    assert parse(*flags, "--minutes", "10").run.steps == 77
    assert ssd_train.PROGRAM.recipe.is_fitted
    with pytest.raises(RunChangedError):
        parse(*flags, "--minutes", "5")


class _SharedError(Exception):
    """Ends what would need several processes."""


class OneOfTwo(Session):
    """A session of one of two ranks that share one process, up to the comparison of what they are about to do."""

    def __init__(self, app: SSDApplication, rank: Any) -> None:
        self.app, self.communicator, self.is_root = app, rank, rank.rank == 0

    def require_equal_start(self, data: str = "") -> None:
        raise _SharedError


def test_ranks_that_evaluate_follow_the_recipe_of_rank_0() -> None:
    recipe = Recipe((Choice("steps", 77, "fitted"), Choice("batch_size", 3, "so")), minutes=10.0, is_fitted=True)

    def follow(rank: Any) -> tuple[int, int]:
        app = SSDApplication(SSDConfig(), recipe=NO_RECIPE if rank.rank else recipe)
        with pytest.raises(_SharedError):
            run_evaluation(OneOfTwo(app, rank))
        return app.config.run.steps, app.config.data.batch_size

    assert run_ranks(2, follow)[1] == (77, 3)


def test_the_configuration_of_a_fitted_run_continues_it(records: Path, tmp_path: Path) -> None:
    recipe = Recipe((Choice("steps", 77, "fitted"), Choice("batch_size", 3, "so")), minutes=10.0, is_fitted=True)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_document()))
    path = tmp_path / "config.yaml"
    values = {"data": str(records), "model_dir": str(tmp_path), "batch_size": 3}
    path.write_text(yaml.safe_dump({**values, "steps": 77}))
    assert parse("--config", path).run.steps == 77
    assert ssd_train.PROGRAM.recipe.to_document() == recipe.to_document()
    for steps in (76, 0):
        path.write_text(yaml.safe_dump({**values, "steps": steps}))
        with pytest.raises(RunChangedError):
            parse("--config", path)


@pytest.mark.parametrize("mode", ["train", "plan", "eval"])
def test_the_run_of_another_program_is_refused(records: Path, tmp_path: Path, mode: str) -> None:
    """By its recipe, or, as an earlier release wrote none of it there, by its log."""
    recipe = Recipe((Choice("image_size", 128, "so"), Choice("batch_size", 3, "so")))
    flags = ("--data", records, "--model_dir", tmp_path, "--mode", mode)
    for owner, log in (("resnet_train", None), (None, "resnet_train"), ("ssd_train", None), (None, "ssd_train")):
        (tmp_path / "recipe.json").write_text(json.dumps({**recipe.to_document(), "program": owner}))
        (tmp_path / "run_log.json").write_text(json.dumps({"program": log}))
        with pytest.raises(FlagError if "ssd_train" in (owner, log) else RunChangedError) as caught:
            parse(*flags)
        if isinstance(caught.value, RunChangedError):
            assert (caught.value.field, caught.value.path) == ("program", str(tmp_path))
            assert "resnet_train" in str(caught.value)


def test_a_recipe_is_kept_with_the_program_that_it_is_of() -> None:
    recipe = Recipe((Choice("batch_size", 3, "so"),))
    assert SSDApplication(SSDConfig(), recipe=recipe).list_documents()["recipe.json"]["program"] == "ssd_train"


def test_given_epochs_replace_the_steps_of_a_run(records: Path, tmp_path: Path) -> None:
    recipe = Recipe((Choice("steps", 77, "so"), Choice("batch_size", 3, "so")))
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.to_document()))
    config = parse("--data", records, "--model_dir", tmp_path, "--epochs", "9")
    assert (config.run.steps, config.run.epochs, config.data.batch_size) == (0, 9, 3)


def test_weights_that_are_gone_do_not_keep_a_run_from_going_on(records: Path, tmp_path: Path) -> None:
    flags = ("--data_dir", records, "--model_dir", tmp_path, "--weights", tmp_path / "gone.npz")
    app = SSDApplication(parse(*flags))
    with pytest.raises(MissingInputError):
        app.find_inputs("train")
    CheckpointFolder(tmp_path / "checkpoints").save(1, {"a": np.zeros(3)}, {})
    app.find_inputs("train")
    with pytest.raises(MissingInputError):
        SSDApplication(parse(*flags, "--clean")).find_inputs("train")


def test_paths_of_training_images_are_not_needed_to_evaluate(
    image_dir: Path, annotation_file: Path, tmp_path: Path
) -> None:
    CheckpointFolder(tmp_path / "checkpoints").save(1, {"a": np.zeros(3)}, {})
    flags: list[str | Path] = ["--val_annotations", annotation_file, "--val_images", image_dir, "--model_dir", tmp_path]
    flags += ["--train_annotations", tmp_path / "gone.json", "--train_images", tmp_path / "gone"]
    SSDApplication(parse(*flags, "--mode", "eval")).find_inputs("eval")
    with pytest.raises(MissingInputError) as caught:
        SSDApplication(parse(*flags)).find_inputs("train")
    assert caught.value.flag == "--train_annotations"


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        (["--minutes", "10", "--steps", "5"], "--minutes"),
        (["--minutes", "10", "-e", "5"], "--minutes"),
        (["--minutes", "-1"], "--minutes"),
        (["--minutes", "10", "--mode", "verify-resume"], "--minutes"),
        (["--val_share", "1"], "--val_share"),
        (["--data_dir", "records"], "--data"),
        (["--train_annotations", "a.json", "--train_images", "b"], "--data"),
        (["--use_fake_data"], "--data"),
    ],
)
def test_flags_that_contradict_are_refused(records: Path, flags: list[str], flag: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse("--data", records, *flags)
    assert (caught.value.flag, caught.value.exit_status) == (flag, 64)


@pytest.mark.costly
@pytest.mark.parametrize("program", ["ssd_train", "resnet_train"])
def test_a_wrong_path_is_found_before_tensorflow(program: str, tmp_path: Path) -> None:
    """In a process of its own, in which TensorFlow cannot be imported."""
    code = f"import sys; sys.modules['tensorflow'] = None; from gaudi_apps import {program}; {program}.main()"
    command = [sys.executable, "-c", code, "--data", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == MissingInputError("").exit_status
    assert str(tmp_path / "nothing") in done.stderr


def test_patience_without_images_to_validate_on_asks_for_them(records: Path, tmp_path: Path) -> None:
    shutil.copytree(records, tmp_path / "records")
    for path in (tmp_path / "records").glob("val-*"):
        path.unlink()
    with pytest.raises(FlagError) as caught:
        parse("--data", tmp_path / "records", "--val_share", "0", "--patience", "2", "--model_dir", tmp_path / "run")
    assert caught.value.flag == "--target"
    assert "--val_share" in str(caught.value.remedy)


def test_a_share_to_validate_on_is_for_data_as_it_is(records: Path) -> None:
    with pytest.raises(FlagError) as caught:
        parse("--data_dir", records, "--val_share", "0.3")
    assert (caught.value.flag, caught.value.exit_status) == ("--val_share", 64)


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    """Make folders of three classes, of 10 images each."""
    for label, name in enumerate(("coat", "hat", "shoe")):
        folder = tmp_path / "clothes" / name
        folder.mkdir(parents=True)
        for number in range(10):
            image = np.full((40, 40, 3), 20 * number, np.uint8)
            image[..., label] = 255 - 9 * number
            cv2.imwrite(str(folder / f"{number}.png"), image)
    return tmp_path / "clothes"


def test_a_classifier_of_folders_is_planned(clothes: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--data", clothes, "--val_share", "0.3", "--mode", "plan", "--json", "--model_dir", tmp_path / "run"]
    with pytest.raises(SystemExit) as ended:
        resnet_train.main([str(one) for one in arguments])
    assert ended.value.code == 0
    plan = json.loads(capsys.readouterr().out)
    values = {entry["flag"]: entry["value"] for entry in plan["recipe"]}
    assert plan["data"] == {"images": 21, "num_classes": 3}
    assert (plan["model"], plan["optimizer"], plan["lr_schedule"]) == ("resnet18", "Adam", "cosine")
    assert plan["total_steps"] == values["steps"] == 2000
    assert values["zero_gamma"] is True
    assert plan["evaluation_steps"] == 250
    assert all(entry["reason"] for entry in plan["recipe"])


SLOW = Host("cpu", 1, has_bf16=False, has_avx512=False)
CARD = Host("gpu", 8, has_bf16=True)


def choose_classifier(
    images: int, minutes: float = 0.0, *, workers: int = 1, host: Host = SLOW, **given: Any
) -> dict[str, Any]:
    """Return what the recipe of a classifier chooses where a user gives some flags."""
    flags = {"data": "clothes", "minutes": minutes, "use_horovod": workers > 1, **given}
    config = replace_flags(ResNetConfig(), flags)
    names = frozenset(given)
    recipe = resnet_train.choose_recipe(config, names, workers, images=images, validates=True, host=host)
    return {choice.flag: choice.value for choice in recipe.choices}


@pytest.mark.parametrize(
    ("minutes", "workers", "size", "batch"),
    [
        (2.0, 1, 64, 8),
        (5.0, 1, 64, 32),
        (10.0, 1, 64, 32),
        (25.0, 1, 96, 32),
        (60.0, 1, 128, 32),
        (2.0, 2, 64, 8),
        (0.0, 1, 128, 32),
    ],
)
def test_a_classifier_of_little_time_sees_more_of_smaller_images(
    minutes: float, workers: int, size: int, batch: int
) -> None:
    values = choose_classifier(1000, minutes, workers=workers)
    assert (values["batch_size"] * workers, values["image_size"]) == (batch, size)
    assert choose_classifier(1000, minutes, workers=workers, weights="resnet18.npz")["image_size"] == 128


@pytest.mark.parametrize(
    ("minutes", "network"),
    [
        (10.0, ("resnet18", 64)),
        (60.0, ("resnet18", 128)),
        (3000.0, ("resnet18", 128)),  # five epochs, and no million images
        (20000.0, ("resnet50_v1.5", 224)),
        (0.0, ("resnet50_v1.5", 224)),
    ],
)
def test_a_large_data_set_has_a_large_classifier_where_there_is_time(minutes: float, network: tuple[str, int]) -> None:
    values = choose_classifier(50000, minutes)
    assert (values["model"], values["image_size"]) == network
    assert choose_classifier(50000, minutes, weights="resnet50.npz")["model"] == "resnet50_v1.5"
    fetched = choose_classifier(50000, minutes, model="resnet50", weights="resnet50.npz")
    assert fetched["image_size"] == max(network[1], 128)
    assert ("least_crop_area" in values) == (network[0] == "resnet18")


@pytest.mark.parametrize("images", [1000, 50000])
@pytest.mark.parametrize("minutes", [0.0, 2.0, 10.0, 25.0, 60.0, 1000.0, 20000.0])
def test_to_name_what_is_chosen_changes_nothing_else(images: int, minutes: float) -> None:
    chosen = choose_classifier(images, minutes)
    for names in (("model",), ("image_size",), ("model", "image_size"), ("batch_size",)):
        assert choose_classifier(images, minutes, **{name: chosen[name] for name in names}) == chosen


def test_minutes_are_planned_by_the_speed_of_the_classifier() -> None:
    small, large = choose_classifier(1000, 20000.0), choose_classifier(50000, 20000.0)
    assert large["steps"] == pytest.approx(0.213 * small["steps"], rel=0.01)
    named = choose_classifier(1000, 60.0, model="resnet50v2_keras", image_size=224)
    assert named["steps"] == pytest.approx(0.213 * choose_classifier(1000, 60.0)["steps"], rel=0.02)
    few, usual = choose_classifier(1000, 2.0), choose_classifier(1000, 2.0, batch_size=32)
    assert 8 * few["steps"] == pytest.approx(0.7 * 32 * usual["steps"], rel=0.02)
    # A larger network has time for smaller images alone.
    assert choose_classifier(1000, 60.0)["image_size"] == 128
    assert choose_classifier(1000, 60.0, model="resnet101")["image_size"] == 64


def test_ranks_with_cards_of_their_own_have_time_for_more() -> None:
    million = 1281167
    alone, many = (choose_classifier(million, 60.0, workers=workers, host=CARD) for workers in (1, 8))
    assert (alone["model"], many["model"]) == ("resnet18", "resnet50_v1.5")
    assert 8 * many["batch_size"] == alone["batch_size"] == 128
    config = replace_flags(SSDConfig(), {"data": "cells", "minutes": 60.0, "use_horovod": True})
    lengths = []
    for workers in (1, 8):
        recipe = choose_recipe(config, frozenset(), workers, images=5000, validates=True, host=CARD)
        values: dict[str, Any] = {choice.flag: choice.value for choice in recipe.choices}
        lengths.append(values["steps"] * values["batch_size"] * workers)
    assert lengths[1] == pytest.approx(8 * lengths[0], rel=0.01)


def test_steps_of_many_images_are_as_many_epochs() -> None:
    few, more = (choose_classifier(images, host=CARD) for images in (1999, 2000))
    assert (few["steps"] * few["batch_size"], more["steps"] * more["batch_size"]) == pytest.approx((99200, 96000))
    assert choose_classifier(100, host=CARD)["steps"] == 2000


@pytest.mark.parametrize("name", ["resnet51", "", "resnet50v3_keras"])
def test_an_unknown_classifier_is_refused_with_data_too(clothes: Path, name: str) -> None:
    with pytest.raises(FlagError) as caught:
        resnet_train.PROGRAM.parse(["--data", str(clothes), "--model", name])
    assert (caught.value.flag, caught.value.exit_status) == ("--model", 64)


def test_flags_of_the_user_win_over_the_recipe_of_a_classifier(clothes: Path) -> None:
    flags = ["--no_zero_gamma", "--train_epochs", "7", "-bs", "4", "--color_jitter", "0"]
    config = resnet_train.PROGRAM.parse(["--data", str(clothes), *flags])
    assert not config.training.zero_gamma
    assert (config.run.epochs, config.run.steps) == (7, 0)
    assert (config.data.batch_size, config.data.color_jitter) == (4, 0)
    assert config.training.optimizer == "Adam"


def test_an_export_is_checked_on_the_data_of_its_run(records: Path, tmp_path: Path) -> None:
    run = dict.fromkeys(("data_dir", "train_annotations", "train_images", "val_annotations", "val_images"))
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({**run, "data": str(records), "val_share": 0.3, "seed": 7, "steps": 5}))
    app = SSDApplication(parse("--mode", "export", "--model_dir", tmp_path))
    app.use_data_of_run()
    flags = dict(list_flags(app.config))
    assert (flags["data"], flags["val_share"], flags["seed"], flags["steps"]) == (str(records), 0.3, 7, 0)

    named = SSDApplication(parse("--mode", "export", "--model_dir", tmp_path, "--data_dir", records))
    path.write_text(yaml.safe_dump({"data": str(records)}))  # of a release with fewer flags
    app = SSDApplication(parse("--mode", "export", "--model_dir", tmp_path))
    app.use_data_of_run()
    assert dict(list_flags(app.config))["data"] == str(records)

    for text in ("", "- a", yaml.safe_dump({**run, "data": str(tmp_path / "gone"), "val_share": 0.3, "seed": 7})):
        path.write_text(text)
        named.use_data_of_run()
        assert dict(list_flags(named.config))["data"] is None
        with pytest.raises(FlagError) as caught:
            SSDApplication(parse("--mode", "export", "--model_dir", tmp_path)).use_data_of_run()
        assert (caught.value.flag, caught.value.exit_status) == ("--mode", 64)


@pytest.mark.parametrize(
    ("mode", "flags", "split"),
    [("eval", [], (0.3, 7)), ("export", [], (0.3, 7)), ("eval", ["--seed", "8"], (0.3, 8)), ("plan", [], (0.2, 0))],
)
def test_the_data_of_a_run_is_split_as_it_was(
    mode: str, flags: list[str], split: tuple[float, int], records: Path, tmp_path: Path
) -> None:
    """Else a network is scored on images that it was trained on."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": str(records), "val_share": 0.3, "seed": 7}))
    config = parse("--mode", mode, "--model_dir", tmp_path, "--data", f"{records}/.", *flags)
    assert (config.recipe.val_share, config.run.seed) == split
    moved = shutil.copytree(records, tmp_path / "other")
    other = parse("--mode", mode, "--model_dir", tmp_path, "--data", moved, *flags)
    assert other.recipe.val_share == 0.2


@pytest.mark.parametrize("flags", [["--eval_split", "test"], ["--train_splits", "train", "more"]])
def test_splits_by_name_contradict_data_as_it_is(clothes: Path, flags: list[str]) -> None:
    with pytest.raises(FlagError) as caught:
        resnet_train.PROGRAM.parse(["--data", str(clothes), *flags])
    assert caught.value.flag == "--data"
