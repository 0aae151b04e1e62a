"""Reach files in stores that URLs name, such as s3:// and gs://, with bounded retries and clear errors.

fsspec does the transport, because its file systems are kept by those who use them, take the credentials of each store's
own library, and are already what TensorFlow's neighbours (pandas, Dask, Hugging Face) read buckets by.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import random
import re
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from gaudi_datasets.errors import AccessError, DataError, FlagError, MissingExtraError, MissingInputError, TransferError
from gaudi_datasets.output_files import find_user_cache

if TYPE_CHECKING:
    from gaudi_datasets.fetching.downloads import Patience

DEFAULT_GB = 100.0
"""Size of the cache of what was fetched, unless somebody says otherwise; 1 GB is 10^9 bytes."""

Piece = tuple[str, int, int]
"""A name, the first byte, and the byte after the last."""

_Result = TypeVar("_Result")

_URL = re.compile(r"[a-z][a-z0-9+.:-]*://")
_MOST_BYTES = 2**28  # of a file that is read whole
_PIECE = 2**23  # a request: so large that its answer outlasts the way to the store, and no more is lost with it
_AT_ONCE = 16  # requests under way, so that a distant store sends all the time
_LIBRARIES = ("fsspec", "s3fs", "gcsfs", "aiobotocore", "botocore", "google", "asyncio")  # of extra `remote`
_MOST_CAUSES = 10  # of an error, one behind the other


def is_url(path: str | PathLike[str] | None) -> TypeGuard[str]:
    """Tell whether something names a place in a store, and not a path of this machine."""
    return isinstance(path, str) and _URL.match(path) is not None


_cache_dir: Path | None = None


def use_cache_dir(folder: str | Path | None) -> None:
    """Keep the copies of this process of what is in stores in a folder from now on; None: in the user's cache."""
    global _cache_dir
    _cache_dir = None if folder is None else Path(folder)


def find_cache(kind: str) -> Path:
    """Return the folder of copies of a kind; records lie in the folder of `use_cache_dir` itself."""
    if _cache_dir is not None:
        return _cache_dir if kind == "records" else _cache_dir / kind
    return find_user_cache(os.environ) / kind


def find_copy(place: str | Path, kind: str = "runs") -> Path:
    """Return a path of this machine as it is, and for a URL the place of its copy here, which may not be there yet."""
    if not is_url(place):
        return Path(place)
    return find_cache(kind) / hashlib.sha256(str(place).rstrip("/").encode()).hexdigest()[:24]


def list_copies(folder: Path) -> list[Path]:
    """List the JSON files of copies in a folder, the one that was written last first."""
    found = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # another process removes copies, too
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def cut_pieces(name: str, size: int) -> list[Piece]:
    """Cut a file into pieces to ask for; an empty one has none."""
    return [(name, start, min(start + _PIECE, size)) for start in range(0, size, _PIECE)]


def require_plain_url(url: str, flag: str | None = None) -> None:
    """Raise FlagError for a URL that carries credentials, which every log would repeat; it prints none of them."""
    scheme, _, rest = url.partition("://")
    if "@" in rest.partition("/")[0] or re.search(r"[?#]", rest) or not url.isprintable():
        raise FlagError(
            "a URL has neither a user, a password nor a query",
            flag=flag,
            path=f"{scheme}://...",
            remedy="leave them out; credentials are those of the store's own library, in its files or variables",
        )


def refuse_url(value: object, flag: str) -> None:
    """Raise FlagError for a URL as the value of a flag that names files of this machine."""
    if isinstance(value, str) and is_url(value):
        require_plain_url(value, flag)
        raise FlagError(
            f"{flag} {value}: names a file or folder of this machine, and takes no URL",
            flag=flag,
            remedy="copy it here by your store's own program",
        )


def check_records_url(data_dir: str | None, cache_dir: str | PathLike[str] | None, cache_gb: float) -> None:
    """Check the flags of records: a URL without credentials, and a cache for a URL alone.

    Raises:
        FlagError: for the first value that breaks a rule.
    """
    if cache_gb <= 0:
        raise FlagError(f"--cache_gb {cache_gb:g}: must be above 0", flag="--cache_gb")
    if is_url(data_dir):
        require_plain_url(str(data_dir), "--data_dir")
    elif cache_dir is not None or cache_gb != DEFAULT_GB:
        name = "--cache_gb" if cache_dir is None else "--cache_dir"
        raise FlagError(f"{name}: is for a folder that is a URL", flag=name, remedy="leave it out")


class Store:
    """A folder in a store.

    Args:
        url: of the folder.
        patience: how long the store is waited for.

    Raises:
        FlagError: the URL carries credentials, or no library knows such ones.
        MissingExtraError: the library of this kind of URL is not installed.
    """

    def __init__(self, url: str, patience: Patience | None = None) -> None:
        require_plain_url(url)
        self.url = url.rstrip("/")
        if patience is None:
            from gaudi_datasets.fetching.downloads import Patience

            patience = replace(Patience(), longest_wait_seconds=15)
        if self.url.startswith(("gs:", "gcs:")):
            patience = replace(patience, attempts=1)  # gcsfs tries six times by itself
        self._patience = patience
        self._files, self._root = _open_file_system(self.url, patience)

    def name(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}"

    def read(self, name: str, *, most: int = _MOST_BYTES) -> bytes:
        """Read a whole file of at most 256 MiB, or its first bytes; one request, whose refusal tells why.

        Raises:
            MissingInputError: it is not there, or its bucket is not.
            AccessError: the store refuses.
            DataError: it has not the store's own checksum.
            TransferError: it could not be read, after all attempts.
        """

        def read(path: str) -> bytes:
            try:
                content: bytes = self._files.cat_file(path, start=0, end=most)
                return content
            except Exception as error:
                if _find_reason(error) != "InvalidRange":
                    raise
                return b""  # an empty file has no first byte

        return self._try(name, read)

    def read_pieces(self, pieces: Sequence[Piece]) -> Generator[bytes, None, None]:
        """Read pieces of files in their order; the next ones are on their way meanwhile. Errors are those of `read`."""
        ahead, left = deque[Future[bytes]](), iter(pieces)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                while True:
                    with contextlib.suppress(StopIteration):
                        while len(ahead) < _AT_ONCE:
                            ahead.append(pool.submit(self.read_piece, next(left)))
                    if not ahead:
                        return
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    def read_piece(self, piece: Piece) -> bytes:
        """Read one piece, which may be empty. Errors are those of `read`."""
        name, start, end = piece
        if start == end:  # which a store cannot tell from the rest of a file
            return b""

        def read(path: str) -> bytes:
            content: bytes = self._files.cat_file(path, start=start, end=end)
            if len(content) != end - start:
                raise ConnectionError(f"sent {len(content)} of {end - start} bytes")
            return content

        return self._try(name, read)

    def _try(self, name: str, call: Callable[[str], _Result]) -> _Result:
        """Call something with the path of a file until it succeeds, or cannot, or has been tried often enough."""
        url = self.name(name)
        for attempt in range(1, self._patience.attempts + 1):
            try:
                return call(f"{self._root}/{name}")
            except Exception as error:  # each library has its own
                reason = _find_reason(error)
                if isinstance(error, FileExistsError):
                    raise
                if _is_missing(error, reason):
                    raise MissingInputError(
                        f"the store has no such file ({reason})", path=url, remedy="correct the URL"
                    ) from None
                if _is_refused(error, reason):
                    raise AccessError(
                        f"the store refuses access ({reason})",
                        path=url,
                        remedy="give its library credentials that are valid and may do this",
                    ) from None
                if attempt == self._patience.attempts and "Checksum" in reason:  # of the store's own
                    raise DataError(
                        f"is not what was stored ({reason})", path=url, field="checksum", remedy="write it again"
                    ) from None
                if attempt == self._patience.attempts:
                    raise TransferError(
                        f"the store does not answer ({reason}, {attempt} times in a row)",
                        path=url,
                        remedy="run it again later to go on",
                    ) from None
                longest = min(
                    self._patience.longest_wait_seconds, self._patience.first_wait_seconds * 2 ** (attempt - 1)
                )
                time.sleep(longest * random.uniform(0.5, 1))  # so that many ranks do not come back at once
        raise ValueError(f"{self._patience.attempts} attempts; there must be one")


@functools.lru_cache
def _open_file_system(url: str, patience: Patience) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it; retries are ours, so that they are bounded once."""
    scheme = url.partition(":")[0]
    options: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        options["use_listings_cache"] = False
        options["config_kwargs"] = {
            "connect_timeout": patience.connect_seconds,
            "read_timeout": patience.silent_seconds,
            "max_pool_connections": 2 * _AT_ONCE,
            "retries": {"max_attempts": 0},
        }
    for name in _LIBRARIES:  # without a handler they print what we tell, at length
        logging.getLogger(name).addHandler(logging.NullHandler())
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url, **options)
    except ImportError as error:
        raise MissingExtraError(
            f"{scheme}:// needs {error.name or 'a library'}, which is not installed",
            path=url,
            remedy="install gaudi-datasets[remote], or for other kinds of stores the library that fsspec names",
        ) from None
    except ValueError:
        raise FlagError(f"fsspec knows no {scheme}://", path=url, remedy="give s3://, gs:// or a folder") from None
    if scheme in ("s3", "s3a"):
        files.retries = 1
    return files, root.rstrip("/")


def _find_reason(error: BaseException) -> str:
    """Find what a store answered: its code, or the kind of error; messages of libraries may have credentials."""
    kinds = [type(error).__name__]
    inner: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if inner is None:
            break
        response = getattr(inner, "response", None)
        if isinstance(response, dict) and isinstance(code := response.get("Error", {}).get("Code"), str):
            return code if re.fullmatch(r"\w{1,60}", code) else kinds[0]
        if isinstance(status := getattr(inner, "code", getattr(inner, "status", None)), int):
            return f"{kinds[0]} {status}"
        kinds.append(type(inner).__name__)
        inner = inner.__cause__ or inner.__context__
    return kinds[-1] if kinds[0] == "OSError" else kinds[0]


def _is_missing(error: Exception, reason: str) -> bool:
    return isinstance(error, FileNotFoundError) or reason in ("NoSuchBucket", "NoSuchKey", "404")


def _is_refused(error: Exception, reason: str) -> bool:
    """Tell whether a store refused, or its library found no credentials: nothing that passes."""
    names = ("Credential", "Token", "Signature", "AccessKey", "Profile", "Forbidden", "RefreshError")
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    return isinstance(error, PermissionError) or any(name in f"{reason} {kinds}" for name in names) or reason == "403"
