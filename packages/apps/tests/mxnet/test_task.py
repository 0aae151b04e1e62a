from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gaudi_apps.mxnet.task import MXNetTask
from gaudi_datasets.detection.batches import synthetic_batches
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess

RATE, MOMENTUM, DECAY = 0.01, 0.9, 0.1


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy
    from pathlib import Path

    small_program = runpy.run_path(str(Path(__file__).parents[1] / "small_ssd_mxnet.py"))
    monkeypatch.setattr("gaudi_apps.mxnet.task.build_ssd", small_program["build_small_ssd"])


@pytest.fixture(scope="module")
def batches() -> list[dict[str, Any]]:
    found = (synthetic_batches(InputOptions(batch_size=2, seed=seed), num_classes=3) for seed in range(3))
    return [next(one) for one in found]


def make_task(num_classes: int = 3, loss_scale: float = 1.0, **sgd: float) -> MXNetTask:
    import mxnet as mx

    given: Any = {"momentum": MOMENTUM, "weight_decay": DECAY, "loss_scale": loss_scale} | sgd
    return MXNetTask(num_classes, device=mx.cpu(), communicator=SingleProcess(), **given)


def test_steps_are_those_of_the_formula(batches: list[dict[str, Any]]) -> None:
    """Gradients by a task whose step is a plain one of rate 1; then momentum and decay by hand, in NumPy."""
    task, plain = make_task(), make_task(momentum=0.0, weight_decay=0.0)
    state = task.read_state()
    for batch, rate in zip(batches, (RATE, RATE, RATE / 10), strict=True):
        plain.write_state(state)
        plain.train_step(batch, 1.0)
        after = plain.read_state()
        scalars = task.train_step(batch, rate)
        assert scalars["finite"]
        found = task.read_state()
        for name in [name for name in state if f"momentum/{name}" in state]:
            gradient = state[name] - after[name] + DECAY * state[name]
            velocity = MOMENTUM * state[f"momentum/{name}"] - rate * gradient
            np.testing.assert_allclose(found[f"momentum/{name}"], velocity, rtol=1e-3, atol=1e-5, err_msg=name)
            np.testing.assert_allclose(found[name], state[name] + velocity, rtol=1e-3, atol=1e-5, err_msg=name)
        state = found


def test_the_scale_of_the_loss_changes_rounding_only(batches: list[dict[str, Any]]) -> None:
    states = []
    for scale in (1.0, 128.0):
        task = make_task(loss_scale=scale)
        scalars = task.train_step(batches[0], RATE)
        states.append((scalars["loss"], task.read_state()))
    assert states[0][0] == states[1][0]
    for name, values in states[0][1].items():
        np.testing.assert_allclose(values, states[1][1][name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_state_is_gone_on_with_bit_for_bit(batches: list[dict[str, Any]]) -> None:
    task, other = make_task(), make_task()
    for batch in batches:
        task.train_step(batch, RATE)
        state = {name: values.copy() for name, values in task.read_state().items()}
    other.train_step(batches[2], 1.0)  # MXNet may keep what it computed with in an order of its own
    other.write_state(state)
    for one in (task, other):
        one.train_step(batches[0], RATE)
    for name, values in task.read_state().items():
        np.testing.assert_array_equal(values, other.read_state()[name], err_msg=name)


def test_weights_are_drawn_from_the_seed_and_not_from_what_was_drawn_before() -> None:
    for name, values in make_task().read_state().items():
        np.testing.assert_array_equal(values, make_task().read_state()[name], err_msg=name)


@pytest.mark.parametrize(("rate", "spoiled"), [(float("inf"), False), (RATE, True)])
def test_what_is_not_finite_changes_no_weight(batches: list[dict[str, Any]], rate: float, spoiled: bool) -> None:
    task = make_task()
    batch = dict(batches[0])
    if spoiled:
        batch["images"] = np.where(np.arange(batch["images"].size).reshape(batch["images"].shape) == 7, np.nan, 0.0)
    before = {name: values for name, values in task.read_state().items() if "moving" not in name}
    assert not task.train_step(batch, rate)["finite"]
    for name, values in before.items():
        np.testing.assert_array_equal(task.read_state()[name], values, err_msg=name)


def test_tensors_that_do_not_fit_are_refused() -> None:
    task, state = make_task(), make_task().read_state()
    with pytest.raises(DataError, match="1 tensors are") as caught:
        task.write_state({name: values for name, values in state.items() if name != "conv1/kernel"})
    assert caught.value.field == "conv1/kernel"
    with pytest.raises(DataError, match="other classes") as caught:
        task.write_state(make_task(num_classes=5).read_state())
    assert caught.value.field in state
    weights = {name: values + 1 for name, values in state.items() if not name.startswith("momentum/")}
    task.write_weights({**weights, "momentum/other": np.zeros(3)})
    np.testing.assert_array_equal(task.read_state()["conv1/kernel"], weights["conv1/kernel"])
