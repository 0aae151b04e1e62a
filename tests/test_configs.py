"""The configurations that gave the documented figures: each is parsed and planned by its program."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from gaudi_datasets.cli import parse_arguments

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
IMAGES = {"bccd": 292, "bccd_long": 292, "clothing": 1364, "scenes": 1200}
PEAKS = {"bccd": 0.012, "bccd_long": 0.016, "clothing": 1e-3, "scenes": 0.02}
HEADINGS = ("source", "records", "command", "minutes", "figures")
# The data of a command, in place of which a plan is given a number of images.
DATA = ("--data_dir", "--tfrecord-root")


def read_heading(path: Path) -> dict[str, list[str]]:
    """Read the comments at the top of a configuration: the lines of each name."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            name, _, text = line.removeprefix("# ").partition(": ")
            found.setdefault(name, []).append(text)
    return found


def read_command(path: Path) -> tuple[str, list[str]]:
    """Return the program of a configuration and its arguments, with the whole path of the file."""
    (command,) = read_heading(path)["command"]
    program, *arguments = shlex.split(command)
    assert arguments[:2] == ["--config", f"configs/{path.name}"]
    return program, ["--config", str(path), *arguments[2:]]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_says_where_its_figures_are_from(path: Path) -> None:
    heading = read_heading(path)
    assert [*heading] == [name for name in HEADINGS if name in heading or name != "records"]
    (source,) = heading["source"]
    assert "https://" in source or "make-scenes" in heading["records"][0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_records_of_a_configuration_are_made_by_commands(path: Path) -> None:
    _, arguments = read_command(path)
    data = arguments[next(place for place, word in enumerate(arguments) if word in DATA) + 1]
    commands = read_heading(path).get("records", [])
    made = {}
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "gaudi-datasets"
        parse_arguments(words)
        flags = dict(pairwise(words))
        if "convert" in words:
            made[flags["--split"]] = flags["--output_dir"]
    assert made == ({"train": data, "val": data} if "records" in data else {})


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
