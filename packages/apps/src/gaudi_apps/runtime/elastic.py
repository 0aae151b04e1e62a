"""Elastic training: copies of the state in memory, to go back to when ranks are lost or come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gaudi_apps.errors import RanksChangedError
from gaudi_datasets.errors import FlagError
from gaudi_distributed.cluster.elastic import RendezvousClient, is_elastic

if TYPE_CHECKING:
    from gaudi_apps.runtime.framework import Framework
    from gaudi_apps.training.checkpoint import Checkpoint


@dataclass
class ElasticState:
    """The state that a process keeps while ranks come and go.

    Attributes:
        every: steps between two copies of the state; 0: none are made, for ranks do not come and go.
        newest: the newest copy. All ranks have the same, so whoever is rank 0 next can give it to the others.
        framework: the one that computes, once it was started.
    """

    every: int = 0
    newest: Checkpoint | None = None
    framework: Framework | None = field(default=None, repr=False)
    _client: RendezvousClient | None = field(default=None, repr=False)
    _is_later_round: bool = field(default=False, repr=False)

    @classmethod
    def connect(cls, every: int) -> ElasticState:
        """Connect to the rendezvous of the launcher that started this process."""
        return cls(every, _client=RendezvousClient(os.environ))

    def is_due(self, step: int) -> bool:
        """Return whether the newest copy is old enough for another one."""
        return self.every > 0 and step - (0 if self.newest is None else self.newest.step) >= self.every

    def hosts_updated(self) -> bool:
        """Return whether the launcher is about to begin a new round, with other ranks."""
        return self._client is not None and self._client.hosts_updated()

    def begin_round(self) -> bool:
        """Wait for the next round, and set the variables of this process's rank; return False if it is not needed."""
        from gaudi_distributed.comm.horovod_engine import end_horovod

        if self._is_later_round:
            end_horovod()
        self._is_later_round = True
        variables = None if self._client is None else self._client.next_assignment()
        if variables is None:
            return False
        os.environ.update(variables)
        return True

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """Suppress the loss of a rank and a change of ranks within a context; the next round goes back to the copy."""
        from gaudi_distributed.comm.horovod_engine import is_rank_lost

        try:
            yield
        except Exception as error:
            if not isinstance(error, RanksChangedError) and not is_rank_lost(error):
                raise
            step = 0 if self.newest is None else self.newest.step
            print(f"the processes change: going back to step {step}", flush=True)


def check_elastic(mode: str, flags: Any) -> None:
    """Raise FlagError unless this can be done by processes that come and go.

    Args:
        mode: of the program.
        flags: see `gaudi_apps.cli.flags.DistributionFlags`.
    """
    if mode != "train":
        raise FlagError(
            f"--mode {mode}: hosts may change during train only", flag="--mode", remedy="start it by gaudi-run --np"
        )
    if not flags.global_batch_size or not flags.use_horovod:
        raise FlagError(
            "--use_horovod and --global_batch_size: give both, for the number of processes changes",
            flag="--use_horovod",
        )


__all__ = ["ElasticState", "RanksChangedError", "check_elastic", "is_elastic"]
