from __future__ import annotations

import io

import pytest

from gaudi_datasets.errors import DataError
from gaudi_datasets.program import ProgressLine, count_things, make_console
from gaudi_ops.program import run_program


@pytest.mark.parametrize(
    ("number", "noun", "counted"),
    [
        (1, "image", "1 image"),
        (0, "image", "0 images"),
        (1, "class", "1 class"),
        (2, "class", "2 classes"),
        (3, "box", "3 boxes"),
        (1, "box", "1 box"),
        (2, "batch", "2 batches"),
    ],
)
def test_a_number_has_its_noun_in_the_right_form(number: int, noun: str, counted: str) -> None:
    assert count_things(number, noun) == counted


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _show_progress(stream: io.StringIO, seconds: float) -> list[str]:
    """Show 1000 images in so many seconds; return what was written at once."""
    times = (seconds * number / 1000 for number in range(2000))
    progress = ProgressLine("checking", stream=stream, clock=lambda: next(times))
    for done in range(1, 1001):
        progress(done, 1000)
    return stream.getvalue().splitlines()


def test_a_log_gets_few_lines_of_progress_and_none_of_short_work() -> None:
    assert _show_progress(io.StringIO(), 9) == []
    lines = _show_progress(io.StringIO(), 200)
    assert [line.partition(" of ")[0] for line in lines] == [
        "checking: 50",
        "checking: 150",
        "checking: 350",
        "checking: 750",
    ]
    assert len(_show_progress(io.StringIO(), 10000)) == 9


def test_a_terminal_gets_one_line_that_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = _Terminal()
    _show_progress(stream, 20)
    shown = stream.getvalue()
    assert "\n" not in shown
    assert shown.startswith("\r\x1b[Kchecking: 50 of 1000 images")
    assert shown.endswith("\r\x1b[K")
    assert _show_progress(_Terminal(), 0.9) == []
    monkeypatch.setenv("TERM", "dumb")
    assert _show_progress(_Terminal(), 9) == []


def test_an_error_removes_the_line_of_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, times = _Terminal(), iter((0.0, 5.0, 5.0))

    def main() -> None:
        ProgressLine("checking", stream=stream, clock=lambda: next(times))(3, 9)
        raise DataError("x.json: is empty")

    with pytest.raises(SystemExit):
        run_program(main, prog="prog")
    assert stream.getvalue().count("\x1b[K") == 2
    assert stream.getvalue().endswith("\x1b[K")
    assert capsys.readouterr().err == "prog: error: x.json: is empty\n"


def test_rich_prints_names_as_they_are_and_escaped() -> None:
    from rich.table import Table

    name, stream = "[/x] :smile: \x1b]0;title\x07", io.StringIO()
    table = Table(name, title=name)
    table.add_row(name)
    console = make_console(file=stream, force_terminal=True, width=120)
    for each in (name, table):
        console.print(each)
    shown = stream.getvalue()
    assert shown.count("[/x] :smile: \\x1b]0;title\\x07") == 4  # the line, and of the table title, head and cell
    assert "\x1b]" not in shown
    assert "\x1b[" in shown  # rich's own
