"""Define the errors of the training programs, beside those of `gaudi_datasets.errors`, and show warnings."""

from __future__ import annotations

import sys

from gaudi_datasets.errors import GaudiError


class ConfigFileError(GaudiError, ValueError):
    """A configuration file that cannot be read as flags."""

    exit_status = 78


class RunChangedError(GaudiError, ValueError):
    """A run is to be continued with other settings or data than it was begun with."""

    exit_status = 78


class ShapeError(GaudiError):
    """A tensor of a step whose shape is not fixed, or a step that was traced again."""

    exit_status = 78


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


class BackgroundError(GaudiError, RuntimeError):
    """The process that scores in the background has ended by itself."""


class ThreadTrialError(GaudiError, RuntimeError):
    """A choice of threads could not be measured."""


def warn(text: str) -> None:
    """Show a line that is no result."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
