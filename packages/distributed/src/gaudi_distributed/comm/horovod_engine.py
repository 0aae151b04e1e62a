"""Communicate through Horovod for TensorFlow, over Open MPI, Gloo, NCCL or HCCL."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata, util
from typing import Any, Literal, get_args

from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.comm.communicator import check_group, check_root, reduce_in_buckets
from gaudi_distributed.errors import ConfigurationError

Framework = Literal["tensorflow", "mxnet"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
TITLES: Mapping[Framework, str] = {"tensorflow": "TensorFlow", "mxnet": "MXNet"}
# The distributions that own each framework's module.
DISTRIBUTIONS: Mapping[Framework, tuple[str, ...]] = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "intel-tensorflow"),
    "mxnet": ("mxnet", "mxnet-cu112", "mxnet-cu110"),
}
VENDORS_HOROVOD = "habana-horovod"
# From this TensorFlow on, headers that Horovod is compiled against are not shipped.
FIRST_WITHOUT_HEADERS = (2, 20)


def require_horovod() -> None:
    """Raise ConfigurationError unless Horovod is installed in this Python; it is not imported."""
    if util.find_spec("horovod") is None:
        raise ConfigurationError(
            f"Horovod is not installed in {sys.prefix}",
            remedy="`gaudi-run install-horovod` builds it for what is there",
        )


class HorovodRank(ABC):
    """A rank of Horovod, whatever the framework; operations are matched between ranks by name.

    Args:
        hvd: Horovod's module for the framework.
        rank_info: what the environment says.
        group_size: of the groups of neighbouring ranks within which sums are made, too; 1: none are.

    Raises:
        ConfigurationError: Horovod counts other ranks than the environment names, or groups cannot be made of them.
    """

    def __init__(self, hvd: Any, rank_info: RankInfo, group_size: int = 1) -> None:
        check_group(group_size, rank_info.size)
        self._hvd = hvd
        self._calls = 0
        # Before Horovod begins, for a set that is made later costs a message of all ranks in each of its cycles.
        sets = []
        if 1 < group_size < rank_info.size and has_process_sets(hvd):
            firsts = range(0, rank_info.size, group_size)
            sets = [hvd.ProcessSet(list(range(first, first + group_size))) for first in firsts]
        hvd.init(process_sets=sets) if sets else hvd.init()
        self.group_size = group_size if sets else 1
        self._process_set = {"process_set": sets[rank_info.rank // group_size]} if sets else {}
        self.rank, self.size = int(hvd.rank()), int(hvd.size())
        self.local_rank, self.local_size = int(hvd.local_rank()), int(hvd.local_size())
        if (self.rank, self.size) != (rank_info.rank, rank_info.size):
            raise ConfigurationError(
                f"Horovod is rank {self.rank} of {self.size}, and the environment says rank {rank_info.rank} of "
                f"{rank_info.size}",
                remedy="start the run with mpirun, horovodrun or gaudi-run",
            )

    def gather(self, content: bytes) -> list[bytes]:
        """See `Communicator.gather`."""
        import numpy as np

        name = self._next_name("gather")
        # A byte more than the content, for an empty one is no tensor to Horovod.
        mine = np.frombuffer(content + b"\0", np.uint8)
        counts = self._join_arrays(np.array([len(mine)], np.int64), f"{name}_counts")
        every = self._join_arrays(mine, f"{name}_contents")
        return [part[:-1].tobytes() for part in np.split(every, np.cumsum(counts)[:-1])]

    def gather_at_root(self, content: bytes) -> list[bytes]:
        """See `Communicator.gather_at_root`."""
        import numpy as np

        mine = np.frombuffer(content + b"\0", np.uint8)
        lengths = np.array([len(mine), *[0] * (self.size - 1)], np.int32)
        every, counts = self._send_arrays(mine, lengths, self._next_name("gather_at_root"))
        return [] if self.rank else [part[:-1].tobytes() for part in np.split(every, np.cumsum(counts)[:-1])]

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.gather(b"")

    def close(self) -> None:
        """See `Communicator.close`."""
        self._hvd.shutdown()

    @abstractmethod
    def _join_arrays(self, array: Any, name: str) -> Any:
        """Return the concatenation of each rank's NumPy array [n]."""

    @abstractmethod
    def _send_arrays(self, array: Any, lengths: Any, name: str) -> tuple[Any, Any]:
        """Send a part of a NumPy array [n] to each rank, of int32 lengths [size]; return what came, and its lengths."""

    def _next_name(self, kind: str) -> str:
        """Return an unused name, equal on all ranks because all make the same calls in the same order."""
        self._calls += 1
        return f"gaudi_{kind}_{self._calls}"


class HorovodCommunicator(HorovodRank):
    """A communicator for tensors of TensorFlow; see `Communicator`."""

    def __init__(self, rank_info: RankInfo, max_bytes: int, compressed_dtype: str | None, group_size: int = 1) -> None:
        super().__init__(load_horovod(), rank_info, group_size)
        self._reduce = partial(reduce_in_buckets, max_bytes=max_bytes, compressed_dtype=compressed_dtype)

    def allreduce(self, tensors: Sequence[Any], *, average: bool = True, compressed: bool = False) -> list[Any]:
        """See `Communicator.allreduce`."""
        return self._reduce(tensors, size=self.size, average=average, compressed=compressed, total=self._sum)

    def allreduce_group(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the sum of each tensor over the ranks of this one's group, of `group_size`; no other rank hears it."""
        total = partial(self._sum, **self._process_set)
        return self._reduce(tensors, size=self.group_size, average=False, compressed=False, total=total)

    def broadcast(self, tensors: Sequence[Any], *, root: int = 0) -> list[Any]:
        """See `Communicator.broadcast`."""
        check_root(root, self.size)
        name = self._next_name("broadcast")
        return [self._hvd.broadcast(tensor, root, name=f"{name}_{i}") for i, tensor in enumerate(tensors)]

    def _join_arrays(self, array: Any, name: str) -> Any:
        return self._hvd.allgather(array, name=name).numpy()

    def _send_arrays(self, array: Any, lengths: Any, name: str) -> tuple[Any, Any]:
        came, counts = self._hvd.alltoall(array, splits=lengths, name=name)
        return came.numpy(), counts.numpy()

    def _sum(self, vectors: list[Any], **process_set: Any) -> list[Any]:
        name = self._next_name("allreduce")
        # Without its scope, which names layers: Keras counts them, and a rank may have made other models before.
        return [
            self._hvd.allreduce(vector, op=self._hvd.Sum, name=f"{name}_{i}", ignore_name_scope=True, **process_set)
            for i, vector in enumerate(vectors)
        ]


def has_process_sets(hvd: Any) -> bool:
    """Return whether some ranks of this build can reduce without the others; nothing says so of Gaudi's build."""
    try:
        metadata.distribution(VENDORS_HOROVOD)
    except metadata.PackageNotFoundError:
        return hasattr(hvd, "ProcessSet")
    return False


def lacks_headers(tensorflow: str) -> bool:
    """Return whether a version of TensorFlow, like "2.15.1", lacks headers that Horovod needs; False for ""."""
    numbers = tensorflow.split(".")[:2]
    return all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) >= FIRST_WITHOUT_HEADERS


def make_headers_error(tensorflow: str) -> ConfigurationError:
    """Return the error for a version of TensorFlow that lacks headers."""
    return ConfigurationError(
        f"Horovod cannot be built for TensorFlow {tensorflow}, which does not ship its headers",
        remedy="use TensorFlow 2.15 to 2.18 (lanes default and gaudi), or tf.distribute with --distribution_strategy "
        "multi_worker",
    )


def is_rank_lost(error: BaseException) -> bool:
    """Return whether an error of Horovod says that a rank, or the connection to it, is lost."""
    # By name: the error may be that the library, which would have to be imported, is not there.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "HorovodInternalError" in kinds or ("OpError" in kinds and "Horovod" in str(error))


def end_horovod() -> None:
    """Shut Horovod down, so that this process can start again as another rank."""
    load_horovod().shutdown()


def load_horovod() -> Any:
    """Import Horovod for TensorFlow.

    Raises:
        ConfigurationError: it is not installed, or was not built for this TensorFlow.
    """
    import tensorflow as tf

    if lacks_headers(tf.__version__):
        raise make_headers_error(tf.__version__)
    try:
        import horovod.tensorflow as hvd

        hvd.mpi_built()
    except ImportError as error:
        raise ConfigurationError(
            f"Horovod does not work here ({str(error).splitlines()[0]})",
            remedy=f"`gaudi-run install-horovod` builds it for TensorFlow {tf.__version__}; or use "
            "--distribution_strategy multi_worker",
        ) from error
    return hvd
