"""The configurations that gave the documented figures: each is parsed and planned by its program."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
IMAGES = {"bccd": 292, "bccd_long": 292, "clothing": 1364, "scenes": 1200}
PEAKS = {"bccd": 0.012, "bccd_long": 0.016, "clothing": 1e-3, "scenes": 0.02}
HEADINGS = ("source", "command", "minutes", "figures")
# The data of a command, in place of which a plan is given a number of images.
DATA = ("--data_dir", "--tfrecord-root")


def read_heading(path: Path) -> dict[str, str]:
    """Read the comments at the top of a configuration."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found = (line.removeprefix("# ").partition(": ") for line in lines if line.startswith("# "))
    return {name: text for name, _, text in found}


def read_command(path: Path) -> tuple[str, list[str]]:
    """Return the program of a configuration and its arguments, with the whole path of the file."""
    program, *arguments = shlex.split(read_heading(path)["command"])
    assert arguments[:2] == ["--config", f"configs/{path.name}"]
    return program, ["--config", str(path), *arguments[2:]]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_says_where_its_figures_are_from(path: Path) -> None:
    assert tuple(read_heading(path)) == HEADINGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_command_of_a_configuration_takes_its_flags(path: Path) -> None:
    program, arguments = read_command(path)
    config = import_module(f"gaudi_apps.{program}").PROGRAM.parse(arguments)
    assert config.run.config == str(path)
    assert config.run.mode == "train" or program == "ssd_mxnet_train"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_is_planned(path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    program, arguments = read_command(path)
    data = next(place for place, word in enumerate(arguments) if word in DATA)
    del arguments[data : data + 2]
    arguments += ["--mode", "plan", "--json", "--model_dir", str(tmp_path / "run")]
    if program == "ssd_mxnet_train":
        arguments += ["--no_use_tfrecord", "--synthetic"]
    else:
        arguments += ["--num_examples_per_epoch", str(IMAGES[path.stem])]
    with pytest.raises(SystemExit) as ended:
        import_module(f"gaudi_apps.{program}").main(arguments)
    assert ended.value.code == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert plan["total_steps"] == values["steps"]
    if path.stem in PEAKS:
        assert plan["warnings"] == []
        assert plan["peak_learning_rate"] == pytest.approx(PEAKS[path.stem])
