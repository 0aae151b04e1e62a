from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_apps.ssd.task import SSDTask
from gaudi_datasets.detection_input import InputOptions, train_dataset
from gaudi_datasets.errors import DataError
from gaudi_datasets.sources import RecordSource

State = dict[str, npt.NDArray[Any]]


def differ(one: State, other: State) -> set[str]:
    """Names of the tensors that differ."""
    return {name for name in one if not np.array_equal(one[name], other[name])}


def test_the_state_is_all_there_is(task: SSDTask) -> None:
    state = task.read_state()
    weights = {name for name in state if not name.startswith("momentum/")}
    trained = {name.removeprefix("momentum/") for name in state} - weights | {
        name.removeprefix("momentum/") for name in state if name.startswith("momentum/")
    }
    assert len(weights) == len(task.model.variables)
    assert len(state) - len(weights) == len(task.model.trainable_variables)
    assert trained < weights
    assert {name.rpartition("/")[2] for name in weights - trained} == {"moving_mean", "moving_variance"}


def test_a_task_learns_and_goes_back_to_a_state(task: SSDTask, records: Path) -> None:
    batch = next(iter(train_dataset(RecordSource(records, "train"), InputOptions(2))))
    start = task.read_state()
    losses = []
    for _ in range(3):
        scalars = {name: float(value) for name, value in task.train_step(batch, 2e-4).items()}
        assert scalars["loss"] == pytest.approx(scalars["class_loss"] + scalars["box_loss"], rel=1e-5)
        losses.append(scalars["loss"])
    learnt = task.read_state()
    assert losses[2] < losses[0]
    # All but the biases of heads whose level has no part in the loss: their gradient is 0.
    unchanged = start.keys() - differ(start, learnt)
    assert all("_head" in name and name.endswith("/bias") for name in unchanged), unchanged
    task.write_state(start)
    assert differ(start, task.read_state()) == set()
    # The optimizer's memory is back too: a step of rate 0 moves it and the batch statistics, and no weight.
    task.train_step(batch, 0.0)
    still = task.read_state()
    task.write_state(start)
    moved = differ(start, still)
    assert all(name.startswith("momentum/") or "/moving_" in name for name in moved)
    assert any(name.startswith("momentum/") for name in moved)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(task: SSDTask) -> None:
    start = task.read_state()
    name = next(name for name in start if name.startswith("class_head"))
    other = {key: value + 1 for key, value in start.items()}
    cases: list[tuple[State, str]] = [
        ({key: value for key, value in other.items() if key != name}, f"the first is {name}"),
        ({**other, "superfluous": np.zeros(1)}, "the first is superfluous"),
        ({**other, name: other[name][..., :-1]}, f"tensor {name} has shape"),
    ]
    for state, message in cases:
        with pytest.raises(DataError, match=message):
            task.write_state(state)
        assert differ(start, task.read_state()) == set()
