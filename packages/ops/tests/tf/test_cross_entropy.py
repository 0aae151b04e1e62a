from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_ops import reference
from gaudi_ops.tf import SoftmaxCrossEntropyMME, softmax_cross_entropy_mme
from gaudi_ops.tf.graphs import list_operations
from gaudi_ops.tf.hpu import find_unsupported
from gaudi_ops.tf.keras_api import keras

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "losses.npz")
FORMS: tuple[Literal["mme", "plain"], ...] = ("mme", "plain")


def batch(*shape: int, classes: int = 5, scale: float = 3.0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(len(shape))
    return (scale * rng.normal(size=[*shape, classes])).astype(np.float32), rng.integers(0, classes, shape, np.int32)


def find_ops(implementation: Any) -> set[str]:
    """Types of the operations in the graph of one call."""
    graph = tf.function(lambda logits, labels: softmax_cross_entropy_mme(logits, labels, implementation))
    concrete = graph.get_concrete_function(tf.TensorSpec([2, 3, 4]), tf.TensorSpec([2, 3], tf.int32))
    return {op.type for op in concrete.graph.get_operations()}


@pytest.mark.parametrize("form", FORMS)
def test_values_are_the_originals(form: Literal["mme", "plain"]) -> None:
    entropy = softmax_cross_entropy_mme(
        GOLDEN["logits"][None].astype(np.float32), GOLDEN["classes"][None].astype(np.int32), form
    )
    np.testing.assert_allclose(entropy[0], GOLDEN["cross_entropy"], rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_values_and_gradients_are_the_references(form: Literal["mme", "plain"], scale: float) -> None:
    logits, labels = batch(2, 30, scale=scale)
    upstream = np.random.default_rng(1).normal(size=[2, 30]).astype(np.float32)
    with tf.GradientTape() as tape:
        inputs = tf.constant(logits)
        tape.watch(inputs)
        entropy = softmax_cross_entropy_mme(inputs, labels, form)
    np.testing.assert_allclose(entropy, reference.softmax_cross_entropy(logits, labels), rtol=1e-5, atol=1e-6)
    exponentials = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    softmax = exponentials / exponentials.sum(-1, keepdims=True)
    expected = (softmax - np.eye(5)[labels]) * upstream[..., None]
    np.testing.assert_allclose(tape.gradient(entropy, inputs, upstream), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["", "xla"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 3, 4)])
def test_every_rank_and_a_label_that_is_no_class(
    shape: tuple[int, ...], form: Literal["mme", "plain"], compiled: bool
) -> None:
    logits, labels = batch(*shape)
    labels.flat[:2] = (-1, 5)
    upstream = np.random.default_rng(1).normal(size=shape).astype(np.float32)

    @tf.function(jit_compile=compiled)
    def differentiate(logits: Any, labels: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            entropy = softmax_cross_entropy_mme(logits, labels, form)
        return entropy, tape.gradient(entropy, logits, upstream)

    entropy, gradient = differentiate(tf.constant(logits), tf.constant(labels))
    expected = reference.softmax_cross_entropy(logits, labels)
    assert np.flatnonzero(np.isnan(expected)).tolist() == [0, 1]
    np.testing.assert_allclose(entropy, expected, rtol=1e-5, atol=1e-6)
    one_hot = np.where(np.isnan(expected)[..., None], np.nan, np.eye(5)[np.clip(labels, 0, 4)])
    slope = (tf.nn.softmax(logits) - one_hot) * upstream[..., None]
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_classes_that_cannot_be(dtype: tf.DType, form: Literal["mme", "plain"], compiled: bool) -> None:
    """Their logits are -inf, of another class than the label's, and of its own."""
    logits, labels = tf.constant([[1.0, 2.0, -np.inf]] * 2, dtype), tf.constant([0, 2])

    @tf.function(jit_compile=compiled)
    def differentiate() -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            entropy = softmax_cross_entropy_mme(logits, labels, form)
        return entropy, tape.gradient(entropy, logits)

    entropy, gradient = differentiate()
    np.testing.assert_allclose(entropy, [1.3132617, np.inf], rtol=1e-5)
    expected = [[-0.7310586, 0.7310586, 0.0], [0.2689414, 0.7310586, -1.0]]
    np.testing.assert_allclose(tf.cast(gradient, tf.float32), expected, rtol=1e-5 if dtype == tf.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [tf.int8, tf.uint8, tf.int16, tf.uint32])
def test_labels_of_any_integers(dtype: Any) -> None:
    logits, labels = batch(2, 7)
    found = softmax_cross_entropy_mme(logits, tf.cast(labels, dtype))
    np.testing.assert_allclose(found, reference.softmax_cross_entropy(logits, labels), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("logits", "labels", "name"),
    [
        (tf.zeros([5]), tf.zeros([], tf.int32), "logits"),
        (tf.zeros([1, 1, 1, 2, 5]), tf.zeros([1, 1, 1, 2], tf.int32), "logits"),
        (tf.zeros([2, 5], tf.int32), tf.zeros([2], tf.int32), "logits"),
        (tf.zeros([2, 3, 5]), tf.zeros([2, 3]), "labels"),
        (tf.zeros([2, 3, 5]), tf.zeros([2], tf.int32), "labels"),
        (tf.zeros([2, 3, 5]), tf.zeros([2, 4], tf.int32), "labels"),
        (tf.zeros([2, 3, 5]), tf.zeros([2, 3, 5], tf.int32), "labels"),
    ],
)
def test_what_does_not_fit_is_refused(logits: Any, labels: Any, name: str, form: Literal["mme", "plain"]) -> None:
    with pytest.raises(ValueError, match=rf"^{name} are "):
        softmax_cross_entropy_mme(logits, labels, form)


def test_unknown_ranks_are_refused() -> None:
    signature = [tf.TensorSpec(None), tf.TensorSpec(None, tf.int32)]
    with pytest.raises(ValueError, match=r"^logits are "):
        tf.function(softmax_cross_entropy_mme, input_signature=signature, autograph=False).get_concrete_function()


def test_on_hpu_all_operations_are_known_to_run_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gaudi_ops.tf.hpu.has_hpu", lambda: True)

    @tf.function
    def differentiate(logits: Any, labels: Any) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(logits)
            entropy = softmax_cross_entropy_mme(logits, labels)
        return entropy, tape.gradient(entropy, logits)

    concrete = differentiate.get_concrete_function(tf.TensorSpec([2, 7, 5]), tf.TensorSpec([2, 7], tf.int32))
    operations = list_operations(concrete)
    assert "Conv2D" in {one.kind for one in operations}
    assert find_unsupported(operations) == []


class TestLoss:
    def test_losses_are_the_operations(self) -> None:
        logits, labels = batch(2, 7)
        losses = softmax_cross_entropy_mme(logits, labels)
        each = SoftmaxCrossEntropyMME(reduction="none")(labels, tf.constant(logits))
        np.testing.assert_array_equal(each, losses)
        weights = np.array([[2.0], [0.5]], np.float32)
        found = SoftmaxCrossEntropyMME("mme")(labels, tf.constant(logits), weights)
        np.testing.assert_allclose(found, np.mean(losses * weights), rtol=1e-5)

    def test_keras_trains_a_classifier_with_it(self) -> None:
        """Keras gives [batch] labels as [batch, 1], and weights of images likewise."""
        logits, labels = batch(8)
        model = keras.Sequential([keras.layers.Dense(5, use_bias=False, kernel_initializer="identity")])
        model.compile("sgd", SoftmaxCrossEntropyMME())
        weights = np.arange(8, dtype=np.float32)
        losses = model.fit(logits, labels, 8, epochs=2, sample_weight=weights, verbose=0).history["loss"]
        expected = np.mean(weights * reference.softmax_cross_entropy(logits, labels))
        assert losses[0] == pytest.approx(expected, rel=1e-5)
        assert losses[1] < losses[0]

    def test_wrong_arguments_are_refused(self) -> None:
        wrong: Any = "fast"
        with pytest.raises(ValueError, match="'fast'"):
            SoftmaxCrossEntropyMME(wrong)
        with pytest.raises(ValueError, match=r"^labels are "):
            SoftmaxCrossEntropyMME()(tf.zeros([2, 7]), tf.zeros([2, 7, 5]))


@pytest.mark.parametrize("form", FORMS)
def test_large_logits_leave_a_small_loss_its_digits(form: Literal["mme", "plain"]) -> None:
    logits = tf.constant([[[1024.0, 1016.0]]])
    entropy = softmax_cross_entropy_mme(logits, tf.zeros([1, 1], tf.int32), form)
    np.testing.assert_allclose(entropy[0, 0], np.log1p(np.exp(-8.0)), rtol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_logits_are_computed_in_float32(form: Literal["mme", "plain"]) -> None:
    logits, labels = batch(2, 30)
    rounded = tf.cast(logits, tf.bfloat16)
    with tf.GradientTape() as tape:
        tape.watch(rounded)
        entropy = softmax_cross_entropy_mme(rounded, labels, form)
    assert entropy.dtype == tf.float32
    expected = reference.softmax_cross_entropy(tf.cast(rounded, tf.float32), labels)
    np.testing.assert_allclose(entropy, expected, rtol=1e-5, atol=1e-6)
    assert tape.gradient(entropy, rounded).dtype == tf.bfloat16


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_unknown_sizes(form: Literal["mme", "plain"], dtype: Any) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, None, 5]), tf.TensorSpec([None, None], dtype)])
    def traced(logits: Any, labels: Any) -> Any:
        return softmax_cross_entropy_mme(logits, labels, form)

    for shape in [(2, 3), (1, 7), (0, 4)]:
        logits, labels = batch(*shape)
        result = traced(logits, tf.cast(labels, dtype))
        np.testing.assert_allclose(result, reference.softmax_cross_entropy(logits, labels), rtol=1e-5, atol=1e-6)


def test_forms_are_what_they_say() -> None:
    assert "Conv2D" in find_ops("mme")
    assert "Sum" not in find_ops("mme")
    assert "Softmax" in find_ops("plain")
    assert "Conv2D" not in find_ops("plain")


@pytest.mark.parametrize(("devices", "form"), [(["CPU"], "plain"), (["CPU", "HPU"], "mme")])
def test_auto_chooses_by_device(devices: list[str], form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def list_devices(kind: str) -> list[str]:
        return [device for device in devices if device == kind]

    monkeypatch.setattr(tf.config, "list_logical_devices", list_devices)
    assert find_ops("auto") == find_ops(form)


def test_a_form_that_is_not_there_is_refused() -> None:
    logits, labels = batch(1, 2)
    wrong: Any = "fast"
    with pytest.raises(ValueError, match="implementation is 'fast'"):
        softmax_cross_entropy_mme(logits, labels, wrong)


def test_the_keras_loss_takes_arrays() -> None:
    logits = np.random.default_rng(0).normal(size=[4, 5]).astype(np.float32)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(np.arange(4), logits)
    for labels in (np.arange(4), np.arange(4)[:, None]):  # Keras gives [batch] labels as [batch, 1]
        np.testing.assert_allclose(SoftmaxCrossEntropyMME()(labels, logits), expected, rtol=1e-6)
