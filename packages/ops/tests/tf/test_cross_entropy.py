from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from gaudi_ops import reference
from gaudi_ops.tf import softmax_cross_entropy_mme

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
    with pytest.raises(ValueError, match="implementation is 'fast'; use one of auto, mme, plain"):
        softmax_cross_entropy_mme(logits, labels, wrong)
