"""Open reports in Chromium: nothing fails, nothing is asked of anybody, and the slider counts as the analysis does."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gaudi_apps.inference.report_page import write_comparison, write_report

BROWSER = os.environ.get("BROWSER", "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="BROWSER names no Chromium; nox -s browser does")
# Chromium itself would ask Google's hosts for updates.
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")


class Opened(NamedTuple):
    """A page, what its console said, and what it asked for."""

    page: Any
    messages: list[str]
    requests: list[str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=[*FLAGS, "--disable-component-update"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[Path], Opened]]:
    """Return a function that opens a file, and fails where its script does."""
    context = browser.new_context()

    def open_file(path: Path) -> Opened:
        page = context.new_page()
        opened = Opened(page, [], [])
        page.on("console", lambda message: opened.messages.append(message.text))
        page.on("pageerror", lambda error: opened.messages.append(str(error)))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_load_state("networkidle")
        return opened

    yield open_file
    context.close()


def check_quiet(opened: Opened, path: Path) -> None:
    """Fail where the console has a message, or something else than the page was asked for."""
    assert opened.messages == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [path.as_uri()]


def read_counts(page: Any) -> list[list[str]]:
    rows = page.query_selector_all("#counts-table tbody tr")
    return [[cell.inner_text() for cell in row.query_selector_all("td")] for row in rows]


def test_a_report_is_quiet_and_its_slider_counts(
    hostile_run: Path, open_page: Callable[[Path], Opened], tmp_path: Path
) -> None:
    path = write_report(hostile_run)
    opened = open_page(path)
    check_quiet(opened, path)
    page = opened.page
    assert page.evaluate("document.querySelectorAll('img').length") == 6
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 100)")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    analysis = json.loads((hostile_run / "analysis.json").read_text())
    for place in (round(100 * analysis["threshold"]), 0, 80):
        page.evaluate(
            "(value) => { const slider = document.getElementById('slider'); slider.value = value;"
            " slider.dispatchEvent(new Event('input')); }",
            place,
        )
        hits, alarms = (sum(one[name][place] for one in analysis["classes"]) for name in ("hits", "false_alarms"))
        truth = analysis["data"]["boxes"]
        first = read_counts(page)[0]
        assert first[1:4] == [str(hits), str(alarms), str(truth - hits)]
        assert first[4:6] == [f"{hits / (hits + alarms):.4f}", f"{hits / truth:.4f}"]
        assert page.inner_text("#chosen") == f"{place / 100:.2f}"
    check_quiet(opened, path)


def test_figures_are_those_of_the_evaluation(hostile_run: Path, open_page: Callable[[Path], Opened]) -> None:
    figures = json.loads((hostile_run / "evaluation.json").read_text())["figures"]
    page = open_page(write_report(hostile_run)).page
    tiles = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#figures div')].map((tile) =>"
        " [tile.querySelector('span').textContent, tile.querySelector('b').textContent]))"
    )
    for name in ("AP", "AP50", "AP75", "AR100"):
        assert tiles[name] == f"{figures[name]:.4f}"


def test_a_table_is_sorted_by_a_click_and_an_image_enlarged(
    hostile_run: Path, open_page: Callable[[Path], Opened]
) -> None:
    page = open_page(write_report(hostile_run)).page

    def read_column(column: int) -> list[float]:
        cells = page.query_selector_all(f"#class-table tbody td:nth-child({column})")
        return [float(cell.inner_text()) for cell in cells]

    heading = page.query_selector("#class-table th:nth-child(3)")
    heading.click()
    assert read_column(3) == sorted(read_column(3), reverse=True)
    heading.click()
    assert read_column(3) == sorted(read_column(3))
    assert heading.get_attribute("aria-sort") == "ascending"
    figure = page.query_selector(".images figure")
    before = figure.bounding_box()["width"]
    figure.query_selector("img").click()
    assert figure.bounding_box()["width"] > 2 * before


def test_a_large_report_opens(large_run: Path, open_page: Callable[[Path], Opened]) -> None:
    path = write_report(large_run)
    opened = open_page(path)
    check_quiet(opened, path)
    assert len(read_counts(opened.page)) == 81


def test_a_comparison_is_quiet(hostile_run: Path, open_page: Callable[[Path], Opened], tmp_path: Path) -> None:
    other = Path(shutil.copytree(hostile_run, tmp_path / '"><script>alert(4)</script>'.replace("/", "|")))
    path = tmp_path / "compare.html"
    write_comparison([hostile_run, other], path)
    opened = open_page(path)
    check_quiet(opened, path)
    assert len(opened.page.query_selector_all("#compared-metrics tbody tr")) == 12
