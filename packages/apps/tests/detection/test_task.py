from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from gaudi_apps.detection.detector import SSDTask
from gaudi_apps.training.trainer import count_votes
from gaudi_datasets.detection.pipeline import synthetic_dataset, train_dataset
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess

State = dict[str, npt.NDArray[Any]]


def differ(one: State, other: State) -> set[str]:
    """Names of the tensors that differ."""
    return {name for name in one if not np.array_equal(one[name], other[name])}


@pytest.mark.costly
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


@pytest.mark.costly
def test_a_task_learns_and_goes_back_to_a_state(task: SSDTask, records: Path) -> None:
    batch = next(iter(train_dataset(RecordSource(records, "train"), InputOptions(2))))
    start = task.read_state()
    losses = []
    for _ in range(3):
        scalars = {name: float(value) for name, value in task.train_step(batch, 2e-4).items()}
        assert scalars["finite"]
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


@pytest.fixture
def make_small(small_network: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SSDTask]:
    """Make a task with the small network."""
    monkeypatch.setattr("gaudi_apps.detection.detector.build_ssd", small_network)

    def make(ema_decay: float = 0.0, box_weight: float = 1.0) -> SSDTask:
        options: dict[str, Any] = {"communicator": SingleProcess(), "ema_decay": ema_decay, "box_weight": box_weight}
        return SSDTask(3, keras_policy="float32", weight_decay=5e-4, **options)

    return make


def make_batch() -> dict[str, Any]:
    batch: dict[str, Any] = next(iter(synthetic_dataset(InputOptions(2), num_classes=3)))
    return batch


@pytest.mark.costly
def test_the_loss_of_the_boxes_is_weighted(make_small: Callable[..., SSDTask]) -> None:
    batch = make_batch()
    plain, weighted = (make_small(box_weight=weight) for weight in (1.0, 2.0))
    weighted.write_state(plain.read_state())
    one, other = plain.train_step(batch, 0.0), weighted.train_step(batch, 0.0)
    assert float(other["box_loss"]) == pytest.approx(2 * float(one["box_loss"]))
    assert float(other["loss"]) == pytest.approx(float(one["loss"] + one["box_loss"]))


@pytest.mark.costly
@pytest.mark.parametrize("bad", ["images", "offsets", "rate"])
def test_what_is_not_finite_changes_no_weight(make_small: Callable[..., SSDTask], bad: str) -> None:
    task, batch = make_small(ema_decay=0.5), make_batch()
    assert bool(task.train_step(batch, 0.01)["finite"])
    before = task.read_state()
    spoiled = batch if bad == "rate" else {**batch, bad: batch[bad] * np.nan}
    scalars = task.train_step(spoiled, np.inf if bad == "rate" else 0.01)
    assert not bool(scalars["finite"])
    # Statistics of batch norm are of the forward pass; they do not outlive the run, which ends here.
    changed = differ(before, task.read_state())
    assert all("/moving_" in name and not name.startswith("average/") for name in changed), changed
    task.write_state(before)
    assert bool(task.train_step(batch, 0.01)["finite"])
    assert differ(before, task.read_state()) != set()


@pytest.mark.costly
def test_the_average_is_part_of_the_state_and_stands_in_for_the_weights(make_small: Callable[..., SSDTask]) -> None:
    task, batch = make_small(ema_decay=0.9), make_batch()
    plain = {name for name in make_small().read_state() if not name.startswith("momentum/")}
    for _ in range(3):
        task.train_step(batch, 0.05)
    state = task.read_state()
    averages = {name.removeprefix("average/") for name in state if name.startswith("average/")}
    assert averages == plain | {"updates"}
    assert int(state["average/updates"]) == 3
    with task.averaged():
        inside = task.read_state()
    assert differ(state, task.read_state()) == set()
    for name in plain:
        np.testing.assert_array_equal(inside[name], state[f"average/{name}"])
    assert {"hidden/kernel", "conv1_bn/moving_mean"} <= differ(inside, state)

    user = make_small()
    user.write_weights(state)
    for name in plain:
        np.testing.assert_array_equal(user.read_state()[name], state[f"average/{name}"])
    user.write_weights({name: state[name] for name in plain})
    for name in plain:
        np.testing.assert_array_equal(user.read_state()[name], state[name])

    task.reset_averages()
    again = task.read_state()
    assert int(again["average/updates"]) == 0
    assert all(np.array_equal(again[f"average/{name}"], again[name]) for name in plain)


def test_without_an_average_there_is_none(make_small: Callable[..., SSDTask]) -> None:
    task = make_small()
    state = task.read_state()
    assert not any(name.startswith("average/") for name in state)
    task.reset_averages()
    with task.averaged():
        assert differ(state, task.read_state()) == set()


def test_weights_that_do_not_fit_are_refused_and_change_nothing(make_small: Callable[..., SSDTask]) -> None:
    task = make_small()
    state = task.read_state()
    other = {name: tensor + 1 for name, tensor in state.items()}
    del other["class/kernel"]
    with pytest.raises(DataError, match="the first is class/kernel"):
        task.write_weights(other)
    with pytest.raises(DataError, match="tensor class/kernel has shape"):
        task.write_weights({**other, "class/kernel": state["class/kernel"][:, :-1]})
    assert differ(state, task.read_state()) == set()


class Twins:
    """Two ranks that are alike, or whose other one has numbers that are not finite."""

    rank, size, local_rank, local_size = 0, 2, 0, 2

    def __init__(self, others: float = 1.0) -> None:
        self.others = others
        self.compressed: list[int] = []

    def allreduce(self, tensors: Any, *, average: bool = True, compressed: bool = False) -> list[Any]:
        assert average
        if compressed:
            self.compressed.append(len(tensors))
        return [(tensor + self.others * tensor) / 2 for tensor in tensors]


@pytest.mark.costly
def test_two_ranks_that_are_alike_train_as_one(make_small: Callable[..., SSDTask]) -> None:
    alone, twins, batch = make_small(), Twins(), make_batch()
    task = SSDTask(3, keras_policy="float32", weight_decay=5e-4, communicator=cast("Any", twins))
    task.write_state(alone.read_state())
    for stop, save in ((False, False), (True, False), (False, True)):
        task.vote(stop=stop, save=save)
        scalars, expected = task.train_step(batch, 0.01), alone.train_step(batch, 0.01)
        assert count_votes(scalars) == (stop, save)
        assert float(scalars["loss"]) == float(expected["loss"])
        assert scalars["finite"]
        assert scalars["own_finite"]
    assert differ(alone.read_state(), task.read_state()) == set()
    # Gradients alone may travel in fewer bits.
    assert twins.compressed == [len(task.model.trainable_variables)]
    assert "votes" not in alone.train_step(batch, 0.01)


@pytest.mark.costly
def test_numbers_of_another_rank_stop_this_one_too(make_small: Callable[..., SSDTask]) -> None:
    del make_small  # which exchanges the network
    task = SSDTask(3, keras_policy="float32", weight_decay=5e-4, communicator=cast("Any", Twins(np.nan)))
    before = task.read_state()
    scalars = task.train_step(make_batch(), 0.01)
    assert not scalars["finite"]
    assert scalars["own_finite"]
    assert all("/moving_" in name for name in differ(before, task.read_state()))
