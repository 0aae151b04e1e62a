"""MXNet as framework: start it, write summaries, trace steps, replay steps for `--mode parity`."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import mxnet as mx
import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb

from gaudi_apps.mxnet.task import MXNetTask
from gaudi_apps.runtime.profiler import StepRange
from gaudi_apps.runtime.settings import DeviceSettings
from gaudi_apps.runtime.tensorflow import to_hparam
from gaudi_apps.training.parity.record import (
    Array,
    Lead,
    LedStep,
    StepTensor,
    list_outputs,
    note_tensor,
    require_shape,
    wrapped,
)
from gaudi_datasets.errors import MissingExtraError
from gaudi_datasets.record_files import frame_record
from gaudi_distributed import Precision, apply_environment, polling_environment
from gaudi_distributed.errors import DeviceError
from gaudi_models.mxnet.layers import BatchNorm, Convolution

if TYPE_CHECKING:
    from gaudi_apps.mxnet.config import SSDMXNetConfig


# MXNet is imported inside the functions, after `MXNet.start` has set what it reads when it is imported.


class MXNet:
    """See `gaudi_apps.runtime.framework.Framework`.

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
        """See `gaudi_apps.mxnet.framework`."""
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


TRACE = "trace.json"


class MXNetTracer:
    """Traces the steps of a range; the trace is written when the range or the run ends, whichever is first.

    Args:
        folder: gets `trace.json`.
        steps: what to trace; None: nothing.
    """

    def __init__(self, folder: Path, steps: StepRange | None) -> None:
        self._path, self._steps, self._is_tracing = folder / TRACE, steps, False

    def before_step(self, step: int) -> None:
        """Call before the step of this number, counted from 1."""
        if self._steps is None or step not in self._steps or self._is_tracing:
            return
        from mxnet import profiler

        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Its own dumping now and then ends in an error where a process traces twice.
        profiler.set_config(profile_all=True, continuous_dump=False, filename=str(self._path))
        profiler.set_state("run")
        self._is_tracing = True

    def after_step(self, step: int) -> None:
        """Call after that step."""
        if self._steps is not None and step == self._steps.last:
            self.close()

    def close(self) -> None:
        """Write what is traced; without a trace nothing happens."""
        if not self._is_tracing:
            return
        import mxnet as mx

        self._is_tracing = False
        mx.nd.waitall()  # the last step may still be running on its device
        mx.profiler.set_state("stop")
        mx.profiler.dump()

    def __enter__(self) -> MXNetTracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


FILE_VERSION = "brain.Event:2"


class EventsWriter:
    """Write scalars into a folder for `tensorboard --logdir`; see `gaudi_apps.runtime.tensorflow.SummaryWriter`.

    Args:
        folder: made when it is not there; a continued run adds a file to it.

    Raises:
        OSError: the folder cannot be written to; so may every method.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The name that TensorBoard looks for; the process keeps apart what begins in the same second.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("wb")
        self._add(Event(file_version=FILE_VERSION))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point at `step` to the curve of each name."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(Event(step=step, summary=Summary(value=values)))

    def write_hparams(self, values: Mapping[str, Any]) -> None:
        """Set down what the run is done with, for TensorBoard's table of hyperparameters."""
        self._add(Event(summary=hparams_pb({name: to_hparam(value) for name, value in values.items()})))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        try:
            self._file.write(frame_record(event.SerializeToString()))
            self._file.flush()
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, self._file.name) from None

    def __enter__(self) -> EventsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_TRANSPOSITIONS: Mapping[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "NHWC": (np.ascontiguousarray, np.ascontiguousarray),
    "NCHW": (
        lambda values: np.ascontiguousarray(values.transpose(0, 2, 3, 1)),
        lambda values: np.ascontiguousarray(values.transpose(0, 3, 1, 2)),
    ),
}
LOSSES = ("loss", "class_loss", "box_loss")


def replay_steps(
    task: MXNetTask,
    batches: Iterator[Mapping[str, Any]],
    learning_rate: Callable[[int], float],
    steps: int,
    lead: Lead | None = None,
) -> Iterator[list[StepTensor]]:
    """Train, as `MXNetTask.train_step` does, and give all tensors of each step in the order of computation.

    Arguments and exceptions are those of `gaudi_apps.training.parity.keras_steps.replay_steps`. Outputs are those of
    convolutions and batch norms.
    """
    task.model.hybridize(active=False)  # so that each layer is called
    to_nhwc, from_nhwc = _TRANSPOSITIONS[task.model.layout]
    before: Mapping[str, Array] = task.read_weights()
    for number in range(1, steps + 1):
        batch = next(batches)
        led = lead(number) if lead else LedStep({}, {}, {})
        own = {**batch, "images": to_nhwc(batch["images"])}
        used = {name: _take(name, values, led.batch.get(name)) for name, values in own.items()}
        used["images"] = from_nhwc(used["images"])
        with _noting_outputs(task.model, led.outputs) as outputs:
            losses = task.compute_gradients(used)
        gradients = task.read_gradients()
        task.update(learning_rate(number - 1))
        after = task.read_weights()
        order = {layer: place for place, layer in enumerate(outputs)}
        backwards = sorted(gradients, key=lambda name: order[_layer_of(name)], reverse=True)
        scalars = dict(zip(LOSSES, losses.asnumpy(), strict=True))
        yield [
            *(note_tensor(number, "batch", name, np.array(values)) for name, values in sorted(own.items())),
            *list_outputs(number, outputs.items(), _by_layers(before) if number == 1 else {}),
            *(note_tensor(number, "loss", name, np.asarray(scalars[name])) for name in (*LOSSES[1:], LOSSES[0])),
            *(note_tensor(number, "gradient", name, gradients[name], _layer_of(name)) for name in backwards),
            *(
                note_tensor(number, "update", name, values - before[name], layer)
                for layer, variables in sorted(_by_layers(after).items(), key=lambda item: order[item[0]])
                for name, values in variables
            ),
        ]
        before = _follow(task, before, led.updates) if led.updates else after


def _follow(task: MXNetTask, before: Mapping[str, Array], updates: Mapping[str, Array]) -> Mapping[str, Array]:
    """Take the other side's step in place of the own one; returns the weights after it."""
    task.write_weights({name: old + _take(name, old, updates[name]) for name, old in before.items()})
    return task.read_weights()


@contextlib.contextmanager
def _noting_outputs(model: Any, lead: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Within, what layers give is noted by their names, in the order of their calls, and replaced by the lead."""
    noted: dict[str, Array] = {}
    to_nhwc, from_nhwc = _TRANSPOSITIONS[model.layout]
    layers: list[Any] = [one for one in _list_blocks(model) if isinstance(one, (Convolution, BatchNorm))]

    def call(layer: Any, own_forward: Callable[..., Any], *arguments: Any) -> Any:
        output, name = own_forward(*arguments), layer.prefix.removesuffix("_")
        exact = mx.nd.amp_cast(output, dtype="float32")
        noted[name] = to_nhwc(exact.asnumpy())
        if name not in lead:
            return output
        given = mx.nd.array(from_nhwc(_take(name, noted[name], lead[name])), ctx=output.context)
        # Other values, whose gradient is that of the output; in float32, which all operations know.
        return mx.nd.amp_cast(given + (exact - mx.nd.stop_gradient(exact)), dtype=output.dtype)

    with wrapped(layers, "forward", call):
        yield noted


def _list_blocks(block: Any) -> Iterator[Any]:
    yield block
    for child in block._children.values():
        yield from _list_blocks(child)


def _by_layers(weights: Mapping[str, Array]) -> dict[str, list[tuple[str, Array]]]:
    layers: dict[str, list[tuple[str, Array]]] = {}
    for name in sorted(weights):
        layers.setdefault(_layer_of(name), []).append((name, weights[name]))
    return layers


def _layer_of(name: str) -> str:
    return name.partition("/")[0]


def _take(name: str, own: Array, given: Array | None) -> Array:
    """The other side's values in the type of this side's; this side's where there are no others."""
    if given is None:
        return own
    require_shape(name, own.shape, given.shape)
    return given.astype(own.dtype)
