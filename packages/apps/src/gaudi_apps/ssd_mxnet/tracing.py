"""A trace of some steps of a training in MXNet, for Chrome's about:tracing and Perfetto."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from gaudi_apps.profiling import StepRange

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
