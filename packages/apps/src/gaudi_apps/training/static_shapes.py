"""A compiled step that takes one shape of everything: what else would compile a Gaudi's graph anew is an error."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gaudi_apps.errors import ShapeError
from gaudi_ops.tf.graphs import find_dynamic, list_operations

_SHOWN = 3


class GuardedFunction:
    """A tf.function that is called as before, and looked at.

    Args:
        function: made by tf.function. Its first call is the warm-up, which traces it.
        layers: names of layers, to tell which one makes a tensor.
    """

    def __init__(self, function: Any, layers: Collection[str] = ()) -> None:
        self._function, self._layers = function, layers
        self._signature: dict[str, str] = {}
        self._calls, self._traces = 0, 0

    def __call__(self, *arguments: Any) -> Any:
        """Call it.

        Raises:
            ShapeError: a tensor of the arguments has another shape or type than at the first call, a tensor inside has
                none that is static, or the call traced it again.
        """
        self._check_arguments(arguments)
        if not self._calls:
            self._check_graph(arguments)
        results = self._function(*arguments)
        traces = int(self._function.experimental_get_tracing_count())
        self._calls += 1
        if self._calls > 1 and traces > self._traces:
            raise ShapeError(
                f"step {self._calls} of this start was traced again though its tensors are as before, so it holds a "
                "Python value that changes; make it a tensor"
            )
        self._traces = traces
        return results

    def get_concrete_function(self, *arguments: Any) -> Any:
        """See tf.function."""
        return self._function.get_concrete_function(*arguments)

    def _check_arguments(self, arguments: tuple[Any, ...]) -> None:
        signature = dict(_list_tensors(arguments))
        expected = self._signature or signature
        self._signature = expected
        for name in expected.keys() | signature.keys():
            if signature.get(name) != expected.get(name):
                raise ShapeError(
                    f"step {self._calls + 1} of this start: tensor {name} is {signature.get(name, 'missing')} and was "
                    f"{expected.get(name, 'missing')} before; give every batch the same shape, such as by dropping "
                    "or padding the last one"
                )

    def _check_graph(self, arguments: tuple[Any, ...]) -> None:
        concrete = self._function.get_concrete_function(*arguments)
        dynamic = find_dynamic(list_operations(concrete, self._layers))
        if dynamic:
            more = f" and {len(dynamic) - _SHOWN} more" * (len(dynamic) > _SHOWN)
            raise ShapeError(f"{'; '.join(dynamic[:_SHOWN])}{more}: give every tensor of a step a static shape")


def _list_tensors(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Name and description of every tensor in nested arguments; a mapping's keys name what is in it."""
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
