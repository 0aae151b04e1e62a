"""Scores during training, after it, and of checkpoints, whatever is scored."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gaudi_apps.inference.scores import Score
from gaudi_apps.runtime.session import Session, from_root, warn
from gaudi_apps.training.checkpoint import Checkpoint, load_checkpoint
from gaudi_apps.training.setup import require_equal_start
from gaudi_datasets.errors import DataError
from gaudi_datasets.output_files import write_json
from gaudi_distributed import Communicator
from gaudi_distributed.comm.opening import verify_consistent

CHECKPOINT_SCORES = "checkpoint_scores.json"

Part = TypeVar("Part")
Result = TypeVar("Result")


class Scorer(ABC, Generic[Part, Result]):
    """Scores networks; the same step only once, for training scores its last step and then reports it.

    Each process uses the network on a part of the images. All parts are gathered, rank 0 makes a result of them, and
    its score is that of all ranks.

    Args:
        communicator: of the processes that score together.
        facts: JSON values by name that must be the same for all of them: what they score on.

    Raises:
        ConfigurationError: the facts differ.
    """

    def __init__(self, communicator: Communicator, facts: Mapping[str, Any]) -> None:
        verify_consistent(communicator, facts)
        self._communicator = communicator
        self._latest: tuple[int, Result | None] | None = None
        self._begin: Callable[[str], None] = lambda phase: None

    def watch(self, begin: Callable[[str], None]) -> None:
        """Have somebody told what comes next: an "evaluation" of a batch, and then the "scoring" of all."""
        self._begin = begin

    def report_batch(self) -> None:
        """Say that the next batch is begun."""
        self._begin("evaluation")

    def set_result(self, step: int, result: Result | None) -> None:
        """Take a result of a step that was found elsewhere; rank 0 has it."""
        self._latest = step, result

    def score(self, task: Any, step: int) -> Score:
        """Score a task after so many steps, with the average of its weights where one is kept."""
        result = self._result_of(task, step)
        return Score(**from_root(self._communicator, lambda: vars(self.summarize(_known(result)))))

    def report(self, task: Any, step: int) -> Score:
        """Score it, and on rank 0 show the figures and leave them in the folder of the run."""
        result = self._result_of(task, step)
        from_root(self._communicator, lambda: self.write(_known(result), step))
        return self.score(task, step)

    def _result_of(self, task: Any, step: int) -> Result | None:
        """The result of all images; None on other ranks than 0."""
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
        """Use the network on every image that this process is to score."""

    @abstractmethod
    def pack(self, part: Part) -> bytes:
        """A part as bytes."""

    @abstractmethod
    def unpack(self, content: bytes) -> Part:
        """The part that `pack` made the bytes of."""

    @abstractmethod
    def join(self, parts: Sequence[Part]) -> Result:
        """The result of the parts of all processes, by rank: of every image once, in the order of the data set."""

    @abstractmethod
    def summarize(self, result: Result) -> Score:
        """The figures of a result."""

    @abstractmethod
    def write(self, result: Result, step: int) -> None:
        """Show a result, and leave it in the folder of the run."""


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """Arrays of numbers by name as bytes, which `unpack_arrays` reads."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def unpack_arrays(content: bytes) -> dict[str, npt.NDArray[Any]]:
    """The arrays of `pack_arrays`; what is no number is refused."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


def find_order(positions: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Where, among the images of all ranks one after the other, each image of the data set is.

    Args:
        positions: in the data set, of each rank's images.

    Raises:
        DataError: an image is missing, or was scored twice.
    """
    joined = np.concatenate(positions)
    order = np.argsort(joined, kind="stable")
    if not np.array_equal(joined[order], np.arange(len(joined))):
        raise DataError("the parts that the ranks scored are not every image once; give all ranks the same data")
    return order


def run_evaluation(session: Session) -> None:
    """Mode eval: score the checkpoints that --checkpoint names, in the order of steps, on all ranks together.

    For ``all``, the figures of each go into ``checkpoint_scores.json``, too, and one that is damaged is named and
    passed over.

    Raises:
        MissingInputError: there is no checkpoint.
        DataError: none can be read.
    """
    require_equal_start(session)
    if session.settings.checkpoint != "all":
        _score_checkpoint(session, session.load_selected)
        return
    rows = []
    # The paths are rank 0's: other ranks count them, and load nothing.
    paths = from_root(session.communicator, lambda: [str(path) for path in session.select_checkpoints()])
    for path in map(Path, paths):
        found: list[Checkpoint] = []
        loaded = from_root(session.communicator, partial(_load_readable, path, found))
        if loaded:
            step, score = _score_checkpoint(session, found.pop)
            rows.append({"step": step, **score.figures})
    if not rows:
        raise DataError(f"{session.checkpoints.folder}: none of its checkpoints can be read; restore one from a copy")
    if session.is_root:
        table = session.model_dir / CHECKPOINT_SCORES
        write_json(table, rows)
        session.folder.own(table)


def _load_readable(path: Path, found: list[Checkpoint]) -> bool:
    """Add a checkpoint to those found, and return whether it can be read."""
    try:
        found.append(load_checkpoint(path))
    except DataError as error:
        warn(f"{error}")
    return bool(found)


def _score_checkpoint(session: Session, load: Callable[[], Checkpoint]) -> tuple[int, Score]:
    restored = session.restore_together(load)
    print(f"step {restored.step}")
    scorer = session.app.open_scorer(session.folder, restored.facts, session.communicator)
    scorer.watch(session.supervised.begin)
    return restored.step, scorer.report(restored.task, restored.step)


def _known(result: Result | None) -> Result:
    if result is None:
        raise RuntimeError("only rank 0 has the result of an evaluation")
    return result
