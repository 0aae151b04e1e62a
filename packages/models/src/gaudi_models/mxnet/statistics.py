"""Batch statistics over groups of ranks, as an operator of MXNet's graphs that calls back into Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx

# From a float32 NDArray and a name to the sum over the ranks of this rank's group. Threads of MXNet call it, for layers
# beside each other in an order that may differ from rank to rank: arrays of one name belong together.
ReduceStatistics = Callable[[Any, str], Any]

_OPERATOR = "gaudi_models_group_statistics"

# The arguments of an operator of MXNet are texts, so the function is passed as its key in here.
_functions: dict[str, ReduceStatistics] = {}
_keys = itertools.count()


def register_reduction(function: ReduceStatistics) -> str:
    """Keep a function for `group_statistics`; returns its key."""
    key = str(next(_keys))
    _functions[key] = function
    return key


def group_statistics(
    F: Any,  # noqa: N803 - Gluon's name
    moments: Any,
    running_mean: Any,
    running_variance: Any,
    *,
    key: str,
    name: str,
    momentum: float,
) -> Any:
    """Mean and variance over a group of ranks; outside of training the moving ones.

    Args:
        F: `mxnet.nd` or `mxnet.sym`.
        moments: float32 [2, channels], mean and mean square over this rank's batch; all ranks have as large batches.
        running_mean: float32 [channels], moved towards the mean in training.
        running_variance: float32 [channels], the same.
        key: of the function, from `register_reduction`.
        name: what arrays of this layer are called; the same on all ranks, and another one for each layer.
        momentum: of the moving statistics.

    Returns:
        float32 [2, channels]. Its gradient is that of the sum of the losses of all ranks in the group.
    """
    return F.Custom(moments, running_mean, running_variance, op_type=_OPERATOR, key=key, layer=name, momentum=momentum)


class _GroupStatistics(mx.operator.CustomOp):
    def __init__(self, reduce_statistics: ReduceStatistics, layer: str, momentum: float) -> None:
        super().__init__()
        self._reduce, self._layer, self._momentum = reduce_statistics, layer, momentum

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        if is_train:
            mean, square = self._average(in_data[0], "forward")
            statistics = mean, mx.nd.maximum(square - mean * mean, 0)
            for moving, value in zip(aux, statistics, strict=True):
                moving[:] = self._momentum * moving + (1 - self._momentum) * value
        else:
            statistics = tuple(aux)
        self.assign(out_data[0], req[0], mx.nd.stack(*statistics))

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        of_mean, of_variance = out_grad[0]
        # The variance is the mean square less the square of the mean.
        gradient = mx.nd.stack(of_mean - 2 * out_data[0][0] * of_variance, of_variance)
        self.assign(in_grad[0], req[0], self._average(gradient, "backward"))

    def _average(self, rows: Any, when: str) -> Any:
        """The mean [2, channels] over the group, whose size is found by summing ones."""
        sums = self._reduce(mx.nd.concat(rows, mx.nd.ones_like(rows[:1]), dim=0), f"{self._layer}_{when}")
        return sums[:2] / sums[2:]


@mx.operator.register(_OPERATOR)
class _GroupStatisticsProperties(mx.operator.CustomOpProp):
    def __init__(self, key: str, layer: str, momentum: str) -> None:
        super().__init__(need_top_grad=True)
        self._arguments = _functions[key], layer, float(momentum)

    def list_arguments(self) -> list[str]:
        return ["moments"]

    def list_outputs(self) -> list[str]:
        return ["statistics"]

    def list_auxiliary_states(self) -> list[str]:
        return ["running_mean", "running_variance"]

    def infer_shape(self, in_shape: Sequence[Any]) -> Any:
        return in_shape, [in_shape[0]], [[in_shape[0][1]]] * 2

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> _GroupStatistics:
        return _GroupStatistics(*self._arguments)
