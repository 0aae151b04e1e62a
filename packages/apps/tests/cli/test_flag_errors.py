"""Errors of the programs name flags as they were typed, give reasons, and leave alone what asks for nothing."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.training.run_dir import FORMAT, VERSION
from gaudi_datasets.documents import seal

Run = Callable[..., Any]


@pytest.fixture
def run(run_main: Run) -> Run:
    """Run a program by its name."""
    return lambda program, *argv: run_main(importlib.import_module(f"gaudi_apps.{program}").main, argv)


@pytest.mark.parametrize(
    ("command", "flag", "named"),
    [
        ("resnet_train -synth --profile_steps 7", "--profile_steps", "--profile_steps '7'"),
        ("resnet_train -synth --profile 1,2 --profile_steps=7", "--profile_steps", "--profile_steps '7'"),
        ("resnet_train -synth --profile_steps 1,2 --profile 7", "--profile", "--profile '7'"),
        ("resnext_train -synth --stop_threshold 7", "--stop_threshold", "--stop_threshold 7: "),
        ("resnext_train -synth -st x", "-st", "-st: could not"),
        ("resnet_train --use_synthetic_data --data_dir x", "--use_synthetic_data", "--data_dir x"),
        ("resnet_train -dd x --use_fake_data", "--use_fake_data", "contradicts -dd x"),
        ("ssd_train -f --batch-size 0", "--batch-size", "--batch-size 0: "),
        ("ssd_train -f -b 0", "-b", "-b 0: "),
        ("ssd_mxnet_train --mode VAL --synthetic", "--mode", "--mode VAL: "),
        ("ssd_mxnet_train --mode=val --synthetic", "--mode", "not --synthetic"),
        ("resnet_train --nouse_synthetic_data", "--mode", "--mode train: "),
        ("ssd_train -f --model_dir s3://name:word@bucket/run", "--model_dir", "s3://...: "),
        ("ssd_train -f --weights s3://name:word@bucket/w.pth", "--weights", "s3://...: "),
        ("ssd_train --data_dir s3://bucket/batches --static", "--data_dir", "no URL"),
        ("resnext_train --jpeg_data_dir gs://bucket/images", "--jpeg_data_dir", "no URL"),
        ("resnet_train --data_dir s3://name:word@bucket/records", "--data_dir", "s3://...: "),
        ("resnet_train --data_dir records --cache_dir cache", "--cache_dir", "is a URL"),
        ("ssd_mxnet_train --coco_root s3://bucket/coco", "--coco_root", "no URL"),
    ],
)
def test_an_error_names_the_flag_that_was_typed(run: Run, command: str, flag: str, named: str) -> None:
    done = run(*command.split())
    assert (done.status, done.error.flag) == (64, flag)
    assert named in done.err


def test_a_url_without_the_library_of_stores(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    done = run("ssd_train", "-f", "--model_dir", "s3://bucket/without-the-library")
    assert (done.status, done.error.path) == (78, "s3://bucket/without-the-library")


def test_an_error_names_the_flag_of_the_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("profile_steps: 7\n")
    done = run("resnet_train", "-synth", "--config", path)
    assert (done.status, done.error.flag) == (64, "--profile_steps")
    path.write_text("dtype: fp16\n")
    done = run("resnet_train", "-synth", "--config", path)
    assert (done.status, done.error.flag) == (78, "--dtype")
    assert f"{path}: --dtype fp16: " in done.err


@pytest.mark.parametrize(
    ("command", "flag", "reason"),
    [
        ("resnet_train --dtype fp16", "--dtype", "give bf16"),
        ("resnext_train -dlit fp16", "-dlit", "give bf16"),
        ("ssd_train -d fp16", "-d", "give bf16"),
        ("resnet_train --distribution_strategy one_device", "--distribution_strategy", "leave it out"),
        ("resnet_train -ds=tpu", "-ds", "give --device"),
        ("resnext_train -ds parameter_server", "-ds", "give multi_worker"),
        ("resnext_train --resnet_size 200", "--resnet_size", "give 152"),
        ("resnext_train --resnet_size 7", "--resnet_size", "'152'"),
    ],
)
def test_a_value_that_is_gone_has_a_reason(run: Run, command: str, flag: str, reason: str) -> None:
    done = run(*command.split())
    assert (done.status, done.error.flag) == (64, flag)
    assert reason in done.err


@pytest.mark.parametrize("program", ["ssd_train", "ssd_mxnet_train", "resnet_train", "resnext_train"])
def test_a_plan_with_clean_is_of_a_new_run(run: Run, tmp_path: Path, program: str) -> None:
    """One of before the originals' rules, by which a run that is not removed goes on."""
    record = {"format": FORMAT, "version": VERSION, "settings": {}, "files": []}
    (tmp_path / "run.json").write_text(json.dumps(seal(record)))
    command = ("--use_fake_data", "--mode", "plan", "--json", "--model_dir", tmp_path)
    other, new, empty = (
        json.loads(run(program, *command, *flags).out)
        for flags in ([], ["--clean"], ["--clean", "--model_dir", tmp_path / "other"])
    )
    assert new == empty
    assert (new != other) == (program != "ssd_train")  # whose figures are the same by both rules
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("name", ["GAUDI_RUN_RESTART", "SLURM_RESTART_COUNT"])
@pytest.mark.parametrize("program", ["ssd_train", "ssd_mxnet_train", "resnet_train", "resnext_train"])
def test_a_run_that_is_started_again_is_not_cleaned_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, name: str
) -> None:
    seen: list[bool] = []
    module = importlib.import_module(f"gaudi_apps.{program}")
    monkeypatch.setattr(type(module.PROGRAM), "print_plan", lambda self, config, *_: seen.append(config.run.clean))
    (tmp_path / "flags.yaml").write_text("clean: true")
    command = ("--use_fake_data", "--mode", "plan", "--model_dir", tmp_path)
    for flags in (["--clean"], ["--config", tmp_path / "flags.yaml"]):
        for restarts in ("", "0", "1"):
            monkeypatch.setenv(name, restarts)
            err = run(program, *command, *flags).err
            assert [line for line in err.splitlines() if "--clean" in line and "restart 1" in line] == (
                [err.splitlines()[0]] if restarts == "1" else []
            )
    assert seen == [True, True, False] * 2


def test_the_original_workers_of_a_machine_ask_for_nothing_by_themselves(run: Run, tmp_path: Path) -> None:
    command = ("ssd_train", "-f", "--mode", "plan", "--json", "--model_dir", tmp_path)
    assert run(*command, "--num_workers_per_hls", 8).out == run(*command).out
    assert run(*command, "--num_workers_per_hls", 4).status == 64
    assert run("resnet_train", "-synth", "--mode", "plan", "--num_workers_per_hls", 8).status == 64
