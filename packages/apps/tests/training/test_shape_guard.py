from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from gaudi_apps.runtime.errors import ShapeError
from gaudi_apps.training.keras_task import GuardedFunction
from gaudi_ops.tf.keras_api import keras


def guard(function: Any, **others: Any) -> GuardedFunction:
    return GuardedFunction(tf.function(function, autograph=False, reduce_retracing=True), **others)


def make_batch(size: int, dtype: Any = tf.float32) -> dict[str, Any]:
    return {"images": tf.zeros([size, 8, 8, 3], dtype), "labels": tf.zeros([size], tf.int32)}


def test_the_same_shapes_pass() -> None:
    step = guard(lambda batch, rate: tf.reduce_sum(batch["images"]) * rate)
    assert [float(step(make_batch(4), tf.constant(rate))) for rate in (1.0, 2.0, 3.0)] == [0.0, 0.0, 0.0]


def test_a_batch_of_another_size_is_named_before_anything_is_computed() -> None:
    calls = tf.Variable(0)

    def compute(batch: Any) -> Any:
        calls.assign_add(1)
        return tf.reduce_sum(batch["images"])

    step = guard(compute)
    step(make_batch(4))
    with pytest.raises(ShapeError) as caught:
        step(make_batch(3))
    assert str(caught.value).startswith("step 2 ")
    assert caught.value.field in ("images", "labels")
    assert "(3," in str(caught.value)
    assert "(4," in str(caught.value)
    assert int(calls) == 1
    step(make_batch(4))
    assert caught.value.exit_status == 78


def test_another_type_and_a_missing_tensor_are_named() -> None:
    step = guard(lambda batch: tf.reduce_sum(batch["images"]))
    step(make_batch(4))
    for batch, name, text in (
        (make_batch(4, tf.bfloat16), "images", "bfloat16"),
        ({"images": make_batch(4)["images"]}, "labels", "missing"),
    ):
        with pytest.raises(ShapeError, match=text) as caught:
            step(batch)
        assert caught.value.field == name


def test_a_dynamic_shape_inside_is_named_with_its_layer() -> None:
    class Chosen(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.boolean_mask(inputs, inputs > 0)

    layer = Chosen(name="chosen")
    step = guard(lambda batch: tf.reduce_sum(layer(batch["images"])), layers=["chosen"])
    with pytest.raises(ShapeError, match=r"tensor chosen/.*has shape \[\?.*made by .* of layer chosen.*static shape"):
        step(make_batch(4))


def test_a_retrace_without_another_shape_is_an_error() -> None:
    function = tf.function(lambda batch, flag: tf.reduce_sum(batch["images"]) * flag, autograph=False)
    given = [1.0]
    step = GuardedFunction(tf.function(lambda batch: function(batch, given[0]), autograph=False))
    step(make_batch(4))

    class Changing:
        def __init__(self) -> None:
            self.count = 1

        def experimental_get_tracing_count(self) -> int:
            self.count += 1
            return self.count

        def get_concrete_function(self, *arguments: Any) -> Any:
            return step.get_concrete_function(*arguments)

        def __call__(self, *arguments: Any) -> Any:
            return None

    changing = GuardedFunction(Changing())
    changing(make_batch(4))
    with pytest.raises(ShapeError, match="traced again"):
        changing(make_batch(4))
