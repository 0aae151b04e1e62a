"""Build the shim (shim.c), and say what it is to do to a program."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
VARIABLE = "TORTURE"
OPEN, WRITE, SYNC, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE, LINK, READ, MMAP = range(1, 12)
NAMES = dict(
    enumerate(("open", "write", "sync", "rename", "unlink", "mkdir", "rmdir", "truncate", "link", "read", "mmap"), 1)
)
_HEAD = struct.Struct("=IIIIqq")


@dataclass(frozen=True)
class Spoiled:
    """Spoil one call of a program.

    Attributes:
        nth: which call below the folder, from 1; 0: none.
        action: see shim.c.
        reads: count calls that read, not those that write.
    """

    nth: int = 0
    action: str = ""
    reads: bool = False


@dataclass(frozen=True)
class Call:
    """A call that changes files, as the shim wrote it down.

    Attributes:
        kind: one of the numbers above.
        path: of the file, whole.
        other: the second path of a rename or link.
        offset: of a write; flags of an open; length of a truncation.
        size: bytes of a write.
        data: of a write.
    """

    kind: int
    path: str
    other: str
    offset: int
    size: int
    data: bytes


def build(folder: Path) -> Path:
    """Compile the shim, unless that was done; return the library.

    Raises:
        SystemExit: there is no compiler.
    """
    library = folder / f"shim-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        try:
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", draft, SOURCE, "-ldl"], check=True)
        except FileNotFoundError:
            raise SystemExit("torture: there is no cc; install g++") from None
        draft.replace(library)
    return library


def preload(library: Path) -> None:
    """Start this process anew with the shim preloaded, unless it is."""
    if os.environ.get("LD_PRELOAD") != str(library):
        os.environ["LD_PRELOAD"] = str(library)
        os.execv(sys.executable, sys.orig_argv)


def describe(root: Path, control: Path, spoiled: Spoiled, log: Path | None) -> str:
    """Return the value of the variable that arms the shim; `control` is made anew."""
    control.write_bytes(bytes(4096))
    values = {
        "root": root.resolve(),
        "control": control.resolve(),
        "log": log.resolve() if log else "",
        "nth": spoiled.nth,
        "action": spoiled.action,
        "reads": int(spoiled.reads),
    }
    return "\n".join(f"{name}={value}" for name, value in values.items())


def arm(value: str, environ: Mapping[str, str] = os.environ) -> None:
    """Arm the shim in this process, which has it preloaded; programs that it starts are armed, too."""
    os.environ[VARIABLE] = value
    ctypes.CDLL(None).torture_arm()


def count_calls(control: Path) -> int:
    """Return how many calls a program made that was armed with this file."""
    return int.from_bytes(control.read_bytes()[:8], sys.byteorder)


def note_growth(control: Path, size: int) -> None:
    """Note beside the number of calls how many bytes of addresses a program added."""
    with control.open("r+b") as file:
        file.seek(8)
        file.write(max(size, 0).to_bytes(8, sys.byteorder))


def read_growth(control: Path) -> int:
    """Return what `note_growth` noted; 0 where nothing was."""
    return int.from_bytes(control.read_bytes()[8:16], sys.byteorder)


def read_log(path: Path) -> Iterator[Call]:
    """Yield what was written down, in its order."""
    content = memoryview(path.read_bytes())
    place = 0
    while place + _HEAD.size <= len(content):
        kind, first, second, third, offset, size = _HEAD.unpack_from(content, place)
        place += _HEAD.size
        parts = []
        for length in (first, second, third):
            parts.append(bytes(content[place : place + length]))
            place += length
        yield Call(kind, parts[0].decode(), parts[1].decode(), offset, size, parts[2])
