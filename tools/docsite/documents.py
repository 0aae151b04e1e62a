"""List the documents of the repository that are pages of the site, and make pages of folders of other files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ops", "datasets", "models", "distributed", "apps")
_PATTERNS = (
    "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/*.md", "docs/**/*.md",
    *(f"packages/{name}/{part}" for name in PACKAGES for part in ("README.md", "CHANGELOG.md", "docs/*.md")),
)  # fmt: skip

MEANINGS = {
    "64": "a bad flag or value",
    "65": "bad data",
    "66": "missing input",
    "70": "numbers that are not finite, or not as expected",
    "74": "disk or other I/O",
    "75": "stopped, and can be resumed",
    "77": "refused as unsafe",
    "78": "bad configuration",
}


def list_documents(root: Path = ROOT) -> list[str]:
    """Return the paths of the documents, relative to the root."""
    return sorted({str(path.relative_to(root)) for pattern in _PATTERNS for path in root.glob(pattern)})


def make_folder_pages(root: Path = ROOT) -> Mapping[str, str]:
    """Return the Markdown of a page for each folder whose files are no documents, which documents link to, by its path.

    A link to such a folder opens its page, and nobody has to copy the files into a document.
    """
    return {
        "configs/README.md": _show_configs(root / "configs"),
        "notebooks/README.md": _show_notebooks(root / "notebooks"),
        "tests/data/error_text/README.md": _show_errors(root / "tests" / "data" / "error_text"),
    }


def read_title(text: str) -> str:
    """Return the first heading of a Markdown text, without marks."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return found.group(1).replace("`", "") if found else "Untitled"


def _show_configs(folder: Path) -> str:
    parts = [
        "# Measured configurations\n\nThe files of `configs/`; `--config FILE` takes one, and flags win over it.\n"
    ]
    for path in sorted(folder.glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        parts.append(f"## {path.name}\n\n```yaml\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)


def _show_notebooks(folder: Path) -> str:
    """Show the cells of notebooks, without outputs; headings go down by one level."""
    parts = ["# Notebooks\n\nThe cells of the notebooks in `notebooks/`, which the tests run.\n"]
    for path in sorted(folder.glob("*.ipynb")):
        parts.append(f"*{path.name}*\n")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code":
                parts.append(f"```python\n{source}\n```\n")
            else:
                parts.append(re.sub(r"^#", "##", source, flags=re.MULTILINE) + "\n")
    return "\n".join(parts)


def _show_errors(folder: Path) -> str:
    """Show the errors that the tests compare with: the command or the situation, the status and the text."""
    parts = [
        "# Errors by their text\n\nWhat the programs say, each with what was typed or found and the exit status. "
        "Search for words of your message; names and numbers in it will be others. "
        "[Troubleshooting](../../../docs/troubleshooting.md) tells what to do about the most frequent ones.\n"
    ]
    for path in sorted(folder.glob("*.txt")):
        title = "Runs and checkpoints, of all programs" if path.stem == "runs" else f"`{path.stem}`"
        parts.append(f"## {title}\n")
        for case in path.read_text(encoding="utf-8").strip().split("\n\n"):
            parts.append(_show_error(case))
    return "\n".join(parts)


def _show_error(case: str) -> str:
    """Show one error of the files: a line of its cause, one of the status in brackets, and the text."""
    cause, status, *text = case.splitlines()
    status = status.strip("[]")
    said = f"`{cause[2:]}`" if cause.startswith("$ ") else cause[:1].upper() + cause[1:]
    return f"{said} — {status}, {MEANINGS.get(status, 'other')}:\n\n```text\n" + "\n".join(text) + "\n```\n"
