"""Write event files for TensorBoard, without TensorFlow.

One writer serves the programs of both frameworks. Points have the form of `tf.summary.scalar`: a float32 tensor and the
metadata of TensorBoard's plugin for scalars. A file is complete after each call, so a run can be watched while it
trains, and a full disk is an OSError of the call that met it.
"""

from __future__ import annotations

import itertools
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
from tensorboard.plugins.scalar.summary_v2 import scalar_pb

from gaudi_datasets.records.tfrecords import frame_record

FILE_VERSION = "brain.Event:2"

# Keeps apart the files that a process begins within the same second.
_numbers = itertools.count()


class SummaryWriter:
    """Write scalars and hyperparameters into a folder for `tensorboard --logdir`.

    Args:
        folder: is made if it does not exist; a resumed run adds a file to it.

    Raises:
        OSError: the folder cannot be written to. Every method may raise it; its `filename` is the folder.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard looks for names with "tfevents" in them, and reads them in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}.v2"
        self._folder = folder
        self._file = (folder / name).open("xb", buffering=0)
        self._add(Event(file_version=FILE_VERSION))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point at `step` to the curve of each name."""
        values = [value for name, scalar in scalars.items() for value in scalar_pb(name, scalar).value]
        self._add(Event(step=step, summary=Summary(value=values)))

    def write_hparams(self, values: Mapping[str, Any]) -> None:
        """Add the run to TensorBoard's table of hyperparameters; other values than numbers and texts become texts."""
        shown = {
            name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in values.items()
        }
        self._add(Event(summary=hparams_pb(shown)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        record = memoryview(frame_record(event.SerializeToString()))
        try:
            while record:  # a file that is not buffered may take a part
                record = record[self._file.write(record) :]
        except OSError as error:  # which does not name the file
            raise OSError(error.errno, error.strerror, str(self._folder)) from None

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
