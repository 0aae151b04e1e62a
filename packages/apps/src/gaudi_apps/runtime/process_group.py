"""Share results, errors and state of rank 0 with the other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gaudi_apps.runtime.errors import RootError
from gaudi_datasets.program import describe_error, exit_status_of
from gaudi_distributed import Communicator

if TYPE_CHECKING:
    from gaudi_apps.training.trainer import TrainableTask

Value = TypeVar("Value")


def broadcast_from_rank0(communicator: Communicator, compute: Callable[[], Value]) -> Value:
    """Call a function on rank 0 only, and return its result, a JSON value, on every rank.

    Raises:
        RootError: on the other ranks, if the function raised an error on rank 0, where that error is raised.
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
