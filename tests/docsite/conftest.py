"""The built site, whose folder the variable SITE names; `nox -s docs` builds it and runs these tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def site() -> Path:
    """Return the folder of the built site."""
    folder = Path(os.environ.get("SITE", "")).resolve()
    assert (folder / "index.html").is_file(), "SITE names no built site; nox -s docs builds one"
    return folder
