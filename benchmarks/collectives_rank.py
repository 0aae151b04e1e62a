"""One rank of collectives.py; rank 0 writes seconds by name. Arguments: OUTPUT REPEATS SECONDS GROUP."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gaudi_distributed import (
    CommunicationOptions,
    Communicator,
    apply_environment,
    communication_environment,
    detect_rank,
    open_communicator,
    open_device,
)

CLASSES = 81


def main(output: Path, repeats: int, seconds: float, group: int) -> None:
    """Reduce in turns, as often as there is time for, on all ranks alike; with groups, what batch norms sum in them."""
    communicator = open_horovod(CommunicationOptions("horovod", compression="fp16", group_size=group))
    candidates, megabytes = (make_group_sums if group > 1 else make_reductions)(communicator)
    timings = time_in_turns(communicator, candidates, 1, repeats, seconds)
    if communicator.rank == 0:
        output.write_text(json.dumps({"megabytes": megabytes, **timings}), encoding="utf-8")
    communicator.barrier()
    communicator.close()


def open_horovod(options: CommunicationOptions) -> Communicator:
    """Open the communicator of this rank, on a processor."""
    apply_environment(communication_environment(options, detect_rank(os.environ), os.environ))
    open_device("cpu")
    return open_communicator(options)


def make_group_sums(communicator: Any) -> tuple[dict[str, Callable[[], Any]], float]:
    """Return functions that sum within pairs what the batch norms of an SSD sum one after the other, and its MB."""
    import tensorflow as tf

    from gaudi_distributed.comm.communicator import _sum_rows
    from gaudi_models.architectures import list_ssd_tensors

    counts = [2 * channels + 1 for channels in list_ssd_tensors(CLASSES - 1).channels]

    def sum_all(reduce: Callable[[list[Any]], list[Any]], value: Any) -> list[Any]:
        sums = []
        for count in counts:
            (one,) = reduce([tf.fill([count], value)])
            value = one[0] / 2
            sums.append(one)
        return sums

    # An argument, for what is constant TensorFlow sums while it optimizes the graph, in an order of each rank's own.
    start = tf.constant(communicator.rank + 1.0)

    size = communicator.group_size
    rows = tf.function(lambda value: sum_all(partial(_sum_rows, communicator, size), value), autograph=False)
    groups = tf.function(lambda value: sum_all(communicator.allreduce_group, value), autograph=False)
    candidates: dict[str, Callable[[], Any]] = {"rows": lambda: rows(start), "groups": lambda: groups(start)}
    for one, other in zip(*(function() for function in candidates.values()), strict=True):
        tf.debugging.assert_equal(one, other)
    return candidates, sum(counts) * 4 / 1e6


def make_reductions(communicator: Any) -> tuple[dict[str, Callable[[], Any]], float]:
    """Return functions that reduce the gradients of an SSD, and their MB."""
    import horovod.tensorflow as hvd
    import numpy as np
    import tensorflow as tf

    from gaudi_models.ssd import build_ssd

    shapes = [variable.shape for variable in build_ssd(CLASSES).trainable_variables]
    gradients = [tf.random.stateless_normal(shape, [communicator.rank, 0]) for shape in shapes]
    candidates: dict[str, Callable[[], Any]] = {
        "Horovod": tf.function(lambda: [hvd.allreduce(one, name=f"g{n}") for n, one in enumerate(gradients)]),
        "ours": tf.function(lambda: communicator.allreduce(gradients)),
        "ours in fp16": tf.function(lambda: communicator.allreduce(gradients, compressed=True)),
    }
    first, second, _ = ([one.numpy() for one in function()] for function in candidates.values())
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    return candidates, sum(shape.num_elements() for shape in shapes) * 4 / 1e6


def time_in_turns(
    communicator: Any,
    candidates: Mapping[str, Callable[[], Any]],
    fewest: int,
    most: int,
    seconds: float,
    end_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time functions in turns, on all ranks alike, as often as there is time for; rank 0 decides when it is over.

    Args:
        communicator: of the ranks.
        candidates: return tensors, by name.
        fewest: rounds, whatever they take.
        most: rounds.
        seconds: after which no other round begins.
        end_round: called after each round.

    Returns:
        the seconds of each, by name.
    """
    import tensorflow as tf

    timings: dict[str, list[float]] = {name: [] for name in candidates}
    started, rounds, is_over = time.perf_counter(), 0, False
    while not is_over:
        for name, function in candidates.items():
            communicator.barrier()
            before = time.perf_counter()
            for one in function():
                one.numpy()
            timings[name].append(time.perf_counter() - before)
        end_round()
        rounds += 1
        enough = rounds >= most or (rounds >= fewest and time.perf_counter() - started > seconds)
        (is_over,) = (bool(one) for one in communicator.broadcast([tf.constant(enough)]))
    return timings


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
