"""Tell in the terminal what is done: numbers with their nouns, a line of progress, and rich's console."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from gaudi_ops.program import escape, say, show_status

if TYPE_CHECKING:
    from rich.console import Console


def count_things(number: int, noun: str) -> str:
    """Return a number with its noun in the right form, such as 1 image, 2 images, 1 class or 3 boxes."""
    ending = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number} {noun}{ending * (number != 1)}"


def make_console(**options: Any) -> Console:
    """Make a console of rich that prints texts as they are, and escaped: no markup, no emoji, no colour of words.

    Args:
        options: those of `rich.console.Console`.
    """
    from rich import console, segment
    from rich.text import Text

    def escape_lines(lines: str) -> str:
        return "\n".join(map(escape, lines.split("\n")))

    class EscapingConsole(console.Console):
        def render_str(self, text: str, **options: Any) -> Text:
            """Return a text of which rich knows how wide it is when escaped."""
            return super().render_str(escape_lines(text), **options)

        def render(
            self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
        ) -> Iterable[segment.Segment]:
            """Yield what is to be written, escaped but for the ends of lines."""
            for each in super().render(renderable, options):
                yield each if each.control else each._replace(text=escape_lines(each.text))

    return EscapingConsole(**{"markup": False, "emoji": False, "highlight": False} | options)


class ProgressLine:
    """Show on standard error how much of a work is done, once it has lasted for some seconds.

    On a terminal it is one line, which is written anew and removed at the end. Elsewhere it is a line now and then,
    each after twice the time of the one before, so that a log has few.

    Args:
        work: what is done, such as "checking".
        noun: what is counted.
        stream: where to show it; standard error when None.
        clock: gives the time in seconds.
    """

    FIRST_SECONDS, FIRST_LINE_SECONDS, REFRESH_SECONDS = 1.0, 10.0, 0.2

    def __init__(
        self, work: str, noun: str = "image", *, stream: TextIO | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self._work, self._noun = work, noun
        self._clock = clock or time.monotonic
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._done = 0
        self._begin()

    def _begin(self) -> None:
        self._wait = self.FIRST_SECONDS if self._is_terminal else self.FIRST_LINE_SECONDS
        self._next = self._clock() + self._wait

    def __call__(self, done: int, total: int) -> None:
        """Show that so many of all are done; 0, or fewer than before, begin the next work."""
        if not done or done < self._done:
            self._begin()
        self._done = done
        if done >= total:
            show_status("")
        elif self._clock() >= self._next:
            text = f"{self._work}: {done} of {count_things(total, self._noun)}"
            if self._is_terminal:
                show_status(text, self._stream)
                self._wait = self.REFRESH_SECONDS
            else:
                say(text, stream=self._stream)
                self._wait *= 2
            self._next = self._clock() + self._wait
