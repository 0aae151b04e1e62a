"""Refuse steps whose shapes are dynamic or change, because a Gaudi would compile its graph again."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gaudi_apps.runtime.errors import ShapeError
from gaudi_ops.tf.graphs import find_dynamic, list_operations

_SHOWN = 3


class GuardedFunction:
    """Check the shapes of a tf.function at each call.

    Args:
        function: made by tf.function. Its first call traces it.
        layers: names of layers, to name the one that makes a tensor.
    """

    def __init__(self, function: Any, layers: Collection[str] = ()) -> None:
        self._function, self._layers = function, layers
        self._signature: dict[str, str] = {}
        self._calls, self._traces = 0, 0

    def __call__(self, *arguments: Any) -> Any:
        """Call the function.

        Raises:
            ShapeError: an argument has another shape or type than at the first call, a tensor inside has a dynamic
                shape, or the function was traced again.
        """
        self._check_arguments(arguments)
        if not self._calls:
            self._check_graph(arguments)
        results = self._function(*arguments)
        traces = int(self._function.experimental_get_tracing_count())
        self._calls += 1
        if self._calls > 1 and traces > self._traces:
            raise ShapeError(
                f"step {self._calls} of this start was traced again with equal shapes, so a Python value changes",
                remedy="make it a tensor",
            )
        self._traces = traces
        return results

    def get_concrete_function(self, *arguments: Any) -> Any:
        """Return the concrete function of the arguments, see tf.function."""
        return self._function.get_concrete_function(*arguments)

    def _check_arguments(self, arguments: tuple[Any, ...]) -> None:
        signature = dict(_list_tensors(arguments))
        expected = self._signature or signature
        self._signature = expected
        for name in expected.keys() | signature.keys():
            if signature.get(name) != expected.get(name):
                raise ShapeError(
                    f"step {self._calls + 1} of this start: tensor {name} is {signature.get(name, 'missing')} and was "
                    f"{expected.get(name, 'missing')} before",
                    field=name,
                    remedy="give every batch the same shape, for example by dropping or padding the last one",
                )

    def _check_graph(self, arguments: tuple[Any, ...]) -> None:
        concrete = self._function.get_concrete_function(*arguments)
        dynamic = find_dynamic(list_operations(concrete, self._layers))
        if dynamic:
            more = f" and {len(dynamic) - _SHOWN} more" * (len(dynamic) > _SHOWN)
            raise ShapeError(
                f"{'; '.join(dynamic[:_SHOWN])}{more}", remedy="give every tensor of a step a static shape"
            )


def _list_tensors(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and description of each tensor in nested arguments."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _list_tensors(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            yield from _list_tensors(one, (name and f"{name}[{index}]") or f"argument {index}" * (not _is_nest(one)))
    else:
        yield name, f"{value.dtype.name} {value.shape}"


def _is_nest(value: Any) -> bool:
    return isinstance(value, (Mapping, list, tuple))
