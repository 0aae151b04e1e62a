"""Evaluate networks on all ranks together: each rank uses the network on some images, and rank 0 joins the parts."""

from __future__ import annotations

import io
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gaudi_apps.runtime.errors import broadcast_from_rank0
from gaudi_apps.training.run_dir import RunFolder
from gaudi_apps.training.trainer import Score
from gaudi_datasets.errors import DataError
from gaudi_datasets.program import ProgressLine
from gaudi_datasets.sampling import PADDING_ID, InputOptions, shard_indices
from gaudi_distributed import Communicator
from gaudi_distributed.comm.opening import verify_consistent

Batch: TypeAlias = Mapping[str, Any]
Columns: TypeAlias = dict[str, npt.NDArray[Any]]  # by name, each with a row for each image
Result = TypeVar("Result")

MEASURED_BATCHES = 5  # with the first one, which is compiled


class Evaluator(ABC, Generic[Result]):
    """Evaluate a task. A step is evaluated once, so that training can score its last step and then report it.

    Args:
        source: images and ground truth, of `gaudi_datasets`.
        options: batch size, threads, rank and number of ranks; metrics do not depend on them.
        folder: of the run, to write metrics and images into.
        communicator: of the processes that evaluate together.
        num_images: evaluate the first images only; None: all.

    Attributes:
        split: name of the images, in what is written.
        show: shows how many of this rank's images are evaluated, and their number; None: nobody does.

    Raises:
        ConfigurationError: the data of the ranks differs.
    """

    def __init__(
        self,
        source: Any,
        options: InputOptions,
        folder: RunFolder,
        communicator: Communicator,
        *,
        num_images: int | None,
    ) -> None:
        verify_consistent(communicator, {"validation data": source.fingerprint, "images": num_images})
        self._source, self._options, self._folder, self._communicator = source, options, folder, communicator
        self._limit = num_images
        self._total = len(source) if num_images is None else min(num_images, len(source))
        self._network: tuple[Any, Any] | None = None  # a task, and what is made of its model
        self._latest: tuple[int, Result | None] | None = None
        self._begin: Callable[[str], None] = lambda phase: None
        self.split = "val"
        self.show: Callable[[int, int], None] | None = None if communicator.rank else ProgressLine("evaluating")

    def watch(self, begin: Callable[[str], None]) -> None:
        """Call a function at the beginning of each phase: "evaluation" for each batch, then "scoring"."""
        self._begin = begin

    @property
    def num_images(self) -> int:
        """Return the number of images that are evaluated."""
        return self._total

    def use_source(self, source: Any, split: str) -> None:
        """Evaluate another source of the same classes from now on, and name its split in what is written.

        Raises:
            ConfigurationError: the data of the ranks differs.
        """
        verify_consistent(self._communicator, {f"{split} data": source.fingerprint})
        self._total = len(source) if self._limit is None else min(self._limit, len(source))
        self._source, self._latest, self.split = source, None, split

    def measure(self, task: Any) -> float:
        """Measure the seconds that the network needs for an image of all ranks, once it is compiled."""
        if self._network is None or self._network[0] is not task:
            self._network = task, self.open_network(task.model)
        per_step = self._options.batch_size * self._options.size
        times = []
        for batch in self.read_batches(min(MEASURED_BATCHES * per_step, self._total)):
            self._begin("evaluation")
            self.predict(self._network[1], batch)
            times.append(time.monotonic())
        if len(times) == 1:  # which was compiled meanwhile
            self.predict(self._network[1], batch)
            times.append(time.monotonic())
        return (times[-1] - times[0]) / (len(times) - 1) / per_step

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
                parts = [unpack_arrays(content) for content in self._communicator.gather(pack_arrays(part))]
            self._latest = step, None if self._communicator.rank else self.join(parts)
        return self._latest[1]

    def evaluate(self, task: Any) -> Columns:
        """Use the network on the images of this rank; return the predictions, and "positions" in the data set."""
        # One network for all evaluations of a training: a new one would be traced and compiled again.
        if self._network is None or self._network[0] is not task:
            self._network = task, self.open_network(task.model)
        positions = shard_indices(self._total, self._options)
        positions = positions[positions < self._total]
        found, done = [], 0
        if self.show is not None:
            self.show(0, len(positions))
        for batch in self.read_batches(self._total):
            self._begin("evaluation")
            is_image = np.asarray(batch["image_ids"]) != PADDING_ID
            predicted = self.predict(self._network[1], batch)
            found.append({name: values[is_image] for name, values in predicted.items()})
            done += int(is_image.sum())
            if self.show is not None:
                self.show(done, len(positions))
        return {"positions": positions, **_concatenate(found)}

    def join(self, parts: Sequence[Columns]) -> Result:
        """Compute the result of the parts of all ranks, each from `evaluate`.

        Raises:
            DataError: an image is missing, or is there twice.
        """
        order = find_order([part["positions"] for part in parts])
        columns = {name: values[order] for name, values in _concatenate(parts).items()}
        del columns["positions"]
        return self.compute(columns)

    @abstractmethod
    def open_network(self, model: Any) -> Any:
        """Prepare the model of a task for predictions."""

    @abstractmethod
    def read_batches(self, num_images: int) -> Iterable[Batch]:
        """Read the images of this rank among the first ones; `PADDING_ID` in ``image_ids`` marks padding."""

    @abstractmethod
    def predict(self, network: Any, batch: Batch) -> Columns:
        """Use what `open_network` returned on a batch."""

    @abstractmethod
    def compute(self, columns: Columns) -> Result:
        """Compute the result of the predictions for all images, in the order of the data set."""

    @abstractmethod
    def summarize(self, result: Result) -> Score:
        """Return the metrics of a result."""

    @abstractmethod
    def write(self, result: Result, step: int) -> None:
        """Print a result, and write it into the folder of the run."""


def _concatenate(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


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


CONFUSED_CLASSES = 30


def cut_confusion(matrix: npt.NDArray[np.int64], names: Sequence[str]) -> dict[str, Any]:
    """Return the rows and columns of the classes with the most confusion, and of the background.

    Args:
        matrix: [classes + 1, classes + 1], the truth in rows, the background last; or [classes, classes] without one.
        names: of the classes.

    Returns:
        names, matrix and the number of classes that are left out, as JSON values.
    """
    wrong = matrix.sum(axis=0) + matrix.sum(axis=1) - 2 * np.diagonal(matrix)
    chosen = sorted(np.argsort(-wrong[: len(names)], kind="stable")[:CONFUSED_CLASSES].tolist())
    rows = [*chosen, *range(len(names), len(matrix))]
    return {
        "names": [names[row] for row in chosen],
        "background": len(matrix) > len(names),
        "matrix": matrix[np.ix_(rows, rows)].tolist(),
        "left_out": len(names) - len(chosen),
    }
