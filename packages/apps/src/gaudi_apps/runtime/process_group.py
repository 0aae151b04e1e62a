"""Share results and errors of rank 0 with the other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from gaudi_apps.runtime.errors import RootError
from gaudi_datasets.program import describe_error, exit_status_of
from gaudi_distributed import Communicator

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
