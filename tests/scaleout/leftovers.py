"""Traces of a run on this machine: what it leaves there, of processes, files and shared memory, is seen."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Each process of a run has it: gaudi-run forwards variables of TensorFlow to ranks.
_NAME = "TF_TEST_PLACE"
# In a mount namespace of its own, a folder takes the place of shared memory. The command keeps the process.
_SHARED = 'mount --make-rprivate / && mount --bind "$0" /dev/shm && exec "$@"'


@dataclass(frozen=True)
class Traces:
    """Where a run keeps what it removes in the end.

    Attributes:
        folder: which is made; nothing else is to be written there. Root only.
    """

    folder: Path

    def __post_init__(self) -> None:
        for path in (self._temporary, self._shared):
            path.mkdir(parents=True, exist_ok=True)

    @property
    def _temporary(self) -> Path:
        return self.folder / "temporary"

    @property
    def _shared(self) -> Path:
        return self.folder / "shared"

    @property
    def environ(self) -> dict[str, str]:
        """Return this process's variables, with those by which the run is known, and its temporary files."""
        return {**os.environ, _NAME: str(self.folder), "TMPDIR": str(self._temporary)}

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return the command as it runs there."""
        return ["unshare", "--mount", "sh", "-c", _SHARED, str(self._shared), *command]

    def processes(self) -> list[int]:
        """Return the ids of the run's processes: launcher, guards, mpirun, its daemons, and ranks."""
        sign = f"{_NAME}={self.folder}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended
                if sign in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def files(self) -> list[str]:
        """Return the temporary files and the segments of shared memory.

        Without what TensorFlow's AutoGraph writes and compiles there: it is not removed by a rank that is killed.
        """
        found = (path for path in self.folder.glob("*/*") if not path.name.startswith(("__autograph", "__pycache__")))
        return sorted(str(path.relative_to(self.folder)) for path in found)
