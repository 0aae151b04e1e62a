"""Records that are converted into a store: each shard is indexed, uploaded, compared and removed, the manifest last.

A store renames nothing, so shards have their names from the beginning. A file beside them says that they are unfinished
until the manifest is there, without which nothing reads them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from gaudi_datasets.documents import seal
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.uploads import StoredFile, WritableStore
from gaudi_datasets.output_files import resumable_folder
from gaudi_datasets.records.manifests import INDEX, JOB, JOB_IDENTITY, find_index_size, index_path, parse_manifest
from gaudi_datasets.records.tfrecords import encode_index
from gaudi_ops.errors import GaudiError
from gaudi_ops.files import read_file, read_text, write_file

_FORMAT = "gaudi-datasets unfinished records"

Shard: TypeAlias = Mapping[str, Any]
WriteAll: TypeAlias = Callable[[Callable[[Shard], bool], Callable[[Shard], Shard]], list[dict[str, Any]]]
"""Writes the shards that the first function does not know, and calls the second with each; see `write_shards`."""


def write_shards_to_store(
    url: str,
    split: str,
    staging: Path,
    names: Sequence[str],
    write_all: WriteAll,
    describe: Callable[[list[dict[str, Any]], bytes], dict[str, Any]],
    identity: str,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Write the shards of a split, their index and their manifest to a store; see `write_shards` of `conversion`.

    Args:
        url: of the folder of the records.
        split: what the names begin with.
        staging: has the shards while they are written and uploaded, and what is known of those that are there.
        names: of the shards.
        write_all: writes them.
        describe: makes the manifest of shards and of the index, without its seal.
        identity: of the job.
        overwrite: replace other records of the split.

    Returns:
        the manifest.

    Raises:
        UnsafeError: there are other records of the split, or files that no conversion wrote.
        DataError: the manifest there is damaged.
        AccessError, TransferError, FlagError, MissingExtraError, MissingInputError: as by `Store`.
    """
    store = WritableStore(url)
    manifest_name, marker = f"{split}.json", f"{split}.unfinished.json"
    with resumable_folder(staging):
        manifest, job = _read_manifest(store, manifest_name), staging / JOB
        files = store.list_files(None if manifest is None else manifest_name)  # which may lag behind
        if manifest is not None and not overwrite and _is_finished(manifest, files, identity):
            return manifest
        if not job.exists() or read_text(job, errors="replace") != identity:
            shutil.rmtree(staging)
            staging.mkdir()
            write_file(job, identity)
        replaced = _list_replaced(store, split, files, manifest, overwrite=overwrite)
        index = index_path(staging, split)
        unfinished = {"format": _FORMAT, JOB_IDENTITY: identity, "shards": sorted({*names, index.name, *replaced})}
        store.write(marker, _render(unfinished))
        store.remove(manifest_name)  # from here on, nobody takes some of each for a whole

        def is_there(shard: Shard) -> bool:
            is_whole = shard["name"] in files and files[shard["name"]].size == shard["bytes"] and manifest is None
            return is_whole and _hash(read_file(_name_part(staging, shard), limit=None)) == shard[INDEX]

        def bring(shard: Shard) -> Shard:
            path, part = staging / shard["name"], encode_index([staging / shard["name"]])
            write_file(_name_part(staging, shard), part)
            store.upload(path.name, path)
            path.unlink()
            return {INDEX: _hash(part)}

        written = write_all(is_there, bring)
        write_file(index, b"".join(read_file(_name_part(staging, shard), limit=None) for shard in written))
        rows = [{name: value for name, value in shard.items() if name != INDEX} for shard in written]
        document = seal(describe(rows, read_file(index, limit=None)))
        for name in sorted(replaced - {*names, index.name}):
            store.remove(name)
        store.upload(index.name, index)
        store.write(manifest_name, _render(document))
        store.remove(marker)
        return document


def _name_part(staging: Path, shard: Shard) -> Path:
    """Return the path of the index of one shard, which is kept when the shard is removed."""
    return staging / f"{shard['name']}.index"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _render(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _read_manifest(store: WritableStore, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(store.read(name))
    except MissingInputError as error:
        if "NoSuchBucket" in str(error):
            raise
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error})", path=store.name(name), remedy="move it away") from None
    parse_manifest(found, store.name(name))
    return found


def _is_finished(manifest: Mapping[str, Any], files: Mapping[str, StoredFile], identity: str) -> bool:
    """Return whether the same job was done before, and its shards and their index are there, by their sizes."""
    sizes = {name: size for name, (size, _) in parse_manifest(manifest, "").items()}
    if (index_size := find_index_size(manifest)) is not None:
        sizes[index_path(Path(), manifest["split"]).name] = index_size
    is_there = all(name in files and files[name].size == size for name, size in sizes.items())
    return manifest.get(JOB_IDENTITY) == identity and is_there


def _list_replaced(
    store: WritableStore,
    split: str,
    files: Mapping[str, StoredFile],
    manifest: Mapping[str, Any] | None,
    *,
    overwrite: bool,
) -> set[str]:
    """List the shards and the index of earlier conversions, and of those that were stopped.

    Others are somebody else's.
    """
    if manifest is not None and not overwrite:
        raise UnsafeError(f"has records of split {split!r}", path=store.url, remedy="name another or --overwrite")
    ours = set() if manifest is None else set(parse_manifest(manifest, store.name(f"{split}.json")))
    index = index_path(Path(), split).name
    ours |= {index} if manifest is not None and INDEX in manifest else set()
    ours |= _read_unfinished(store, f"{split}.unfinished.json")
    there = {name for name in files if name == index or (name.startswith(f"{split}-") and "/" not in name)}
    for name in sorted(there - ours):
        if store.find_file(name) is not None:  # else the list lags behind
            raise UnsafeError(
                "was not written by an earlier conversion that a manifest tells of, so it is not overwritten",
                path=store.name(name),
                remedy="move it away",
            )
    return there & ours


def _read_unfinished(store: WritableStore, name: str) -> set[str]:
    try:
        found = json.loads(store.read(name))
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']!r}")
        return {str(each) for each in found["shards"]}
    except MissingInputError:
        return set()
    except GaudiError:
        raise
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise DataError(f"is no list of unfinished records ({error})", path=store.name(name)) from None
