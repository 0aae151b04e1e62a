"""In which layout and which numbers a device can train."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import mxnet as mx
from mxnet.contrib.amp.amp import bfloat16

from gaudi_models.errors import UnsupportedError
from gaudi_models.mxnet.layers import Convolution

Layout = Literal["NCHW", "NHWC"]
Precision = Literal["fp32", "bf16", "fp16"]

FP16_LOSS_SCALE = 128.0


@dataclass(frozen=True)
class PrecisionPolicy:
    """How numbers are held; weights, statistics and what the optimizer works on are float32 with each of them.

    Attributes:
        dtype: of the convolutions and of what runs between them, as MXNet takes it.
        loss_scale: the loss is multiplied by it before the backward pass, and gradients are divided by it after.
    """

    dtype: Any
    loss_scale: float = 1.0


POLICIES: Mapping[Precision, PrecisionPolicy] = {
    "fp32": PrecisionPolicy("float32"),
    "bf16": PrecisionPolicy(bfloat16),
    "fp16": PrecisionPolicy("float16", FP16_LOSS_SCALE),
}


def require_support(device: Any, precision: Precision, layout: Layout) -> None:
    """See by a small training step whether a device can train like this.

    Args:
        device: an `mxnet.Context`.
        precision: of the convolutions.
        layout: of the images.

    Raises:
        UnsupportedError: the device is not there, or cannot; says what it can.
    """
    fault = _find_fault(device, precision, layout)
    if fault:
        pairs = itertools.product(get_args(Precision), get_args(Layout))
        able = [f"{other} with {one}" for other, one in pairs if not _find_fault(device, other, one)]
        remedy = f"use {' or '.join(able)}" if able else "use another device"
        raise UnsupportedError(f"{device}: MXNet cannot train {precision} with {layout} there ({fault}); {remedy}")


def _find_fault(device: Any, precision: Precision, layout: Layout) -> str:
    """What MXNet says when it is made to; empty if nothing."""
    try:
        dtype = POLICIES[precision].dtype
        layer = Convolution(16, 3, channels=16, layout=layout, dtype=dtype, prefix="probe_")
        layer.initialize(ctx=device)
        images = mx.nd.amp_cast(mx.nd.ones((1, 16, 16, 16), ctx=device), dtype=dtype)
        with mx.autograd.record():
            total = mx.nd.sum(mx.nd.amp_cast(layer(images), dtype="float32"))
        total.backward()
        mx.nd.waitall()
    except mx.MXNetError as error:
        _drop_errors()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1].removeprefix("MXNetError: ").rpartition("] ")[2] if lines else "no reason given"
    return ""


def _drop_errors() -> None:
    """Have MXNet report what else went wrong of what it was doing, which it would do at the end of the process."""
    with contextlib.suppress(mx.MXNetError):
        mx.nd.waitall()
