"""Evaluate networks on all ranks together: each rank uses the network on some images, and rank 0 joins the parts."""

from __future__ import annotations

import io
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gaudi_apps.runtime.errors import broadcast_from_rank0, warn
from gaudi_apps.training.run_dir import RunFolder, describe_data
from gaudi_apps.training.trainer import Score
from gaudi_datasets.errors import BadImageError, DataError
from gaudi_datasets.program import ProgressLine, count_things
from gaudi_datasets.sampling import PADDING_ID, InputOptions, shard_indices
from gaudi_distributed import Communicator
from gaudi_distributed.comm.opening import verify_consistent
from gaudi_distributed.devices.machine import name_processor

if TYPE_CHECKING:
    from gaudi_apps.inference.exported_models import ExportedModel

Batch: TypeAlias = Mapping[str, Any]
Columns: TypeAlias = dict[str, npt.NDArray[Any]]  # by name, each with a row for each image
Result = TypeVar("Result")

TIMED_BATCH, TIMED_REPEATS = 16, 3  # of an export, besides images one by one
MEASURED_BATCHES = 5  # with the first one, which is compiled


@dataclass(frozen=True)
class ExportScore:
    """The metric of an exported model, and its speed without decoding and resizing, unless it includes them.

    Attributes:
        metric: name of the metric that training is to raise.
        value: of this metric, in 0..1.
        figures: all metrics by name.
        split: name of the images.
        images: that were evaluated, one by one.
        images_total: of the data set.
        seconds: for each image by itself.
        batch: images of a batch.
        batch_seconds: median for such a batch.
        runtime: that computed, such as ``"openvino"``.
        device: that it used, ``"CPU"`` or ``"GPU"``.
        threads: of the CPU that computed.
        included: what else was timed, such as decoding.
    """

    metric: str
    value: float
    figures: Mapping[str, float]
    split: str
    images: int
    images_total: int
    seconds: Sequence[float]
    batch: int
    batch_seconds: float
    runtime: str = "tensorflow"
    device: str = "CPU"
    threads: int = 1
    included: Sequence[str] = ()

    def to_document(self, reference: ExportScore) -> dict[str, Any]:
        """Return what export.json says of it beside the network: JSON values by name."""
        p50, p99 = np.percentile(np.array(self.seconds) * 1000, [50, 99]).tolist()
        rates = {"1": len(self.seconds) / sum(self.seconds), "16": self.batch / self.batch_seconds}
        return {
            "evaluation": {
                "split": self.split,
                "images": self.images,
                "images_total": self.images_total,
                "metric": self.metric,
                "of_network": reference.value,
                "lost": reference.value - self.value,
                **self.figures,
            },
            "speed": {
                "images_per_second": rates,
                "of_network": len(reference.seconds) / sum(reference.seconds),
                "latency_ms": {"p50": p50, "p99": p99},
                "processors": len(os.sched_getaffinity(0)),
                "processor": name_processor(),
                "runtime": self.runtime,
                "device": self.device,
                "threads": self.threads,
                "network_device": reference.device,
                "network_threads": reference.threads,
                "included": list(self.included),
            },
        }


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
        metric: name of the metric that training is to raise, among those of a `Score`.
        export: name of the export that is evaluated, in what is written; empty: the network is.
        show: shows how many of this rank's images are evaluated, and their number; None: nobody does.

    Raises:
        ConfigurationError: the data of the ranks differs.
    """

    metric: ClassVar[str]

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
        self.split, self.export = "val", ""
        self.show: Callable[[int, int], None] | None = None if communicator.rank else ProgressLine("evaluating")

    def watch(self, begin: Callable[[str], None]) -> None:
        """Call a function at the beginning of each phase: "evaluation" for each batch, then "scoring"."""
        self._begin = begin

    @property
    def num_images(self) -> int:
        """Return the number of images that are evaluated."""
        return self._total

    def name_images(self) -> str:
        """Name the images by their contents and number, to tell whether scores can be compared."""
        return f"{self._source.fingerprint} {self._total}"

    def compare_with_run(self, model_config: Mapping[str, Any]) -> None:
        """Warn where the run was scored on other images of this name, or was trained on some of these."""
        now = self.describe_data(model_config)
        if change := self._folder.describe_validation_change(self.split, now):
            warn(f"the run was scored on other {self.split} images, so compare its scores with care: {change}")
        try:
            listed = [(str(name), str(known)) for name, known in dict(self._folder.read_data()["files"]).items()]
        except (LookupError, TypeError, ValueError):  # there is no list, or one of another form
            return
        # Of several joined splits, names begin with a number.
        trained = {(re.sub(r"^\d+:", "", name), known) for name, known in listed}
        own = [(re.sub(r"^\d+:", "", name), known) for name, known in now["files"].items()]
        # Earlier releases lacked the CRC-32C in the end.
        if count := sum((name, known) in trained or (name, known.rpartition(" ")[0]) in trained for name, known in own):
            found = f"{count_things(count, 'file')} of the {self.split} images"
            warn(f"the run was trained on {found} (of {len(own)}), so their score tells little of new images")

    def describe_data(self, model_config: Mapping[str, Any]) -> dict[str, Any]:
        """Describe the images, to name what differs when a run goes on; see `gaudi_apps.training.run_dir`."""
        files: Mapping[str, str] = getattr(self._source, "list_files", dict)()
        return describe_data(model_config, self._source.fingerprint, files)

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
                parts = [unpack_arrays(content) for content in self._communicator.gather_at_root(pack_arrays(part))]
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

    def score_exported(self, model: ExportedModel) -> ExportScore:
        """Evaluate an exported model in this process alone, image by image as they are stored, and time it."""
        columns, seconds = self.run_exported(model)
        score = self.summarize(self.compute(columns))
        first = [model.prepare(self._source.read(place).encoded) for place in range(min(TIMED_BATCH, self._total))]
        batch = [first[place % len(first)] for place in range(TIMED_BATCH)]
        total, repeats = len(self._source), _time(lambda: model.compute(batch))
        figures = self.metric, score.value, score.figures, self.split, self._total, total
        computed = model.runtime, model.device, model.threads, model.included
        return ExportScore(*figures, seconds, TIMED_BATCH, float(np.median(repeats)), *computed)

    def measure_exported(self, model: ExportedModel, positions: Sequence[int]) -> float:
        """Return the metric of an exported model on some images, by their positions among those of the evaluation.

        It is 0 where they define none, as an image without a box: no network loses anything there.
        """
        value = self.summarize(self.compute(self.run_exported(model, positions, shows=False)[0])).value
        return 0.0 if math.isnan(value) else value

    def report_exported(self, model: ExportedModel, step: int, export: str) -> Score:
        """Evaluate an exported model of a step, and print and write the metrics as `report` does, with its name."""
        self.export = export
        result = self.compute(self.run_exported(model)[0])
        self.write(result, step)
        return self.summarize(result)

    def run_exported(
        self, model: ExportedModel, positions: Sequence[int] | None = None, *, shows: bool = True
    ) -> tuple[Columns, list[float]]:
        """Use an exported model on images one by one, all by default; return the predictions, and seconds of each."""
        chosen = range(self._total) if positions is None else positions
        found, seconds = [], []
        for done, position in enumerate(chosen):
            example = self._source.read(position)
            try:
                given = model.prepare(example.encoded)
            except BadImageError as error:
                error.record = f"{self._source.name}: record {position}"
                raise
            if not done:
                model.compute([given])  # which compiles
            began = time.perf_counter()
            outputs = model.compute([given])
            seconds.append(time.perf_counter() - began)
            found.append(self.read_outputs(outputs, example))
            if shows and self.show is not None:
                self.show(done + 1, len(chosen))
        return _concatenate(found), seconds

    def read_encoded(self, position: int) -> bytes:
        """Read an image of the evaluation as it is stored, JPEG or PNG."""
        encoded: bytes = self._source.read(position).encoded
        return encoded

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
    def read_outputs(self, outputs: Mapping[str, npt.NDArray[Any]], example: Any) -> Columns:
        """Make of the outputs of an exported model for an image of the source what `predict` returns."""

    @abstractmethod
    def compute(self, columns: Columns) -> Result:
        """Compute the result of the predictions for all images, in the order of the data set."""

    @abstractmethod
    def summarize(self, result: Result) -> Score:
        """Return the metrics of a result."""

    @abstractmethod
    def write(self, result: Result, step: int) -> None:
        """Print a result, and write it into the folder of the run."""


def _time(function: Callable[[], object]) -> list[float]:
    """Return the seconds of some calls, after one that compiles."""
    function()
    times = [time.perf_counter()]
    for _ in range(TIMED_REPEATS):
        function()
        times.append(time.perf_counter())
    return np.diff(times).tolist()


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
