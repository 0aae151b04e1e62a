"""Where jemalloc is, whose use makes input pipelines that allocate much faster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NAMES = ("libjemalloc.so.2", "libjemalloc.so.1")
FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")


def find_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> Path | None:
    """The library, version 2 before 1, in LD_LIBRARY_PATH and then in the usual folders; None: it is nowhere."""
    folders = [*filter(None, environ.get("LD_LIBRARY_PATH", "").split(":")), *FOLDERS]
    paths = (root / folder.lstrip("/") / name for name in NAMES for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def describe_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """A line that says whether it is used, and how it would be."""
    if "libjemalloc" in environ.get("LD_PRELOAD", ""):
        return f"jemalloc: used, by LD_PRELOAD={environ['LD_PRELOAD']}"
    found = find_jemalloc(environ, root)
    if found is None:
        return f"jemalloc: not used, for {' or '.join(NAMES)} is in none of LD_LIBRARY_PATH, {', '.join(FOLDERS)}"
    return f"jemalloc: not used; start with LD_PRELOAD={found} to use it"


def preload_jemalloc(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """The variable that preloads it before what is preloaded already; empty where it is nowhere, or loaded already."""
    before = environ.get("LD_PRELOAD", "")
    found = find_jemalloc(environ, root)
    if found is None or "libjemalloc" in before:
        return {}
    return {"LD_PRELOAD": f"{found}:{before}" if before else str(found)}
