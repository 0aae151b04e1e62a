"""Copies of files and folders that URLs name: fetched to be read, or written here and then uploaded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from gaudi_datasets.errors import DataError, GaudiError, MissingInputError, TransferError, UnsafeError
from gaudi_datasets.fetching.stores import find_copy, is_url, list_copies
from gaudi_datasets.fetching.uploads import WHOLE_BYTES, StoredFile, WritableStore
from gaudi_datasets.output_files import write_json
from gaudi_ops.files import hash_file, hold_lock, read_file, read_text, write_file

MOST_COPIES = 16
"""Copies of files and small folders that a machine keeps, those whose use is newest."""

LAST_NAMES = frozenset({"manifest.json", "export.json"})
"""Names of files by which what lies beside them is known to be whole, so that they are uploaded last."""

_HEAD_BYTES = 256  # of a manifest, among them its format


def fetch_copy(
    place: str | os.PathLike[str], select: Callable[[Collection[str]], Collection[str]] | None = None
) -> Path:
    """Return a path of this machine as it is; fetch the file or folder of a URL, and return the path of its copy.

    What did not change in the store since is not fetched again. A TensorFlow checkpoint has the beginning of a name.

    Args:
        place: path or URL.
        select: chooses of the files of a folder those that are fetched; by default all are.

    Raises:
        MissingInputError: there is nothing of that name.
        AccessError, TransferError, FlagError, MissingExtraError, DataError: as by `Store`.
    """
    if not is_url(place):
        return Path(place)
    url = place.rstrip("/")
    cache = find_copy(url, "files")
    with hold_lock(_find_lock(cache)):
        store, files = _find_files(url)
        state_path = cache.with_name(f"{cache.name}.json")
        if select is not None:
            files = {name: files[name] for name in select(files)}
        known = _read_state(state_path, url)
        for name in known.keys() - files.keys():
            (cache / name).unlink(missing_ok=True)
        for name, file in files.items():
            if known.get(name) != list(file) or not (cache / name).is_file():
                _download(store, name, file, cache / name)
        write_json(state_path, {"url": url, "files": {name: list(file) for name, file in files.items()}}, durable=False)
        _make_room(cache.parent, cache)
    return cache if store.url == url else cache / url.rpartition("/")[2]


def _find_files(url: str) -> tuple[WritableStore, Mapping[str, StoredFile]]:
    """Find a file, all files of a folder, or those in the folder above that begin with a name."""
    parent, _, name = url.rpartition("/")
    is_bucket = parent.endswith("/")
    if not is_bucket:
        store = WritableStore(parent)
        if (file := store.find_file(name)) is not None:  # asked for itself, because a list may lag behind
            return store, {name: file}
    folder = WritableStore(url)
    if files := folder.list_files():
        return folder, files
    if not is_bucket and (files := store.list_named(name)):
        return store, files
    raise MissingInputError("there is no such file or folder in the store", path=url, remedy="correct the URL")


def _download(store: WritableStore, name: str, file: StoredFile, target: Path) -> None:
    """Fetch a file, once more if it was written again meanwhile, so that it is of one writing.

    Raises:
        TransferError: it was written again and again.
    """
    for _ in range(2):
        store.download(name, file.size, target)
        if file.size <= WHOLE_BYTES:  # fetched in one request
            return
        before, file = file, store.find_file(name) or file
        if before == file:
            return
    target.unlink()
    raise TransferError("is written while it is fetched", path=store.name(name), remedy="run it again later")


def _read_state(path: Path, url: str) -> dict[str, Any]:
    try:
        state = json.loads(read_text(path))
        return dict(state["files"]) if state["url"] == url else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _make_room(folder: Path, own: Path) -> None:
    """Remove the copies whose use is longest ago, but for those that another process fetches."""
    for path in list_copies(folder)[MOST_COPIES:]:
        cache = path.with_suffix("")
        if cache != own:
            with contextlib.suppress(BlockingIOError), hold_lock(_find_lock(cache), waiting=_refuse):
                path.unlink(missing_ok=True)
                shutil.rmtree(cache, ignore_errors=True)


def _find_lock(cache: Path) -> Path:
    return cache.with_name(f"{cache.name}.lock")


def _refuse() -> None:
    raise BlockingIOError


def upload_copy(url: str) -> None:
    """Upload the files of a folder that were written into the copy of a URL for outputs, and remove them here.

    What another process still writes for the same URL stays for that one, and so does what it replaces meanwhile.

    Raises:
        AccessError, TransferError, MissingInputError: they are not all there; the copy stays.
    """
    folder, store = find_copy(url, "outputs"), WritableStore(url)
    found: dict[Path, tuple[int, int, int]] = {}
    for path in folder.rglob("*"):
        if path.is_file() and not _is_draft(path, folder):
            with contextlib.suppress(FileNotFoundError):
                found[path] = _identify(path)
    try:
        for path in sorted(found, key=lambda path: (path.name in LAST_NAMES, path)):
            try:
                store.upload(path.relative_to(folder).as_posix(), path)
            except FileNotFoundError:
                if path.exists():  # else the other process has uploaded and removed it
                    raise
    except GaudiError as error:
        error.remedy = f"{error.remedy}; the results are in {folder}"
        raise
    for path, identity in found.items():
        with contextlib.suppress(FileNotFoundError):  # uploaded and removed by the other process, too
            if _identify(path) == identity:
                path.unlink()
    emptied = {parent for path in found for parent in path.parents if parent.is_relative_to(folder)}
    for each in sorted(emptied, reverse=True):
        with contextlib.suppress(OSError):  # not empty
            each.rmdir()


def _is_draft(path: Path, folder: Path) -> bool:
    return any(part.startswith(".unfinished") for part in path.relative_to(folder).parts)


def _identify(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def fetch_folder(url: str, output_dir: Path, progress: Callable[[int, int], None]) -> int:
    """Fetch all files below a URL into a folder; records and their index are compared with their manifests.

    Files of the same size that are there already are not fetched again. A manifest is written once all that it tells of
    is there, also where the store's list of files lags behind.

    Returns:
        how many files there are.

    Raises:
        UnsafeError: another file of such a name is there.
        DataError: a shard or an index is not that of its manifest.
        MissingInputError, AccessError, TransferError, FlagError, MissingExtraError: as by `Store`.
    """
    from gaudi_datasets.records.manifests import list_described

    store, files = _find_files(url.rstrip("/"))
    manifests = _read_manifests(store, files)
    described: dict[str, tuple[int, str, str]] = {}
    for name, content in manifests.items():
        folder = name.rpartition("/")[0]
        rows = list_described(content, Path(name).stem, store.name(name))
        described |= {f"{folder}/{each}" if folder else each: row for each, row in rows.items()}
    wanted = {name: file for name, file in files.items() if name not in manifests}
    wanted |= {name: StoredFile(row[0], "") for name, row in described.items() if name not in wanted}
    count = len(manifests)
    for number, (name, file) in enumerate(wanted.items()):
        progress(number, len(wanted))
        try:
            _fetch_file(store, name, file, output_dir / name, described.get(name))
            count += 1
        except MissingInputError:
            if name in files or described[name][1] != "sha256":  # the index, without which each record is looked up
                raise
    progress(len(wanted), len(wanted))
    for name, content in manifests.items():
        if (output_dir / name).is_file() and read_file(output_dir / name, limit=None) != content:
            raise _make_other_error(output_dir / name)
        write_file(output_dir / name, content)
    return count


def _read_manifests(store: WritableStore, files: Mapping[str, StoredFile]) -> dict[str, bytes]:
    """Read the manifests of records among files, and those that a list lacks of records that are among them."""
    from gaudi_datasets.records.manifests import MANIFEST_FORMAT
    from gaudi_datasets.split_folders import SHARD_NAME

    names = {name for name in files if name.endswith(".json")}
    shards = [match for name in files if (match := SHARD_NAME.fullmatch(name))]
    names |= {f"{match.string[: match.start('number') - 1]}.json" for match in shards}
    manifests = {}
    for name in sorted(names):
        with contextlib.suppress(MissingInputError):
            if MANIFEST_FORMAT.encode() in store.read(name, most=_HEAD_BYTES):
                manifests[name] = store.read(name)
    return manifests


def _fetch_file(
    store: WritableStore, name: str, file: StoredFile, path: Path, described: tuple[int, str, str] | None
) -> None:
    """Fetch a file that is not here, once more if it is not that of a manifest; see `list_described`."""
    from gaudi_datasets.records.tfrecords import checksum_file

    kind, expected = ("", None) if described is None else described[1:]
    is_here = path.is_file()
    if is_here and path.stat().st_size != file.size:
        raise _make_other_error(path)
    for _ in range(1 if is_here else 2):
        if not is_here:
            _download(store, name, file, path)
        if expected is None or expected == (hash_file(path) if kind == "sha256" else checksum_file(path)):
            return
        if not is_here:
            path.unlink()
    raise DataError(
        f"has not the {kind} {expected} of its manifest",
        path=path if is_here else store.name(name),
        field=kind,
        remedy="remove it, and repeat the command" if is_here else "it was replaced or is damaged: write it again",
    )


def _make_other_error(path: Path) -> UnsafeError:
    return UnsafeError("is there, and another file than in the store", path=path, remedy="move it away")
