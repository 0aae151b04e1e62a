"""Communicate through Horovod for MXNet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.comm.communicator import check_group, check_root
from gaudi_distributed.comm.horovod_engine import HorovodRank
from gaudi_distributed.errors import ConfigurationError


class HorovodMXNetCommunicator(HorovodRank):
    """A communicator for arrays of MXNet and NumPy; see `Communicator`.

    Tensors are arrays of MXNet or of NumPy, and so is what comes back.
    """

    def __init__(self, rank_info: RankInfo, group_size: int = 1) -> None:
        super().__init__(load_horovod(), rank_info, group_size)

    def allreduce(self, tensors: Sequence[Any], *, average: bool = True, compressed: bool = False) -> list[Any]:
        """See `Communicator.allreduce`; nothing is compressed, because gradients travel by `open_trainer`."""
        del compressed
        name, kind = self._next_name("allreduce"), self._hvd.Average if average else self._hvd.Sum
        return self._apply(lambda tensor, i: self._hvd.allreduce(tensor, op=kind, name=f"{name}_{i}"), tensors)

    def broadcast(self, tensors: Sequence[Any], *, root: int = 0) -> list[Any]:
        """See `Communicator.broadcast`."""
        check_root(root, self.size)
        name = self._next_name("broadcast")
        return self._apply(lambda tensor, i: self._hvd.broadcast(tensor, root, name=f"{name}_{i}"), tensors)

    def close(self) -> None:
        """See `Communicator.close`."""
        import mxnet as mx

        mx.nd.waitall()  # MXNet works behind Python's back
        super().close()

    def open_trainer(self, parameters: Mapping[str, Any], optimizer: Any, *, predivide: float, groups: int) -> Any:
        """Return a trainer that averages gradients over the ranks; see `horovod.mxnet.DistributedTrainer`.

        Args:
            parameters: of Gluon, by name.
            optimizer: of `mxnet.optimizer`.
            predivide: gradients are divided by it before they are summed, and by the rest of the size after.
            groups: in how many groups gradients travel; 0: each by itself.
        """
        return self._hvd.DistributedTrainer(
            dict(parameters), optimizer, gradient_predivide_factor=predivide, num_groups=groups
        )

    def sum_within(self, group_size: int) -> Callable[[Any, str], Any]:
        """Return a function from an array and its name to the sum over this rank's group of neighbouring ranks.

        Threads of MXNet call it, in an order of their own on each rank: arrays of one name belong together.

        Raises:
            ConfigurationError: `group_size` does not divide the number of ranks.
        """
        import mxnet as mx

        check_group(group_size, self.size)
        if group_size in (self.group_size, self.size):
            among = {} if group_size == self.size else self._process_set
            return lambda array, name: self._hvd.allreduce(array, op=self._hvd.Sum, name=f"gaudi_sum_{name}", **among)
        group, groups = self.rank // group_size, self.size // group_size

        def add(array: Any, name: str) -> Any:
            # One sum over all ranks, of which each fills the row of its group, where Horovod has no sets of ranks.
            rows = mx.nd.zeros((groups, *array.shape), ctx=array.context)
            rows[group] = array
            return self._hvd.allreduce(rows, op=self._hvd.Sum, name=f"gaudi_sum_{name}")[group]

        return add

    def _apply(self, operation: Callable[[Any, int], Any], tensors: Sequence[Any]) -> list[Any]:
        import mxnet as mx

        given = [
            one if isinstance(one, mx.nd.NDArray) else mx.nd.array(one, ctx=mx.cpu(), dtype=one.dtype)
            for one in tensors
        ]
        results = [operation(tensor, i) for i, tensor in enumerate(given)]
        return [
            result if one is tensor else result.asnumpy()
            for one, tensor, result in zip(tensors, given, results, strict=True)
        ]

    def _join_arrays(self, array: Any, name: str) -> Any:
        import mxnet as mx

        return self._hvd.allgather(mx.nd.array(array, ctx=mx.cpu(), dtype=array.dtype), name=name).asnumpy()

    def _send_arrays(self, array: Any, lengths: Any, name: str) -> tuple[Any, Any]:
        import mxnet as mx

        given = (mx.nd.array(one, ctx=mx.cpu(), dtype=one.dtype) for one in (array, lengths))
        came, counts = self._hvd.alltoall(*given, name=name)
        return came.asnumpy(), counts.asnumpy()


def load_horovod() -> Any:
    """Import Horovod for MXNet.

    Raises:
        ConfigurationError: it is not installed, or was not built for MXNet.
    """
    try:
        import horovod.mxnet as hvd

        hvd.mpi_built()
    except ImportError as error:
        raise ConfigurationError(
            f"Horovod does not work with MXNet here ({str(error).splitlines()[0]})",
            remedy="`gaudi-run install-horovod --with_mxnet` builds it; or start one process",
        ) from error
    return hvd
