"""Open the site in Chromium from the disk, on a phone's and a desk's width: quiet, whole, and nothing asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = os.environ.get("BROWSER", "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="BROWSER names no Chromium; nox -s docs does")
# Chromium itself would ask Google's hosts for updates.
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--disable-quic", "--allow-file-access-from-files")  # fmt: skip
PAGES = (
    "index.html", "ARCHITECTURE.html", "CONTRIBUTING.html", "docs/how_it_works.html", "docs/gallery.html",
    "docs/ops_by_example.html", "docs/own_data.html", "docs/recipes.html", "docs/migration.html",
    "docs/several_machines.html", "docs/troubleshooting.html", "packages/apps/index.html",
    "packages/apps/docs/resnet_flags.html", "api/gaudi_ops/index.html", "api/gaudi_ops/targets.html",
    "api/gaudi_distributed/errors.html", "tests/data/error_text/index.html", "configs/index.html",
)  # fmt: skip
PATIENCE_MILLISECONDS = 600_000  # ends only what would never end
DIAGRAM = "div.mermaid"  # the theme puts the drawing into a closed shadow root of this
SCROLLED = ".md-content .md-typeset__scrollwrap, .md-content div.mermaid"
WIDE = """found => found.filter(each => each.scrollWidth > each.clientWidth + 1)
    .map(each => [each.textContent.trim().slice(0, 40), getComputedStyle(each).overflowX])"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=[*FLAGS])
        yield opened
        opened.close()


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_pages_are_quiet_and_fit(browser: Any, site: Path, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append((page.url, message.text)))
    page.on("pageerror", lambda error: said.append((page.url, str(error))))
    page.on("request", lambda request: asked.append(request.url))
    for name in PAGES:
        page.goto((site / name).as_uri())
        diagrams = page.locator(".mermaid").count()
        if diagrams:
            page.wait_for_function(
                "([selector, count]) => document.querySelectorAll(selector).length == count", arg=[DIAGRAM, diagrams]
            )
            heights = page.eval_on_selector_all(DIAGRAM, "found => found.map(each => each.clientHeight)")
            assert min(heights) > 50, (name, heights)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        wide = page.eval_on_selector_all(SCROLLED, WIDE)
        # On a phone what is wider than the page is scrolled; at a desk nothing of these pages is.
        assert {overflow for _, overflow in wide} <= ({"auto"} if width < 1000 else set()), (name, wide)
        missing = "images => images.filter(each => !each.complete || !each.naturalWidth).map(each => each.src)"
        assert page.eval_on_selector_all("img", missing) == [], name
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    context.close()


def test_the_search_finds_an_error_by_its_text(browser: Any, site: Path) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").fill("bath_size")
    page.wait_for_selector(".md-search-result__link")
    found = page.eval_on_selector_all(".md-search-result__link", "links => links.map(each => each.href)")
    assert any("error_text" in address for address in found), found
    context.close()
