"""What an evaluation found, in the form that a training compares and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """What an evaluation found.

    Attributes:
        value: the one figure that should rise, in 0..1.
        figures: all figures by name.
        text: the figures in a line.
    """

    value: float
    figures: Mapping[str, float]
    text: str
