"""Callbacks that a user names by import path."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.runtime.errors import CallbackError
from gaudi_apps.training.callbacks import load_callbacks
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.trainer import Callback
from gaudi_datasets.errors import DataError, FlagError

MODULE = "callbacks_of_a_user"
CODE = """
import json
from pathlib import Path

from gaudi_apps.training.trainer import Callback


class Recorder(Callback):
    def __init__(self, path="events.jsonl"):
        self.file = Path(path).open("a")

    def write(self, *event):
        self.file.write(json.dumps(event) + "\\n")

    def on_train_begin(self):
        self.write("begin", self.trainer.step)

    def on_step_end(self, step, logs):
        self.write("step", step, logs["loss"], logs["learning_rate"])

    def on_checkpoint(self, step):
        self.write("checkpoint", step, Path("run/checkpoints", f"step-{step:08d}", "manifest.json").exists())

    def on_evaluate_end(self, step, score):
        self.write("score", step, sorted(score.figures)[0])

    def on_train_end(self):
        self.write("end", self.trainer.step)

    def close(self):
        self.file.close()


class Stopper(Callback):
    def on_step_end(self, step, logs):
        if step == 2:
            self.trainer.request_stop()


class NeedsArguments(Callback):
    def __init__(self, path):
        self.path = path


class Fails(Callback):
    def __init__(self):
        raise RuntimeError("no server")


class Bad(Callback):
    def on_step_end(self, step, logs):
        print(logs["nix"])

    def on_message(self, text):
        raise self.error

    def close(self):
        super().close()


class NoCallback:
    pass


number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Be in a folder with a module of callbacks, and with one that cannot be imported."""
    (tmp_path / f"{MODULE}.py").write_text(CODE)
    (tmp_path / "broken_module.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    # What the loader adds to the path is taken away again.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield tmp_path
    sys.modules.pop(MODULE, None)


def read_events(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_callbacks_of_a_user_are_called_in_a_training(
    ssd_train: Callable[..., Any], records: Path, folder: Path
) -> None:
    data = ("--data_dir", records, "--model_dir", "run", "--batch_size", 2, "--dtype", "fp32")
    common = (*data, "--no_evaluate", "--save_checkpoints_steps", 2)
    done = ssd_train(*common, "--steps", 3, "--callbacks", f"{MODULE}:Recorder", f"{MODULE}:Stopper")
    # The second one stops the run, as a signal does but for the exit status.
    assert done.status == 0, done.err
    assert CheckpointFolder(folder / "run" / "checkpoints").steps() == [2]
    history = [json.loads(line) for line in (folder / "run" / "history.jsonl").read_text().splitlines()]
    assert read_events(folder) == [
        ["begin", 0],
        *(["step", row["step"], row["loss"], row["learning_rate"]] for row in history),
        ["checkpoint", 2, True],
        ["end", 2],
    ]
    # A run that goes on may have other callbacks.
    done = ssd_train(*common, "--steps", 3, "--callbacks", f"{MODULE}:Recorder")
    assert done.status == 0, done.err
    later = [event[:2] for event in read_events(folder)][5:]
    assert later == [["begin", 2], ["step", 3], ["checkpoint", 3], ["end", 3]]
    assert ssd_train(*common, "--steps", 3).status == 0


@pytest.mark.parametrize(
    ("name", "named"),
    [
        (MODULE, "package.module:Name"),
        (f"{MODULE}:", "package.module:Name"),
        (":Recorder", "package.module:Name"),
        ("no_such_module:Recorder", "ModuleNotFoundError"),
        ("broken_module:Recorder", "a_module_that_is_not_there"),
        (f"{MODULE}:Missing", "gaudi_apps.Callback"),
        (f"{MODULE}:NoCallback", "gaudi_apps.Callback"),
        (f"{MODULE}:number", "gaudi_apps.Callback"),
        (f"{MODULE}:NeedsArguments", "arguments"),
        (f"{MODULE}:Fails", "no server"),
    ],
)
def test_an_import_path_that_is_wrong_is_named(name: str, named: str) -> None:
    with pytest.raises(FlagError) as caught:
        load_callbacks([f"{MODULE}:Recorder", name])
    assert caught.value.exit_status == 64
    assert caught.value.flag == "--callbacks"
    assert caught.value.remedy
    assert f"--callbacks {name}:" in str(caught.value)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_import_paths_are_checked_before_any_data_is_read(ssd_train: Callable[..., Any], folder: Path) -> None:
    (folder / "train-00000-of-00001").write_bytes(b"no record")
    done = ssd_train("--data_dir", folder, "--model_dir", "run", "--callbacks", "no_such_module:Name")
    assert done.status == 64
    assert "--callbacks no_such_module:Name" in done.err
    assert not (folder / "run").exists()


def test_without_names_there_are_none() -> None:
    assert load_callbacks([]) == []
    (callback,) = load_callbacks([f"{MODULE}:Stopper"])
    assert isinstance(callback, Callback)


@pytest.mark.costly
def test_a_callback_that_fails_is_named_with_its_method(
    ssd_train: Callable[..., Any], records: Path, folder: Path
) -> None:
    flags = ("--data_dir", records, "--model_dir", "run", "--batch_size", 2, "--dtype", "fp32", "--no_evaluate")
    done = ssd_train(*flags, "--steps", 1, "--callbacks", f"{MODULE}:Bad")
    assert (done.status, type(done.error), type(done.error.__cause__)) == (78, CallbackError, KeyError)
    assert f"--callbacks {MODULE}:Bad: fails in on_step_end (KeyError: 'nix')" in done.err


def test_errors_that_are_foreseen_and_ends_pass_through_a_callback() -> None:
    callback: Any
    (callback,) = load_callbacks([f"{MODULE}:Bad"])
    for error in (
        DataError("bad"),
        MemoryError(),
        KeyboardInterrupt(),
        SystemExit(3),
        type("OpError", (Exception,), {})(),
    ):
        callback.error = error
        with pytest.raises(type(error)) as caught:
            callback.on_message("")
        assert caught.value is error
    with pytest.raises(KeyError):  # of a callback that no flag names
        type(callback)().on_step_end(1, {})
    assert [name for name in vars(callback) if name.startswith("on_")] == ["on_step_end", "on_message"]
