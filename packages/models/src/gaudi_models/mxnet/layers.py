"""The layers of the networks: convolutions in the numbers of the policy, and batch norms."""

from __future__ import annotations

from typing import Any

from mxnet.gluon import nn

from gaudi_models.mxnet.statistics import ReduceStatistics, group_statistics, register_reduction

MOMENTUM = 0.9
EPSILON = 1e-5


def cast(F: Any, array: Any, dtype: Any, source: Any = "float32") -> Any:  # noqa: N803 - Gluon's name
    """An array in another type than that of its source, by MXNet's AMP; the same is not cast, for that would copy."""
    return array if dtype == source else F.amp_cast(array, dtype=dtype)


class Convolution(nn.Conv2D):
    """`nn.Conv2D` whose parameters stay float32 and are cast to what it computes in.

    Args:
        filters: channels out.
        kernel: side of the square kernel.
        stride: of both sides.
        pad: zeros on each side.
        channels: channels in.
        layout: ``"NCHW"`` or ``"NHWC"``.
        dtype: of images, and of what is computed.
        prefix: of the names of its parameters.
        use_bias: whether there is a bias.
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
        """Convolve images."""
        parameters = [array for array in (weight, bias) if array is not None]
        return super().hybrid_forward(F, x, *(cast(F, array, self._compute_dtype) for array in parameters))


class BatchNorm(nn.BatchNorm):
    """`nn.BatchNorm`, or the same with the statistics of a group of ranks.

    Args:
        channels: in and out.
        layout: ``"NCHW"`` or ``"NHWC"``.
        dtype: of images; statistics and parameters are float32.
        prefix: of the names of its parameters.
        gamma: what gamma is initialised to, ``"ones"`` or ``"zeros"``.
        reduce_statistics: sums over the ranks of a group; None: each rank has statistics of its own.
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
