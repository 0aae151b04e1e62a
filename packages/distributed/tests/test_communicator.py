"""One process is a complete communicator."""

from __future__ import annotations

import pytest

from gaudi_distributed import Communicator, SingleProcess


def test_single_process_reduces_and_broadcasts_to_itself() -> None:
    communicator: Communicator = SingleProcess()
    assert (communicator.rank, communicator.size) == (0, 1)
    assert communicator.allreduce([1.5, 2.5]) == [1.5, 2.5]
    assert communicator.allreduce([3.0], average=False) == [3.0]
    assert communicator.broadcast(["a"], root=0) == ["a"]
    communicator.barrier()


def test_no_other_root() -> None:
    with pytest.raises(ValueError, match="root is 1"):
        SingleProcess().broadcast([1], root=1)
