"""Scalars and hyperparameters for TensorBoard."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


class SummaryWriter:
    """Writes scalars into a folder that `tensorboard --logdir` reads.

    Args:
        folder: made when it is not there; a continued run adds a file to it.

    Raises:
        ImportError: TensorFlow is not installed; the message names the extra.
        OSError: the folder cannot be written to; so may every method.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import tensorflow as tf
        except ImportError as error:
            raise ImportError("summaries need TensorFlow: pip install gaudi-apps[tensorflow]") from error
        self._summary, self._error = tf.summary, tf.errors.OpError
        self._folder = folder
        with self._writing():
            self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point at `step` to the curve of each name."""
        with self._writing(), self._writer.as_default():
            for name, value in scalars.items():
                self._summary.scalar(name, value, step=step)

    def write_hparams(self, values: Mapping[str, Any]) -> None:
        """Set down what the run is done with, for TensorBoard's table of hyperparameters.

        What is no number, truth value or text is written as text. Without the distribution tensorboard, which newer
        TensorFlow does not bring along, nothing is written: there is nobody to look at it.
        """
        try:
            from tensorboard.plugins.hparams import api
        except ImportError:
            return
        with self._writing(), self._writer.as_default():
            api.hparams({name: to_hparam(value) for name, value in values.items()})
            self._writer.flush()

    def close(self) -> None:
        """Write what is buffered and close the file."""
        with self._writing():
            self._writer.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """TensorFlow's errors about the disk as Python's."""
        try:
            yield
        except self._error as error:
            reason = re.sub(r"\{\{.*?\}\} ?| \[Op:.*", "", " ".join(error.message.split()))
            raise OSError(errno.EIO, reason, str(self._folder)) from None

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def to_hparam(value: Any) -> bool | int | float | str:
    """A value as the table of hyperparameters takes it: what is no number, truth value or text, as text."""
    return value if isinstance(value, bool | int | float | str) else str(value)
