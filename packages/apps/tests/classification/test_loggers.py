"""Runs are logged to a CSV file, a real file store of MLflow, and Weights & Biases without a network."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gaudi_apps.runtime.errors import StoppedError
from gaudi_apps.training import history as module
from gaudi_apps.training.history import CsvLogger, Ending, RunLogger, hide_user, log_score, open_loggers, read_history
from gaudi_apps.training.trainer import Score

FLAGS = ("-bs", 4, "--image_size", 32, "--log_steps", 1, "--eval_epochs", 0)


@pytest.fixture
def train(
    run_classifier: Callable[..., Any], folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")  # so that what the program sets ends with the test
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")

    def run(*flags: object) -> Any:
        return run_classifier("--data_dir", folders, *FLAGS, "--model_dir", tmp_path / "run", *flags)

    return run


def make_csv_logger(folder: Path) -> CsvLogger:
    logger = CsvLogger(folder, 1, lambda path: None)
    logger.trainer = SimpleNamespace(step=5)  # type: ignore[assignment]
    return logger


@pytest.mark.costly
def test_a_csv_file_has_a_row_for_each_step_also_of_a_run_that_goes_on(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    for steps in (2, 3):
        done = train("--log_to", "csv", "--steps", steps)
        assert done.status == 0, done.err
    with (tmp_path / "run" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    history = read_history(tmp_path / "run" / "history.jsonl")
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert [float(row["loss"]) for row in rows] == [row["loss"] for row in history]
    assert rows[0]["val_top_1"] == ""
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert float(rows[2]["val_top_1"]) == scores["top_1"]
    assert "metrics.csv" in json.loads((tmp_path / "run" / "run.json").read_text())["files"]


@pytest.mark.parametrize(
    "content", [b"step;loss\n1;2\n", "step,loss\n1,2\n".encode("utf-16"), b"step,loss\n\xe4,2\n", b"x"]
)
def test_a_csv_file_that_another_program_saved_is_kept(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    (tmp_path / "metrics.1.csv").write_bytes(b"kept before")
    logger = make_csv_logger(tmp_path)
    logger.on_train_begin()
    assert (tmp_path / "metrics.2.csv").read_bytes() == content
    assert (tmp_path / "metrics.csv").read_text() == "step\n"
    assert "metrics.2.csv" in capsys.readouterr().err


def test_a_csv_file_that_a_spreadsheet_saved_is_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_bytes("step,loss\r\n1,0.5\r\n".encode("utf-8-sig"))
    make_csv_logger(tmp_path).on_train_begin()
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,0.5\n"


@pytest.mark.slow
def test_a_file_store_of_mlflow_has_settings_scalars_and_scores(train: Callable[..., Any], tmp_path: Path) -> None:
    import mlflow

    for steps in (2, 3):
        done = train("--log_to", "mlflow", "--steps", steps)
        assert done.status == 0, done.err
    client = mlflow.MlflowClient(f"file:{tmp_path / 'mlruns'}")
    (run,) = client.search_runs([client.get_experiment_by_name("gaudi-apps").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert (run.data.params["batch_size"], run.data.params["seed"]) == ("4", "0")
    history = read_history(tmp_path / "run" / "history.jsonl")
    losses = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in losses] == [(row["step"], row["loss"]) for row in history]
    scores = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert run.data.metrics["val_top_1"] == scores["top_1"]


@pytest.mark.slow
def test_weights_and_biases_gets_a_run_that_can_be_sent_later(train: Callable[..., Any], tmp_path: Path) -> None:
    import wandb

    done = train("--log_to", "csv", "wandb", "--steps", 2)
    assert done.status == 0, done.err
    wandb.teardown()  # as at the end of a program: its service writes the file, and may do so after the run has ended
    run_id = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    (log,) = (tmp_path / "run" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    content = log.read_bytes()
    assert all(name in content for name in (b"learning_rate", b"val_top_1", b"gaudi-apps"))


def test_a_missing_package_is_named_before_anything_is_read(
    train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        done = train("--log_to", name, "--steps", 2)
        assert (done.status, done.error.flag) == (78, "--log_to")
        assert f"gaudi-apps[{name}]" in done.error.remedy
    assert not (tmp_path / "run").exists()
    assert train("--log_to", "tensorboard").status == 64


class Failing(RunLogger):
    """A tracker whose service answers no more after the first point."""

    name = "mlflow"
    written: ClassVar[list[dict[str, float]]] = []
    ended: ClassVar[list[str]] = []

    def begin(self) -> None:
        """Begin."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the first step only."""
        if step > 1:
            raise ConnectionError("no answer")
        self.written.append(dict(figures))

    def finish(self, ending: Ending) -> None:
        """Note the end, and fail."""
        self.ended.append(ending)
        raise ConnectionError("no answer")


@pytest.mark.parametrize(
    ("error", "ending"), [(StoppedError, "KILLED"), (ZeroDivisionError, "FAILED"), (None, "FINISHED")]
)
def test_a_tracker_that_fails_ends_no_training_and_hides_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[Exception] | None, ending: str
) -> None:
    monkeypatch.setitem(vars(module)["_LOGGERS"], "mlflow", Failing)
    Failing.written.clear()
    Failing.ended.clear()
    score = Score(value=0.5, figures={"AP": 0.5}, text="")
    expected = pytest.raises(error) if error else contextlib.nullcontext()
    with expected, open_loggers(["mlflow"], tmp_path, 1, lambda *paths: None) as loggers:
        loggers[0].on_train_begin()
        loggers[0].on_evaluate_end(1, score)
        log_score(loggers, "test", 1, score)
        if error:
            raise error
    assert Failing.written == [{"val_AP": 0.5}, {"test_AP": 0.5}]
    assert Failing.ended == [ending]
    with open_loggers(["mlflow"], tmp_path, 1, lambda *paths: None) as loggers:
        loggers[0].on_train_begin()
        loggers[0].on_evaluate_end(2, score)
        assert not loggers[0].is_open
        loggers[0].on_evaluate_end(1, score)
    assert len(Failing.written) == 2


def test_an_address_is_shown_without_its_token() -> None:
    assert hide_user("https://me:token@host:8080/a?b=1") == "https://host:8080/a?b=1"
    assert hide_user("file:/mlruns@home") == "file:/mlruns@home"
