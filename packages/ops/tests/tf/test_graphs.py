from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from gaudi_ops.tf.graphs import Operation, find_dynamic, list_operations
from gaudi_ops.tf.hpu import find_unsupported, load_hpu_operations
from gaudi_ops.tf.keras_api import keras


def list_of(function: Any, *specs: Any, layers: tuple[str, ...] = ()) -> list[Operation]:
    return list_operations(tf.function(function, autograph=False).get_concrete_function(*specs), layers)


def kinds(operations: list[Operation]) -> list[str]:
    return [one.kind for one in operations if one.kind not in ("Placeholder", "Identity", "NoOp")]


VECTOR = tf.TensorSpec([4])


def test_what_is_not_needed_is_left_out() -> None:
    def compute(x: Any) -> Any:
        tf.exp(x)
        return tf.sin(x)

    assert kinds(list_of(compute, VECTOR)) == ["Sin"]


def test_what_constants_and_static_shapes_decide_is_left_out() -> None:
    def compute(x: Any) -> Any:
        return x * tf.cast(tf.size(x) + tf.shape(x)[0], tf.float32) + tf.sqrt(2.0)

    assert kinds(list_of(compute, VECTOR)) == ["Mul", "AddV2"]
    # Of a shape that is not static it is computed.
    assert {"Size", "Shape"} <= set(kinds(list_of(compute, tf.TensorSpec([None]))))


def test_branches_and_updates_are_looked_into() -> None:
    variable = tf.Variable(tf.zeros([4]))

    def compute(x: Any) -> Any:
        tf.cond(tf.reduce_sum(x) > 0, lambda: variable.assign(tf.tan(x)).op, lambda: tf.no_op())
        return tf.sin(x)

    assert {"If", "Tan", "AssignVariableOp", "Sin"} <= set(kinds(list_of(compute, VECTOR)))


def test_the_layer_the_line_or_the_scope_is_named() -> None:
    inputs = keras.Input([8])
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(inputs))

    def compute(x: Any) -> Any:
        with tf.name_scope("outside"):
            scaled = tf.tan(x)
        from gaudi_ops.tf import topk_mask

        return model(scaled), topk_mask(x, 2)

    made = {one.kind: one.maker for one in list_of(compute, tf.TensorSpec([3, 8]), layers=("head",))}
    assert made["MatMul"] == "layer head"
    assert made["Tan"] == "scope outside"
    assert made["Bitcast"].startswith("gaudi_ops/tf/masks.py, line ")
    assert made["Bitcast"].endswith(", _order_keys")


def test_types_are_named() -> None:
    (cast,) = (one for one in list_of(lambda x: tf.cast(x, tf.bfloat16), VECTOR) if one.kind == "Cast")
    assert cast.types["SrcT"] == ("float32",)
    assert cast.types["DstT"] == ("bfloat16",)


def test_a_dynamic_tensor_is_named() -> None:
    assert find_dynamic(list_of(tf.sin, VECTOR)) == []
    (first, *_) = find_dynamic(list_of(lambda x: tf.where(x > 0), VECTOR))
    assert {word for word in ("Where:0", "[?, 1]") if word not in first} == set()


def test_the_scratch_of_batch_norm_is_no_dynamic_tensor() -> None:
    layer = keras.layers.BatchNormalization(name="norm")
    layer.build([2, 5, 5, 3])
    operations = list_of(lambda x: layer(x, training=True), tf.TensorSpec([2, 5, 5, 3]))
    assert "FusedBatchNormV3" in kinds(operations)
    assert find_dynamic(operations) == []


def test_every_operation_of_the_list_has_a_source_and_exists() -> None:
    known = load_hpu_operations()
    assert set(known["operations"].values()) == set(known["sources"])
    assert [kind for kind in known["operations"] if not hasattr(tf.raw_ops, kind)] == []
    assert set(known["other_types"]["names"]) <= set(known["operations"])


@pytest.mark.parametrize(
    ("function", "dtype", "start", "end"),
    [
        (tf.tan, tf.float32, "Tan 'Tan' of ", "HPU"),
        (tf.exp, tf.float64, "Exp 'Exp' of ", "bfloat16, bool, float32, int32, int8"),
    ],
)
def test_what_is_not_on_the_list_is_named(function: Any, dtype: Any, start: str, end: str) -> None:
    assert find_unsupported(list_of(tf.exp, VECTOR)) == []
    fault, *_ = find_unsupported(list_of(function, tf.TensorSpec([4], dtype)))
    assert fault.startswith(start)
    assert fault.endswith(end)
