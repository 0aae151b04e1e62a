"""What is read of a machine: files below a root, and environment variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MAX_BYTES = 1 << 23  # of a file; /proc/cpuinfo of 2000 processors is smaller


@dataclass(frozen=True)
class Machine:
    """A machine, or a folder that plays one: `root` holds its /proc, /sys, /dev and so on."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        """Return where an absolute name lies."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Return a file's text, stripped; None where it is not there, or may not or cannot be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(MAX_BYTES).decode(errors="replace").strip()
        except OSError:
            return None

    def read_number(self, name: str) -> int | None:
        """Return the whole number that a file holds; None where it holds none, or cannot be read."""
        text = self.read(name)
        return int(text) if text is not None and re.fullmatch("-?[0-9]{1,20}", text) else None

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Return the sorted names in a folder that match; none where it is not there or may not be read."""
        try:
            return sorted(path.name for path in self.path(folder).glob(pattern))
        except OSError:
            return []
