"""What ended a run."""

from __future__ import annotations

from dataclasses import dataclass

LOST = 75
CONTINUE = "the same command continues from the last checkpoint"


@dataclass(frozen=True)
class Cause:
    """The first thing that went wrong.

    Attributes:
        rank: where; -1: in the launcher.
        host: of the rank.
        step: steps that were done there.
        phase: what the rank was at.
        status: exit status of every process of the run.
        text: what happened, and the remedy.
    """

    rank: int
    host: str
    step: int
    phase: str
    status: int
    text: str

    def describe(self) -> str:
        """One line that names rank, host and step."""
        if self.rank < 0:
            return self.text
        return f"rank {self.rank} on {self.host} at step {self.step} ({self.phase}): {self.text}"
