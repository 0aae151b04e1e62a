"""Stopping on request: SIGTERM and Ctrl-C let the step end, so that a checkpoint can be written."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def interrupt_on_sigterm() -> None:
    """Have SIGTERM interrupt the program as Ctrl-C does, so that what it was writing is taken away, as a rule."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


class StoppedError(Exception):
    """The run was asked to stop, and has saved what it did."""

    exit_status: ClassVar[int] = 75
    is_on_all_ranks: ClassVar[bool] = True


class StopRequest:
    """Notes the first SIGINT or SIGTERM while it is entered; a second one interrupts at once.

    Args:
        find_other: the name of who else asks; empty: nobody does.
    """

    def __init__(self, find_other: Callable[[], str] = lambda: "") -> None:
        self._name = ""
        self._find_other = find_other
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def name(self) -> str:
        """Name of the signal that came, or of who else asked; empty before."""
        return self._name or self._find_other()

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._name:
            raise KeyboardInterrupt
        self._name = signal.Signals(number).name
