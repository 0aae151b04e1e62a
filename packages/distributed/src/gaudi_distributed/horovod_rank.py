"""What a rank of Horovod's is, whichever framework its tensors are of."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from importlib import util
from typing import Any

from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.place import Place


def require_horovod() -> None:
    """Raise ConfigurationError unless Horovod is installed in this Python; it is not imported."""
    if util.find_spec("horovod") is None:
        raise ConfigurationError(
            f"Horovod is not installed in {sys.prefix}; `gaudi-run install-horovod` builds it for what is there"
        )


class HorovodRank(ABC):
    """A rank; its operations are matched between ranks by their names.

    Args:
        hvd: Horovod's module for the framework.
        place: of this process.

    Raises:
        ConfigurationError: Horovod counts other ranks than the environment names.
    """

    def __init__(self, hvd: Any, place: Place) -> None:
        self._hvd = hvd
        self._hvd.init()
        self._calls = 0
        if (self._hvd.rank(), self._hvd.size()) != (place.rank, place.size):
            raise ConfigurationError(
                f"Horovod is rank {self._hvd.rank()} of {self._hvd.size()}, and the environment says rank {place.rank} "
                f"of {place.size}; start the run with mpirun, horovodrun or gaudi-run"
            )

    @property
    def rank(self) -> int:
        """This process, as Horovod counts."""
        return int(self._hvd.rank())

    @property
    def size(self) -> int:
        """How many processes Horovod has."""
        return int(self._hvd.size())

    @property
    def local_rank(self) -> int:
        """This process among those of its host."""
        return int(self._hvd.local_rank())

    @property
    def local_size(self) -> int:
        """How many of the processes run on this host."""
        return int(self._hvd.local_size())

    def gather(self, content: bytes) -> list[bytes]:
        """See `Communicator.gather`."""
        import numpy as np

        name = self._next_name("gather")
        # A byte more than the content, for an empty one is no tensor to Horovod.
        mine = np.frombuffer(content + b"\0", np.uint8)
        counts = self._join_arrays(np.array([len(mine)], np.int64), f"{name}_counts")
        every = self._join_arrays(mine, f"{name}_contents")
        return [part[:-1].tobytes() for part in np.split(every, np.cumsum(counts)[:-1])]

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.gather(b"")

    def close(self) -> None:
        """See `Communicator.close`."""
        self._hvd.shutdown()

    @abstractmethod
    def _join_arrays(self, array: Any, name: str) -> Any:
        """NumPy arrays [n], that of each rank after the other."""

    def _next_name(self, kind: str) -> str:
        """Return a name that this process has not used, and that is the same on all ranks: calls are in one order."""
        self._calls += 1
        return f"gaudi_{kind}_{self._calls}"
