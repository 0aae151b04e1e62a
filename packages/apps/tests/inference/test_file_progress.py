from __future__ import annotations

import io

from gaudi_apps.inference.predictor import FileProgress
from gaudi_datasets.program import make_console


def show(*, is_terminal: bool, seconds: float) -> str:
    box = io.StringIO()
    console = make_console(file=box, force_terminal=is_terminal, width=80, soft_wrap=True)
    with FileProgress(7, console=console, seconds_between_lines=seconds) as progress:
        progress.update(3, "12 images")
        progress.note("skipped: [x].png")
        progress.update(7, "20 images")
    return box.getvalue()


def test_plain_lines_come_when_it_is_time() -> None:
    assert show(is_terminal=False, seconds=0) == "3/7 files, 12 images\nskipped: [x].png\n7/7 files, 20 images\n"
    assert show(is_terminal=False, seconds=60) == "skipped: [x].png\n"


def test_a_terminal_shows_a_bar_and_the_notes() -> None:
    shown = show(is_terminal=True, seconds=0)
    assert "7/7 files" in shown
    assert "20 images" in shown
    assert "skipped: [x].png" in shown
