"""The other side: a recording that is there, or one that is made now, by the program in a process of its own.

Of its own, because a process starts TensorFlow, its device and its environment only once; and it ends before this one
starts them, because a device may take one process at a time.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gaudi_apps.parity.flags import ParityFlags, find_other_side


class OtherSideError(RuntimeError):
    """The other side could not be computed; the program ends with its exit status."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@contextlib.contextmanager
def recorded_side(flags: ParityFlags, command: Sequence[str]) -> Iterator[Path | None]:
    """The folder of the other side's recording; None: only this side is to be recorded.

    Args:
        flags: checked.
        command: that computes this side.

    Raises:
        OtherSideError: it could not be computed.
    """
    other = find_other_side(flags)
    if other is None:
        yield None
    elif other.recorded is not None:
        yield Path(other.recorded)
    else:
        with tempfile.TemporaryDirectory(prefix="parity-") as parent:
            folder = Path(parent) / "other"
            _record([*command, *other_arguments(flags, folder)], other.text)
            yield folder


def other_arguments(flags: ParityFlags, folder: Path) -> tuple[str, ...]:
    """What a command line says after that of this side, to have the other side recorded in a folder."""
    other = find_other_side(flags)
    return (*(other.arguments if other else ()), "--parity_against", f"--parity_output={folder}")


def _record(command: Sequence[str], text: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        last = next((line for line in reversed(said) if "error: " in line), said[-1] if said else "it said nothing")
        status = done.returncode if done.returncode > 0 else 70
        raise OtherSideError(f"the other side ({text}): {last.partition('error: ')[2] or last}", status)
