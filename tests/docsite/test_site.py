"""Read the built pages: each link leads somewhere, nothing is asked of another host, every public name is shown."""

from __future__ import annotations

import html
import os
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tools.docsite.api import Api, read_apis
from tools.docsite.documents import ROOT, list_documents
from tools.docsite.figures import draw_figures
from tools.docsite.hooks import divide_code
from tools.release import read_changelog

# Attributes by which a browser fetches something as soon as it shows a page.
FETCHING = {"img": "src", "script": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
KEPT_BY = {"canonical", "prev", "next", "edit"}  # relations of a link element that fetch nothing
MAX_FIGURE_BYTES = 60_000


class References(HTMLParser):
    """Collect what a page defines and refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.links, self.fetched, self.diagrams = set[str](), list[str](), list[str](), 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.add(found["id"])
        if tag == "a" and "name" in found:
            self.ids.add(found["name"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in FETCHING and FETCHING[tag] in found and found.get("rel") not in KEPT_BY:
            self.fetched.append(found[FETCHING[tag]])
        self.diagrams += found.get("class") == "mermaid"


@cache
def read_page(path: Path) -> References:
    references = References()
    references.feed(path.read_text(encoding="utf-8"))
    return references


def list_pages(site: Path) -> list[Path]:
    # Links of the page for what is not found are absolute, for it is shown at any address.
    return [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]


def find_page(document: str) -> str:
    """Return the page of a document."""
    return re.sub(r"(README|index)\.md$", "index.md", document).removesuffix(".md") + ".html"


def test_every_document_is_a_page(site: Path) -> None:
    assert [path for path in list_documents() if not (site / find_page(path)).is_file()] == []


def test_every_link_leads_somewhere(site: Path) -> None:
    dead = []
    for page in list_pages(site):
        for link in (*read_page(page).links, *read_page(page).fetched):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            there = target.is_file() and target.is_relative_to(site)
            anchor = unquote(parts.fragment)
            if not there or (anchor and target.suffix == ".html" and anchor not in read_page(target).ids):
                dead.append((str(page.relative_to(site)), link))
    assert dead == []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    foreign = [
        (str(page.relative_to(site)), link)
        for page in list_pages(site)
        for link in read_page(page).fetched
        if urlsplit(link).scheme or link.startswith("//")
    ]
    styles = [
        (str(path.relative_to(site)), found)
        for path in site.rglob("*.css")
        for found in re.findall(r"url\(['\"]?(https?:[^)]*)\)", path.read_text(encoding="utf-8"))
    ]
    assert foreign + styles == []


def test_every_diagram_is_drawn_by_the_script_of_the_site(site: Path) -> None:
    for document in list_documents():
        written = len(re.findall(r"^```mermaid$", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE))
        page = read_page(site / find_page(document))
        assert page.diagrams == written, document
        assert any(link.endswith("mermaid.js") for link in page.fetched) == bool(written), document


def test_figures_are_small_and_drawn_alike_each_time(site: Path) -> None:
    built = {path.name: path.read_bytes() for path in (site / "docs" / "figures").glob("*")}
    assert {name: len(content) for name, content in built.items() if len(content) > MAX_FIGURE_BYTES} == {}
    assert built == draw_figures()


@pytest.mark.parametrize("api", read_apis(), ids=lambda api: api.package)
def test_every_public_name_is_shown(site: Path, api: Api) -> None:
    """A name is shown where it is defined; names of another package are shown there."""
    shown = {each for page in (site / "api").rglob("*.html") for each in read_page(page).ids}
    assert {target for target in api.names.values() if target not in shown} == set()
    assert {*api.modules} <= shown
    assert api.undocumented == ()


@pytest.mark.parametrize("api", read_apis(), ids=lambda api: api.package)
def test_the_page_of_a_package_tells_what_its_modules_are_for(site: Path, api: Api) -> None:
    text = html.unescape(
        re.sub(r"<[^>]+>", "", (site / "api" / api.package / "index.html").read_text(encoding="utf-8"))
    )
    plain = " ".join(re.sub(r"[`*]", "", text).split())
    for module, sentence in api.modules.items():
        assert f"{module} {re.sub(r'[`*]', '', sentence)}" in plain, module


@pytest.mark.parametrize("api", read_apis(), ids=lambda api: api.package)
def test_a_changelog_names_what_is_public(site: Path, api: Api) -> None:
    """Users read it, so what it names in full is on a page of the API, or a group of entry points."""
    package = ROOT / "packages" / api.package.removeprefix("gaudi_")
    shown = {each for page in (site / "api").rglob("*.html") for each in read_page(page).ids}
    shown |= {name for each in read_apis() for name in (*each.names, each.package, f"{each.package}.__version__")}
    shown |= set(
        re.findall(r'entry-points\."([\w.]+)"', (ROOT / "packages/apps/pyproject.toml").read_text(encoding="utf-8"))
    )
    named = re.findall(r"`(gaudi_\w+(?:\.\w+)+)[`(]", read_changelog(package)[0].text)
    assert {name for name in named if name not in shown} == set()


def test_what_a_function_returns_is_one_text(site: Path) -> None:
    found = [
        (str(page.relative_to(site)), section.count('class="doc-section-item'))
        for page in (site / "api").rglob("*.html")
        for section in re.findall(
            r'doc-section-title">(?:Returns|Yields):</span>(.*?)(?:doc-section-title"|class="doc doc-)',
            page.read_text(encoding="utf-8"),
            re.DOTALL,
        )
    ]
    assert found
    assert [each for each in found if each[1] != 1] == []


def test_a_long_name_is_divided_and_a_flag_is_not() -> None:
    page = "<pre><code>--a_flag</code></pre><p><code>--a_flag gaudi_ops.targets.encode_targets</code></p>"
    divided = divide_code(page)
    assert divided.startswith("<pre><code>--a_flag</code></pre>")
    assert '<span class="whole">--a_flag</span> gaudi_<wbr>ops.<wbr>targets.<wbr>encode_<wbr>targets' in divided
    assert re.sub(r"<[^>]+>", "", divided) == re.sub(r"<[^>]+>", "", page)


def test_the_site_knows_its_address_where_it_is_published(site: Path) -> None:
    """Without an address, as on the disk, the map is empty, and the page for what is not found starts at the root."""
    address = os.environ.get("SITE_URL", "")
    listed = re.findall(r"<loc>([^<]+)</loc>", (site / "sitemap.xml").read_text(encoding="utf-8"))
    pages = {f"{address}{page.relative_to(site)}" for page in list_pages(site)} if address else set()
    assert {*listed} == pages
    styles = [link for link in read_page(site / "404.html").fetched if link.endswith("site.css")]
    assert styles == [f"{urlsplit(address).path or '/'}docs/site.css"]


def test_an_undocumented_name_is_found(tmp_path: Path) -> None:
    for name in ("ops", "datasets", "models", "distributed", "apps"):
        package = tmp_path / "packages" / name
        source = package / "src" / f"gaudi_{name}"
        source.mkdir(parents=True)
        (package / "README.md").write_text(f"`gaudi_{name}.shown`")
        (source / "__init__.py").write_text(f"from gaudi_{name}.parts import named\n__all__ = ['named']")
        (source / "parts.py").write_text("named = 1\n\nclass Kept:\n    '''Kept.'''\n    def method(self): ...\n")
        shown = "'Show\\na|b. It is more.\\n\\nAnd more.'\ndef documented():\n    '''Do it.'''\n\ndef bare(): ...\n"
        (source / "shown.py").write_text(shown)
    api = read_apis(tmp_path)[0]
    assert api.modules == {"gaudi_ops.parts": "", "gaudi_ops.shown": "Show a|b."}
    undocumented = ("gaudi_ops.named", "gaudi_ops.parts", "gaudi_ops.parts.Kept.method", "gaudi_ops.shown.bare")
    assert api.undocumented == undocumented
