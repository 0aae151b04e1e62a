"""Which of all that ranks say, or no longer say, ended the run first; it is told the time and waits for nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gaudi_distributed.supervision.bounds import Bounds
from gaudi_distributed.supervision.causes import CONTINUE, LOST, Cause

# In these one rank works and the others wait, on a disk or on a library that gives no sign: they may take longer.
PATIENT_PHASES, PATIENCE = frozenset({"checkpoint", "scoring"}), 10
_QUIET_BEATS = 3


@dataclass
class _Rank:
    host: str
    heard: float
    moved: float
    step: int = 0
    phase: str = "start"
    reports: int = 0
    # Reports by phase: a first one is not timed, for a device may have to compile then.
    seen: dict[str, int] = field(default_factory=dict)

    @property
    def patience(self) -> float:
        """How many times as long as usual it may stay where it is."""
        if self.seen.get(self.phase, 0) < 2 or self.phase == "start":
            return math.inf
        return PATIENCE if self.phase in PATIENT_PHASES else 1


class Judgement:
    """The ranks that are there, and the first cause. Times are seconds of one clock that only rises.

    Args:
        bounds: see `Bounds`.
        now: the time.

    Attributes:
        left: ranks that are gone.
        was_given_up: whether this process itself was stopped for so long that ranks took it for lost.
    """

    def __init__(self, bounds: Bounds, now: float) -> None:
        self._bounds = bounds
        self._ranks: dict[int, _Rank] = {}
        self._looked = now
        self._certain: Cause | None = None
        self._doubtful: tuple[float, Cause] | None = None
        self._stopped: Cause | None = None
        self.left: set[int] = set()
        self.was_given_up = False

    @property
    def present(self) -> set[int]:
        """Ranks that joined, and did not leave."""
        return set(self._ranks)

    def join(self, rank: int, host: str, now: float) -> bool:
        """A rank is there; False if it was before."""
        if rank in self._ranks or rank in self.left:
            return False
        self._ranks[rank] = _Rank(host, heard=now, moved=now)
        return True

    def hear(self, rank: int, step: int, phase: str, reports: int, now: float) -> None:
        """A rank says where it is, and how often it said so."""
        state = self._ranks[rank]
        state.heard = now
        if reports != state.reports:
            state.seen[phase] = state.seen.get(phase, 0) + (reports - state.reports if phase == state.phase else 1)
            state.step, state.phase, state.reports, state.moved = step, phase, reports, now

    def fail(self, rank: int, status: int, text: str, now: float, *, certain: bool) -> None:
        """A rank reports an error; one that is not certain may follow from what happened to another."""
        cause = self._cause(rank, status, text)
        self._ranks.pop(rank)
        self.left.add(rank)
        if certain:
            self._certain = self._certain or cause
        else:
            self._doubtful = self._doubtful or (now, cause)

    def leave(self, rank: int, status: int, text: str) -> None:
        """A rank is done; with a status other than 0 all others will be, too, as soon as they have saved."""
        if status:
            self._stopped = self._stopped or self._cause(rank, status, text)
        self._ranks.pop(rank)
        self.left.add(rank)

    def lose(self, rank: int) -> None:
        """The connection of a rank is gone."""
        if rank in self._ranks:
            text = f"its process ended without a word, killed or crashed; see its output and the kernel's; {CONTINUE}"
            self._certain = self._certain or self._cause(rank, LOST, text)
            self._ranks.pop(rank)
            self.left.add(rank)

    def declare(self, status: int, text: str) -> None:
        """The launcher itself has a reason to end the run."""
        self._certain = self._certain or Cause(-1, "", 0, "", status, text)

    def decide(self, now: float) -> Cause | None:
        """The cause that ends the run, if there is one by now; call it once a beat at least."""
        # Where this process itself was stopped for a while, ranks were not silent: nobody listened.
        if (deaf := now - self._looked) > 2 * self._bounds.beat_seconds:
            self.was_given_up = self.was_given_up or deaf > self._bounds.stall_seconds
            for state in self._ranks.values():
                state.heard, state.moved = state.heard + deaf, state.moved + deaf
        self._looked = now
        if self._certain is None:
            self._certain = self._find_silent(now) or self._find_still(now)
        if self._certain is None and self._doubtful is not None and not self._is_any_quiet(now):
            since, cause = self._doubtful
            self._certain = cause if now - since >= self._bounds.settle_seconds else None
        return self._certain

    def conclude(self) -> Cause | None:
        """The cause once all have left: what `decide` held back, or the request to stop that they followed."""
        doubtful = None if self._doubtful is None else self._doubtful[1]
        return self._certain or doubtful or self._stopped

    def _is_any_quiet(self, now: float) -> bool:
        """Whether a rank misses signs of life: it may be the one that others cannot reach."""
        return any(now - state.heard > _QUIET_BEATS * self._bounds.beat_seconds for state in self._ranks.values())

    def _find_silent(self, now: float) -> Cause | None:
        bound = self._bounds.stall_seconds
        silent = [rank for rank, state in self._ranks.items() if now - state.heard > bound]
        if not silent:
            return None
        rank = min(silent, key=lambda rank: self._ranks[rank].heard)
        text = f"has not answered for {bound:g} s: stopped, or its machine or network is lost; look there; {CONTINUE}"
        return self._cause(rank, LOST, text)

    def _find_still(self, now: float) -> Cause | None:
        """The rank that all wait for, if none has got any further."""
        if not self._ranks or self.left or self._is_any_quiet(now):
            return None
        patience = max(state.patience for state in self._ranks.values())
        bound = self._bounds.stall_seconds * patience
        if now - max(state.moved for state in self._ranks.values()) <= bound:
            return None
        rank = min(self._ranks, key=lambda rank: (self._ranks[rank].step, self._ranks[rank].moved))
        text = (
            f"no rank has got any further for {bound:g} s, and this one stood still first; look what it waits for "
            f"(py-spy dump), or raise the bound; {CONTINUE}"
        )
        return self._cause(rank, LOST, text)

    def _cause(self, rank: int, status: int, text: str) -> Cause:
        state = self._ranks[rank]
        return Cause(rank, state.host, state.step, state.phase, status, text)
