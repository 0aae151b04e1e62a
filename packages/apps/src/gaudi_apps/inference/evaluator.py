"""Evaluate networks on all ranks together: each rank uses the network on some images, and rank 0 joins the parts."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gaudi_apps.inference.scores import Score
from gaudi_apps.runtime.session import broadcast_from_rank0
from gaudi_datasets.errors import DataError
from gaudi_distributed import Communicator
from gaudi_distributed.comm.opening import verify_consistent

Part = TypeVar("Part")
Result = TypeVar("Result")


class Evaluator(ABC, Generic[Part, Result]):
    """Evaluate a task. A step is evaluated once, so that training can score its last step and then report it.

    Args:
        communicator: of the processes that evaluate together.
        settings: JSON values by name that must be the same on all ranks, such as the fingerprint of the data.

    Raises:
        ConfigurationError: the settings of the ranks differ.
    """

    def __init__(self, communicator: Communicator, settings: Mapping[str, Any]) -> None:
        verify_consistent(communicator, settings)
        self._communicator = communicator
        self._latest: tuple[int, Result | None] | None = None
        self._begin: Callable[[str], None] = lambda phase: None

    def watch(self, begin: Callable[[str], None]) -> None:
        """Call a function at the beginning of each phase: "evaluation" for each batch, then "scoring"."""
        self._begin = begin

    def report_batch(self) -> None:
        """Report the beginning of a batch."""
        self._begin("evaluation")

    def set_result(self, step: int, result: Result | None) -> None:
        """Take the result of a step that was computed elsewhere; only rank 0 has it."""
        self._latest = step, result

    def score(self, task: Any, step: int) -> Score:
        """Evaluate a task after a step, with the average of its weights if one is kept.

        Returns:
            the metrics, on all ranks.
        """
        result = self._find_result(task, step)
        return Score(**broadcast_from_rank0(self._communicator, lambda: vars(self.summarize(_require(result)))))

    def report(self, task: Any, step: int) -> Score:
        """Evaluate a task, and on rank 0 print the metrics and write them into the folder of the run."""
        result = self._find_result(task, step)
        broadcast_from_rank0(self._communicator, lambda: self.write(_require(result), step))
        return self.score(task, step)

    def _find_result(self, task: Any, step: int) -> Result | None:
        if self._latest is None or self._latest[0] != step:
            with task.averaged():
                part = self.evaluate(task)
            self._begin("scoring")
            parts = [part]
            if self._communicator.size > 1:
                parts = [self.unpack(content) for content in self._communicator.gather(self.pack(part))]
            self._latest = step, None if self._communicator.rank else self.join(parts)
        return self._latest[1]

    @abstractmethod
    def evaluate(self, task: Any) -> Part:
        """Use the network on the images of this rank."""

    @abstractmethod
    def pack(self, part: Part) -> bytes:
        """Return a part as bytes."""

    @abstractmethod
    def unpack(self, content: bytes) -> Part:
        """Return the part of the bytes of `pack`."""

    @abstractmethod
    def join(self, parts: Sequence[Part]) -> Result:
        """Compute the result of the parts of all ranks, by rank; each image is in one part."""

    @abstractmethod
    def summarize(self, result: Result) -> Score:
        """Return the metrics of a result."""

    @abstractmethod
    def write(self, result: Result, step: int) -> None:
        """Print a result, and write it into the folder of the run."""


def _require(result: Result | None) -> Result:
    if result is None:
        raise RuntimeError("only rank 0 has the result of an evaluation")
    return result


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Return arrays of numbers by name as bytes, which `unpack_arrays` reads."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def unpack_arrays(content: bytes) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of `pack_arrays`.

    Raises:
        ValueError: an array holds other objects than numbers.
    """
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


def find_order(positions: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Find the order in which the joined images of all ranks are those of the data set.

    Args:
        positions: of each rank's images in the data set.

    Returns:
        int64 [images], indices into the joined images.

    Raises:
        DataError: an image is missing, or is there twice.
    """
    joined = np.concatenate(positions)
    order = np.argsort(joined, kind="stable")
    if not np.array_equal(joined[order], np.arange(len(joined))):
        raise DataError(
            "the ranks did not evaluate each image of the data set once", remedy="give all ranks the same data"
        )
    return order
