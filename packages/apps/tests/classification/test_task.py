"""Each part of the config changes what it says: the loss, the update, or the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.classification.flags import LearningConfig, PruningFlags
from gaudi_apps.classification.task import Adam, ClassificationTask, ClassifierExport, drop_out, find_decay
from gaudi_apps.inference.converters import decode_pixels
from gaudi_distributed import Communicator, SingleProcess

PLAIN = LearningConfig("SGD", 0.9, 0.0, 0.0, False, 0.0, 0.0, 0.0, 0.0, None, "keras", "l2")
ALONE = SingleProcess()
DECAYED = ("conv1/kernel", "logits/bias", "logits/kernel")


@pytest.fixture
def make_task(small_classifier: Callable[..., Any]) -> Callable[..., ClassificationTask]:
    """Make a task with the small network, whose weights are always the same."""

    def make(
        config: LearningConfig = PLAIN, *, head_only: bool = False, communicator: Communicator = ALONE
    ) -> ClassificationTask:
        from gaudi_ops.tf.keras_api import keras

        keras.utils.set_random_seed(3)
        model = small_classifier("resnet50", 4, image_size=32)
        return ClassificationTask(model, config, seed=5, head_only=head_only, communicator=communicator, averages=True)

    return make


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    images = generator.normal(size=(6, 32, 32, 3), scale=60).astype(np.float32)
    return {
        "images": tf.constant(images),
        "labels": tf.constant([0, 1, 2, 3, 0, 1], tf.int32),
        "image_ids": tf.range(6, dtype=tf.int64),
    }


def step(task: ClassificationTask, batch: dict[str, Any], rate: float = 0.1) -> float:
    scalars = task.train_step(batch, rate)
    assert bool(scalars["finite"])
    return float(scalars["loss"])


@pytest.mark.costly
def test_the_loss_is_smoothed_cross_entropy(make_task: Any, batch: dict[str, Any]) -> None:
    task = make_task()
    logits = task.model(batch["images"], training=True).numpy().astype(np.float64)
    log_shares = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    truth = np.eye(4)[batch["labels"].numpy()]
    for smoothing in (0.0, 0.1, 0.5):
        soft = truth * (1 - smoothing) + smoothing / 4
        expected = -(soft * log_shares).sum(axis=1).mean()
        loss = step(make_task(replace(PLAIN, label_smoothing=smoothing)), batch)
        assert loss == pytest.approx(expected, rel=1e-5)


def test_accuracy_is_of_the_batch(make_task: Any, batch: dict[str, Any]) -> None:
    task = make_task()
    right = task.model(batch["images"], training=True).numpy().argmax(axis=1) == batch["labels"].numpy()
    assert float(task.train_step(batch, 0.0)["accuracy"]) == pytest.approx(right.mean())


class SecondOfTwo(SingleProcess):
    """The place of a rank; what it computes before anything is exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 1, 2


DRAWN = pytest.mark.parametrize(
    "config", [replace(PLAIN, mixup_alpha=0.4), replace(PLAIN, dropout=0.5)], ids=["mixup", "dropout"]
)


@pytest.mark.costly
@DRAWN
def test_what_is_drawn_changes_from_step_to_step_and_is_drawn_again_after_a_resume(
    make_task: Any, batch: dict[str, Any], config: LearningConfig
) -> None:
    task = make_task(config)
    losses = []
    for _ in range(2):
        losses.append(step(task, batch, 0.0))
    state = task.read_state()
    losses.append(step(task, batch, 0.0))
    assert len({*losses, step(make_task(), batch, 0.0)}) == 4
    other = make_task(config)
    other.write_state(state)
    assert step(other, batch, 0.0) == pytest.approx(losses[2], rel=1e-6)


def compute_losses(task: ClassificationTask, batch: dict[str, Any], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(float(task.compute_loss(batch)["loss"]))
        task.after_update()
    return losses


@pytest.mark.costly
def test_no_two_batches_are_mixed_alike(make_task: Any, batch: dict[str, Any]) -> None:
    """Whatever the number of ranks: what is drawn follows from the place of a batch in the sequence of all images."""
    config = replace(PLAIN, mixup_alpha=0.4)
    alone = compute_losses(make_task(config), batch, 6)
    second = compute_losses(make_task(config, communicator=SecondOfTwo()), batch, 3)
    assert len(set(alone)) == 6
    assert second == pytest.approx(alone[1::2], rel=1e-5)
    # Twice the batch: as the first of two ranks, which have half of it each.
    whole = {name: tf.concat([values, values], 0) for name, values in batch.items()}
    task = make_task(config)
    first = task._find_first(batch["images"])
    assert [int(first), int(task._find_first(whole["images"]))] == [0, 0]
    task.after_update()
    assert int(task._find_first(whole["images"])) == 12


def test_features_are_dropped_alike_on_any_number_of_ranks(make_task: Any, batch: dict[str, Any]) -> None:
    features = tf.constant(np.random.default_rng(1).uniform(1, 2, (8, 50)), tf.float32)
    seeds = [tf.constant([5, step], tf.int64) for step in range(2)]
    whole, next_step = (drop_out(features, 0.25, seed, rank=0, size=1).numpy() for seed in seeds)
    assert not np.array_equal(whole == 0, next_step == 0)
    for size in (2, 4):
        parts = [
            drop_out(part, 0.25, seeds[0], rank=rank, size=size) for rank, part in enumerate(tf.split(features, size))
        ]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_allclose(whole[whole != 0], (features.numpy() / 0.75)[whole != 0], rtol=1e-6)
    assert 0.15 < np.mean(whole == 0) < 0.35
    losses = compute_losses(make_task(replace(PLAIN, dropout=0.5)), batch, 3)
    losses += compute_losses(make_task(replace(PLAIN, dropout=0.5), communicator=SecondOfTwo()), batch, 3)
    assert len(set(losses)) == 6


@pytest.mark.costly
def test_as_many_features_are_dropped_as_the_recipe_says(make_task: Any, batch: dict[str, Any]) -> None:
    task, plain = make_task(replace(PLAIN, dropout=0.75)), make_task()
    head, plain_head = task.model.get_layer("logits"), plain.model.get_layer("logits")
    # Logits that are the mean feature, whose mean over draws dropout keeps.
    for one in (head, plain_head):
        one.kernel.assign(tf.eye(*one.kernel.shape) * 0 + 1 / one.kernel.shape[0])
        one.bias.assign(tf.zeros_like(one.bias))
    means = []
    for _ in range(200):
        means.append(task._compute_logits(batch["images"]).numpy()[:, 0])
        task.after_update()
    expected = plain.model(batch["images"], training=True).numpy()[:, 0]
    np.testing.assert_allclose(np.mean(means, axis=0), expected, rtol=0.2)
    assert np.std(means, axis=0).min() > 0.1 * expected.max()


@pytest.mark.costly
@pytest.mark.parametrize(("form", "gradient"), [("l2", 0.02), ("half_squares", 0.01)])
def test_decay_is_of_all_weights_but_batch_norms(
    make_task: Any, batch: dict[str, Any], form: Any, gradient: float
) -> None:
    plain, decayed = make_task(), make_task(replace(PLAIN, weight_decay=0.01, decay_form=form))
    before = plain.read_state()
    assert step(plain, batch) == step(decayed, batch)
    one, other = plain.read_state(), decayed.read_state()
    for name in ("conv1_bn/gamma", "conv1_bn/beta"):
        np.testing.assert_array_equal(one[name], other[name])
    for name in DECAYED:
        np.testing.assert_allclose(one[name] - other[name], 0.1 * gradient * before[name], atol=1e-7, err_msg=name)


def test_which_variables_are_decayed() -> None:
    names = ("conv1/kernel", "conv1/bias", "conv1_bn/gamma", "logits/kernel", "logits/bias")

    def list_decays(head_only: bool = False, **changes: Any) -> list[float]:
        config = replace(PLAIN, weight_decay=0.5, **changes)
        return [find_decay(name, config, head_only=head_only) for name in names]

    assert list_decays() == [1, 0, 0, 1, 1]
    assert list_decays(head_only=True) == [1, 0, 0, 1, 0]
    assert list_decays(decay_form="half_squares") == [0.5, 0.5, 0, 0.5, 0.5]
    assert list_decays(single_l2=True) == [0, 0, 0, 0, 0]


@pytest.mark.costly
def test_a_single_l2_is_reported_and_updates_alike(make_task: Any, batch: dict[str, Any]) -> None:
    config = replace(PLAIN, weight_decay=0.01, decay_form="half_squares")
    each, single = make_task(config), make_task(replace(config, single_l2=True))
    weights = each.read_state()
    half_squares = sum(0.5 * float((weights[name].astype(np.float64) ** 2).sum()) for name in DECAYED)
    assert step(single, batch) - step(each, batch) == pytest.approx(0.01 * half_squares, rel=1e-4)
    one, other = each.read_state(), single.read_state()
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-6, err_msg=name)


def test_the_average_lags_behind_the_weights(make_task: Any, batch: dict[str, Any]) -> None:
    task = make_task(replace(PLAIN, ema_decay=0.9))
    for _ in range(3):
        step(task, batch)
    state = task.read_state()
    assert state["average/updates"] == 3
    assert np.abs(state["average/logits/kernel"] - state["logits/kernel"]).max() > 1e-5
    with task.averaged():
        np.testing.assert_array_equal(task.read_state()["logits/kernel"], state["average/logits/kernel"])


@pytest.mark.costly
def test_pruning_sets_the_smallest_weights_of_each_kernel_to_zero(make_task: Any, batch: dict[str, Any]) -> None:
    pruning = PruningFlags("polynomial_decay", 0.0, 0.5, pruning_begin_step=0, pruning_end_step=4, pruning_frequency=1)
    task = make_task(replace(PLAIN, pruning=pruning))
    zeros = []
    for _ in range(6):
        step(task, batch)
        state = task.read_state()
        zeros.append([float((state[name] == 0).mean()) for name in ("conv1/kernel", "logits/kernel")])
    assert zeros[-1] == [0.5, 0.5]
    assert zeros[0][0] < zeros[2][0] <= zeros[4][0]
    assert (state["logits/bias"] != 0).all()


def test_lars_moves_each_layer_by_its_own_scale(make_task: Any, batch: dict[str, Any]) -> None:
    task = make_task(replace(PLAIN, optimizer="LARS", weight_decay=1e-4))
    before = task.read_state()
    step(task, batch, 1.0)
    after = task.read_state()
    for name in ("conv1/kernel", "logits/kernel"):
        moved = np.linalg.norm(after[name] - before[name]) / np.linalg.norm(before[name])
        assert moved == pytest.approx(1e-3, rel=0.05)


def test_adam_is_that_of_keras() -> None:
    from gaudi_ops.tf.keras_api import keras

    values, generator = [np.ones((3, 2), np.float32), np.zeros(4, np.float32)], np.random.default_rng(1)
    ours, theirs = ([tf.Variable(value) for value in values] for _ in range(2))
    adam, reference = Adam(ours, [0.0, 0.0]), keras.optimizers.Adam(1.0)
    for rate in (0.1, 0.02, 0.3):
        gradients = [tf.constant(generator.normal(size=value.shape), tf.float32) for value in values]
        adam.apply(gradients, tf.constant(rate))
        reference.learning_rate = rate
        reference.apply_gradients(zip(gradients, theirs, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
    assert int(adam.updates) == 3


def test_only_the_head_is_trained(make_task: Any, batch: dict[str, Any]) -> None:
    task = make_task(head_only=True)
    before = task.read_state()
    step(task, batch)
    after = task.read_state()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {
        "steps",
        *(f"{group}logits/{name}" for group in ("", "momentum/") for name in ("kernel", "bias")),
    }


@pytest.mark.costly
@pytest.mark.parametrize("optimizer", ["SGD", "LARS", "Adam"])
def test_several_steps_in_a_call(make_task: Any, batch: dict[str, Any], optimizer: Any) -> None:
    config = replace(PLAIN, optimizer=optimizer, mixup_alpha=0.2, ema_decay=0.9, weight_decay=1e-4)
    one, several = make_task(config), make_task(config)
    rates = [0.01, 0.02, 0.0]
    losses = [step(one, batch, rate) for rate in rates]
    scalars = several.train_steps([batch] * 3, rates)
    assert [float(each["loss"]) for each in scalars] == pytest.approx(losses, rel=1e-4)
    assert all(each["finite"] for each in scalars)
    state, other = one.read_state(), several.read_state()
    for name in state:
        np.testing.assert_allclose(state[name], other[name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_what_is_not_finite_changes_no_weight(make_task: Any, batch: dict[str, Any]) -> None:
    task = make_task(replace(PLAIN, optimizer="Adam"))
    before = task.read_state()
    assert not bool(task.train_step({**batch, "images": batch["images"] * np.nan}, 0.1)["finite"])
    changed = {name for name, value in task.read_state().items() if not np.array_equal(before[name], value)}
    assert all("/moving_" in name for name in changed)


def test_large_jpegs_are_prepared_for_exports_as_evaluation_decodes_them() -> None:
    """Of all pixels of a fine pattern bilinear resizing takes some; a scale of an eighth averages it."""
    pixels = np.zeros((800, 960, 3), np.uint8)
    pixels[::2] = 255
    encoded = bytes(cv2.imencode(".jpg", pixels)[1])
    config: Any = {"padding": "same", "classes": [{"name": "a"}], "image_size": 64, "model": "resnet18"}
    network = ClassifierExport(None, "probabilities", config)
    expected = network.prepare_encoded(encoded).numpy()
    for found in (network.normalize(network.prepare_resized(encoded)), network.prepare_pixels(network.decode(encoded))):
        np.testing.assert_allclose(found, expected, atol=1e-3)
    np.testing.assert_allclose(network.prepare_pixels(network.prepare_onnx(encoded)).numpy(), expected, atol=1e-3)
    assert np.abs(network.prepare_pixels(pixels).numpy() - expected).max() > 50


def test_what_an_onnx_model_gets_ends_as_what_evaluation_takes() -> None:
    """The model cuts the centre out itself, so it is not given the centre, of which it would take the centre."""
    pixels = cv2.resize(np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8), (157, 121))
    encoded = bytes(cv2.imencode(".png", pixels)[1])
    config: Any = {"padding": "same", "classes": [{"name": "a"}], "image_size": 56, "model": "resnet50"}
    network = ClassifierExport(None, "probabilities", config)
    expected = network.prepare_pixels(decode_pixels(encoded)).numpy()
    np.testing.assert_allclose(network.prepare_pixels(network.prepare_onnx(encoded)).numpy(), expected, atol=1e-3)
    assert np.abs(network.prepare_pixels(network.prepare_resized(encoded)).numpy() - expected).max() > 1
