"""One rank: calls all of an MXNet communicator, and writes what it got to FOLDER/rank_R.npz. Argument: FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

from gaudi_distributed import CommunicationOptions, apply_environment, communication_environment, detect_rank
from gaudi_distributed.comm.opening import open_communicator

SHAPES = ((3,), (2, 5), (1, 1, 4))


def main() -> None:
    folder, rank_info = Path(sys.argv[1]), detect_rank(os.environ)
    options = CommunicationOptions("horovod_mxnet", group_size=2)
    apply_environment(communication_environment(options, rank_info, os.environ))
    communicator: Any = open_communicator(options)
    assert (communicator.rank, communicator.size) == (rank_info.rank, rank_info.size)
    assert (communicator.local_rank, communicator.local_size) == (rank_info.local_rank, rank_info.local_size)
    tensors = make_tensors(rank_info.rank)
    arrays = [mx.nd.array(tensor) for tensor in tensors]
    results = {
        "mean": communicator.allreduce(tensors),
        "sum": [one.asnumpy() for one in communicator.allreduce(arrays, average=False)],
        "last": communicator.broadcast(tensors, root=rank_info.size - 1),
        "pair": [communicator.sum_within(2)(one, f"pair_{i}").asnumpy() for i, one in enumerate(arrays)],
    }
    contents = communicator.gather(bytes([rank_info.rank]) * rank_info.rank)
    assert contents == [bytes([rank]) * rank for rank in range(rank_info.size)]
    own = bytes([rank_info.rank]) * rank_info.rank
    assert communicator.gather_at_root(own) == ([] if rank_info.rank else contents)
    np.savez(folder / f"rank_{rank_info.rank}.npz", **flatten(results))
    communicator.barrier()
    communicator.close()


def make_tensors(rank: int) -> list[Any]:
    """Tensors of all shapes, other ones on each rank."""
    generator = np.random.default_rng(100 + rank)
    return [generator.normal(size=shape).astype(np.float32) for shape in SHAPES]


def flatten(results: dict[str, list[Any]]) -> dict[str, Any]:
    """Every array by its call and number."""
    return {f"{name}_{i}": array for name, arrays in results.items() for i, array in enumerate(arrays)}


if __name__ == "__main__":
    main()
