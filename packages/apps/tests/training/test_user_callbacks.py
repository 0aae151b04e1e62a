"""Callbacks that a user names by --callbacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.training.callbacks import load_callbacks
from gaudi_datasets.errors import FlagError

SOURCE = """
import json
from pathlib import Path

from gaudi_apps.training.trainer import Callback

class Steps(Callback):
    def on_train_begin(self):
        self.seen = []

    def on_step_end(self, step, logs):
        self.seen.append((step, sorted(logs)[0]))

    def on_train_end(self):
        Path("seen.json").write_text(json.dumps(self.seen))

class Needy(Callback):
    def __init__(self, size):
        self.size = size

class Broken(Callback):
    def __init__(self):
        raise OSError("no such server")

class Other:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module of callbacks that Python finds only there."""
    (tmp_path / "my_callbacks.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "my_faults.py").write_text("import nothing_of_this_name", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("my_callbacks", "my_faults"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Steps", "no import path"),
        ("my_callbacks:", "no import path"),
        ("nowhere_at_all:Steps", "ModuleNotFoundError"),
        ("my_faults:Steps", "nothing_of_this_name"),
        ("my_callbacks:Absent", "no subclass"),
        ("my_callbacks:Other", "no subclass"),
        ("my_callbacks:Needy", "needs arguments"),
        ("my_callbacks:Broken", "no such server"),
    ],
)
def test_what_is_no_callback_is_refused(folder: Path, name: str, named: str) -> None:
    with pytest.raises(FlagError) as caught:
        load_callbacks([name])
    assert (caught.value.flag, caught.value.exit_status) == ("--callbacks", 64)
    assert named in str(caught.value)
    assert caught.value.remedy


def test_a_named_callback_hears_of_every_step(folder: Path, ssd_train: Callable[..., Any]) -> None:
    words = ("--use_fake_data", "-b", 2, "-s", 3, "-d", "fp32", "--num_examples_per_epoch", 4, "--no_evaluate")
    done = ssd_train(*words, "--callbacks", "my_callbacks:Steps", "--model_dir", folder / "run")
    assert done.status == 0, done.err
    seen = (folder / "seen.json").read_text(encoding="utf-8")
    assert seen.count("loss") or seen.count("learning_rate")
    assert [seen.count(f"[{step}, ") for step in (1, 2, 3)] == [1, 1, 1]


def test_a_wrong_callback_ends_the_program_before_anything_is_written(
    folder: Path, ssd_train: Callable[..., Any]
) -> None:
    done = ssd_train("--use_fake_data", "--callbacks", "my_callbacks:Absent", "--model_dir", folder / "run")
    assert done.status == 64
    assert "--callbacks my_callbacks:Absent:" in done.err
    assert not (folder / "run").exists()
