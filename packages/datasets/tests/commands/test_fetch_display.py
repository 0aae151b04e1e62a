from __future__ import annotations

import pytest

from gaudi_datasets.fetching.display import show_fetching


def test_without_a_terminal_only_lines_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with show_fetching() as display:
        display.transferred("a.zip", 5, 10)
        display.counted("images", 1, 2)
        display.finished("a.zip: [done]")
    assert capsys.readouterr() == ("a.zip: [done]\n", "")


def test_a_terminal_shows_bars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with show_fetching() as display:
        display.transferred("[a].zip", 5_000, 10_000)
        display.transferred("b.zip", 7_000, None)
        display.counted("images", 1, 2)
        display._bars.refresh()  # type: ignore[union-attr]
        seen = capsys.readouterr().err
        display.finished("done")
        assert display._bars.task_ids == []  # type: ignore[union-attr]
    assert "[a].zip" in seen
    assert "5.0 kB of 10.0 kB" in seen
    assert "7.0 kB" in seen
    assert "1 of 2" in seen
    assert capsys.readouterr().out == "done\n"
