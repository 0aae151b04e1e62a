"""Open the page of a server in Chromium, and give it images as a person does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSER = os.environ.get("BROWSER", "")
pytestmark = pytest.mark.skipif(not BROWSER, reason="BROWSER names no Chromium; nox -s browser does")
# Chromium itself would ask Google's hosts for updates.
FLAGS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync")
PATIENCE_MS = 600_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=BROWSER, args=[*FLAGS, "--disable-component-update"])
        yield opened
        opened.close()


@pytest.mark.parametrize("size", [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_the_page_shows_what_is_found(
    browser: Any, start: Callable[..., Any], images: list[bytes], tmp_path: Path, size: tuple[int, int]
) -> None:
    server = start(score_threshold=0.05)
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.set_default_timeout(PATIENCE_MS)
    messages: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(f"http://127.0.0.1:{server.port}/")
    expected = server.post("/predict", images[1]).document["detections"]
    page.set_input_files("#file", {"name": "photo.png", "mimeType": "image/png", "buffer": images[1]})
    page.wait_for_selector("#result:not([hidden])")
    assert len(page.query_selector_all(".box")) == len(page.query_selector_all("#rows tr")) == len(expected) > 2
    assert page.inner_text("#rows tr:first-child td:first-child") == expected[0]["class"]
    shown = page.evaluate("document.getElementById('photo').getBoundingClientRect().width")
    box = page.query_selector(".box:last-child").bounding_box()
    factor = shown / server.post("/predict", images[1]).document["width"]
    assert box["width"] == pytest.approx(expected[0]["bbox"][2] * factor, abs=2)
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/page-{size[0]}.png", full_page=True)
    page.evaluate("() => { const one = document.getElementById('slider'); one.value = one.max;"
                  " one.dispatchEvent(new Event('input')); }")  # fmt: skip
    assert page.query_selector_all(".box") == []
    with page.expect_download() as download:
        page.click("#save")
    path = tmp_path / "drawn.jpg"
    download.value.save_as(path)
    assert path.read_bytes().startswith(b"\xff\xd8\xff")
    page.set_input_files("#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"<script>alert(1)</script>"})
    page.wait_for_selector("#status.bad")
    assert "415" in page.inner_text("#status")
    assert not page.is_visible("#result")
    if folder:
        page.screenshot(path=f"{folder}/refused-{size[0]}.png", full_page=True)
    # The console names the refusal itself, and nothing else.
    assert [one for one in messages if "415" not in one] == []
    assert all(url.startswith(("data:", "blob:", f"http://127.0.0.1:{server.port}/")) for url in requests)
    page.close()
