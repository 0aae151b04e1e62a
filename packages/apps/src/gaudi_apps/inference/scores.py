"""Define the metrics of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """Hold the metrics of an evaluation.

    Attributes:
        value: the metric that training is to raise, in 0..1.
        figures: all metrics by name.
        text: the metrics in a line.
    """

    value: float
    figures: Mapping[str, float]
    text: str
