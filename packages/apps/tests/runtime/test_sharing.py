"""Check the exchange between ranks, with ranks that are threads."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gaudi_apps import ssd_train
from gaudi_apps.detection.application import SSDApplication
from gaudi_apps.runtime.errors import RootError, broadcast_from_rank0
from gaudi_apps.runtime.session import Session, share_state
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.trainer import ImageSequence
from gaudi_datasets.errors import DataError
from gaudi_distributed import SingleProcess

run_ranks = runpy.run_path(str(Path(__file__).parents[1] / "ranks_in_threads.py"))["run_ranks"]


def test_all_ranks_get_what_rank_0_computes() -> None:
    asked = []

    def compute() -> dict[str, Any]:
        asked.append(1)
        return {"steps": [1, 2], "name": None}

    assert run_ranks(3, lambda rank: broadcast_from_rank0(rank, compute)) == [compute()] * 3
    assert len(asked) == 2
    assert broadcast_from_rank0(SingleProcess(), lambda: (1, 2)) == (1, 2)


def test_all_ranks_split_the_data_as_rank_0_does() -> None:
    """It may be the only one that has the folder of the run, which tells how."""
    flags = ["--mode", "eval", "--data", "x", "--recipe", "original", "--seed"]
    apps = [SSDApplication(ssd_train.PROGRAM.parse([*flags, seed]), Distribution()) for seed in ("0", "1")]

    def share(rank: Any) -> tuple[float, int]:
        app = apps[rank.rank]
        session: Any = SimpleNamespace(app=app, communicator=rank, is_root=not rank.rank, settings=None)
        Session.share_split(session)
        return app.config.recipe.val_share, app.config.run.seed

    assert run_ranks(2, share) == [(0.2, 0)] * 2


@pytest.mark.parametrize("error", [DataError("file: is damaged"), OSError(28, os.strerror(28), "file")])
def test_all_ranks_end_with_what_rank_0_raises(error: Exception) -> None:
    def fail() -> None:
        raise error

    first, *others = run_ranks(3, lambda rank: broadcast_from_rank0(rank, fail))
    assert first is error
    status = {"DataError": 65, "OSError": 74}[type(error).__name__]
    for other in others:
        assert isinstance(other, RootError)
        assert other.exit_status == status
        assert str(other).startswith("rank 0: file: ")


class Box:
    """Something with a state."""

    def __init__(self, value: float) -> None:
        self.state = {"a": np.full(3, value, np.float32), "b": np.array(int(value), np.int64)}

    def read_state(self) -> dict[str, Any]:
        return self.state

    def write_state(self, state: dict[str, Any]) -> None:
        self.state = state


def test_all_ranks_get_the_state_of_rank_0() -> None:
    def share(rank: Any) -> dict[str, Any]:
        box: Any = Box(rank.rank + 0.5)
        share_state(rank, box)
        state: dict[str, Any] = box.state
        return state

    for state in run_ranks(4, share):
        assert state["a"].tolist() == [0.5] * 3
        assert (state["b"], state["b"].dtype) == (0, np.int64)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_sequence_of_images_does_not_depend_on_the_ranks(size: int) -> None:
    """Of 300 steps, which are put together before all are there, and of 12 images each."""
    batches = np.arange(3600).reshape(300, 12)

    def see(rank: Any) -> str:
        sequence = ImageSequence()
        for ids in batches.reshape(300, size, -1)[:, rank.rank]:
            sequence.add(ids, rank)
        sequence.join(rank)
        return sequence.join(rank)

    alone, digest = ImageSequence(), ""
    for ids in batches:
        alone.add(ids, SingleProcess())
        digest = alone.join(SingleProcess())
    assert run_ranks(size, see) == [digest] * size
