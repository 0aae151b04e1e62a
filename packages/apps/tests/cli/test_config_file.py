from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps import resnet_train
from gaudi_apps.cli.flag_rules import parse_config
from gaudi_apps.detection.config import SSDConfig
from gaudi_apps.mxnet.config import SSDMXNetConfig
from gaudi_apps.runtime.errors import ConfigFileError
from gaudi_datasets.errors import FlagError, MissingInputError


def parse(tmp_path: Path, text: str, *argv: str) -> SSDConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return parse_config(SSDConfig, ["--config", str(path), *argv], prog="ssd_train", description="")


def test_command_line_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    text = "batch_size: 16\nbase-lr: 8e-3\nuse_fake_data: true\nlr_drop_epochs: [3, 4.5]\ndata_dir: null\nk: -3\n"
    config = parse(tmp_path, text, "-b", "4")
    assert config.data.batch_size == 4
    assert config.schedule.base_lr == 8e-3
    assert config.schedule.lr_drop_epochs == (3, 4.5)
    assert config.schedule.k == -3
    assert config.data.use_fake_data
    assert config.data.data_dir is None
    assert config.run.epochs == 50


def test_lists_may_be_empty_and_numbers_infinite(tmp_path: Path) -> None:
    config = parse(tmp_path, "inference: []\nbase_lr: .inf\ncheckpoint: '300'\nprofile: 0,0\nk: -1\n")
    assert config == replace(
        SSDConfig(),
        run=replace(SSDConfig().run, checkpoint="300", config=str(tmp_path / "run.yaml")),
        schedule=replace(SSDConfig().schedule, base_lr=float("inf"), k=-1),
    )


@pytest.mark.parametrize(("engine", "kept"), [("", 0), ("use_horovod: false\n", 0), ("use_horovod: true\n", 8)])
def test_workers_of_a_run_of_one_process_by_an_earlier_version(tmp_path: Path, engine: str, kept: int) -> None:
    config = parse(tmp_path, f"num_workers_per_hls: 8\n{engine}")
    assert config.distribution.num_workers_per_hls == kept


def test_a_file_may_have_the_names_of_the_original(tmp_path: Path) -> None:
    config = parse(tmp_path, "resnet_checkpoint: a.pth\nlr_warmup_epoch: 2\ntarget_ap: 0.5\nlog_step_count_steps: 7\n")
    assert (config.network.weights, config.schedule.warmup_epochs) == ("a.pth", 2)
    assert (config.report.target, config.report.log_steps) == (0.5, 7)


def test_false_switch_is_the_default(tmp_path: Path) -> None:
    assert not parse(tmp_path, "use_fake_data: false\n").data.use_fake_data


@pytest.mark.parametrize(
    ("text", "field", "flag", "named"),
    [
        ("bath_size: 3\n", "bath_size", None, "did you mean batch_size?"),
        ("config: other.yaml\n", "config", None, "remove it"),
        ("batch_size: many\n", None, "--batch_size", "many"),
        ("batch_size: true\n", None, "--batch_size", "True"),
        ("mode: fly\n", None, "--mode", "fly"),
        ("use_fake_data: 7\n", "use_fake_data", None, "7"),
        ("schedule:\n  batch_size: 3\n", "schedule", None, "no flag"),
        ("batch_size: {a: 3}\n", "batch_size", None, "a mapping"),
        ("- batch_size\n", None, None, "a list"),
        ("", None, None, "nothing"),
        ("a: [1\n", None, None, "not YAML"),
        ("a: !!python/object/apply:os.getcwd []\n", None, None, "not YAML"),
    ],
)
def test_a_bad_file_is_named_in_one_line(
    tmp_path: Path, text: str, field: str | None, flag: str | None, named: str
) -> None:
    with pytest.raises(ConfigFileError) as caught:
        parse(tmp_path, text)
    error = caught.value
    assert (error.exit_status, error.path, error.field) == (78, str(tmp_path / "run.yaml"), field)
    assert flag is None or flag in str(error)
    assert named in str(error)
    assert str(error).startswith(f"{tmp_path / 'run.yaml'}: ")
    assert "\n" not in str(error)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"nothing\.yaml"):
        parse_config(SSDConfig, [f"--config={tmp_path}/nothing.yaml"], prog="ssd_train", description="")


def test_command_line_errors_do_not_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(FlagError) as caught:
        parse(tmp_path, "batch_size: 3\n", "--batch_size", "x")
    assert "run.yaml" not in str(caught.value)


def test_a_file_that_would_swell_is_refused_at_once(tmp_path: Path) -> None:
    rows = [f"r{row}: &r{row} [{', '.join([f'*r{row - 1}'] * 10 if row else ['x'] * 10)}]\n" for row in range(30)]
    with pytest.raises(ConfigFileError) as caught:
        parse(tmp_path, "".join(rows))
    assert (caught.value.exit_status, caught.value.path) == (78, str(tmp_path / "run.yaml"))


def test_a_pipe_is_no_file_of_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    os.mkfifo(path)
    with pytest.raises(ConfigFileError) as caught:
        parse_config(SSDConfig, ["--config", str(path)], prog="ssd_train", description="")
    assert caught.value.path == str(path)


@pytest.mark.parametrize("argument", [["--model_dir", ""], ["--model_dir="], ["--inference", "a.jpg", ""]])
def test_an_empty_value_is_no_path(argument: list[str]) -> None:
    with pytest.raises(FlagError) as caught:
        parse_config(SSDConfig, argument, prog="ssd_train", description="")
    assert caught.value.flag == argument[0].rstrip("=")


@pytest.mark.parametrize("is_on", [True, False])
def test_a_boolean_of_a_file_wins_over_presets_and_recipes(tmp_path: Path, is_on: bool) -> None:
    def choose(_: resnet_train.ResNetConfig, given: frozenset[str]) -> list[str]:
        assert {"zero_gamma", "no_evaluate"} <= given
        return ["--zero_gamma", "--no_evaluate"]

    path = tmp_path / "run.yaml"
    path.write_text(f"zero_gamma: {is_on}\nno_evaluate: {is_on}\n")
    config = parse_config(
        resnet_train.ResNetConfig, ["--config", str(path)], prog="resnet_train", description="", choose=choose
    )
    assert (config.training.zero_gamma, config.report.no_evaluate) == (is_on, is_on)


@pytest.mark.parametrize("glue", [" ", "="])
@pytest.mark.parametrize("dashes", ["-", "--"])
def test_files_and_presets_are_read_by_each_spelling(tmp_path: Path, dashes: str, glue: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("weight_decay: 0.5\n")

    def parse_words(config: type[Any], text: str) -> Any:
        return parse_config(config, text.split(" "), prog="x", description="")

    config = parse_words(resnet_train.ResNetConfig, f"{dashes}config{glue}{path}")
    assert config.training.weight_decay == 0.5
    with pytest.raises(MissingInputError):
        parse_words(resnet_train.ResNetConfig, f"{dashes}config{glue}{path}.gone")
    expected = parse_words(SSDMXNetConfig, "--system C4140")
    assert parse_words(SSDMXNetConfig, f"{dashes}system{glue}C4140") == expected
    assert expected != parse_words(SSDMXNetConfig, "--seed 0")
