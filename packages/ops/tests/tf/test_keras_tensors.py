from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_ops import reference
from gaudi_ops.tf import (
    GroupedConv2D,
    SoftmaxCrossEntropyMME,
    SSDLoss,
    grouped_conv2d,
    softmax_cross_entropy_mme,
    ssd_loss,
    topk_mask,
)
from gaudi_ops.tf.keras_api import keras
from gaudi_ops.tf.keras_tensors import OperationLayer


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_grouped_conv2d_of_fixed_filters() -> None:
    images, filters = draw(2, 6, 5, 8), draw(3, 3, 2, 8, seed=1)
    inputs = keras.Input([6, 5, 8])
    outputs = grouped_conv2d(inputs, filters, 4, strides=2, padding=((1, 1), (1, 1)))
    assert outputs.shape == (None, 3, 3, 8)
    model = keras.Model(inputs, outputs)
    assert model.weights == []
    expected = grouped_conv2d(images, filters, 4, 2, ((1, 1), (1, 1)))
    np.testing.assert_array_equal(model(images), expected)


def test_grouped_conv2d_of_variables_trains_them() -> None:
    images, filters = draw(2, 6, 5, 8), tf.Variable(draw(3, 3, 2, 8, seed=1))
    inputs = keras.Input([6, 5, 8])
    model = keras.Model(inputs, grouped_conv2d(inputs, filters, groups=4, dilations=2))
    assert [weight is filters for weight in model.trainable_weights] == [True]
    with tf.GradientTape() as tape:
        outputs = model(images)
        loss = tf.reduce_sum(outputs**2)
    np.testing.assert_array_equal(outputs, grouped_conv2d(images, filters, 4, dilations=2))
    assert np.all(tape.gradient(loss, filters) != 0)


def test_grouped_conv2d_of_two_keras_tensors() -> None:
    images, filters = draw(2, 6, 5, 8), draw(3, 3, 2, 8, seed=1)
    inputs = [keras.Input([6, 5, 8]), keras.Input([3, 2, 8], batch_size=3)]
    model = keras.Model(inputs, grouped_conv2d(inputs[0], inputs[1], 4))
    np.testing.assert_array_equal(model([images, filters]), grouped_conv2d(images, filters, 4))


def test_inputs_keep_their_dtype() -> None:
    inputs = keras.Input([6, 5, 8], dtype="bfloat16")
    assert grouped_conv2d(inputs, draw(3, 3, 2, 8), 4).dtype == tf.bfloat16


@pytest.mark.parametrize("shape", [(), (7,), (2, 3)])
def test_softmax_cross_entropy_mme(shape: tuple[int, ...]) -> None:
    logits, labels = draw(2, *shape, 5), np.zeros([2, *shape], np.int64)
    inputs = [keras.Input([*shape, 5]), keras.Input(shape, dtype="int64")]
    model = keras.Model(inputs, softmax_cross_entropy_mme(*inputs))
    with tf.GradientTape() as tape:
        given = tf.constant(logits)
        tape.watch(given)
        entropy = model([given, labels])
    expected = reference.softmax_cross_entropy(logits, labels)
    np.testing.assert_allclose(entropy, expected, rtol=1e-5, atol=1e-6)
    assert np.all(tape.gradient(entropy, given) != 0)


def test_the_other_operations_of_the_detector() -> None:
    logits, offsets = draw(2, 9, 5), draw(2, 9, 4, seed=1)
    classes = np.array([[1, 2, 0, 0, 0, 0, 0, 0, 0]] * 2, np.int32)
    inputs = [keras.Input([9, 5]), keras.Input([9, 4]), keras.Input([9], dtype="int32")]
    losses = ssd_loss(inputs[0], inputs[1], inputs[2], tf.zeros([2, 9, 4]), num_matched=tf.constant([2, 2]))
    mask = topk_mask(softmax_cross_entropy_mme(inputs[0], inputs[2]), k=3)
    *found, chosen = keras.Model(inputs, [*losses, mask])([logits, offsets, classes])
    expected = reference.ssd_loss(logits, offsets, classes, np.zeros_like(offsets), [2, 2])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(np.count_nonzero(chosen, axis=1), [3, 3])


def test_a_keras_tensor_that_is_no_tensor_of_the_operation_is_refused() -> None:
    groups: Any = keras.Input([])
    with pytest.raises(ValueError, match="groups is a"):
        grouped_conv2d(keras.Input([6, 5, 8]), draw(3, 3, 2, 8), groups)


def test_an_operation_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="operation is 'open'"):
        OperationLayer("open", ["values"], {})


def test_a_model_is_made_again_of_its_configuration() -> None:
    """In this process, with layers and losses as Keras makes them of what get_config returns."""
    inputs = keras.Input([6, 5, 8])
    layer = GroupedConv2D(12, 3, groups=4, activation="relu", implementation="split", name="layer")
    outputs = grouped_conv2d(layer(inputs), tf.Variable(draw(1, 1, 3, 12)), groups=4, padding="same")
    model = keras.Model(inputs, grouped_conv2d(outputs, draw(1, 1, 3, 12), groups=4, dilations=(1, 2)))
    again = keras.Model.from_config(model.get_config())
    assert again.get_layer("layer").implementation == "split"
    again.set_weights(model.get_weights())
    images = draw(2, 6, 5, 8)
    np.testing.assert_array_equal(again(images), model(images))
    for loss in (SSDLoss("mme"), SoftmaxCrossEntropyMME("mme", name="own")):
        made = type(loss).from_config(loss.get_config())
        assert (made.name, made.implementation) == (loss.name, "mme")


LOADER = """
import sys
import numpy as np
import gaudi_ops.tf
from gaudi_ops.tf.keras_api import keras

given = np.load(sys.argv[1])
images, labels, boxes = given["images"], given["labels"], given["boxes"]
for path in sys.argv[2:]:
    model = keras.models.load_model(path)
    for number, output in enumerate(model([images, labels])):
        np.testing.assert_allclose(output, given[f"output{number}"], rtol=1e-5, atol=1e-6)
    losses = model.evaluate([images, labels], [boxes, labels, labels], verbose=0)
    np.testing.assert_allclose(losses, given["losses"], rtol=1e-5)
    print(*(type(layer).__name__ for layer in model.layers if layer.weights))
    print(*(f"{type(loss).__name__} {loss.name} {loss.implementation}" for loss in model.loss if loss))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are saving")
def test_a_saved_model_is_loaded_by_another_process(tmp_path: Path) -> None:
    """Layer, losses, and operations on Keras tensors, with filters that are variables and others that are fixed."""
    inputs = [keras.Input([6, 5, 8]), keras.Input([6, 5], dtype="int64")]
    layer = GroupedConv2D(12, 3, padding="same", groups=4, dilation_rate=2, activation="relu", implementation="split")
    x = grouped_conv2d(layer(inputs[0]), tf.Variable(draw(3, 3, 3, 12)), groups=4, padding="same")
    x = grouped_conv2d(x, draw(1, 1, 3, 12), groups=4, dilations=(1, 2))
    model = keras.Model(inputs, [keras.layers.Reshape([30, 12])(x), x, softmax_cross_entropy_mme(x, inputs[1])])
    model.compile("sgd", [SSDLoss("mme"), SoftmaxCrossEntropyMME(name="own"), None])

    generator = np.random.default_rng(1)
    images, labels = draw(2, 6, 5, 8), generator.integers(0, 12, [2, 6, 5])
    boxes = np.concatenate([generator.integers(0, 3, [2, 30, 1]), draw(2, 30, 4)], -1)
    outputs = {f"output{number}": output for number, output in enumerate(model([images, labels]))}
    losses = model.evaluate([images, labels], [boxes, labels, labels], verbose=0)
    given, *paths = (str(tmp_path / name) for name in ("given.npz", "model.keras", "model.h5"))
    np.savez(given, images=images, labels=labels, boxes=boxes, losses=losses, **outputs)
    for path in paths:
        model.save(path)

    command = [sys.executable, "-c", LOADER, given, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    expected = ["GroupedConv2D OperationLayer", "SSDLoss ssd_loss mme SoftmaxCrossEntropyMME own auto"]
    assert done.stdout.splitlines() == expected * 2
