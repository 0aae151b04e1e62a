"""The steps that parity compares are those of a training, and guided they stay near the other side in any precision."""

from __future__ import annotations

import itertools
import runpy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.classification.flags import LearningConfig
from gaudi_apps.training.keras_task import replay_steps
from gaudi_apps.training.recording import Part, Reference, StepTensor, choose_tolerances, without_reference
from gaudi_distributed import SingleProcess
from gaudi_distributed.errors import ConfigurationError

SIDE = 64
CONFIG = LearningConfig("SGD", 0.9, 1e-4, 1e-7, False, 0.0, 0.0, 0.0, 0.0, None, "keras", "l2")


@pytest.fixture(scope="module")
def small_classifier() -> Callable[..., Any]:
    """Of the classifiers' tests, which are no module that a test could import."""
    path = Path(__file__).parents[1] / "classification" / "conftest.py"
    build: Callable[..., Any] = runpy.run_path(str(path))["build_small_classifier"]
    return build


def make_batches(side: int = SIDE, images: int = 2) -> Iterator[Mapping[str, Any]]:
    import tensorflow as tf

    generator = np.random.default_rng(0)
    batch = {
        "images": tf.constant(generator.normal(size=[images, side, side, 3]).astype(np.float32)),
        "labels": tf.constant(np.arange(images), tf.int32),
        "image_ids": tf.constant(np.arange(images)),
    }
    return itertools.repeat(batch)


def make_task(build: Callable[..., Any] | None = None, keras_policy: str = "float32", **options: Any) -> Any:
    from gaudi_apps.classification.task import ClassificationTask
    from gaudi_models.classifiers import build_classifier
    from gaudi_ops.tf.keras_api import keras

    keras.utils.set_random_seed(0)
    model = (build or build_classifier)(options.pop("name", "resnet18"), 3, image_size=SIDE, dtype=keras_policy)
    config = LearningConfig(**{**vars(CONFIG), **options})
    return ClassificationTask(model, config, seed=0, head_only=False, communicator=SingleProcess(), averages=False)


def rate(step: int) -> float:
    return 0.1 + step


def make_reference(steps: list[list[StepTensor]]) -> Reference:
    def read(step: int, part: Part) -> dict[str, Any]:
        return {one.metadata.name: one.values for one in steps[step - 1] if one.metadata.part == part}

    return read


def test_tensors_come_in_the_order_of_computation(small_classifier: Callable[..., Any]) -> None:
    steps = list(replay_steps(make_task(small_classifier), make_batches(), rate, 2))
    keys = [one.metadata.key for one in steps[0]]
    assert keys[:8] == [
        "step1/batch/image_ids",
        "step1/batch/images",
        "step1/batch/labels",
        "step1/output/scale",
        "step1/weight/conv1/kernel",
        "step1/output/conv1",
        "step1/weight/conv1_bn/gamma",
        "step1/weight/conv1_bn/beta",
    ]
    assert keys[10:23] == [
        "step1/output/conv1_bn",
        "step1/output/relu",
        "step1/output/block",
        "step1/output/features",
        "step1/weight/logits/kernel",
        "step1/weight/logits/bias",
        "step1/output/logits",
        "step1/loss/accuracy",
        "step1/loss/loss",
        "step1/gradient/logits/bias",
        "step1/gradient/logits/kernel",
        "step1/gradient/conv1_bn/beta",
        "step1/gradient/conv1_bn/gamma",
    ]
    assert {one.metadata.part for one in steps[1]} == {"batch", "output", "loss", "gradient", "update"}
    layers = {one.metadata.layer for one in steps[0] if one.metadata.name == "conv1_bn/moving_mean"}
    assert layers == {"conv1_bn"}


@pytest.mark.costly
@pytest.mark.parametrize("options", [{}, {"mixup_alpha": 0.2, "dropout": 0.3, "optimizer": "LARS"}])
def test_the_steps_are_those_of_training(small_classifier: Callable[..., Any], options: dict[str, Any]) -> None:
    replayed, trained = (make_task(small_classifier, **options) for _ in range(2))
    before = trained.read_state()
    scalars: list[Mapping[str, Any]] = []
    updates: dict[str, Any] = {}
    for step, batch in zip(range(2), make_batches(), strict=False):
        scalars.append(trained.train_step(batch, rate(step)))
    after = trained.read_state()
    for number, step_tensors in enumerate(replay_steps(replayed, make_batches(), rate, 2)):
        for one in step_tensors:
            if one.metadata.part == "loss":
                np.testing.assert_allclose(one.values, scalars[number][one.metadata.name], rtol=1e-6)
            if one.metadata.part == "update":
                updates[one.metadata.name] = updates.get(one.metadata.name, 0) + one.values
    for name, tensor in replayed.read_state().items():
        np.testing.assert_allclose(tensor, after[name], rtol=1e-5, atol=1e-6, err_msg=name)
    for name, update in updates.items():
        np.testing.assert_allclose(update, after[name] - before[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_layers_are_left_as_they_were(small_classifier: Callable[..., Any]) -> None:
    task = make_task(small_classifier)
    list(replay_steps(task, make_batches(), rate, 1))
    assert all("call" not in vars(layer) for layer in task.model.layers)


def test_a_led_side_goes_by_the_others_outputs(small_classifier: Callable[..., Any]) -> None:
    steps = list(replay_steps(make_task(small_classifier), make_batches(), rate, 1))
    task = make_task(small_classifier)
    kernel = task.model.get_layer("conv1").kernel
    kernel.assign(2 * kernel)
    guided = next(replay_steps(task, make_batches(), rate, 1, make_reference(steps)))
    apart = {
        own.metadata.key
        for own, other in zip(guided, steps[0], strict=True)
        if not np.allclose(own.values, other.values, rtol=1e-5, atol=1e-7)
    }
    # Of what follows on the layer nothing, but for what its own weights decay by.
    assert apart == {"step1/weight/conv1/kernel", "step1/output/conv1", "step1/update/conv1/kernel"}


@pytest.mark.costly
def test_a_led_side_goes_by_the_others_batch(small_classifier: Callable[..., Any]) -> None:
    steps = list(replay_steps(make_task(small_classifier), make_batches(), rate, 1))
    others = ({**batch, "images": batch["images"] + 1} for batch in make_batches())
    guided = next(replay_steps(make_task(small_classifier), others, rate, 1, make_reference(steps)))
    apart = [
        own.metadata.key
        for own, other in zip(guided, steps[0], strict=True)
        if not np.array_equal(own.values, other.values)
    ]
    assert apart == ["step1/batch/images"]


def test_a_led_side_takes_the_others_steps(small_classifier: Callable[..., Any]) -> None:
    steps = list(replay_steps(make_task(small_classifier), make_batches(), rate, 2))
    task = make_task(small_classifier)
    guided = list(replay_steps(task, make_batches(), lambda step: 9.0, 2, make_reference(steps)))
    apart = {
        own.metadata.key
        for own, other in zip(guided[0] + guided[1], steps[0] + steps[1], strict=True)
        if not np.allclose(own.values, other.values, rtol=1e-4, atol=1e-5)
    }
    assert {key.split("/")[1] for key in apart} == {"update"}


def test_other_shapes_are_named(small_classifier: Callable[..., Any]) -> None:
    steps = list(replay_steps(make_task(small_classifier), make_batches(), rate, 1))
    with pytest.raises(ConfigurationError, match=r"\[2, 64, 64, 3\] there and \[1, 64, 64, 3\]") as caught:
        list(replay_steps(make_task(small_classifier), make_batches(images=1), rate, 1, make_reference(steps)))
    assert caught.value.field == "images"


def compare(one: list[list[StepTensor]], other: list[list[StepTensor]], precisions: list[str]) -> list[str]:
    """Return the differences beyond the tolerance."""
    tolerances, found = choose_tolerances(precisions), []
    for ours, theirs in zip(one, other, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.metadata.key == b.metadata.key
            x, y = (np.asarray(side.values, np.float64) for side in (a, b))
            absolute, relative = tolerances[a.metadata.part]
            if not abs(x - y).max() <= absolute + relative * max(abs(x).max(), abs(y).max()):
                found.append(a.metadata.key)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("bf16_kernels")
def test_bfloat16_is_within_its_tolerance() -> None:
    exact = list(replay_steps(make_task(name="resnet18"), make_batches(), lambda step: 0.01, 2))
    task = make_task(keras_policy="mixed_bfloat16", name="resnet18")
    guided = list(replay_steps(task, make_batches(), lambda step: 0.01, 2, make_reference(exact)))
    assert compare(guided, exact, ["fp32", "bf16"]) == []
    # And it is bfloat16: exact tolerances are passed.
    assert "step1/output/conv1" in compare(guided, exact, ["fp32", "fp32"])


@pytest.mark.slow
@pytest.mark.usefixtures("bf16_kernels")
def test_the_detector_in_bfloat16_is_within_its_tolerance() -> None:
    from gaudi_apps.detection.detector import SSDTask
    from gaudi_datasets.detection.pipeline import synthetic_dataset
    from gaudi_datasets.sampling import InputOptions
    from gaudi_models.architectures import SSDArchitecture
    from gaudi_ops.tf.keras_api import keras

    def replay(dtype: str, policy: str, guided: Reference = without_reference) -> list[list[StepTensor]]:
        keras.utils.set_random_seed(0)
        options: dict[str, Any] = {"communicator": SingleProcess(), "architecture": SSDArchitecture("resnet18")}
        task = SSDTask(3, keras_policy=policy, weight_decay=5e-4, **options)
        batches = iter(synthetic_dataset(InputOptions(1, dtype=dtype), num_classes=3))
        return list(replay_steps(task, batches, lambda step: 0.001, 1, guided))

    exact = replay("float32", "float32")
    assert compare(replay("bfloat16", "mixed_bfloat16", make_reference(exact)), exact, ["fp32", "bf16"]) == []
