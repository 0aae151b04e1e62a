"""Define the errors of the training programs, share them among ranks, and end on a failure or a request."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from numbers import Integral
from types import FrameType, TracebackType
from typing import Any, TypeVar

from gaudi_datasets.errors import FlagError, GaudiError
from gaudi_distributed import Communicator
from gaudi_distributed.cluster.rank_info import RankInfo, detect_rank
from gaudi_distributed.failure import RankClient, exit_now, join_coordinator, start_coordinator
from gaudi_ops.program import (
    EX_TEMPFAIL,
    MAX_ERROR,
    describe_error,
    exit_status_of,
    is_foreseen,
    lacks_memory,
    say,
    shorten,
)


class ConfigFileError(GaudiError, ValueError):
    """A configuration file that cannot be read as flags."""

    exit_status = 78


class RunChangedError(GaudiError, ValueError):
    """A run is to be continued with other settings or data than it was begun with."""

    exit_status = 78


class RunInUseError(GaudiError):
    """Another process trains in the folder of the run."""

    exit_status = 75


class ShapeError(GaudiError):
    """A tensor of a step whose shape is not fixed, or a step that was traced again."""

    exit_status = 78


class CallbackError(GaudiError, RuntimeError):
    """A callback of the user that raised an error of its own."""

    exit_status = 78


class AddressError(GaudiError, OSError):
    """An address that a server cannot listen on."""

    exit_status = 74


class StoppedError(GaudiError):
    """The run was asked to stop, and has saved its state."""

    exit_status = 75
    is_on_all_ranks = True


class RanksChangedError(GaudiError):
    """Ranks are to join or to leave; all ranks raise it after the same commit."""

    exit_status = 75


class NonFiniteError(GaudiError, ArithmeticError):
    """A number of the training is no longer finite.

    Args:
        message: what to tell the user.
        step: after which it was found, from 1.
        field: the tensor that holds it.
        is_own: whether it is a number of this rank, or only in the mean over all ranks.
    """

    def __init__(self, message: str, *, step: int, field: str | None = None, is_own: bool = True) -> None:
        super().__init__(message, record=f"step {step}", field=field)
        self.is_own = is_own


class RootError(GaudiError):
    """An error of rank 0, raised on the other ranks; they end with its exit status."""

    is_own = False

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(f"rank 0: {message}")
        self.exit_status = exit_status


class OtherSideError(GaudiError, RuntimeError):
    """The other side of a comparison could not be computed; the program ends with its exit status."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class ParityError(GaudiError):
    """Two sides differ."""


class ResumeError(GaudiError, RuntimeError):
    """A run that was killed and resumed ended in another state than one that was not."""


class ExportError(GaudiError, RuntimeError):
    """An exported model that cannot be run, or whose output differs from the network's."""


class ThreadTrialError(GaudiError, RuntimeError):
    """A choice of threads could not be measured."""


# Of a device or another rank that fails; a callback may be the first to wait for it, as by reading the loss.
_OF_DEVICE = {"OpError", "HorovodInternalError", "MXNetError"}


def call_hook(name: str, hook: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a method of the user's callback with an import path.

    Raises:
        CallbackError: it raised an error of its own, which is neither foreseen nor of the device.
    """
    try:
        return call(*arguments, **named)
    except Exception as error:
        is_of_device = not _OF_DEVICE.isdisjoint(kind.__name__ for kind in type(error).__mro__)
        if hasattr(error, "exit_status") or lacks_memory(error) or is_of_device:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        failed = CallbackError(f"--callbacks {name}: fails in {hook} ({reason})", flag="--callbacks")
        if isinstance(error, OSError):  # of a disk or a network, which the next try may find well
            failed.exit_status = exit_status_of(error)
        raise failed from error


def require_argument(
    name: str, value: Any, *choices: str | None, bounds: tuple[float, float] = (1, 0), kind: type[Any] = Integral
) -> None:
    """Raise ValueError unless an argument in Python is one of some choices, or a number of a kind within bounds."""
    low, high = bounds
    allowed = [*map(repr, choices)]
    if repr(value) in allowed or (isinstance(value, kind) and low <= value <= high):
        return
    if low <= high:
        allowed.append(f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}")
    raise ValueError(f"{name} is {value!r}; use {', '.join(allowed)}")


def flag_error(message: str, remedy: str | None = None) -> FlagError:
    """Return the error of the flag that a message begins with."""
    return FlagError(message, flag=message.split(" ")[0].removesuffix(":"), remedy=remedy)


def warn(text: str) -> None:
    """Show a line that is no result."""
    say(f"warning: {text}", error=True)


Value = TypeVar("Value")


def broadcast_from_rank0(communicator: Communicator, compute: Callable[[], Value]) -> Value:
    """Call a function on rank 0 only, and return its result, a JSON value, on every rank.

    Raises:
        RootError: on the other ranks, if the function raised an error on rank 0, where that error is raised.
    """
    if communicator.size == 1:
        return compute()
    if communicator.rank:
        answer = json.loads(communicator.gather(b"")[0])
        if "error" in answer:
            raise RootError(answer["error"], answer["status"])
        value: Value = answer["value"]
        return value
    try:
        value = compute()
    except Exception as error:
        told = {"error": describe_error(error), "status": exit_status_of(error)}
        communicator.gather(json.dumps(told).encode())
        raise
    communicator.gather(json.dumps({"value": value}).encode())
    return value


class FailureReporter:
    """Report to the failure detector where this rank is and what ends it; use it as a context manager.

    Args:
        prog: the name that error messages begin with.
        debug: show the traceback of an error.
    """

    def __init__(self, prog: str = "", *, debug: bool = False) -> None:
        self._prog, self._debug = prog, debug
        self._client: RankClient | None = None
        self._step, self._phases = 0, set[str]()
        self._request: StopRequest | None = None

    @contextlib.contextmanager
    def noting_stops(self) -> Iterator[StopRequest]:
        """Yield the request to stop that is noted within a context, and by each context that is opened in it.

        So what comes between two rounds of ranks, or at the end of one, holds for the next round.
        """
        if self._request is not None:
            yield self._request
            return
        with StopRequest(self.find_requester) as self._request:
            try:
                yield self._request
            finally:
                self._request = None

    def find_requester(self) -> str:
        """Return who asks all ranks to save and end; empty: nobody does."""
        return "gaudi-run" if self._client is not None and self._client.stop_requested else ""

    def at(self, step: int, phase: str, images: int = 0) -> None:
        """Report the number of steps done, the next phase, and images of a step, see `RankClient.set_progress`."""
        self._step = step
        self._phases.add(phase)
        if self._client is not None:
            self._client.set_progress(step, phase, images)

    def begin(self, phase: str) -> None:
        """Report the next phase after the same step."""
        self.at(self._step, phase)

    def __enter__(self) -> FailureReporter:
        """Connect to the coordinator of gaudi-run, if gaudi-run started this process."""
        self._client = join_coordinator(detect_rank(os.environ), os.environ, self._announce)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Report an error, or leave the run.

        A rank of several ends here with the exit status of what ended the run, be it its own error or another rank's
        that came first; its own error is not shown then. Of a process that is alone, the error goes on.
        """
        if self._client is None:
            return
        if isinstance(error, (Exception, KeyboardInterrupt)):
            if self._debug:
                say(*"".join(traceback.format_exception(error)).splitlines(), error=True)
            exit_now(self._report(self._client, error))
        cause = self._client.leave()
        if error is None and cause is not None:
            exit_now(cause.status)

    def host(self, communicator: Communicator, rank_info: RankInfo) -> None:
        """Start a coordinator in rank 0, if gaudi-run did not; every rank calls this."""
        if self._client is None:
            self._client = start_coordinator(communicator, rank_info, os.environ, self._announce)
            if self._client is not None and "start" in self._phases:  # by which it knows that this is a training
                self._client.set_progress(self._step, "start")

    def _report(self, client: RankClient, error: BaseException) -> int:
        status, text = exit_status_of(error), shorten(describe_error(error), MAX_ERROR)
        if getattr(error, "is_on_all_ranks", False):
            cause = client.leave(text, status)
            return status if cause is None else cause.status
        is_certain = is_foreseen(error) and status != EX_TEMPFAIL and getattr(error, "is_own", True)
        if not is_foreseen(error) and not self._debug:
            text += "; this was not foreseen, rerun with --debug for the traceback"
        return client.report_failure(text, status, certain=is_certain).status

    def _announce(self, text: str) -> None:
        say(shorten(f"{self._prog}: error: {text}", MAX_ERROR), error=True)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Remember the first SIGINT, SIGTERM or SIGHUP within a context; only a second SIGINT interrupts at once.

    A scheduler sends its signals to every process, and the launcher passes them on: what comes again changes nothing.
    A person who presses Ctrl-C twice does not wait. A SIGHUP that is ignored, as by nohup, stays ignored.

    Args:
        find_other: the name of who else asks; empty: nobody does.
    """

    def __init__(self, find_other: Callable[[], str] = lambda: "") -> None:
        self._name = ""
        self._is_interrupted = False
        self._find_other = find_other
        self._before: dict[signal.Signals, Any] = {}

    def __bool__(self) -> bool:
        return bool(self.name)

    @property
    def name(self) -> str:
        """Name of the signal that came, or of who else asked; empty before."""
        return self._name or self._find_other()

    def __enter__(self) -> StopRequest:
        noted = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._note) for number in noted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted |= number == signal.SIGINT
        self._name = self._name or signal.Signals(number).name
