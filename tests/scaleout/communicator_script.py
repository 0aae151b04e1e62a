"""One rank: calls all of a communicator, and writes what it got to FOLDER/rank_R.npz. Arguments: FOLDER ENGINE."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gaudi_distributed import (
    CommunicationOptions,
    Communicator,
    ConfigurationError,
    allreduce_within,
    apply_environment,
    communication_environment,
    detect_rank,
    open_communicator,
    open_device,
    verify_consistent,
)
from gaudi_distributed.comm.communicator import _sum_rows

IMAGES = 8  # of a step, over all ranks
# Many small tensors, one larger than the bucket of 1 MiB, and three types.
SHAPES = ((), (7,), (3, 5), (300, 1000), (64,), (1, 1, 1, 2))


def main() -> None:
    gc.disable()  # what is imported stays
    folder, engine = Path(sys.argv[1]), sys.argv[2]
    rank_info = detect_rank(os.environ)
    options = CommunicationOptions(engine, compression="fp16", fusion_threshold_mb=1, group_size=2)  # type: ignore[arg-type]
    apply_environment(communication_environment(options, rank_info, os.environ))
    open_device("cpu")
    communicator = open_communicator(options)
    assert (communicator.rank, communicator.size) == (rank_info.rank, rank_info.size)
    assert (communicator.local_rank, communicator.local_size) == (rank_info.local_rank, rank_info.local_size)
    results = {
        **reduce_everything(communicator),
        **broadcast_everything(communicator),
        **reduce_in_groups(communicator),
        **gather_everything(communicator),
        **train(communicator),
        "disagreement": disagree(communicator),
    }
    communicator.barrier()
    communicator.close()
    save(folder / f"rank_{rank_info.rank}.npz", results)
    gc.freeze()  # nor is it looked through at the end


def make_tensors(rank: int) -> list[Any]:
    """Return tensors of all shapes, other ones on each rank."""
    import numpy as np
    import tensorflow as tf

    generator = np.random.default_rng(100 + rank)
    return [tf.constant(generator.normal(size=shape), tf.float32) for shape in SHAPES]


def reduce_everything(communicator: Communicator) -> dict[str, Any]:
    """Reduce eagerly, and in a graph called three times; with and without 16 bits."""
    import tensorflow as tf

    tensors = make_tensors(communicator.rank)
    wide = [tf.cast(tensor, tf.float64) for tensor in tensors[:2]]

    @tf.function
    def step(values: list[Any]) -> list[Any]:
        # The scope differs from rank to rank: names must not depend on it.
        with tf.name_scope(f"model_{communicator.rank}"):
            reduced = communicator.allreduce(values)
        return [*communicator.allreduce([2 * value for value in reduced]), *communicator.allreduce(wide)]

    @tf.function
    def loop(rows: Any) -> Any:
        return tf.map_fn(lambda row: communicator.allreduce([row])[0], rows, parallel_iterations=1)

    for _ in range(3):
        in_graph = step(tensors)
    counts = tf.constant([communicator.rank, 1], tf.int64)
    return {
        "mean": communicator.allreduce(tensors),
        "mean_again": communicator.allreduce(tensors),
        "sum": communicator.allreduce([*tensors, counts], average=False),
        "compressed": communicator.allreduce([*tensors, wide[1]], compressed=True),
        "large": communicator.allreduce([tf.constant([40000.0, 1e-3])], compressed=True),
        "in_graph": in_graph,
        "in_loop": [loop(tensors[2])],
    }


def broadcast_everything(communicator: Communicator) -> dict[str, Any]:
    """Broadcast from the first and the last rank, with bits that a sum of floats would lose, and of many types."""
    import numpy as np
    import tensorflow as tf

    rank = communicator.rank
    special = tf.constant([-0.0, np.nan, np.inf, 1e-45, rank], tf.float32)
    types = [tf.constant([rank, 3], kind) for kind in (tf.int64, tf.float64, tf.uint8, tf.int32, tf.float16)]
    refuse(ValueError, lambda: communicator.broadcast([special], root=communicator.size))
    assert communicator.broadcast([]) == []
    return {
        "from_first": communicator.broadcast([*make_tensors(rank), special, *types, tf.constant([rank == 0])]),
        "from_last": communicator.broadcast([*make_tensors(rank), special], root=communicator.size - 1),
        "of_array": communicator.broadcast([np.arange(6, dtype=np.float32).reshape(2, 3) * (1 - rank)]),
    }


def reduce_in_groups(communicator: Communicator) -> dict[str, Any]:
    """Sum within groups of two, eagerly and in a graph, and of one."""
    import tensorflow as tf

    tensors = make_tensors(communicator.rank)[:3]
    within = allreduce_within(communicator, 2)
    if communicator.size > 2:
        assert within == communicator.allreduce_group  # type: ignore[attr-defined]
    refuse(ConfigurationError, lambda: allreduce_within(communicator, 3))
    return {
        "groups": within(tensors),
        "groups_in_graph": tf.function(within)(tensors),
        "groups_by_rows": _sum_rows(communicator, 2, tensors),
        "groups_of_one": allreduce_within(communicator, 1)(tensors),
    }


def gather_everything(communicator: Communicator) -> dict[str, Any]:
    """Gather contents of other lengths, the first empty, and empty ones of all."""
    import numpy as np

    contents = communicator.gather(bytes(range(communicator.rank * 5)))
    assert communicator.gather(b"") == [b""] * communicator.size
    assert communicator.gather_at_root(bytes(range(communicator.rank * 5))) == ([] if communicator.rank else contents)
    assert communicator.gather_at_root(b"") == ([] if communicator.rank else [b""] * communicator.size)
    return {"gathered": [np.frombuffer(content, np.uint8) for content in contents]}


def train(communicator: Communicator) -> dict[str, Any]:
    """Take three steps with batch norm over all ranks on this rank's share of the images; return all weights."""
    import numpy as np
    import tensorflow as tf

    from gaudi_models.layers import make_batch_norm
    from gaudi_ops.tf.keras_api import keras

    keras.utils.set_random_seed(1)
    images = x = keras.Input([9, 9, 3])
    for width in (4, 6):
        # Two branches of one shape, whose statistics may be exchanged at the same time.
        branches = [keras.layers.Conv2D(width, 3)(x) for _ in range(2)]
        reduce = allreduce_within(communicator, communicator.size)
        x = keras.layers.Add()([make_batch_norm(reduce, momentum=0.5)(branch) for branch in branches])
        x = keras.layers.ReLU()(x)
    model = keras.Model(images, keras.layers.Dense(2)(keras.layers.Flatten()(x)))

    @tf.function
    def step(batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch, training=True)))
        gradients = communicator.allreduce(tape.gradient(loss, model.trainable_variables))
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)

    share = IMAGES // communicator.size
    every = np.random.default_rng(3).normal(1, 2, [3, IMAGES, 9, 9, 3]).astype(np.float32)
    for batch in every:
        step(tf.constant(batch[communicator.rank * share :][:share]))
    return {"trained": model.get_weights()}


def disagree(communicator: Communicator) -> list[Any]:
    """Agree on one thing, then disagree on another; return field and message."""
    import numpy as np

    verify_consistent(communicator, {"data": "abc", "configuration": {"batch_size": 2}})
    other = {"data": "abc", "configuration": {"batch_size": 2 if communicator.rank else 4}}
    error = refuse(ConfigurationError, lambda: verify_consistent(communicator, other))
    assert isinstance(error, ConfigurationError)
    return [np.array(error.field), np.array(error.message)]


def refuse(kind: type[Exception], call: Callable[[], object]) -> Exception:
    """Return the error of this kind that a call raises; AssertionError for a call that raises none."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def save(path: Path, results: dict[str, Any]) -> None:
    import numpy as np

    np.savez(
        path, **{f"{name}/{i}": np.asarray(value) for name, values in results.items() for i, value in enumerate(values)}
    )


if __name__ == "__main__":
    main()
