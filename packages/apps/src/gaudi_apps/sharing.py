"""What rank 0 knows or has, for all ranks: its files are those that count, and no other rank needs to see them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from gaudi_datasets.program import describe_error, exit_status_of
from gaudi_distributed import Communicator

if TYPE_CHECKING:
    from gaudi_apps.application import TrainableTask

Value = TypeVar("Value")


class RootError(Exception):
    """What rank 0 could not do, on the other ranks; they end with its exit status."""

    is_own: ClassVar[bool] = False

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(f"rank 0: {message}")
        self.exit_status = exit_status


def from_root(communicator: Communicator, compute: Callable[[], Value]) -> Value:
    """What `compute`, which is called on rank 0 only, gives there: a JSON value, for every rank.

    Raises:
        RootError: it raised something on rank 0, which is raised on there.
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


def share_state(communicator: Communicator, task: TrainableTask) -> None:
    """Give the networks of all ranks, which are built alike, the state that rank 0's has."""
    if communicator.size > 1:
        state = task.read_state()
        tensors = communicator.broadcast(list(state.values()))
        task.write_state(dict(zip(state, map(np.asarray, tensors), strict=True)))
