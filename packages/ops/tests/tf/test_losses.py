from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_ops import reference
from gaudi_ops.tf import SSDLoss, ssd_loss
from gaudi_ops.tf.graphs import list_operations
from gaudi_ops.tf.hpu import find_unsupported
from gaudi_ops.tf.keras_api import keras

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "losses.npz")
FORMS: tuple[Literal["mme", "plain"], ...] = ("mme", "plain")
Form = Literal["auto", "mme", "plain"]
SIGNATURE = [
    tf.TensorSpec([None, 40, 5]),
    tf.TensorSpec([None, 40, 4]),
    tf.TensorSpec([None, 40], tf.int32),
    tf.TensorSpec([None, 40, 4]),
    tf.TensorSpec([None], tf.int32),
]


def golden_batch() -> dict[str, Any]:
    """Load the original's batch; rows that the file leaves out are easy background, which no loss counts."""
    images, rows = GOLDEN["images"].astype(int), GOLDEN["rows"].astype(int)

    def fill(name: str, dtype: type, *channels: int) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = np.zeros([3, 8732, *channels], dtype)
        array[images, rows] = GOLDEN[name]
        return array

    logits = fill("logits", np.float32, 81)
    easy = np.ones([3, 8732], bool)
    easy[images, rows] = False
    logits[easy, 0] = 20.0
    return {
        "logits": logits,
        "offsets": fill("boxes_pred", np.float32, 4),
        "classes": fill("classes", np.int32),
        "target_offsets": fill("boxes_true", np.float32, 4),
        "num_matched": GOLDEN["num_matched"],
    }


def random_batch(positives: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    """Make a batch of images of 40 boxes and 5 classes, with these numbers of positives."""
    rng = np.random.default_rng(seed)
    size = len(positives)
    classes = np.zeros([size, 40], np.int32)
    for image, count in enumerate(positives):
        classes[image, rng.permutation(40)[:count]] = rng.integers(1, 5, count)
    return {
        "logits": rng.normal(scale=3, size=[size, 40, 5]).astype(np.float32),
        "offsets": rng.normal(scale=2, size=[size, 40, 4]).astype(np.float32),
        "classes": classes,
        "target_offsets": rng.normal(size=[size, 40, 4]).astype(np.float32),
        "num_matched": np.array(positives, np.int32),
    }


def compute_gradients(inputs: Mapping[str, Any], form: Form) -> tuple[list[Any], list[Any]]:
    """Return the three losses, and the gradient of the first in logits and offsets."""
    logits, offsets = tf.convert_to_tensor(inputs["logits"]), tf.convert_to_tensor(inputs["offsets"])
    with tf.GradientTape() as tape:
        tape.watch([logits, offsets])
        losses = ssd_loss(**{**inputs, "logits": logits, "offsets": offsets}, implementation=form)
    return list(losses), tape.gradient(losses[0], [logits, offsets])


@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_are_the_originals(form: Form) -> None:
    inputs = golden_batch()
    (loss, class_loss, box_loss), (class_gradient, box_gradient) = compute_gradients(inputs, form)
    np.testing.assert_allclose(class_loss, GOLDEN["class_loss"], rtol=1e-5)
    np.testing.assert_allclose(box_loss, GOLDEN["box_loss"], rtol=1e-5)
    np.testing.assert_allclose(loss, GOLDEN["class_loss"] + GOLDEN["box_loss"], rtol=1e-5)

    rows = GOLDEN["grad_rows"].astype(int)
    norms = np.linalg.norm(class_gradient.numpy().reshape(3, -1), axis=1)
    np.testing.assert_allclose(norms, GOLDEN["class_loss_grad_l2"], rtol=1e-5)
    np.testing.assert_allclose(class_gradient.numpy()[:, rows], GOLDEN["class_loss_grad"], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(box_gradient.numpy()[:, rows], GOLDEN["box_loss_grad"], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("positives", [(3,), (1, 0, 9), (15, 40), (0, 0)])
def test_losses_are_the_references(form: Form, positives: tuple[int, ...]) -> None:
    traced = tf.function(partial(ssd_loss, implementation=form), input_signature=SIGNATURE)
    inputs = random_batch(positives)
    np.testing.assert_allclose(traced(*inputs.values()), reference.ssd_loss(**inputs), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_classes_are_weighted_where_they_are_positive(form: Form) -> None:
    inputs, weights = random_batch((3, 0, 9)), [7.0, 0.5, 2.0, 0.0, 1.0]
    traced = tf.function(partial(ssd_loss, implementation=form, class_weights=weights), input_signature=SIGNATURE)
    found = traced(*inputs.values())
    np.testing.assert_allclose(found, reference.ssd_loss(**inputs, class_weights=weights), rtol=1e-5)
    plain = reference.ssd_loss(**inputs)
    assert abs(found[1] - plain[1]) > 1e-2
    np.testing.assert_allclose(found[2], plain[2], rtol=1e-5)
    with tf.GradientTape() as tape:
        logits = tf.convert_to_tensor(inputs["logits"])
        tape.watch(logits)
        loss, _, _ = ssd_loss(**{**inputs, "logits": logits}, implementation=form, class_weights=weights)
    gradient, (unweighted, _) = tape.gradient(loss, logits), compute_gradients(inputs, form)[1]
    factors = np.where(inputs["classes"] > 0, np.array(weights)[inputs["classes"]], 1.0)
    np.testing.assert_allclose(gradient, unweighted * factors[..., None], rtol=1e-5, atol=1e-8)


def test_weights_of_one_change_no_bit() -> None:
    inputs: dict[str, Any] = dict(random_batch((3, 0, 9)))
    plain, inputs["classes"] = ssd_loss(**inputs), inputs["classes"].astype(np.uint8)
    for one, other in zip(ssd_loss(**inputs, class_weights=[1.0] * 5, box_weight=1.0), plain, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", FORMS)
def test_the_weight_of_the_boxes_is_a_factor_of_their_loss_alone(form: Form) -> None:
    inputs: dict[str, Any] = dict(random_batch((3, 0, 9)))
    np.testing.assert_allclose(
        ssd_loss(**inputs, implementation=form, box_weight=2.5), reference.ssd_loss(**inputs, box_weight=2.5), rtol=1e-5
    )
    plain = reference.ssd_loss(**inputs)
    expected = [plain[1] + 2.5 * plain[2], plain[1], 2.5 * plain[2]]
    np.testing.assert_allclose(reference.ssd_loss(**inputs, box_weight=2.5), expected, rtol=1e-6)


def test_forms_agree() -> None:
    inputs = random_batch((4, 0, 11), seed=1)
    (mme, mme_gradients), (plain, plain_gradients), (auto, _) = (
        compute_gradients(inputs, form) for form in ("mme", "plain", "auto")
    )
    np.testing.assert_allclose(mme, plain, rtol=1e-6)
    np.testing.assert_allclose(auto, plain, rtol=1e-6)
    for one, other in zip(mme_gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("form", FORMS)
def test_an_image_without_positives_adds_nothing(form: Form) -> None:
    inputs = random_batch((5, 0))
    alone = {name: value[:1] for name, value in inputs.items()}
    losses, gradients = compute_gradients(inputs, form)
    expected, expected_gradients = compute_gradients(alone, form)
    np.testing.assert_allclose(losses, np.array(expected) / 2, rtol=1e-6)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_array_equal(gradient[1], 0)
        np.testing.assert_allclose(gradient[0], expected_gradient[0] / 2, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_equal_negatives_are_taken_by_index(form: Form) -> None:
    inputs = random_batch((1,)) | {"logits": np.zeros([1, 40, 5], np.float32)}
    inputs["classes"] = np.eye(40, dtype=np.int32)[2:3]
    _, (gradient, _) = compute_gradients(inputs, form)
    np.testing.assert_array_equal(np.flatnonzero(np.abs(gradient[0]).max(-1)), [0, 1, 2, 3])


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_predictions_give_float32_losses(form: Form) -> None:
    inputs: dict[str, Any] = dict(random_batch((4, 2)))
    for name in ("logits", "offsets"):
        inputs[name] = tf.cast(inputs[name], tf.bfloat16)
    losses, gradients = compute_gradients(inputs, form)
    assert {loss.dtype for loss in losses} == {tf.float32}
    assert {gradient.dtype for gradient in gradients} == {tf.bfloat16}
    for name in ("logits", "offsets"):
        inputs[name] = tf.cast(inputs[name], tf.float32).numpy()
    np.testing.assert_allclose(losses, reference.ssd_loss(**inputs), rtol=1e-5)


@pytest.mark.costly
@pytest.mark.parametrize("form", FORMS)
def test_compiled_by_xla(form: Form) -> None:
    inputs = random_batch((4, 0, 15))
    compiled = tf.function(compute_gradients, jit_compile=True)
    losses, gradients = compiled(inputs, form)
    expected, expected_gradients = compute_gradients(inputs, form)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for one, other in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("label", [-1, 5])
def test_a_class_that_does_not_exist_is_seen_in_the_loss(label: int, form: Form) -> None:
    inputs = random_batch((5, 3))
    inputs["classes"][0, np.flatnonzero(inputs["classes"][0] == 0)[-1]] = label
    losses, _ = compute_gradients(inputs, form)
    np.testing.assert_array_equal(np.isnan(losses), [True, True, False])
    np.testing.assert_allclose(losses, reference.ssd_loss(**inputs), rtol=1e-5)


def test_on_hpu_all_operations_are_known_to_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaudi_ops.tf.hpu.has_hpu", lambda: True)
    specs = [tf.TensorSpec([2, *spec.shape[1:]], spec.dtype) for spec in SIGNATURE]
    names = list(random_batch((1, 1)))
    traced = tf.function(lambda *given: compute_gradients(dict(zip(names, given, strict=True)), "auto"))
    assert find_unsupported(list_operations(traced.get_concrete_function(*specs))) == []


class TestLoss:
    def pack(self, inputs: Mapping[str, Any]) -> tuple[Any, Any]:
        """Targets and predictions as one tensor each, as Keras needs them."""
        classes = inputs["classes"][..., None].astype(np.float32)
        return (
            tf.concat([classes, inputs["target_offsets"]], -1),
            tf.concat([inputs["logits"], inputs["offsets"]], -1),
        )

    def test_losses_and_gradients_are_the_operations(self) -> None:
        inputs = random_batch((4, 0, 11))
        (loss, _, _), gradients = compute_gradients(inputs, "plain")
        y_true, y_pred = self.pack(inputs)
        with tf.GradientTape() as tape:
            tape.watch(y_pred)
            found = SSDLoss()(y_true, y_pred)
        np.testing.assert_allclose(found, loss, rtol=1e-6)
        by_predictions = tape.gradient(found, y_pred)
        for one, other in zip((by_predictions[..., :-4], by_predictions[..., -4:]), gradients, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)

    def test_pairs_are_the_same(self) -> None:
        inputs = random_batch((4, 2))
        given = [
            [tf.constant(inputs[name]) for name in names]
            for names in (("classes", "target_offsets"), ("logits", "offsets"))
        ]
        np.testing.assert_allclose(SSDLoss("mme")(*given), SSDLoss("mme")(*self.pack(inputs)), rtol=1e-6)

    def test_weights_are_of_images(self) -> None:
        inputs = random_batch((4, 2))
        each = SSDLoss(reduction="none")(*self.pack(inputs)).numpy()
        assert each.shape == (2,)
        found = SSDLoss()(*self.pack(inputs), sample_weight=[3.0, 0.0])
        np.testing.assert_allclose(found, 1.5 * each[0], rtol=1e-6)

    @pytest.mark.costly
    def test_keras_trains_a_detector_with_it(self) -> None:
        inputs = random_batch((4, 2))
        y_true, _ = self.pack(inputs)
        images = keras.Input([40, 3])
        outputs = [keras.layers.Dense(size, kernel_initializer="zeros")(images) for size in (5, 4)]
        model = keras.Model(images, keras.layers.Concatenate()(outputs))
        model.compile(keras.optimizers.SGD(0.1), SSDLoss())
        pixels = np.random.default_rng(0).normal(size=[2, 40, 3]).astype(np.float32)
        losses = model.fit(pixels, y_true, epochs=3, verbose=0).history["loss"]
        zeros = {"logits": np.zeros([2, 40, 5]), "offsets": np.zeros([2, 40, 4])}
        assert losses[0] == pytest.approx(float(reference.ssd_loss(**{**inputs, **zeros})[0]), rel=1e-5)
        assert losses[2] < losses[0]

    @pytest.mark.parametrize(
        ("y_true", "y_pred", "name"),
        [
            (tf.zeros([2, 40, 5]), tf.zeros([2, 40, 5]), "y_pred"),
            (tf.zeros([2, 40, 5]), tf.zeros([2, 40]), "y_pred"),
            (tf.zeros([2, 40, 4]), tf.zeros([2, 40, 9]), "y_true"),
            (tf.zeros([2, 40]), tf.zeros([2, 40, 9]), "y_true"),
            (tf.zeros([2, 40, 5], tf.bfloat16), tf.zeros([2, 40, 262], tf.bfloat16), "y_true"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, y_true: Any, y_pred: Any, name: str) -> None:
        with pytest.raises(ValueError, match=f"^{name} is "):
            SSDLoss()(y_true, y_pred)

    def test_as_many_classes_as_bfloat16_counts(self) -> None:
        inputs: dict[str, Any] = {**random_batch((4, 2)), "logits": np.zeros([2, 40, 257], np.float32)}
        inputs["classes"][0, 0] = 256
        rounded = [tf.cast(each, tf.bfloat16) for each in self.pack(inputs)]
        exact = [tf.cast(each, tf.float32) for each in rounded]
        np.testing.assert_allclose(SSDLoss()(*rounded), SSDLoss()(*exact), rtol=1e-6)
        assert rounded[0][0, 0, 0] == 256


def test_gradient_of_the_box_loss_is_the_clipped_error() -> None:
    inputs = random_batch((6, 3))
    _, (_, gradient) = compute_gradients(inputs, "plain")
    errors = np.clip(inputs["offsets"] - inputs["target_offsets"], -1, 1)
    weights = (inputs["classes"] > 0) / inputs["num_matched"][:, None] / 2
    np.testing.assert_allclose(gradient, errors * weights[..., None], rtol=1e-5, atol=1e-8)
