"""Scalars for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


class SummaryWriter:
    """Writes scalars into a folder that `tensorboard --logdir` reads.

    Args:
        folder: made when it is not there; a continued run adds a file to it.

    Raises:
        ImportError: TensorFlow is not installed; the message names the extra.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import tensorflow as tf
        except ImportError as error:
            raise ImportError("summaries need TensorFlow: pip install gaudi-apps[tensorflow]") from error
        self._summary = tf.summary
        self._writer = tf.summary.create_file_writer(str(folder))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add a point at `step` to the curve of each name."""
        with self._writer.as_default():
            for name, value in scalars.items():
                self._summary.scalar(name, value, step=step)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        self._writer.close()

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
