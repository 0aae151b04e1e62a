"""MXNet as what computes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_apps.profiling import StepRange
from gaudi_apps.settings import DeviceSettings
from gaudi_apps.ssd_mxnet.summaries import EventsWriter
from gaudi_apps.ssd_mxnet.tracing import MXNetTracer
from gaudi_datasets.errors import MissingExtraError
from gaudi_distributed import Precision, apply_environment, polling_environment
from gaudi_distributed.errors import DeviceError

if TYPE_CHECKING:
    from gaudi_apps.parity.tensors import Lead, StepTensor
    from gaudi_apps.ssd_mxnet.config import SSDMXNetConfig

# MXNet is imported inside the functions, after `MXNet.start` has set what it reads when it is imported.


class MXNet:
    """See `gaudi_apps.framework.Framework`.

    Args:
        config: says the precision and the layout; what is left open is decided by the device.

    Attributes:
        device: the `mxnet.Context` that is computed on, once started.
        precision: "fp32", "bf16" or "fp16", once started.
        layout: "NCHW" or "NHWC", once started.
    """

    device: Any
    precision: Any
    layout: Any

    def __init__(self, config: SSDMXNetConfig) -> None:
        self._network = config.network

    def start(self, settings: DeviceSettings) -> Precision:
        """Choose device, precision and layout, and see that MXNet can train like this there.

        Raises:
            MissingExtraError: MXNet is not installed.
            DeviceError: there is no GPU, and it was asked for.
            UnsupportedError: the device cannot.
        """
        # Videos' damaged frames are told by our own errors.
        apply_environment({"OPENCV_FFMPEG_LOGLEVEL": "-8"})
        try:
            from gaudi_models.mxnet.precision import require_support
        except ImportError as error:
            raise MissingExtraError(
                f"ssd_mxnet_train needs MXNet ({error}); pip install 'gaudi-apps[mxnet]'"
            ) from error
        import mxnet as mx

        self.device = _choose_device(settings.device, settings.local_rank)
        is_gpu = self.device.device_type == "gpu"
        apply_environment(polling_environment(os.environ) if settings.is_rank and not is_gpu else {})
        by_device = {"auto": "fp16" if is_gpu else "fp32", "amp": "fp16" if is_gpu else "bf16"}
        self.precision = by_device.get(self._network.precision, self._network.precision)
        self.layout = {"auto": "NHWC" if is_gpu else "NCHW"}.get(self._network.data_layout, self._network.data_layout)
        require_support(self.device, self.precision, self.layout)
        mx.random.seed(settings.seed)
        return Precision(f"{self.precision} {self.layout}", "")

    def list_devices(self) -> list[str]:
        """Such as ``["cpu"]``."""
        return [self.device.device_type]

    def needs_static_shapes(self) -> bool:
        """On no device that MXNet has."""
        return False

    def replay_steps(
        self,
        task: Any,
        batches: Iterator[Mapping[str, Any]],
        learning_rate: Callable[[int], float],
        steps: int,
        lead: Lead | None,
    ) -> Iterator[list[StepTensor]]:
        """See `gaudi_apps.ssd_mxnet.steps`."""
        from gaudi_apps.ssd_mxnet.steps import replay_steps

        return replay_steps(task, batches, learning_rate, steps, lead)

    def open_summaries(self, folder: Path) -> EventsWriter:
        """Files of events, written without TensorFlow."""
        return EventsWriter(folder)

    def open_tracer(self, folder: Path, steps: StepRange | None) -> MXNetTracer:
        """By MXNet's profiler."""
        return MXNetTracer(folder, steps)


def _choose_device(asked: str, local_rank: int) -> Any:
    import mxnet as mx

    count = mx.context.num_gpus() if asked != "cpu" else 0
    if asked == "gpu" and not count:
        raise DeviceError("--device gpu: MXNet finds no GPU; install a build of it for CUDA, or use --device cpu")
    return mx.gpu(local_rank % count) if count else mx.cpu()
