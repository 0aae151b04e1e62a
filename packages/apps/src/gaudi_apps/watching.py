"""Somebody who hears what a training does, as a log in a format of its own."""

from __future__ import annotations

from gaudi_apps.scores import Score


class TrainingWatcher:
    """Hears what rank 0 does in a training; it is this class that nobody listens by.

    Steps are those that are done.
    """

    def begin(self, done: int) -> None:
        """All is ready for the next step."""

    def after_step(self, done: int) -> None:
        """A step was made."""

    def begin_evaluation(self, done: int) -> None:
        """The weights after this step are scored from now on."""

    def end_evaluation(self, done: int, score: Score) -> None:
        """They have been; other steps may have been made meanwhile."""

    def end(self, done: int) -> None:
        """Training came to its end, and was not stopped."""

    def close(self) -> None:
        """Nothing follows."""
