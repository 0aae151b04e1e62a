"""Detect failures of ranks: the first one ends all ranks, and is reported once.

One `Coordinator` listens, in gaudi-run or else in rank 0; every rank is a `RankClient`, which says where it is and
leaves the process when the run is over. It needs the standard library only.
"""

from __future__ import annotations

from gaudi_distributed.failure.coordinator import COORDINATOR, TOKEN, Coordinator
from gaudi_distributed.failure.messages import FailureCause, Timeouts, read_timeouts
from gaudi_distributed.failure.rank_client import RankClient, exit_now, join_coordinator, start_coordinator

__all__ = [
    "COORDINATOR",
    "TOKEN",
    "Coordinator",
    "FailureCause",
    "RankClient",
    "Timeouts",
    "exit_now",
    "join_coordinator",
    "read_timeouts",
    "start_coordinator",
]
