"""One rank of collectives.py; rank 0 writes seconds by name. Arguments: OUTPUT REPEATS SECONDS."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gaudi_distributed import (
    CommunicationOptions,
    apply_environment,
    communication_environment,
    detect_rank,
    open_communicator,
    open_device,
)

CLASSES = 81


def main(output: Path, repeats: int, seconds: float) -> None:
    """Reduce in turns, as often as there is time for, on all ranks alike."""
    options = CommunicationOptions("horovod", compression="fp16")
    apply_environment(communication_environment(options, detect_rank(os.environ), os.environ))
    open_device("cpu")
    communicator = open_communicator(options)
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
    timings = time_in_turns(communicator, candidates, 1, repeats, seconds)
    if communicator.rank == 0:
        megabytes = sum(shape.num_elements() for shape in shapes) * 4 / 1e6
        output.write_text(json.dumps({"megabytes": megabytes, **timings}), encoding="utf-8")
    communicator.barrier()
    communicator.close()


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
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
