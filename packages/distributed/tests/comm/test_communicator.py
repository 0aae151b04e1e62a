"""One process is a complete communicator."""

from __future__ import annotations

import pytest

from gaudi_distributed import Communicator, ConfigurationError, SingleProcess, allreduce_within


def test_single_process_reduces_and_broadcasts_to_itself() -> None:
    communicator: Communicator = SingleProcess()
    assert (communicator.rank, communicator.size) == (0, 1)
    assert communicator.allreduce([1.5, 2.5]) == [1.5, 2.5]
    assert communicator.allreduce([3.0], average=False) == [3.0]
    assert communicator.allreduce([3.0], compressed=True) == [3.0]
    assert communicator.broadcast(["a"], root=0) == ["a"]
    assert communicator.gather(b"mine") == communicator.gather_at_root(b"mine") == [b"mine"]
    assert (communicator.local_rank, communicator.local_size) == (0, 1)
    communicator.barrier()
    communicator.close()


def test_no_other_root() -> None:
    with pytest.raises(ValueError, match="root is 1"):
        SingleProcess().broadcast([1], root=1)


def test_one_process_is_one_group() -> None:
    assert allreduce_within(SingleProcess(), 1)([1.5]) == [1.5]
    for size in (0, -1, 2):
        with pytest.raises(ConfigurationError, match=f"groups of {size} ranks cannot be"):
            allreduce_within(SingleProcess(), size)
