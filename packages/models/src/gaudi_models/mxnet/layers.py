"""Convolutions and batch norms that compute in a chosen precision, and batch statistics over groups of ranks.

Parameters and statistics are float32 in every precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import mxnet as mx
from mxnet.contrib.amp.amp import bfloat16
from mxnet.gluon import nn

Layout = Literal["NCHW", "NHWC"]
"""The order of an image's axes inside the network."""

Precision = Literal["fp32", "bf16", "fp16"]
"""Types that convolutions compute in."""

COMPUTE_DTYPES: Mapping[Precision, Any] = {"fp32": "float32", "bf16": bfloat16, "fp16": "float16"}

MOMENTUM = 0.9
EPSILON = 1e-5

ReduceStatistics = Callable[[Any, str], Any]
"""Returns the sum of a float32 NDArray over the ranks of this rank's group.

MXNet's threads call it, for parallel layers maybe in another order on each rank, so the second argument names the
arrays that belong together.
"""


def cast(F: Any, array: Any, dtype: Any, source: Any = "float32") -> Any:  # noqa: N803 - Gluon's name
    """Cast an array from the dtype of its source to another one; return it as it is where they are equal."""
    return array if dtype == source else F.amp_cast(array, dtype=dtype)


class Convolution(nn.Conv2D):
    """`nn.Conv2D` with float32 parameters, which are cast to the dtype of the computation.

    Args:
        filters: number of output channels.
        kernel: side of the square kernel.
        stride: of both sides.
        pad: zeros on each side; ``kernel // 2`` when None.
        channels: number of input channels.
        layout: ``"NCHW"`` or ``"NHWC"``.
        dtype: of inputs, computation and outputs.
        prefix: of the names of its parameters.
        use_bias: whether to add a bias.
    """

    def __init__(
        self,
        filters: int,
        kernel: int,
        stride: int = 1,
        pad: int | None = None,
        *,
        channels: int,
        layout: str,
        dtype: Any,
        prefix: str,
        use_bias: bool = False,
    ) -> None:
        pad = kernel // 2 if pad is None else pad
        super().__init__(
            filters, kernel, stride, pad, layout=layout, use_bias=use_bias, in_channels=channels, prefix=prefix
        )
        self._compute_dtype = dtype

    def hybrid_forward(self, F: Any, x: Any, weight: Any, bias: Any = None) -> Any:  # noqa: N803 - Gluon's name
        """Convolve a batch [batch, channels, height, width] (or the same in NHWC)."""
        parameters = [array for array in (weight, bias) if array is not None]
        return super().hybrid_forward(F, x, *(cast(F, array, self._compute_dtype) for array in parameters))


class BatchNorm(nn.BatchNorm):
    """`nn.BatchNorm`, whose batch statistics may be those of a group of ranks.

    Args:
        channels: number of channels.
        layout: ``"NCHW"`` or ``"NHWC"``.
        dtype: of inputs and outputs; statistics and parameters are float32.
        prefix: of the names of its parameters.
        gamma: initial value of gamma, ``"ones"`` or ``"zeros"``.
        reduce_statistics: returns sums over the ranks of a group; each rank normalises by its own batch when None.
    """

    def __init__(
        self,
        channels: int,
        *,
        layout: str,
        prefix: str,
        dtype: Any = "float32",
        gamma: str = "ones",
        reduce_statistics: ReduceStatistics | None = None,
    ) -> None:
        super().__init__(
            layout.index("C"), MOMENTUM, EPSILON, gamma_initializer=gamma, in_channels=channels, prefix=prefix
        )
        self._axis, self._dtype = layout.index("C"), dtype
        self._key = None if reduce_statistics is None else register_reduction(reduce_statistics)

    def hybrid_forward(  # noqa: D102
        self,
        F: Any,  # noqa: N803 - Gluon's name
        x: Any,
        gamma: Any,
        beta: Any,
        running_mean: Any,
        running_var: Any,
    ) -> Any:
        if self._key is None:
            return super().hybrid_forward(F, x, gamma, beta, running_mean, running_var)
        values = cast(F, x, "float32", self._dtype)
        axes = tuple({0, 1, 2, 3} - {self._axis})
        moments = F.stack(F.mean(values, axis=axes), F.mean(F.square(values), axis=axes))
        statistics = group_statistics(
            F, moments, running_mean, running_var, key=self._key, name=self.prefix, momentum=MOMENTUM
        )
        mean, variance = F.split(statistics, num_outputs=2, axis=0, squeeze_axis=True)
        scale = gamma * F.rsqrt(variance + EPSILON)
        shift = beta - mean * scale
        shape = [-1 if axis == self._axis else 1 for axis in range(4)]
        normalized = F.broadcast_add(F.broadcast_mul(values, scale.reshape(shape)), shift.reshape(shape))
        return cast(F, normalized, self._dtype)


_OPERATOR = "gaudi_models_group_statistics"

# The arguments of an operator of MXNet are texts, so the function is passed as its key in here.
_functions: dict[str, ReduceStatistics] = {}
_keys = itertools.count()


def register_reduction(function: ReduceStatistics) -> str:
    """Register a function for `group_statistics`, and return its key."""
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
    """Return mean and variance over a group of ranks in training, and the moving ones otherwise.

    Args:
        F: `mxnet.nd` or `mxnet.sym`.
        moments: mean and mean square over this rank's batch, float32 [2, channels]; batches are equally large.
        running_mean: float32 [channels]; moves towards the mean in training.
        running_variance: float32 [channels]; moves towards the variance in training.
        key: of the function, from `register_reduction`.
        name: of the layer's arrays; equal on all ranks, and unique in the network.
        momentum: of the moving statistics.

    Returns:
        float32 [2, channels]; its gradient is that of the sum of the losses of the group's ranks.
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
        """Return the mean [2, channels] over the group; a row of ones gives the group's size."""
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
