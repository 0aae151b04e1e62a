"""Machines that folders play, with files as kernels, drivers and packages write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gaudi_distributed.devices.machine import Machine

MakeMachine = Callable[..., Machine]


@pytest.fixture
def make_machine(tmp_path: Path) -> MakeMachine:
    """Return the function that makes a machine of files by name (a name that ends in / is a folder)."""

    def make(files: Mapping[str, str], **environ: str) -> Machine:
        root = tmp_path / "machine"
        root.mkdir(exist_ok=True)
        for name, text in files.items():
            path = root / name.strip("/")
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text(text)
        return Machine(root, environ)

    return make
