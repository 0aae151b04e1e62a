"""Copies of files and folders that URLs name: fetched to be read, or written here and then uploaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c

from gaudi_datasets.errors import DataError, GaudiError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.stores import find_copy, is_url
from gaudi_datasets.fetching.uploads import StoredFile, WritableStore
from gaudi_datasets.output_files import write_json
from gaudi_ops.files import hold_lock, open_regular_file, read_file, read_text

MOST_COPIES = 16
"""Copies of files and small folders that a machine keeps, those whose use is newest."""

_LAST = "manifest.json"  # by which what lies beside it is known to be whole


def fetch_copy(place: str | Path) -> Path:
    """Return a path of this machine as it is; fetch the file or folder of a URL, and return the path of its copy.

    What did not change in the store since is not fetched again. A TensorFlow checkpoint has the beginning of a name.

    Raises:
        MissingInputError: there is nothing of that name.
        AccessError, TransferError, FlagError, MissingExtraError, DataError: as by `Store`.
    """
    if not is_url(place):
        return Path(place)
    url = str(place).rstrip("/")
    cache = find_copy(url, "files")
    with hold_lock(cache.with_name(f"{cache.name}.lock")):
        store, files = _find_files(url)
        state_path = cache.with_name(f"{cache.name}.json")
        known = _read_state(state_path, url)
        for name, file in files.items():
            if known.get(name) != list(file) or not (cache / name).is_file():
                store.download(name, file.size, cache / name)
        write_json(state_path, {"url": url, "files": {name: list(file) for name, file in files.items()}}, durable=False)
        _make_room(cache.parent, cache)
    return cache if store.url == url else cache / url.rpartition("/")[2]


def _find_files(url: str) -> tuple[WritableStore, Mapping[str, StoredFile]]:
    """Find the files of a folder, or a file or those that begin with its name in the folder above."""
    store = WritableStore(url)
    if files := store.list_files():
        return store, files
    parent, _, name = url.rpartition("/")
    if not parent.endswith("/"):  # else it is a bucket
        store = WritableStore(parent)
        if files := store.list_named(name):
            return store, files
    raise MissingInputError("there is no such file or folder in the store", path=url, remedy="correct the URL")


def _read_state(path: Path, url: str) -> dict[str, Any]:
    try:
        state = json.loads(read_text(path))
        return dict(state["files"]) if state["url"] == url else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _make_room(folder: Path, own: Path) -> None:
    """Remove the copies whose use is longest ago."""
    states = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in states[MOST_COPIES:]:
        if path.with_suffix("") != own:
            path.unlink(missing_ok=True)
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)


def upload_copy(url: str) -> None:
    """Upload the files of a folder that were written into the copy of a URL for outputs, and remove them here.

    Raises:
        AccessError, TransferError, MissingInputError: they are not all there; the copy stays.
    """
    folder, store = find_copy(url, "outputs"), WritableStore(url)
    found = [path for path in folder.rglob("*") if path.is_file()]
    try:
        for path in sorted(found, key=lambda path: (path.name == _LAST, path)):
            store.upload(path.relative_to(folder).as_posix(), path)
    except GaudiError as error:
        error.remedy = f"{error.remedy}; the results are in {folder}"
        raise
    shutil.rmtree(folder, ignore_errors=True)


def fetch_folder(url: str, output_dir: Path, progress: Callable[[int, int], None]) -> int:
    """Fetch all files below a URL into a folder, and compare records with the checksums of their manifests.

    Files of the same size that are there already are not fetched again.

    Returns:
        how many files there are.

    Raises:
        UnsafeError: another file of such a name is there.
        DataError: a shard is not that of its manifest.
        MissingInputError, AccessError, TransferError, FlagError, MissingExtraError: as by `Store`.
    """
    from gaudi_datasets.records.manifests import MANIFEST_FORMAT, parse_manifest

    store, files = _find_files(url.rstrip("/"))
    for number, (name, file) in enumerate(files.items()):
        progress(number, len(files))
        path = output_dir / name
        if path.is_file() and path.stat().st_size != file.size:
            raise UnsafeError("is there, and of another size than in the store", path=path, remedy="move it away")
        if not path.is_file():
            store.download(name, file.size, path)
    progress(len(files), len(files))
    for name in files:
        path = output_dir / name
        if path.suffix == ".json" and MANIFEST_FORMAT.encode() in read_file(path, limit=None)[:200]:
            for shard, (_, checksum) in parse_manifest(json.loads(read_file(path)), str(path)).items():
                if checksum != _checksum(path.with_name(shard)):
                    raise DataError(
                        f"has not the CRC-32C {checksum} of its manifest",
                        path=path.with_name(shard),
                        field="crc32c",
                        remedy="remove it, and repeat the command to fetch it again",
                    )
    return len(files)


def _checksum(path: Path) -> str:
    checksum = 0
    with open_regular_file(path) as file:
        while piece := file.read(1 << 22):
            checksum = google_crc32c.extend(checksum, piece)
    return f"{checksum:08x}"
