"""Operations of a traced tf.function: those that TensorFlow will place on a device, and their shapes.

Operations that no device computes are left out: those that no result needs, and those that follow from constants and
static shapes alone, which TensorFlow computes before it places anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

# Their results are known from the shapes of their inputs, if those are static.
_SHAPE_KINDS = frozenset({"Shape", "ShapeN", "Rank", "Size"})
# Memory that cuDNN keeps from the forward to the backward pass: of no known shape, and empty elsewhere.
_SCRATCH = {("FusedBatchNormV3", 5)}
_OURS = ("gaudi_",)


@dataclass(frozen=True)
class Operation:
    """An operation of a graph.

    Attributes:
        name: in the graph, or in the function that the graph calls.
        kind: such as ``"Conv2D"``.
        maker: the layer that made it, else the line of ours that did, else the scope of its name.
        types: of its type attributes, TensorFlow's names such as ``"float32"`` by attribute.
        dynamic: outputs whose shape is not static: index and shape, such as ``(0, "[?, 4]")``.
    """

    name: str
    kind: str
    maker: str
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dynamic: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.maker}"


def list_operations(function: Any, layers: Collection[str] = ()) -> list[Operation]:
    """Return the operations of a concrete function and of the functions that it calls.

    Args:
        function: from ``get_concrete_function``.
        layers: names of layers, to tell which one made an operation.
    """
    graph = function.graph
    graph_def = graph.as_graph_def(add_shapes=True)
    functions = {each.signature.name: each for each in graph_def.library.function}
    outputs = [tensor.op.name for tensor in graph.outputs] + [operation.name for operation in graph.control_outputs]
    # Only operations of the outermost graph know the lines that made them.
    makers = {operation.name: operation for operation in graph.get_operations()}
    nodes = _find_live_nodes(graph_def.node, outputs)
    found: list[Operation] = []
    seen: set[str] = set()
    while nodes:
        found += [_describe(node, layers, makers.get(node.name)) for node in nodes if node.op != "Const"]
        called = [name for name in _list_called(nodes) if name in functions and name not in seen]
        seen.update(called)
        nodes, makers = [], {}
        for name in called:
            called_function = functions[name]
            outputs = [*called_function.ret.values(), *called_function.control_ret.values()]
            nodes += _find_live_nodes(called_function.node_def, outputs)
    return found


def find_dynamic(operations: Iterable[Operation]) -> list[str]:
    """Return a line for each tensor whose shape is not static, with its operation and its maker."""
    return [
        f"tensor {one.name}:{index} has shape {shape}, made by {one.kind} of {one.maker}"
        for one in operations
        for index, shape in one.dynamic
    ]


def _find_live_nodes(nodes: Iterable[Any], wanted: Iterable[str]) -> list[Any]:
    """Return, in order, the nodes that the wanted ones need and that do not follow from constants."""
    by_name = {node.name: node for node in nodes}
    constant: set[str] = set()
    for node in by_name.values():
        sources = [_read_source(given) for given in node.input if not given.startswith("^")]
        if node.op in _SHAPE_KINDS:
            is_constant = all(source in by_name and not _find_dynamic_outputs(by_name[source]) for source in sources)
        else:
            is_constant = node.op == "Const" or (bool(sources) and constant.issuperset(sources))
        if is_constant:
            constant.add(node.name)
    pending, live = [name.split(":")[0] for name in wanted], set[str]()
    while pending:
        name = pending.pop()
        if name in by_name and name not in live and name not in constant:
            live.add(name)
            pending += [_read_source(given) for given in by_name[name].input]
    return [node for name, node in by_name.items() if name in live]


def _read_source(given: str) -> str:
    """Read the node of an input: "name", "name:1", "^name", or "name:output:0" in a function's body."""
    return given.removeprefix("^").split(":")[0]


def _list_called(nodes: Iterable[Any]) -> list[str]:
    """List the functions that nodes call, each once."""
    called: dict[str, None] = {}
    for node in nodes:
        for value in node.attr.values():
            called |= dict.fromkeys([value.func.name, *(function.name for function in value.list.func)])
    return list(called)


def _find_dynamic_outputs(node: Any) -> tuple[tuple[int, str], ...]:
    found = []
    for index, shape in enumerate(node.attr["_output_shapes"].list.shape):
        if (node.op, index) not in _SCRATCH and (shape.unknown_rank or any(one.size < 0 for one in shape.dim)):
            sizes = ", ".join("?" if one.size < 0 else str(one.size) for one in shape.dim)
            found.append((index, "of unknown rank" if shape.unknown_rank else f"[{sizes}]"))
    return tuple(found)


def _describe(node: Any, layers: Collection[str], operation: Any) -> Operation:
    types: dict[str, tuple[str, ...]] = {}
    for name, value in node.attr.items():
        given = value.list.type or ([value.type] if value.type else [])
        if given and not name.startswith("_"):
            types[name] = tuple(tf.dtypes.as_dtype(number).name for number in given)
    holds_handle = any(one in ("resource", "variant") for names in types.values() for one in names)
    dynamic = () if holds_handle else _find_dynamic_outputs(node)
    return Operation(node.name, node.op, _find_maker(node.name, layers, operation), types, dynamic)


def _find_maker(name: str, layers: Collection[str], operation: Any) -> str:
    *scopes, last = name.split("/")
    for part in (*scopes, last):
        if part in layers:
            return f"layer {part}"
    trace = None if operation is None else operation.traceback
    for frame in reversed(trace or []):
        package = next((part for part in frame.filename.split("/") if part.startswith(_OURS)), None)
        if package is not None and frame.filename.endswith(".py"):
            return f"{frame.filename[frame.filename.rindex(package + '/') :]}, line {frame.lineno}, {frame.name}"
    return f"scope {'/'.join(scopes)}" if scopes else "no layer"
