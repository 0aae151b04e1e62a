"""Records that a URL names, in a folder of this host that all its processes share and that has a bounded size.

Nothing lists a bucket: the manifest names all files, so that a store whose lists lag behind tells the same. Each shard
is compared with the manifest's checksum before it has its name, and a set that no process reads makes room for others.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import google_crc32c

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import AccessError, DataError, FlagError, MissingInputError
from gaudi_datasets.fetching.stores import DEFAULT_GB, Store, cut_pieces, find_cache, use_cache_dir
from gaudi_datasets.program import ProgressLine
from gaudi_datasets.records.manifests import INDEX, find_index_size, index_path, read_shards
from gaudi_datasets.records.ranged_reader import RangedReader
from gaudi_datasets.split_folders import name_folders
from gaudi_ops.errors import GaudiError
from gaudi_ops.files import hold_lock, is_shared, read_file, read_text, share_lock, write_atomically, write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_datasets.fetching.downloads import Patience

_IN_USE = "in_use"
_URL = "url"
_KEPT = "kept"  # names of the shards that are kept here

_most_gb = DEFAULT_GB
_held: dict[Path, IO[bytes]] = {}


def use_cache(folder: str | Path | None = None, gigabytes: float = DEFAULT_GB) -> None:
    """Keep what this process fetches from now on in a folder, which may have so many GB; None: in the user's cache."""
    global _most_gb
    _most_gb = gigabytes
    use_cache_dir(folder)


class RemoteRecords:
    """The records of one split below a URL, by their manifest; records without one cannot be checked.

    Args:
        url: the folder of the records, or the one that holds a folder of records for each split.
        split: what the names of the shards begin with.
        kind: what the records must be of; None: of any kind.
        patience: how long the store is waited for.

    Attributes:
        url: the folder of the records.
        split: what the names of the shards begin with there.
        manifest: what it tells.

    Raises:
        MissingInputError: there is no manifest.
        DataError: the manifest is damaged, or of something else.
        AccessError, TransferError, FlagError, MissingExtraError: as by `Store`.
    """

    def __init__(self, url: str, split: str, *, kind: str | None = None, patience: Patience | None = None) -> None:
        self._store = Store(url, patience)
        self._folder, self.split, self._content = _find_manifest(self._store, split)
        self.url = self._store.name(self._folder).rstrip("/")
        path = f"{self.url}/{self.split}.json"
        self.manifest, self._shards = read_shards(self._content, self.split, path)
        if kind is not None and self.manifest.get("kind") != kind:
            found = shorten(self.manifest.get("kind"))
            raise DataError(f"tells of {found} records; {kind} records are needed", path=path)

    @property
    def shards(self) -> list[str]:
        """Return the names of the shards, in the order of their records."""
        return sorted(self._shards)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all shards together."""
        return sum(size for size, _ in self._shards.values())

    def fetch(self) -> Path:
        """Fetch the shards that are not in the cache, or wait for a process that does; return their folder.

        They stay there as long as this process lives. Of shards that do not fit, the first ones are fetched, as many as
        do; see `open_reader` for the others.

        Raises:
            FlagError: they do not fit into the cache beside those that are in use, and have no index.
            MissingInputError, DataError: a shard is not there, or is another than that of the manifest.
            AccessError, TransferError: as by `Store`.
        """
        cache = find_cache("records")
        key = _make_key(self.url, self.split, self._content)
        folder = cache / key
        with hold_lock(cache / "cache.lock"):
            if folder not in _held:
                self._take_room(cache, folder)
                write_file(folder / _URL, f"{self.url}\n")  # whose time is that of the newest use
                _held[folder] = share_lock(folder / _IN_USE)
        tell = partial(say, f"{self.url}: another process fetches it; waiting", error=True)
        with hold_lock(cache / f"{key}.lock", waiting=tell):
            self._fetch_missing(folder)
        return folder

    def open_reader(self, folder: Path) -> RangedReader | None:
        """Return who reads the shards that the folder of `fetch` has not; None where it has all."""
        absent = self._shards.keys() - _list_kept(folder, self._shards)
        return RangedReader(self._store, self._folder, absent) if absent else None

    def _take_room(self, cache: Path, folder: Path) -> None:
        """Make the folder of the set, and note which shards it keeps, of those that fit."""
        own = _find_own_size(folder)
        room, kept, total = _make_room(cache, folder, self.num_bytes), [], 0
        for name in self.shards:
            total += self._shards[name][0]
            if total > room:
                break
            kept.append(name)
        if len(kept) < len(self._shards) and find_index_size(self.manifest) is None:
            raise FlagError(
                f"has {self.num_bytes / 1e9:.3g} GB and no index, so it has to fit into the cache {cache}, of whose"
                f" {_most_gb:.3g} GB {room / 1e9:.3g} are free",
                flag="--cache_gb",
                path=self.url,
                remedy="give a larger --cache_gb, and a --cache_dir with the room",
            )
        if own is not None and own > sum(self._shards[name][0] for name in kept):
            if (folder / _IN_USE).exists() and is_shared(folder / _IN_USE):
                return
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        write_file(folder / f"{self.split}.json", self._content)
        write_file(folder / _KEPT, "".join(f"{name}\n" for name in kept))

    def _fetch_missing(self, folder: Path) -> None:
        kept = _list_kept(folder, self._shards)
        missing = [name for name in self.shards if name in kept and _find_size(folder / name) != self._shards[name][0]]
        if len(kept) < len(self._shards):
            stays = sum(self._shards[name][0] for name in kept)
            told = f"{stays / 1e9:.3g} of {self.num_bytes / 1e9:.3g} GB stay in the cache"
            say(f"{self.url}: {told}; the others are read there each time", error=True)
        progress = ProgressLine("fetching", "file")
        sizes = {name: self._shards[name][0] for name in missing}
        pieces = [piece for name in missing for piece in cut_pieces(self._path(name), sizes[name])]
        with contextlib.closing(self._store.read_pieces(pieces)) as contents:
            for number, name in enumerate(missing):
                progress(number, len(missing))
                if self._write(folder / name, contents):
                    continue
                # Once more, in case it was damaged on its way; those on their way are of the next files.
                if not self._write(folder / name, self._store.read_pieces(cut_pieces(self._path(name), sizes[name]))):
                    raise DataError(
                        f"has not the CRC-32C {self._shards[name][1]} of its manifest",
                        path=f"{self.url}/{name}",
                        field="crc32c",
                        remedy="it was replaced or is damaged: copy or convert it again",
                    )
        progress(len(missing), len(missing))
        index, size = index_path(folder, self.split), find_index_size(self.manifest)
        if size is not None and not index.exists():
            self._fetch_index(index, size)
        if len(kept) < len(self._shards) and not index.exists():
            raise DataError(
                "is not there, or not that of its manifest; without it, records have to fit into the cache",
                path=f"{self.url}/{index.name}",
                field=INDEX,
                remedy="copy or convert the records again, or give a larger --cache_gb",
            )

    def _fetch_index(self, path: Path, size: int) -> None:
        """Fetch the index, once more if it is not that of the manifest; without it, each record is looked up."""
        for _ in range(2):
            with contextlib.suppress(MissingInputError, AccessError):
                content = b"".join(self._store.read_pieces(cut_pieces(self._path(path.name), size)))
                if hashlib.sha256(content).hexdigest() == self.manifest[INDEX]:
                    write_file(path, content)
                    return

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}" if self._folder else name

    def _write(self, path: Path, contents: Iterator[bytes]) -> bool:
        """Write a shard; return False, and leave nothing there, if it is not that of the manifest."""
        size, expected = self._shards[path.name]
        checksum = 0
        with contextlib.suppress(_OtherContentError), write_atomically(path) as file:
            for _ in cut_pieces("", size):
                content = next(contents)
                checksum = google_crc32c.extend(checksum, content)
                file.write(content)
            if f"{checksum:08x}" != expected:
                raise _OtherContentError
        return f"{checksum:08x}" == expected


class _OtherContentError(Exception):
    """A shard that is not that of the manifest, so that its draft is removed."""


def _list_kept(folder: Path, shards: Collection[str]) -> set[str]:
    """List the shards that a folder keeps or is to keep; all where it was made by an earlier release."""
    path = folder / _KEPT
    return set(shards) & set(read_text(path).split("\n")) if path.is_file() else set(shards)


def _find_size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _find_manifest(store: Store, split: str) -> tuple[str, str, bytes]:
    """Find the folder of a manifest below that of the store, the split's name there, and the content.

    Where a store hides what is not there behind a refusal, the next place is tried, too.
    """
    inner = ((folder, name) for folder in name_folders(split) for name in dict.fromkeys((split, folder)))
    refusal: AccessError | None = None
    for folder, name in (("", split), *inner):
        if "/" in name:
            continue
        try:
            return folder, name, store.read(f"{folder}/{name}.json" if folder else f"{name}.json")
        except MissingInputError as error:
            if "NoSuchBucket" in str(error):
                raise
        except AccessError as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    raise MissingInputError(
        f"has no manifest {split}.json, which records in a store need",
        path=store.url,
        remedy="correct the URL, or copy the folder that gaudi-datasets convert wrote there whole",
    )


def _make_room(cache: Path, own: Path, needed: int) -> int:
    """Remove other sets of records, those first whose use is longest ago, until there is room; those in use stay.

    Returns:
        the bytes that there is room for.
    """
    most = int(_most_gb * 1e9)
    found = {folder: _find_own_size(folder) for folder in cache.iterdir() if folder != own}
    sizes = {folder: size for folder, size in found.items() if size is not None}
    for folder in sorted(sizes, key=lambda each: (each / _URL).stat().st_mtime):
        if sum(sizes.values()) + needed <= most:
            break
        if not (folder / _IN_USE).exists() or not is_shared(folder / _IN_USE):
            shutil.rmtree(folder)
            del sizes[folder]
    return most - sum(sizes.values())


def _make_key(url: str, split: str, manifest: bytes) -> str:
    """Return the name of the folder of a set of records."""
    return hashlib.sha256(f"{url}/{split}\n".encode() + manifest).hexdigest()[:32]


def _find_own_size(folder: Path) -> int | None:
    """Return the bytes of a set of records that was fetched; None for any other folder, which is not ours to remove."""
    try:
        (manifest,) = folder.glob("*.json")
        content, url = read_file(manifest), read_text(folder / _URL).rstrip("\n")
        if folder.is_symlink() or folder.name != _make_key(url, manifest.stem, content):
            return None
        _, shards = read_shards(content, manifest.stem, str(manifest))
        kept = _list_kept(folder, shards)
    except (OSError, ValueError, GaudiError):
        return None
    return sum(size for name, (size, _) in shards.items() if name in kept)
