"""A training is opened in Python by the flags of a program, with the checks of its command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gaudi_apps
from gaudi_apps.training.trainer import Callback
from gaudi_datasets.errors import FlagError, MissingExtraError, MissingInputError
from gaudi_distributed import write_tf_config


class Counter(Callback):
    """Count the steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, step: int, logs: Any) -> None:
        """Keep the number of a step."""
        self.steps.append(step)


@pytest.fixture
def small(small_network: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchange the network for the small one; TensorFlow has started already."""
    from gaudi_distributed import Precision

    monkeypatch.setattr("gaudi_apps.runtime.tensorflow.start_tensorflow", lambda _: Precision("fp32", "float32"))
    monkeypatch.setattr("gaudi_apps.detection.detector.build_ssd", small_network)


@pytest.mark.usefixtures("small")
def test_a_training_in_ten_lines(records: Path, tmp_path: Path) -> None:
    counter, run = Counter(), tmp_path / "run"
    flags: dict[str, Any] = {"data_dir": records, "batch_size": 2, "model_dir": run, "no_evaluate": True}
    with gaudi_apps.open_trainer("ssd_train", **flags, steps=3, ema_decay=None) as trainer:
        trainer.callbacks.append(counter)
        assert trainer.fit() == 3
    assert counter.steps == [1, 2, 3]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000003"]
    # It goes on where it ended, as the program does.
    with gaudi_apps.open_trainer("ssd_train", **flags, steps=4) as trainer:
        assert (trainer.step, trainer.fit()) == (3, 4)


@pytest.mark.usefixtures("small")
def test_errors_are_those_of_the_program(records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FlagError) as wrong, gaudi_apps.open_trainer("ssd_train", data_dir=records, steps=-1):
        pass
    assert wrong.value.flag == "--steps"
    missing = tmp_path / "none"
    with pytest.raises(MissingInputError), gaudi_apps.open_trainer("ssd_train", data_dir=missing, model_dir=tmp_path):
        pass
    flags = {"data_dir": records, "model_dir": tmp_path / "run"}
    with pytest.raises(MissingInputError) as gone, gaudi_apps.open_trainer("ssd_train", weights=missing, **flags):
        pass
    assert gone.value.flag == "--weights"
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError) as extra, gaudi_apps.open_trainer("ssd_train", log_to="mlflow", **flags):
        pass
    assert extra.value.flag == "--log_to"
    for name in ("yolo_train", "os", "detection.detector"):
        with pytest.raises(ValueError, match="ssd_train"), gaudi_apps.open_trainer(name):
            pass


@pytest.mark.parametrize("engine", [{"use_horovod": True}, {"distribution_strategy": "multi_worker"}])
def test_one_process_does_not_stand_for_several(engine: dict[str, Any], tmp_path: Path) -> None:
    flags: dict[str, Any] = {"use_fake_data": True, "device": "cpu", "num_workers_per_hls": 2, "model_dir": tmp_path}
    with pytest.raises(FlagError) as caught, gaudi_apps.open_trainer("ssd_train", **engine, **flags):
        pass
    assert "gaudi-run" in str(caught.value.remedy)
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_were_launched_train_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the engine that the launcher started them for, or that flags name."""
    opened = list[Any]()

    def note(self: Any, config: Any, distribution: Any) -> None:
        opened.append((distribution.rank_info.rank, distribution.rank_info.size, distribution.communication.engine))
        raise InterruptedError

    monkeypatch.setattr("gaudi_apps.ssd_train.SSDTrain.open", note)
    monkeypatch.setenv("TF_CONFIG", write_tf_config(["localhost:2410", "localhost:2411"], 1))
    flags: dict[str, Any] = {"use_fake_data": True, "device": "cpu", "batch_size": 2, "model_dir": tmp_path}
    with (
        pytest.raises(InterruptedError),
        gaudi_apps.open_trainer("ssd_train", distribution_strategy="multi_worker", **flags),
    ):
        pass
    monkeypatch.setenv("GAUDI_RUN_ENGINE", "multi_worker")
    with pytest.raises(InterruptedError), gaudi_apps.open_trainer("ssd_train", **flags):
        pass
    assert opened == [(1, 2, "multi_worker")] * 2
