"""Hooks of MkDocs: the documents of the repository, pages made of code and figures become the files of the site."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from tools.docsite.api import make_api_pages, read_apis
from tools.docsite.documents import PACKAGES, ROOT, list_documents, make_folder_pages, read_title
from tools.docsite.figures import draw_figures
from tools.docsite.scripts import IFRAME_WORKER, MERMAID, fetch_script

log = get_plugin_logger("docsite")
CACHE = ROOT / ".nox" / "docsite"
SCRIPTS = {"docs/mermaid.js": MERMAID, "docs/iframe-worker.js": IFRAME_WORKER}
_FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"^!\[[^\]]*\]\(([^)]+)\)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
_DIAGRAM = re.compile(r"\A```mermaid\n")
# A diagram has the size of its letters, and is scrolled where it is too wide: smaller letters could not be read. It is
# drawn tightly, so that it fits a desk's width.
_DRAWN = {
    "fontSize": 13,
    "themeVariables": {"fontSize": "13px"},
    "flowchart": {"useMaxWidth": False, "nodeSpacing": 20, "rankSpacing": 30, "padding": 8, "wrappingWidth": 140},
    "sequence": {"useMaxWidth": False, "width": 90, "height": 40, "actorMargin": 30, "diagramMarginX": 8},
    "state": {"useMaxWidth": False},
}
_DIRECTIVE = f"%%{{init: {json.dumps(_DRAWN)}}}%%\n"
_CODE = re.compile(r"(<pre\b.*?</pre>)|<code>([^<]*)</code>", re.DOTALL)
_LONG_WORD = 14


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Append the sections of the packages, of contributing and of changes to the navigation."""
    documents = list_documents()
    packages: list[Any] = []
    api: list[Any] = []
    for found, name in zip(read_apis(), PACKAGES, strict=True):
        folder = f"packages/{name}"
        below = [path for path in documents if path.startswith(f"{folder}/docs/") and not _is_in(config.nav, path)]
        packages.append({f"gaudi-{name}": [f"{folder}/README.md", *map(_entry, below), f"{folder}/CHANGELOG.md"]})
        pages = [path for path in make_api_pages([found]) if not path.endswith("index.md")]
        titles = [{path.rpartition("/")[2].removesuffix(".md"): path} for path in pages]
        api.append({f"gaudi-{name}": [f"api/gaudi_{name}/index.md", *titles]})
        if found.undocumented:
            log.warning("public, but without a docstring: %s", ", ".join(found.undocumented))
    adding = [_entry(path) for path in documents if path.startswith("docs/add/")]
    contributing = {"Contributing": ["CONTRIBUTING.md", *([{"How to add": adding}] if adding else [])]}
    config.nav = [*(config.nav or []), {"Packages": packages}, {"API": api}, contributing]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by all files of the site, each at its path in the repository."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:  # the others are the theme's
        files.remove(file)
    for path in (*list_documents(), "docs/site.css", "LICENSE"):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    for path, content in {**make_api_pages(read_apis()), **make_folder_pages()}.items():
        files.append(File.generated(config, path, content=content))
    for name, figure in draw_figures().items():
        files.append(File.generated(config, f"docs/figures/{name}", content=figure))
    for path, script in SCRIPTS.items():
        files.append(File.generated(config, path, abs_src_path=str(fetch_script(script, CACHE))))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to a folder open the page of that folder; code is left as it is."""
    folder = posixpath.dirname(page.file.src_uri)

    def complete(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        readme = f"{target}/README.md"
        return f"{found[1].rstrip('/')}/README.md" if files.get_file_from_path(readme) else found[1]

    markdown = _FIGURE.sub(r"[\g<0>](\1)", markdown)  # a figure opens in its own size
    parts = _FENCE.split(markdown)
    for place, part in enumerate(parts):
        drawn = _DIAGRAM.sub(lambda fence: fence[0] + _DIRECTIVE, part)
        parts[place] = drawn if part.startswith("```") else _LINK.sub(complete, part)
    return "".join(parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let what is wide be divided where a reader would divide it."""
    return divide_code(html)


def divide_code(html: str) -> str:
    """Let lines end between the parts of a long name or path in code, and never behind the dashes of a flag.

    Blocks of code, whose lines are scrolled, are left as they are.
    """
    return _CODE.sub(lambda found: found[1] or f"<code>{_divide_words(found[2])}</code>", html)


def _divide_words(code: str) -> str:
    """Mark where the words of a line of code may be divided; the text stays the same."""
    words = re.split(r"(\s+)", code)
    for place, word in enumerate(words):
        parts = re.split(r"(?<=[/=_.,:])(?=[^/=_.,:])", word) if len(word) > _LONG_WORD else [word]
        if word.startswith("-"):
            parts[0] = f'<span class="whole">{parts[0]}</span>'
        words[place] = "<wbr>".join(parts)
    return "".join(words)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Add the script of the diagrams, 3.5 MB, to pages that have one; ask no other host about the repository."""
    output = output.replace(' data-md-component="source"', "")  # by which the theme would ask for its number of stars
    if 'class="mermaid"' not in output:
        return output
    script = posixpath.relpath("docs/mermaid.js", posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("</head>", f'<script src="{script}"></script></head>', 1)


def _entry(path: str) -> dict[str, str]:
    """Return the entry of a document in the navigation: its title and its path."""
    return {read_title(Path(ROOT, path).read_text(encoding="utf-8")): path}


def _is_in(nav: Any, path: str) -> bool:
    """Tell whether a navigation names a page."""
    if isinstance(nav, dict):
        return any(_is_in(part, path) for part in nav.values())
    if isinstance(nav, list):
        return any(_is_in(part, path) for part in nav)
    return bool(nav == path)
