"""The mode parity of the program in MXNet: its own steps laid open, the machinery is that of all programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.mxnet.task import MXNetTask, replay_steps
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.recording import Part, StepTensor
from gaudi_datasets.detection.batches import synthetic_batches
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess


def test_a_recording_is_equal_to_itself(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    flags = ["--mode", "parity", "--model_dir", tmp_path / "run"]
    done = ssd_mxnet_train(*flags, "--parity_output", tmp_path / "recording")
    assert done.status == 0, done.err
    done = ssd_mxnet_train(*flags, "--parity_against", f"recorded={tmp_path / 'recording'}")
    assert (done.status, done.err) == (0, "")
    assert "tensors agree" in done.out


@pytest.mark.costly
def test_a_changed_weight_is_named(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    done = ssd_mxnet_train("--mode", "train", "--steps", 1, "--model_dir", tmp_path / "run")
    assert done.status == 0, done.err
    newest = CheckpointFolder(tmp_path / "run" / "checkpoints").load_newest()
    tensors = {name: np.array(tensor) for name, tensor in newest.tensors.items()}
    tensors["conv1/kernel"].reshape(-1)[5] += 1e-3
    CheckpointFolder(tmp_path / "changed" / "checkpoints").save(newest.step, tensors, newest.metadata)
    flags = ["--mode", "parity", "--model_dir"]
    assert ssd_mxnet_train(*flags, tmp_path / "run", "--parity_output", tmp_path / "recording").status == 0
    against = ("--parity_against", f"recorded={tmp_path / 'recording'}")
    done = ssd_mxnet_train(*flags, tmp_path / "changed", *against, "--json")
    assert done.status == 70
    first = json.loads(done.out)["first"]
    assert (first["step"], first["part"], first["name"], first["layer"]) == (1, "weight", "conv1/kernel", "conv1")


@pytest.fixture
def tasks(ssd_mxnet_train: Callable[..., Any]) -> Callable[[], MXNetTask]:
    import mxnet as mx

    def make() -> MXNetTask:
        return MXNetTask(3, device=mx.cpu(), communicator=SingleProcess(), loss_scale=8.0, weight_decay=0.01)

    return make


def test_the_steps_are_those_of_training(tasks: Callable[[], MXNetTask]) -> None:
    batch = next(synthetic_batches(InputOptions(batch_size=2), num_classes=3))
    replayed, trained = tasks(), tasks()
    before = trained.read_weights()
    scalars = [trained.train_step(batch, rate) for rate in (0.1, 0.2)]
    steps = list(replay_steps(replayed, iter([batch] * 2), lambda step: 0.1 + 0.1 * step, 2))
    for name, values in trained.read_state().items():
        np.testing.assert_allclose(replayed.read_state()[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
    updates: dict[str, Any] = {}
    for number, step in enumerate(steps):
        losses = {one.metadata.name: one.values for one in step if one.metadata.part == "loss"}
        assert losses["loss"] == pytest.approx(scalars[number]["loss"], rel=1e-5)
        for one in step:
            if one.metadata.part == "update":
                updates[one.metadata.name] = updates.get(one.metadata.name, 0) + one.values
    for name, values in trained.read_weights().items():
        np.testing.assert_allclose(updates[name], values - before[name], rtol=1e-3, atol=1e-5, err_msg=name)
    keys = [one.metadata.key for one in steps[0]]
    places = [keys.index(f"step1/{key}") for key in ("batch/images", "weight/conv1_bn/gamma", "output/conv1_bn")]
    places += [keys.index(f"step1/{key}") for key in ("weight/conv1/kernel", "output/conv1", "loss/loss")]
    places += [
        keys.index(f"step1/{key}") for key in ("gradient/box/bias", "gradient/conv1/kernel", "update/conv1/kernel")
    ]
    assert places == sorted(places)


def test_a_led_side_goes_by_the_other(tasks: Callable[[], MXNetTask]) -> None:
    batch = next(synthetic_batches(InputOptions(batch_size=2), num_classes=3))
    steps = list(replay_steps(tasks(), iter([batch] * 2), lambda step: 0.1, 2))

    def read(step: int, part: Part) -> dict[str, Any]:
        return {one.metadata.name: one.values for one in steps[step - 1] if one.metadata.part == part}

    task = tasks()
    state = task.read_state()
    task.write_state({**state, "conv1/kernel": 2 * state["conv1/kernel"]})
    guided: list[list[StepTensor]] = list(replay_steps(task, iter([batch]), lambda step: 0.1, 1, read))
    apart = {
        own.metadata.key
        for own, other in zip(guided[0], steps[0], strict=True)
        if not np.allclose(own.values, other.values, rtol=1e-4, atol=1e-6)
    }
    # The gradients of the layer before go through the kernel.
    before = {f"step1/{part}/conv1_bn/{name}" for part in ("gradient", "update") for name in ("gamma", "beta")}
    own = {"step1/weight/conv1/kernel", "step1/output/conv1", "step1/update/conv1/kernel"}
    assert apart == own | before
