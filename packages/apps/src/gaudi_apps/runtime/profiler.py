"""Trace some steps of a training for TensorBoard's profiler."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gaudi_datasets.errors import FlagError


@dataclass(frozen=True)
class StepRange:
    """Steps from `first` to `last`, both included; the first step of a training is 1, as reports count."""

    first: int
    last: int

    def __contains__(self, step: int) -> bool:
        return self.first <= step <= self.last


def parse_step_range(text: str, flag: str = "profile") -> StepRange | None:
    """Parse the range of a flag such as `--profile a,b`; None for ``0,0``, which is no range.

    Raises:
        FlagError: it is not two numbers of at least 1, the smaller one first.
    """
    match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text, re.ASCII)
    if match is None:
        raise FlagError(f"--{flag} {text!r}: must be two steps as in 100,110, or 0,0 for none", flag=f"--{flag}")
    first, last = int(match[1]), int(match[2])
    if first == last == 0:
        return None
    if not 1 <= first <= last:
        raise FlagError(f"--{flag} {text}: must be steps of at least 1, the smaller one first", flag=f"--{flag}")
    return StepRange(first, last)


class Profiler:
    """Trace the steps of a range; the trace is written when the range or the run ends, whichever is first.

    A run that is continued within the range traces the rest of it. Use it as a context manager.

    Args:
        folder: of TensorBoard's files; the trace goes into `plugins/profile` below it.
        steps: what to trace; None: nothing, and TensorFlow is not imported.
    """

    def __init__(self, folder: Path, steps: StepRange | None) -> None:
        self._folder, self._steps = folder, steps
        self._is_tracing = False
        self._mark = contextlib.ExitStack()  # of the step that is being traced

    def before_step(self, step: int) -> None:
        """Call before the step of this number, counted from 1."""
        if self._steps is None or step not in self._steps:
            return
        import tensorflow as tf

        if not self._is_tracing:
            self._folder.mkdir(parents=True, exist_ok=True)
            tf.profiler.experimental.start(str(self._folder))
            self._is_tracing = True
        # Marks the step in the trace, by which TensorBoard finds the time that a step takes.
        self._mark.enter_context(tf.profiler.experimental.Trace("train", step_num=step, _r=1))

    def after_step(self, step: int) -> None:
        """Call after that step."""
        self._mark.close()
        if self._steps is not None and step == self._steps.last:
            self.close()

    def close(self) -> None:
        """Write what is traced; without a trace nothing happens."""
        self._mark.close()
        if not self._is_tracing:
            return
        import tensorflow as tf

        self._is_tracing = False
        tf.test.experimental.sync_devices()  # the last step may still be running on its device
        tf.profiler.experimental.stop()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
