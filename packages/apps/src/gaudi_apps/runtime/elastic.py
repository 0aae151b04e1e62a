"""Training on while processes come and go: a copy of the state in memory, and back to it when one is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gaudi_apps.errors import RanksChangedError
from gaudi_datasets.errors import FlagError
from gaudi_distributed.cluster.elastic import RendezvousClient, is_elastic

if TYPE_CHECKING:
    from gaudi_apps.training.checkpoint import Checkpoint
    from gaudi_distributed import Precision


@dataclass
class Commits:
    """What a process keeps from one round to the next.

    Attributes:
        every: steps between two copies of the state; 0: none are made, for processes do not come and go.
        newest: the newest copy. All ranks have the same, so whoever is rank 0 next can give it to the others.
        are_changing: whether the launcher has a new round in mind.
        precision: with which TensorFlow was started, once it was.
    """

    every: int = 0
    newest: Checkpoint | None = None
    are_changing: Callable[[], bool] = lambda: False
    precision: Precision | None = field(default=None, repr=False)

    def is_due(self, step: int) -> bool:
        """Whether enough steps were made since the newest."""
        return self.every > 0 and step - (0 if self.newest is None else self.newest.step) >= self.every


def check_elastic(mode: str, flags: Any) -> None:
    """Raise FlagError unless this can be done by processes that come and go.

    Args:
        mode: of the program.
        flags: see `gaudi_apps.cli.flags.DistributionFlags`.
    """
    if mode != "train":
        raise FlagError(f"--mode {mode}: hosts may change during train only; start it by gaudi-run --np")
    if not flags.global_batch_size or not flags.use_horovod:
        raise FlagError("--use_horovod and --global_batch_size: give both, for the number of processes changes")


def train_in_rounds(train: Callable[[Commits], None], every: int) -> None:
    """Train until it is done, from the newest commit in every round.

    Args:
        train: trains as the variables of the process say, and makes commits.
        every: see `Commits`.
    """
    from gaudi_distributed.comm.horovod_engine import end_horovod, is_rank_lost

    client = RendezvousClient(os.environ)
    commits = Commits(every, are_changing=client.hosts_updated)
    while (variables := client.next_assignment()) is not None:
        os.environ.update(variables)
        try:
            train(commits)
            return
        except Exception as error:
            if not isinstance(error, RanksChangedError) and not is_rank_lost(error):
                raise
            step = 0 if commits.newest is None else commits.newest.step
            print(f"the processes change: going back to step {step}", flush=True)
        end_horovod()


__all__ = ["Commits", "RanksChangedError", "check_elastic", "is_elastic", "train_in_rounds"]
