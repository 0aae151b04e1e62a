"""CRC-32C of the images in files, which are read once for each state of a file, and remembered in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt

from gaudi_datasets.errors import DataError
from gaudi_datasets.image_files import stat_image
from gaudi_datasets.layouts.threads import map_threads
from gaudi_datasets.output_files import find_user_cache
from gaudi_datasets.program import ProgressLine
from gaudi_ops.files import hold_lock, read_file, write_file

_ROW = np.dtype([("state", "<u8"), ("checksum", "<u4")])
_DIGEST_BYTES = 32


def find_checksums(
    paths: Sequence[Path], names: Sequence[str], read: Callable[[int], bytes], identity: str
) -> npt.NDArray[np.uint32]:
    """Find the CRC-32C of contents; those are read whose file has another size, time, or place than when it was read.

    Of the processes of a machine one reads, and the others wait. Without a cache that can be written, each reads.

    Args:
        paths: the file of each content.
        names: of the contents, which tell those of one file apart.
        read: returns content `index`.
        identity: names the data set in the cache.

    Returns:
        uint32 [contents].

    Raises:
        MissingInputError: a file is not there.
    """
    states = _hash_states(paths, names)
    cache = cache_folder("checksums") / hashlib.sha256(identity.encode()).hexdigest()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(hold_lock(cache.with_suffix(".lock")))
        known = _load(cache)
        rows = np.searchsorted(known["state"], states)
        is_known = (np.append(known["state"], np.uint64(0))[rows] == states) & (rows < len(known))
        checksums = np.append(known["checksum"], np.uint32(0))[rows]
        missing, progress = np.flatnonzero(~is_known).tolist(), ProgressLine("reading")
        found = map_threads(lambda index: google_crc32c.value(read(index)), missing)
        try:
            for done, (index, checksum) in enumerate(zip(missing, found, strict=True), 1):
                checksums[index], is_known[index] = checksum, True
                progress(done, len(missing))
        finally:  # who is stopped here goes on from what was read
            if missing:
                with contextlib.suppress(OSError):
                    _save(cache, states[is_known], checksums[is_known])
    return checksums


def require_checksum(content: bytes, checksums: npt.NDArray[np.uint32] | None, row: int, place: object) -> None:
    """Compare an image with the CRC-32C of its row, of when the data set was opened; None: they were not computed.

    Raises:
        DataError: they differ.
    """
    if checksums is not None and google_crc32c.value(content) != checksums[row]:
        remedy = "put the former one back, or start again"
        raise DataError("is another image than when the data was opened", path=str(place), remedy=remedy)


def _hash_states(paths: Sequence[Path], names: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Hash what the system tells of the file of each content, which changes whenever that may have."""
    files = {path: stat_image(path) for path in dict.fromkeys(paths)}
    pick = operator.attrgetter("st_size", "st_mtime_ns", "st_ctime_ns", "st_dev", "st_ino")
    texts = (f"{name} {pick(files[path])}" for path, name in zip(paths, names, strict=True))
    hashes = (hashlib.sha256(text.encode(errors="surrogateescape")).digest()[:8] for text in texts)
    return np.frombuffer(b"".join(hashes), "<u8").astype(np.uint64)


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache."""
    return find_user_cache(os.environ) / name


def _load(path: Path) -> npt.NDArray[np.void]:
    """Load what is known, sorted by state; nothing, if the file is not whole."""
    try:
        content = read_file(path)
    except OSError:
        content = b""
    digest, rows = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(rows).digest() != digest or len(rows) % _ROW.itemsize:
        rows = b""
    return np.frombuffer(rows, _ROW)


def _save(path: Path, states: npt.NDArray[np.uint64], checksums: npt.NDArray[np.uint32]) -> None:
    rows = np.empty(len(states), _ROW)
    rows["state"], rows["checksum"] = states, checksums
    content = rows[np.argsort(states)].tobytes()
    write_file(path, hashlib.sha256(content).digest() + content, durable=False)
