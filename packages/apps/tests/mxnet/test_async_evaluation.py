from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.mxnet.evaluation import BackgroundScoring, MXNetEvaluator
from gaudi_apps.runtime.errors import BackgroundError
from gaudi_apps.training.checkpoint import Checkpoint
from gaudi_apps.training.trainer import Score
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess


def open_scoring(gate: Path) -> Callable[[Mapping[str, Any]], Any]:
    def score(tensors: Mapping[str, Any]) -> Any:
        with gate.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
        if tensors["value"] < 0:
            raise ValueError(f"value is {tensors['value']}")
        if tensors["value"] == 99:
            os._exit(3)
        return tensors["value"] * 10, os.getpid()

    return score


def open_half_an_answer() -> Callable[[Mapping[str, Any]], Any]:
    """Return a function whose process ends while it sends the result."""

    def send_half(self: Connection, content: Any, write: Any = os.write) -> None:
        write(self.fileno(), bytes(content)[: len(content) // 2])
        os._exit(3)

    def score(tensors: Mapping[str, Any]) -> Any:
        Connection._send = send_half  # type: ignore[attr-defined]
        return bytes(10_000)

    return score


def make_checkpoint(step: int, value: float) -> Checkpoint:
    return Checkpoint(step, {"value": np.array(value)}, {}, "")


def test_scores_come_in_order_and_nobody_waits_for_them(make_gate: Callable[[str], Any]) -> None:
    gate = make_gate("gate")
    with closing(BackgroundScoring(partial(open_scoring, gate.path))) as scoring:
        for step in (2, 4, 6):
            scoring.submit(make_checkpoint(step, step))
        assert list(scoring.take()) == []  # none can be done yet
        assert scoring.pending_steps == [2, 4, 6]
        gate.open()
        jobs = list(scoring.take(wait=True))
        scores = [(checkpoint.step, result.result()[0]) for checkpoint, result in jobs]
        assert scores == [(step, 10 * step) for step in (2, 4, 6)]
        (process,) = {result.result()[1] for _, result in jobs}
        assert process != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_error_of_one_does_not_keep_the_next_from_being_scored(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()  # and open
    with closing(BackgroundScoring(partial(open_scoring, gate))) as scoring:
        for value in (-1, 1, 99, 2):
            scoring.submit(make_checkpoint(value, value))
        wrong, right, last, after = (result for _, result in scoring.take(wait=True))
        with pytest.raises(ValueError, match="value is -1"):
            wrong.result()
        assert right.result()[0] == 10
        for result in (last, after):
            with pytest.raises(BackgroundError, match="has ended"):
                result.result()


def test_a_process_that_ends_while_it_answers_is_an_error() -> None:
    with closing(BackgroundScoring(open_half_an_answer)) as scoring:
        for step in (1, 2):
            scoring.submit(make_checkpoint(step, step))
        for _, result in scoring.take(wait=True):
            with pytest.raises(BackgroundError, match="has ended"):
                result.result()
        assert scoring.pending_steps == []


def test_closing_ends_what_is_being_scored(make_gate: Callable[[str], Any]) -> None:
    """The gate stays closed, so the first job would never be done."""
    scoring = BackgroundScoring(partial(open_scoring, make_gate("gate").path))
    for step in (1, 2):
        scoring.submit(make_checkpoint(step, step))
    scoring.close()
    first, second = (result for _, result in scoring.take(wait=True))
    assert isinstance(first.exception(), BackgroundError)
    assert second.done()


class Images(list[int]):
    """Stand for a data set."""

    fingerprint, categories = "five", ()


class ValueEvaluator(MXNetEvaluator):
    """Take a number as the result."""

    def summarize(self, result: Any) -> Score:
        """Return the number as the score."""
        return Score(result, {}, "")


def test_the_result_of_another_process_is_not_computed_again() -> None:
    parts: Any = (Images([1] * 5), InputOptions(1), None, (), SingleProcess())
    detector: Any = None
    evaluator = ValueEvaluator(*parts, open_detector=detector, layout="NCHW", num_images=None)
    evaluator.set_result(5, 0.25)  # type: ignore[arg-type]
    assert evaluator.score(None, 5).value == 0.25
    evaluator.set_result(6, 0.5)  # type: ignore[arg-type]
    assert evaluator.score(None, 6).value == 0.5
