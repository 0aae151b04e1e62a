"""Download files, resume them where they were cut off, and verify them."""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import requests
import urllib3

from gaudi_datasets.errors import DataError, MissingInputError, TransferError, UnsafeError
from gaudi_ops.files import hash_file, open_regular_file, publish_file, read_file, sync_file, sync_folder, write_file

Progress = Callable[[str, int, int | None], None]
"""Called with the file's name, its bytes so far, and all of its bytes, None when the server does not say."""

_CHUNK = 2**15  # small: what a lost connection takes with it
_GONE = {404, 410}
_PASSING = {408, 425, 429, 500, 502, 503, 504}
_MOST_REDIRECTS = 5
_POINTLESS = (  # to try again
    requests.exceptions.SSLError,
    requests.exceptions.TooManyRedirects,
    ValueError,  # as are those for what is no address, or one of another kind, which a redirect leads to
)
_WRONG_CONTENTS = 2  # how often a server may send something else before it is believed to mean it
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})")
_LENGTH = re.compile(r"\d{1,18}")


@dataclass(frozen=True)
class Download:
    """A file to fetch.

    Without a SHA-256, `check` must tell by the content whether it is the file: it raises DataError when it is not.
    """

    url: str
    path: Path
    sha256: str = ""
    size: int | None = None
    check: Callable[[Path], None] | None = None
    most_bytes: int = 2**36

    def __post_init__(self) -> None:
        if not is_web_address(self.url):
            raise DataError("is no address of a file; it must begin with http:// or https:// and a host", path=self.url)
        if not self.sha256 and self.check is None:
            raise ValueError(f"{self.url}: there is neither a SHA-256 nor another check")

    def verify(self, path: Path) -> None:
        """Raise DataError unless the file at `path` is the one that this download should give."""
        size = path.stat().st_size
        if self.size is not None and size != self.size:
            raise DataError(f"has {size} bytes; {self.size} are expected", path=self.url)
        if self.sha256 and (found := hash_file(path)) != self.sha256.lower():
            raise DataError(f"has SHA-256 {found}; {self.sha256.lower()} is expected", path=self.url)
        if self.check:
            self.check(path)


@dataclass(frozen=True)
class Patience:
    """Timeouts and numbers of retries."""

    attempts: int = 6
    """failures in a row, none of which brought a byte"""
    connect_seconds: float = 15
    silent_seconds: float = 60
    """between two pieces of a file"""
    first_wait_seconds: float = 1
    """before the second attempt; then twice as long each time, half of it by chance"""
    longest_wait_seconds: float = 120
    """also the longest that a server may ask for"""


class _AttemptError(Exception):
    """An attempt that did not bring the whole file; `wait` is what the server asks for, in seconds."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Fetcher:
    """Fetches files one at a time; each thread needs its own.

    Args:
        patience: how long a server is waited for.
        progress: told of each piece.
        stop: when it is set, what is under way ends with TransferError, to be resumed by another run.
    """

    def __init__(
        self, patience: Patience | None = None, *, progress: Progress | None = None, stop: threading.Event | None = None
    ) -> None:
        self._patience = patience or Patience()
        self._progress = progress
        self._stop = stop or threading.Event()
        self._session = requests.Session()
        self._session.max_redirects = _MOST_REDIRECTS  # to http and https only: requests has adapters for nothing else
        # A server that packed the content would send other bytes than those that were hashed.
        self._session.headers.update({"Accept-Encoding": "identity", "User-Agent": "gaudi-datasets"})

    def fetch(self, download: Download) -> bool:
        """Fetch the file, unless it is there already and verified; False when it was there.

        Raises:
            MissingInputError: the server says that there is no such file.
            DataError: the server sends something else, again and again.
            TransferError: it cannot be reached or does not send the file, after all attempts.
            UnsafeError: something else is at `path`.
        """
        path = download.path
        if os.path.lexists(path):
            try:
                download.verify(path)
            except (DataError, OSError) as error:
                raise UnsafeError(
                    f"is there already and is not the file to fetch ({error})", path=path, remedy="move it away"
                ) from None
            PartialFile.forget(path.with_name(path.name + ".part"))
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = PartialFile(path.with_name(path.name + ".part"), download.url)
        failures = wrong = 0
        furthest = partial.size
        while True:
            try:
                self._transfer(download, partial)
                download.verify(partial.path)
                break
            except DataError as error:
                partial.discard()
                wrong += 1
                if wrong >= _WRONG_CONTENTS:
                    raise DataError(
                        f"{error.args[0]} ({wrong} times)", path=error.path, remedy="fix the address or the expectation"
                    ) from None
            except _AttemptError as failure:
                failures = 1 if partial.size > furthest else failures + 1
                furthest = max(furthest, partial.size)
                if failures >= self._patience.attempts:
                    raise TransferError(
                        f"{failure} ({failures} times in a row)",
                        path=download.url,
                        remedy=f"try again later to go on from byte {partial.size}",
                    ) from None
                self._wait(download, failures, failure.wait)
        partial.publish(path)
        return True

    def _transfer(self, download: Download, partial: PartialFile) -> None:
        """Ask for what is missing and append it; anything but the whole file afterwards is a failure."""
        trusted = bool(download.sha256)  # else two versions of a file could be put together unnoticed
        headers = partial.range_headers(without_validator=trusted)
        try:
            with self._ask(download, headers) as response:
                length = self._accept(download, response, partial)
                if length is not None:
                    self._check_length(download, partial, length)
                if length is None or partial.size < length:
                    self._receive(download, response, partial, length)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            raise _AttemptError(_describe(error)) from None
        if length is not None and partial.size < length:
            raise _AttemptError(f"the connection ended after {partial.size} of {length} bytes")

    def _ask(self, download: Download, headers: dict[str, str]) -> requests.Response:
        limits = (self._patience.connect_seconds, self._patience.silent_seconds)
        try:
            return self._session.get(download.url, headers=headers, stream=True, timeout=limits)
        except _POINTLESS as error:
            raise TransferError(_describe(error), path=download.url, remedy="fix the address") from None

    def _accept(self, download: Download, response: requests.Response, partial: PartialFile) -> int | None:
        """Make the partial file fit the answer's head; return the length of the whole file, if it is told."""
        status = response.status_code
        if status in _GONE:
            raise MissingInputError(
                f"the server answers {status} {response.reason}", path=download.url, remedy="fix the address"
            )
        if status == 416:  # there is nothing after what is here
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if partial.size and total == str(partial.size):
                return partial.size
            partial.discard()
            raise _AttemptError("the server has a shorter file than was begun")
        if status in _PASSING:
            raise _AttemptError(f"the server answers {status} {response.reason}", _asked_wait(response))
        if status not in (200, 206):
            raise TransferError(
                f"the server answers {status} {response.reason}", path=download.url, remedy="fix the address"
            )
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise TransferError(
                "the server packs the content though asked not to", path=download.url, remedy="use another server"
            )
        if status == 206:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if not found or int(found[1]) != partial.size or not partial.is_of(response.headers.get("ETag", "")):
                partial.discard()
                raise _AttemptError("the server sends another part of the file than it was asked for")
            return int(found[2])
        # The whole file: nothing is there, the server cannot resume, or its file has changed.
        text = response.headers.get("Content-Length", "")
        partial.begin(etag=response.headers.get("ETag", ""), modified=response.headers.get("Last-Modified", ""))
        return int(text) if _LENGTH.fullmatch(text) else None

    @staticmethod
    def _check_length(download: Download, partial: PartialFile, length: int) -> None:
        if download.size is not None and length != download.size:
            raise DataError(f"has {length} bytes; {download.size} are expected", path=download.url)
        if length > download.most_bytes:
            raise DataError(f"has {length} bytes; it may have {download.most_bytes}", path=download.url)
        free = shutil.disk_usage(partial.path.parent).free
        if length - partial.size > free:
            raise TransferError(
                f"{length - partial.size} bytes are to come and the disk has {free}",
                path=download.path,
                remedy="make room",
            )

    def _receive(
        self, download: Download, response: requests.Response, partial: PartialFile, length: int | None
    ) -> None:
        most = length if length is not None else download.size or download.most_bytes
        with partial.open() as file:
            for piece in response.raw.stream(_CHUNK, decode_content=False):
                if self._stop.is_set():
                    raise TransferError(
                        f"stopped after {file.tell()} bytes", path=download.url, remedy="run it again to go on"
                    )
                if file.tell() + len(piece) > most:
                    raise DataError(f"does not end after the {most} bytes that it may have", path=download.url)
                file.write(piece)
                if self._progress:
                    self._progress(download.path.name, file.tell(), length)

    def _wait(self, download: Download, failures: int, asked: float | None) -> None:
        longest = self._patience.longest_wait_seconds
        if asked is not None and asked > longest:
            raise TransferError(
                f"the server asks to wait {asked:.0f} seconds", path=download.url, remedy="try again then"
            )
        seconds = min(longest, self._patience.first_wait_seconds * 2 ** (failures - 1))
        seconds *= random.uniform(0.5, 1)  # so that many clients do not come back at once
        if self._stop.wait(max(seconds, asked or 0)):
            raise TransferError("stopped", path=download.url, remedy="run it again to go on")


def is_web_address(url: str) -> bool:
    """Return True for http and https with a host, so that no file of this machine is read."""
    try:
        address = urlsplit(url)
    except ValueError:
        return False
    return address.scheme in ("http", "https") and bool(address.hostname) and url.isprintable()


def _asked_wait(response: requests.Response) -> float | None:
    """Return the seconds that `Retry-After` asks for, as a number or as a date; None when it is not understood."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        moment = email.utils.parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return max(0.0, (moment - datetime.now(timezone.utc)).total_seconds())


def _describe(error: Exception) -> str:
    """Return the innermost reason, which says more than the chain of wrappers around it."""
    inner: BaseException = error
    while inner.__context__ is not None:
        inner = inner.__context__
    if isinstance(error, (requests.Timeout, urllib3.exceptions.TimeoutError)):
        return "the server is silent"
    return f"the transfer failed ({(str(inner).splitlines() or [type(inner).__name__])[0]})"


class PartialFile:
    """Bytes of a file from `url`, at `path`; a JSON file beside it keeps which version of the file they are of.

    What is there of another address, or without such a file, is removed.
    """

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url
        self._state = path.with_name(path.name + ".json")
        self._validator = ""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            state = json.loads(read_file(self._state))
            if state["url"] == url and isinstance(state["validator"], str) and path.exists():
                self._validator = state["validator"]
                return
        self.discard()

    @staticmethod
    def forget(path: Path) -> None:
        """Remove what is left beside a partial file that was published, where the disk let nobody remove it then."""
        if not path.exists():
            with contextlib.suppress(OSError):
                path.with_name(path.name + ".json").unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """Return the number of bytes that are there."""
        return self.path.stat().st_size if self.path.exists() else 0

    def range_headers(self, *, without_validator: bool) -> dict[str, str]:
        """Return the headers that ask for the rest, or for the whole when the server's file has changed.

        Args:
            without_validator: ask for the rest even where the server gave nothing to tell versions apart.
        """
        if not self.size or not (self._validator or without_validator):
            return {}
        headers = {"Range": f"bytes={self.size}-"}
        return headers | {"If-Range": self._validator} if self._validator else headers

    def begin(self, *, etag: str, modified: str) -> None:
        """Start anew with the version that these header fields of an answer name."""
        self.discard()
        # RFC 9110: If-Range takes no weak tag.
        self._validator = modified if etag.startswith("W/") else etag or modified
        write_file(self._state, json.dumps({"url": self.url, "validator": self._validator}))
        self.open().close()

    def is_of(self, etag: str) -> bool:
        """Return False when the ETag of an answer names another version."""
        return not (etag and self._validator.startswith('"')) or etag == self._validator

    def open(self) -> IO[bytes]:
        """Open it to append."""
        return open_regular_file(self.path, "ab")

    def discard(self) -> None:
        """Remove it."""
        self.path.unlink(missing_ok=True)
        self._state.unlink(missing_ok=True)
        self._validator = ""

    def publish(self, path: Path) -> None:
        """Rename it to what it is a part of, when it is on the disk."""
        with open_regular_file(self.path) as file:
            sync_file(file)
        publish_file(self.path, path)
        self._state.unlink(missing_ok=True)
        sync_folder(path.parent)
