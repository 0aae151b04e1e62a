"""Start MXNet on a device, and trace steps.

MXNet is imported inside the functions: `MXNet.start` first sets what it reads when it is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from gaudi_apps.runtime.settings import DeviceSettings
from gaudi_datasets.errors import import_extra
from gaudi_distributed import apply_environment, polling_environment
from gaudi_distributed.errors import DeviceError
from gaudi_ops.program import NO_THREAD, importing

if TYPE_CHECKING:
    from gaudi_apps.mxnet.config import SSDMXNetConfig
    from gaudi_apps.training.recording import ReplaySteps
    from gaudi_models.mxnet import Layout, Precision


class MXNet:
    """The framework MXNet, see `gaudi_apps.training.application.Framework`.

    Args:
        config: gives precision and layout; the device decides where they are "auto".

    Attributes:
        distributions: names of the packages whose versions must be equal on all ranks.
        device: the `mxnet.Context` to compute on, once started.
        precision: "fp32", "bf16" or "fp16", once started.
        layout: "NCHW" or "NHWC", once started.
    """

    distributions: tuple[str, ...] = ("mxnet",)
    device: Any
    precision: Precision
    layout: Layout

    def __init__(self, config: SSDMXNetConfig) -> None:
        self._network = config.device

    def start(self, settings: DeviceSettings) -> None:
        """Choose device, precision and layout, and check that MXNet can train with them there.

        Raises:
            MissingExtraError: MXNet is not installed.
            DeviceError: `--device gpu` finds no GPU, or the device cannot compute in this precision and layout.
        """
        # Our own errors report damaged frames of videos.
        apply_environment({"OPENCV_FFMPEG_LOGLEVEL": "-8"})
        with importing("mxnet"):
            import_extra("gaudi_models.mxnet", "gaudi-apps[mxnet]")
        import mxnet as mx

        count = mx.context.num_gpus() if settings.device != "cpu" else 0
        if settings.device == "gpu" and not count:
            raise DeviceError("--device gpu: MXNet finds no GPU; install a build of it for CUDA, or use --device cpu")
        self.device = mx.gpu(settings.local_rank % count) if count else mx.cpu()
        is_gpu = self.device.device_type == "gpu"
        apply_environment(polling_environment(os.environ) if settings.is_rank and not is_gpu else {})
        by_device = {"auto": "fp16" if is_gpu else "fp32", "amp": "fp16" if is_gpu else "bf16"}
        precision, layout = self._network.precision, self._network.data_layout
        self.precision = cast("Precision", by_device.get(precision, precision))
        self.layout = cast("Layout", {"auto": "NHWC" if is_gpu else "NCHW"}.get(layout, layout))
        require_support(self.device, self.precision, self.layout)
        mx.random.seed(settings.seed)

    @property
    def precision_name(self) -> str:
        """Return precision and layout, such as "fp16 NHWC"."""
        return f"{self.precision} {self.layout}"

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in the backward pass: `--fp16_loss_scale` in fp16, else 1."""
        return self._network.fp16_loss_scale if self.precision == "fp16" else 1.0

    def list_devices(self) -> list[str]:
        """Return the kind of the device, such as ``["cpu"]``."""
        return [self.device.device_type]

    def needs_static_shapes(self) -> bool:
        """Return False: no device of MXNet needs static shapes."""
        return False

    @property
    def replay_steps(self) -> ReplaySteps:
        """Return the function of `gaudi_apps.mxnet.task`."""
        from gaudi_apps.mxnet.task import replay_steps

        return replay_steps

    def start_trace(self, folder: Path) -> None:
        """Start MXNet's profiler, which writes `trace.json` into a folder."""
        from mxnet import profiler

        folder.mkdir(parents=True, exist_ok=True)
        # Continuous dumping can end in an error when a process traces twice.
        profiler.set_config(profile_all=True, continuous_dump=False, filename=str(folder / "trace.json"))
        profiler.set_state("run")

    def trace_step(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Mark nothing: MXNet's trace has no numbers of steps."""
        return contextlib.nullcontext()

    def stop_trace(self) -> None:
        """Write the trace."""
        import mxnet as mx

        mx.nd.waitall()  # the last step may still be running on its device
        mx.profiler.set_state("stop")
        mx.profiler.dump()


def require_support(device: Any, precision: Precision, layout: Layout) -> None:
    """Make a small training step, to check that an `mxnet.Context` supports a precision and a layout.

    Raises:
        DeviceError: the device is missing or does not support them; the message names what it supports.
    """
    from gaudi_models.mxnet import layers

    fault = _find_fault(device, precision, layout)
    if fault:
        pairs = itertools.product(get_args(layers.Precision), get_args(layers.Layout))
        able = [f"{other} with {one}" for other, one in pairs if not _find_fault(device, other, one)]
        remedy = f"use {' or '.join(able)}" if able else "use another device"
        raise DeviceError(f"{device}: MXNet cannot train {precision} with {layout} there ({fault}); {remedy}")


def _find_fault(device: Any, precision: Precision, layout: Layout) -> str:
    """Return the last line of MXNet's error from a small step; empty if it succeeds."""
    import mxnet as mx

    from gaudi_distributed.devices.machine import Machine, gather_processor
    from gaudi_models.mxnet.layers import COMPUTE_DTYPES, Convolution

    if device.device_type == "cpu" and precision == "bf16":
        instructions = gather_processor(Machine(), os.sched_getaffinity(0)).flags
        if instructions and "avx512bw" not in instructions:  # oneDNN would say less, and more often
            return "bf16 on a processor needs AVX-512, which this one lacks"
    try:
        dtype = COMPUTE_DTYPES[precision]
        layer = Convolution(16, 3, channels=16, layout=layout, dtype=dtype, prefix="probe_")
        layer.initialize(ctx=device)
        images = mx.nd.amp_cast(mx.nd.ones((1, 16, 16, 16), ctx=device), dtype=dtype)
        with mx.autograd.record():
            total = mx.nd.sum(mx.nd.amp_cast(layer(images), dtype="float32"))
        total.backward()
        mx.nd.waitall()
    except mx.MXNetError as error:
        # A thread of its engine has found no place for its stack, so waiting for what is queued would never end.
        if os.strerror(errno.EAGAIN) in str(error):
            atexit.unregister(mx.base._notify_shutdown)  # which would print the same error at exit, as a traceback
            raise MemoryError(NO_THREAD) from error
        # Wait for the errors of the operations that are still queued, which MXNet would report at exit.
        with contextlib.suppress(mx.MXNetError):
            mx.nd.waitall()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return lines[-1].removeprefix("MXNetError: ").rpartition("] ")[2] if lines else "no reason given"
    return ""
