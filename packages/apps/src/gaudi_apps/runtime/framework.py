"""Define what training needs of the library that computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gaudi_apps.runtime.profiler import StepRange
from gaudi_apps.runtime.settings import DeviceSettings

if TYPE_CHECKING:
    from gaudi_apps.training.parity.record import Reference, StepTensor


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

    def replay_steps(
        self,
        task: Any,
        batches: Iterator[Mapping[str, Any]],
        learning_rate: Callable[[int], float],
        steps: int,
        reference: Reference | None,
    ) -> Iterator[list[StepTensor]]:
        """Train, and give all tensors of each step in the order of computation, for `gaudi_apps.training.parity`.

        Args:
            task: that the program built for this framework; alone, not with other processes.
            batches: of `gaudi_apps.training.application.TrainingData`.
            learning_rate: of a step, counted from 0.
            steps: how many.
            reference: steps of the other side, whose batches and outputs are used; None: this side runs alone.
        """

    def open_tracer(self, folder: Path, steps: StepRange | None) -> AbstractContextManager[Tracer]:
        """Open a trace of a range of steps, which is written into the folder; None traces no step."""
