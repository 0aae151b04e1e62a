"""Scalars and hyperparameters for TensorBoard, without TensorFlow: a file of records, each an event."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb

from gaudi_apps.summaries import to_hparam
from gaudi_datasets.record_files import frame_record

FILE_VERSION = "brain.Event:2"


class EventsWriter:
    """Writes scalars into a folder that `tensorboard --logdir` reads; see `gaudi_apps.summaries.SummaryWriter`.

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
