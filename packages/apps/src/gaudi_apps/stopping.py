"""Ending a training early: when it is good enough, or has not become better for long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class EarlyStop:
    """Watches a score that should rise, over the evaluations of a training.

    Args:
        target: the score to stop at; 0: there is none.
        patience: stop after so many evaluations in a row without a better score; 0: never.

    Attributes:
        best: the best score so far, -inf before the first one.
        best_step: the step of the best score.
    """

    def __init__(self, *, target: float = 0.0, patience: int = 0) -> None:
        self._target, self._patience = target, patience
        self.best = -math.inf
        self.best_step = 0
        self._without_gain = 0

    def update(self, step: int, score: float) -> bool:
        """Take in the score after a step; returns whether it is the best so far. NaN never is."""
        is_best = score > self.best
        if is_best:
            self.best, self.best_step, self._without_gain = score, step, 0
        else:
            self._without_gain += 1
        return is_best

    @property
    def reason(self) -> str | None:
        """Why to stop, in a line for the user; None to go on."""
        if 0 < self._target <= self.best:
            return f"the target of {self._target:g} is reached: {self.best:.4f} at step {self.best_step}"
        if 0 < self._patience <= self._without_gain:
            best = f"{self.best:.4f} at step {self.best_step}"
            return f"{self._without_gain} evaluations in a row were no better than {best}"
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: JSON values."""
        best = self.best if math.isfinite(self.best) else None
        return {"best": best, "best_step": self.best_step, "without_gain": self._without_gain}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; target and patience are this object's own, so a run can be continued with others."""
        self.best = -math.inf if state["best"] is None else float(state["best"])
        self.best_step, self._without_gain = int(state["best_step"]), int(state["without_gain"])
