"""The vendor's own operations that stand in for ours on HPU take the attributes that ours have."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Child = Callable[..., Any]

NHWC = {"data_format": "NHWC"}
CONVOLUTION = {**NHWC, "strides": [1, 2, 2, 1], "padding": "VALID", "dilations": [1, 1, 1, 1], "explicit_paddings": []}
POOL = {**NHWC, "ksize": [1, 3, 3, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
NORM = {**NHWC, "epsilon": 1e-5, "exponential_avg_factor": 1.0, "is_training": True}
HINTS = {"communication_hint": "auto", "timeout_seconds": 0.0}
# What the vendor's passes make of our layers and collectives: an operation, with the attributes of ours.
OPERATIONS: dict[str, dict[str, Any]] = {
    "HabanaConv2DWithPadding": CONVOLUTION,  # a padding layer with the convolution behind it
    "HabanaConv2DWithPaddingBackpropFilter": CONVOLUTION,
    "HabanaConv2DWithPaddingBackpropInput": CONVOLUTION,
    "HabanaMaxPool": POOL,
    "HabanaMaxPoolGrad": POOL,
    "HabanaFusedBatchNormV3": NORM,
    "HabanaLayerNorm": {},  # none of our networks has one
    "HpuCollectiveReduce": {**HINTS, "group_size": 8, "group_key": 1, "instance_key": 1, "merge_op": "Add"},
    "HpuCollectiveGatherV2": HINTS,
    "HpuCollectiveBcastSendV2": HINTS,
    "HpuCollectiveBcastRecvV2": HINTS,
}
# TensorFlow's names of the types of attributes, by the Python value that we give.
TYPES: dict[type, set[str]] = {bool: {"bool"}, int: {"int"}, float: {"float"}, str: {"string"}, list: {"list(int)"}}

BUILD = """
def build(attributes, kind="HabanaConv2DWithPadding"):
    graph = tf.compat.v1.GraphDef()
    for name, shape in (("x", [2, 300, 300, 3]), ("filters", [7, 7, 3, 64])):
        node = graph.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = tf.bfloat16.as_datatype_enum
        node.attr["shape"].shape.CopyFrom(tf.TensorShape(shape).as_proto())
    node = graph.node.add(name="convolution", op=kind, input=["x", "filters"])
    node.attr["T"].type = tf.bfloat16.as_datatype_enum
    node.attr["additional_paddings"].tensor.CopyFrom(tf.make_tensor_proto([0, 0, 3, 3, 3, 3, 0, 0], tf.int32))
    for name, value in attributes.items():
        if isinstance(value, str):
            node.attr[name].s = value.encode()
        else:
            node.attr[name].list.i.extend(value)
    with tf.Graph().as_default() as made:
        tf.import_graph_def(graph, name="")
    return made.get_operation_by_name("convolution")
"""


def find_faults(kind: str, attributes: dict[str, Any], registry: dict[str, Any]) -> list[str]:
    """Lines for an operation that is not there, or lacks an attribute, or takes another type of it."""
    found = registry["operations"].get(kind)
    if found is None:
        return [f"{kind} is missing"]
    faults = [f"{kind}.{name} is missing" for name in attributes if name not in found]
    wrong = {name: found.get(name) for name, value in attributes.items() if found.get(name) not in TYPES[type(value)]}
    return faults + [f"{kind}.{name} is {given}" for name, given in wrong.items() if given is not None]


@pytest.mark.parametrize("kind", OPERATIONS)
def test_it_exists_with_the_attributes_that_we_pass(registry: dict[str, Any], kind: str) -> None:
    assert find_faults(kind, OPERATIONS[kind], registry) == []
    types = registry["operations"][kind]["types"]
    assert not types or {"float32", "bfloat16"} <= set(types)


def test_a_wrong_attribute_is_named(registry: dict[str, Any]) -> None:
    assert find_faults("HabanaMaxPool", {"stride": [1], "padding": 1}, registry) == [
        "HabanaMaxPool.stride is missing",
        "HabanaMaxPool.padding is string",
    ]
    assert find_faults("HabanaFocalLoss", {}, registry) == ["HabanaFocalLoss is missing"]


def test_tensorflow_takes_our_stem_as_the_padding_convolution(child: Child) -> None:
    done = child(f"{BUILD}print(json.dumps(build({CONVOLUTION!r}).outputs[0].dtype.name))", loaded=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == "bfloat16"


def test_tensorflow_names_an_attribute_that_it_does_not_take(child: Child) -> None:
    done = child(f"{BUILD}build({ {**CONVOLUTION, 'padding': 'AROUND'}!r})", loaded=True)
    assert done.returncode == 1
    told = [line for line in done.stderr.splitlines() if '"AROUND"' in line and "in the list" in line]
    assert told
    assert all("'padding'" in line for line in told)
