"""Define what training needs of the library that computes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gaudi_apps.runtime.profiler import StepRange
from gaudi_apps.runtime.settings import DeviceSettings

if TYPE_CHECKING:
    from gaudi_apps.training.parity.record import ReplaySteps


class Tracer(Protocol):
    """Traces some steps."""

    def before_step(self, step: int) -> None:
        """Call before the step of this number, counted from 1."""

    def after_step(self, step: int) -> None:
        """Call after that step."""


class Framework(Protocol):
    """A library that computes; it is imported by `start` at the earliest.

    Attributes:
        distributions: names of the packages whose versions must be equal on all ranks.
    """

    distributions: tuple[str, ...]

    def start(self, settings: DeviceSettings) -> None:
        """Choose device and precision, set the environment, and only then import the library.

        Raises:
            ConfigurationError, DeviceError, ImportError: it cannot compute like this here.
        """

    @property
    def precision_name(self) -> str:
        """Return the precision that was started with, which ranks compare."""

    def list_devices(self) -> list[str]:
        """List the kinds of the devices in use, once the framework was started."""

    def needs_static_shapes(self) -> bool:
        """Return True if the device in use needs static shapes."""

    @property
    def replay_steps(self) -> ReplaySteps:
        """Return the function that trains and yields the tensors of each step, for `gaudi_apps.training.parity`."""

    def open_tracer(self, folder: Path, steps: StepRange | None) -> AbstractContextManager[Tracer]:
        """Open a trace of a range of steps, which is written into the folder; None traces no step."""
