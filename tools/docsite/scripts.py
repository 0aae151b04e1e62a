"""Fetch the scripts that the site needs beside its theme, once, so that its pages ask no other host for them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ATTEMPTS = 3


@dataclass(frozen=True)
class Script:
    """A file of a package of npm's registry.

    Attributes:
        package: its name and version.
        member: the file in the package.
        sha256: of the file.
    """

    package: str
    member: str
    sha256: str


MERMAID = Script(  # draws the diagrams
    "mermaid@11.17.2",
    "package/dist/mermaid.min.js",
    "581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8",
)
IFRAME_WORKER = Script(  # lets the search of pages that are opened from the disk have a worker
    "iframe-worker@1.0.4",
    "package/shim/index.js",
    "e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609",
)


class ScriptError(Exception):
    """A script is not to be had, or is another one."""


def fetch_script(script: Script, folder: Path) -> Path:
    """Return a script in a folder; it is taken from npm's registry where it is not there yet. Nothing of it is run.

    Raises:
        ScriptError: npm is missing or fails, or the script is not the one that is pinned.
    """
    path = folder / f"{script.package}.js"
    if path.is_file() and _hash(path.read_bytes()) == script.sha256:
        return path
    npm = shutil.which("npm")
    if npm is None:
        raise ScriptError(f"there is no npm, by which {script.package} is fetched; apt-get install npm")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        content = _unpack(_pack(npm, script.package, Path(temporary)), script.member)
        if _hash(content) != script.sha256:
            raise ScriptError(f"{script.package} has the SHA-256 {_hash(content)}, not {script.sha256}")
        whole = Path(temporary) / "script"
        whole.write_bytes(content)
        whole.replace(path)
    return path


def _pack(npm: str, package: str, folder: Path) -> Path:
    """Download a package into a folder."""
    command = [npm, "pack", package, "--ignore-scripts", "--pack-destination", str(folder)]
    said = ""
    for _ in range(ATTEMPTS):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        said, archives = done.stderr, sorted(folder.glob("*.tgz"))
        if not done.returncode and archives:
            return archives[0]
    raise ScriptError(f"npm pack {package} failed: {said.strip()[-300:]}")


def _unpack(path: Path, member: str) -> bytes:
    with tarfile.open(path) as archive:
        file = archive.extractfile(member)
        if file is None:
            raise ScriptError(f"{path.name} has no file {member}")
        return file.read()


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
