"""Watches over the ranks of a run: the first thing that goes wrong ends all of them, and is said once.

One `Coordinator` listens, in gaudi-run or else in rank 0; every rank is a `Member`, which says where it is and leaves
the process when the run is over. Standard library only, so that nothing of a device or of a library is needed to end.
"""

from __future__ import annotations

from gaudi_distributed.failure.coordinator import COORDINATOR, TOKEN, Coordinator
from gaudi_distributed.failure.member import Member, exit_now, host_supervision, join_supervision
from gaudi_distributed.failure.messages import Bounds, Cause, read_bounds

__all__ = [
    "COORDINATOR",
    "TOKEN",
    "Bounds",
    "Cause",
    "Coordinator",
    "Member",
    "exit_now",
    "host_supervision",
    "join_supervision",
    "read_bounds",
]
