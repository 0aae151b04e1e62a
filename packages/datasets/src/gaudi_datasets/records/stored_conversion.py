"""Records that are converted into a store: each shard is uploaded, compared and removed here, the manifest last.

A store renames nothing, so shards have their names from the beginning. A file beside them says that they are unfinished
until the manifest is there, without which nothing reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from gaudi_datasets.documents import seal
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.uploads import StoredFile, WritableStore
from gaudi_datasets.output_files import resumable_folder
from gaudi_datasets.records.manifests import JOB, JOB_IDENTITY, parse_manifest
from gaudi_ops.errors import GaudiError
from gaudi_ops.files import read_text, write_file

_FORMAT = "gaudi-datasets unfinished records"

Shard: TypeAlias = Mapping[str, Any]
WriteAll: TypeAlias = Callable[[Callable[[Shard], bool], Callable[[Shard], None]], list[dict[str, Any]]]
"""Writes the shards that the first function does not know, and calls the second with each; see `write_shards`."""


def write_shards_to_store(
    url: str,
    split: str,
    staging: Path,
    names: Sequence[str],
    write_all: WriteAll,
    describe: Callable[[list[dict[str, Any]]], dict[str, Any]],
    identity: str,
    *,
    overwrite: bool,
) -> dict[str, Any]:
    """Write the shards of a split, and their manifest, to a store; see `write_shards` of `conversion`.

    Args:
        url: of the folder of the records.
        split: what the names begin with.
        staging: has the shards while they are written and uploaded, and what is known of those that are there.
        names: of the shards.
        write_all: writes them.
        describe: makes the manifest, without its seal.
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
        files, job = store.list_files(), staging / JOB
        manifest = _read_manifest(store, manifest_name) if manifest_name in files else None
        if manifest is not None and not overwrite and _is_finished(manifest, files, identity):
            return manifest
        if not job.exists() or read_text(job, errors="replace") != identity:
            shutil.rmtree(staging)
            staging.mkdir()
            write_file(job, identity)
        replaced = _list_replaced(store, split, files, manifest, overwrite=overwrite)
        unfinished = {"format": _FORMAT, JOB_IDENTITY: identity, "shards": sorted({*names, *replaced})}
        store.write(marker, _render(unfinished))
        store.remove(manifest_name)  # from here on, nobody takes some of each for a whole

        def is_there(shard: Shard) -> bool:
            return shard["name"] in files and files[shard["name"]].size == shard["bytes"] and manifest is None

        def bring(shard: Shard) -> None:
            store.upload(shard["name"], staging / shard["name"])
            (staging / shard["name"]).unlink()

        document = seal(describe(write_all(is_there, bring)))
        for name in sorted(replaced - set(names)):
            store.remove(name)
        store.write(manifest_name, _render(document))
        store.remove(marker)
        return document


def _render(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _read_manifest(store: WritableStore, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(store.read(name))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error})", path=store.name(name), remedy="move it away") from None
    parse_manifest(found, store.name(name))
    return found


def _is_finished(manifest: Mapping[str, Any], files: Mapping[str, StoredFile], identity: str) -> bool:
    """Return whether the same job was done before, and its shards are there, by their sizes."""
    shards = parse_manifest(manifest, "")
    is_there = all(name in files and files[name].size == size for name, (size, _) in shards.items())
    return manifest.get(JOB_IDENTITY) == identity and is_there


def _list_replaced(
    store: WritableStore,
    split: str,
    files: Mapping[str, StoredFile],
    manifest: Mapping[str, Any] | None,
    *,
    overwrite: bool,
) -> set[str]:
    """List the shards of an earlier conversion, and of those that were stopped; others are somebody else's."""
    if manifest is not None and not overwrite:
        raise UnsafeError(f"has records of split {split!r}", path=store.url, remedy="name another or --overwrite")
    ours = set() if manifest is None else set(parse_manifest(manifest, store.name(f"{split}.json")))
    ours |= _read_unfinished(store, f"{split}.unfinished.json")
    there = {name for name in files if name.startswith(f"{split}-") and "/" not in name}
    if strangers := there - ours:
        raise UnsafeError(
            "was not written by an earlier conversion that a manifest tells of, so it is not overwritten",
            path=store.name(min(strangers)),
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
