"""Write to stores that URLs name: files that are compared once they are there, and locks that their holder renews.

`gaudi_datasets.fetching.stores` reads from them, and has the retries, errors and credentials of both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from gaudi_datasets.errors import DataError, MissingInputError, TransferError
from gaudi_datasets.fetching.stores import Store, cut_pieces
from gaudi_ops.files import hash_file, read_file, write_atomically, write_file

LEASE_SECONDS = 60.0
"""How long a lock that is not renewed counts as held; its holder renews it four times meanwhile."""

WHOLE_BYTES = 2**24
"""Of a file that is fetched in one request, and read into memory to be sent: it may be written again meanwhile."""

_MOST_LOCK_BYTES = 2**16
_SCHEMES_OF_FOLDERS = ("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs")  # a bucket has none
_STAMPS = ("ETag", "etag", "md5Hash", "LastModified", "updated", "created", "mtime")


class StoredFile(NamedTuple):
    """A file in a store: its size in bytes, and a text that is another one once the file was written again."""

    size: int
    stamp: str


class WritableStore(Store):
    """A folder in a store that is written to; see `Store`. All errors are those of `Store.read`."""

    def list_files(self, known: str | None = None) -> dict[str, StoredFile]:
        """List the files below the folder, by their names in it; a name that leads out of it is left out.

        Args:
            known: a file that is there, so that a list without it lags behind, and is asked for again.

        Raises:
            TransferError: it lags behind still, after all attempts.
        """

        def find(path: str) -> Mapping[str, Any]:
            self._files.invalidate_cache()
            files: Mapping[str, Any] = self._files.find(path.rstrip("/"), detail=True)
            if known is not None and f"{path}{known}" not in files:
                raise _LateListError
            return files

        try:
            found = self._try("", find)
        except MissingInputError as error:
            if "NoSuchBucket" in str(error):
                raise
            return {}
        return _describe_files(found, f"{self._root}/")

    def list_named(self, name: str) -> dict[str, StoredFile]:
        """List the files beside each other that have a name, or this name and an ending."""
        self._files.invalidate_cache()
        found: Mapping[str, Any] = self._try("", lambda path: self._files.glob(f"{path}{name}*", detail=True))
        files = _describe_files(found, f"{self._root}/")
        return {each: file for each, file in files.items() if each == name or each.startswith(f"{name}.")}

    def find_file(self, name: str) -> StoredFile | None:
        """Return what is known of a file; None where there is none. A list may lag behind, and is not asked."""
        self._files.invalidate_cache()
        try:
            found = self._try(name, lambda path: {path: self._files.info(path)})
        except MissingInputError as error:
            if "NoSuchBucket" in str(error):
                raise
            return None
        return _describe_files(found, f"{self._root}/").get(name)

    def find_size(self, name: str) -> int:
        """Return the bytes of a file."""
        self._files.invalidate_cache()
        return self._try(name, lambda path: int(self._files.info(path)["size"]))

    def hash(self, name: str, size: int) -> str:
        """Read a file of so many bytes, and return its SHA-256 in hexadecimal."""
        digest = hashlib.sha256()
        with contextlib.closing(self.read_pieces(cut_pieces(name, size))) as pieces:
            for piece in pieces:
                digest.update(piece)
        return digest.hexdigest()

    def download(self, name: str, size: int, target: Path, *, sha256: str | None = None) -> None:
        """Write a file of so many bytes to this machine, whole or not at all.

        Args:
            name: of the file.
            size: of the file.
            target: gets it; its folder is made.
            sha256: what it has to have, in hexadecimal; it is fetched twice, in case it was damaged on its way.

        Raises:
            DataError: it has another SHA-256.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        if sha256 is None and size <= WHOLE_BYTES:  # in one request, for another may be written meanwhile
            write_file(target, self.read(name))
            return
        for _ in range(2):
            digest = hashlib.sha256()
            with contextlib.suppress(_OtherContentError), write_atomically(target) as file:
                with contextlib.closing(self.read_pieces(cut_pieces(name, size))) as pieces:
                    for piece in pieces:
                        digest.update(piece)
                        file.write(piece)
                if sha256 not in (None, digest.hexdigest()):
                    raise _OtherContentError
                return
        raise DataError(
            f"has not the SHA-256 {sha256}", path=self.name(name), field="sha256", remedy="it is damaged or another"
        )

    def upload(self, name: str, path: Path) -> None:
        """Send a file of this machine, and compare what is there then with it.

        Raises:
            FileNotFoundError: it is not on this machine, maybe any more.
        """
        for _ in range(max(2, self._patience.attempts)):
            size = path.stat().st_size
            if size <= WHOLE_BYTES:
                self.write(name, read_file(path))
                return
            expected = hash_file(path)
            try:
                self._send(name, lambda where: self._files.put_file(str(path), where))
            except MissingInputError:
                if not path.exists():
                    raise FileNotFoundError(str(path)) from None
                raise
            with contextlib.suppress(DataError):
                if self.find_size(name) == size and self.hash(name, size) == expected:
                    return
        raise self._make_damage_error(name)

    def write(self, name: str, content: bytes) -> None:
        """Send a file that is in memory, and compare what is there then with it."""
        for _ in range(max(2, self._patience.attempts)):
            self._send(name, lambda where: self._files.pipe_file(where, content))
            with contextlib.suppress(DataError):
                if self.read(name) == content:
                    return
        raise self._make_damage_error(name)

    def _send(self, name: str, send: Callable[[str], None]) -> None:
        """Call something with the path of a file, see `Store`, in a folder that is made where stores have any."""

        def make_folder_and_send(where: str) -> None:
            if self.url.partition(":")[0] in _SCHEMES_OF_FOLDERS:
                self._files.makedirs(where.rpartition("/")[0], exist_ok=True)
            send(where)

        self._try(name, make_folder_and_send)

    def _make_damage_error(self, name: str) -> TransferError:
        return TransferError(
            "the store keeps other bytes than it was sent",
            path=self.name(name),
            field="sha256",
            remedy="run it again later to send it again",
        )

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file unless one is there; return whether it was written.

        Of several that do this at once one succeeds, if the store can tell: S3 and Google's do. In others, the first
        and the second may both.
        """

        def send(where: str) -> None:
            try:
                self._files.pipe_file(where, content, mode="create")
            except (NotImplementedError, OSError) as error:
                if isinstance(error, OSError) and "not implemented" not in str(error):
                    raise
                if self._files.exists(where):
                    raise FileExistsError from None
                self._files.pipe_file(where, content)

        try:
            self._send(name, send)
        except FileExistsError:
            # Ours, too, where an earlier attempt arrived, and its answer did not.
            with contextlib.suppress(MissingInputError):
                return self.read(name) == content
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is none to remove."""
        with contextlib.suppress(MissingInputError):
            self._try(name, lambda path: self._files.rm_file(path))


class _LateListError(Exception):
    """A list of files that lacks one that is there."""


class _OtherContentError(Exception):
    """A file that is not the one that was expected, so that its draft is removed."""


def _describe_files(found: Mapping[str, Any], prefix: str) -> dict[str, StoredFile]:
    """Return the files below a folder by their names in it, of what a store listed by path."""
    files = {}
    for path, described in found.items():
        name = path.removeprefix(prefix)
        if path.startswith(prefix) and _is_plain(name) and described.get("type", "file") == "file":
            stamp = next((str(described[key]) for key in _STAMPS if described.get(key)), "")
            files[name] = StoredFile(int(described.get("size") or 0), stamp)
    return files


def _is_plain(name: str) -> bool:
    """Return whether a name of a store is that of a file below a folder of this machine."""
    parts = name.split("/")
    return name.isprintable() and "\\" not in name and not any(part in ("", ".", "..") for part in parts)


class StoreLock:
    """A lock in a store: a file that names its holder, and that the holder renews while it lives.

    A store knows nothing of processes, so that the end of one is only known by its silence: a lock that is not renewed
    for the lease is taken over. One that was stopped for longer finds that out when it renews the lock.

    Args:
        store: has it.
        name: of its file.
        holder: a text that is the same where a former process of this machine certainly has ended.
        seconds: of the lease.
    """

    def __init__(self, store: WritableStore, name: str, holder: str, seconds: float = LEASE_SECONDS) -> None:
        self.seconds = seconds
        self._store, self._name, self._holder = store, name, holder
        self._renewals = 0
        self._began = datetime.now(timezone.utc).isoformat(timespec="seconds")

    def acquire(self, waiting: Callable[[Mapping[str, Any]], None]) -> Mapping[str, Any] | None:
        """Take the lock; return who holds it where it is not to be had.

        Args:
            waiting: is told who seems to hold it, before one lease is waited for a sign of life.
        """
        while not self._store.create(self._name, self._render()):
            content = self._read()
            if content is None:
                continue
            if parse_holder(content).get("holder") != self._holder:
                waiting(parse_holder(content))
                now = self._watch(content)
                if now is None:
                    continue
                if now != content:
                    return parse_holder(now)
            self._store.write(self._name, self._render())
            return None
        return None

    def renew(self) -> bool:
        """Renew the lock; return False where another holds it, or it was removed."""
        content = self._read()
        if content is None or parse_holder(content).get("holder") != self._holder:
            return False
        self._renewals += 1
        self._store.write(self._name, self._render())
        return True

    def release(self) -> None:
        """Remove the lock, if it is held still."""
        if parse_holder(self._read() or b"").get("holder") == self._holder:
            self._store.remove(self._name)

    def _watch(self, content: bytes) -> bytes | None:
        """Read the lock until it changes or the lease is over."""
        for _ in range(4):
            time.sleep(self.seconds / 4)
            if (now := self._read()) != content:
                return now
        return content

    def _read(self) -> bytes | None:
        try:
            return self._store.read(self._name)
        except MissingInputError:
            return None

    def _render(self) -> bytes:
        names = {"host": socket.gethostname(), "process": os.getpid(), "began": self._began}
        return json.dumps({**names, "holder": self._holder, "renewals": self._renewals}).encode()


def parse_holder(content: bytes) -> Mapping[str, Any]:
    """Return what a lock tells of its holder; nothing where it tells nothing."""
    try:
        found = json.loads(content[:_MOST_LOCK_BYTES])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
