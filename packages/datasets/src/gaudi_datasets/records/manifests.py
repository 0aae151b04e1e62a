"""The manifest of records: what it has, and how it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gaudi_datasets.documents import Faults, require_seal, shorten
from gaudi_datasets.errors import DataError
from gaudi_datasets.records.tfrecords import INDEX_ROW_BYTES
from gaudi_datasets.split_folders import SHARD_NAME

MANIFEST_FORMAT = "gaudi-datasets records"
MANIFEST_VERSION = 3
UNSEALED_VERSION = 2  # of earlier releases: the same without a checksum of its own
DECODED = "decoded"  # the key that is true where each image was decoded whole before it was written
INDEX = "index"  # the key that has the SHA-256 of the index beside the manifest
JOB_IDENTITY = "job"  # the key in the manifest by which the same call is known; it depends on when files were changed
JOB = "job.json"  # beside unfinished shards: the identity of the job that they are of


def index_path(folder: Path, split: str) -> Path:
    """Return the path of the index of a split, see `encode_index`; its shards are in the order of their names."""
    return folder / f"{split}.index"


def find_index_size(manifest: Mapping[str, Any]) -> int | None:
    """Return the bytes of the index that a manifest tells of; None where it tells of none.

    It is not larger than what the shards can hold, whatever anybody tells: None, then, too.
    """
    rows = [(row.get("records"), row["bytes"]) for row in manifest["shards"]]
    if INDEX not in manifest or not all(
        type(count) is int and 0 <= count * INDEX_ROW_BYTES <= size for count, size in rows
    ):
        return None
    return INDEX_ROW_BYTES * sum(count for count, _ in rows)


def parse_manifest(document: Any, path: str | Path) -> dict[str, tuple[int, str | None]]:
    """Return size and CRC-32C of the shards that a manifest tells of, by name; None where it tells of no CRC-32C.

    Raises:
        DataError: it is of another format, of a version that is not known, damaged, or lacks a field.
    """
    if not isinstance(document, dict) or document.get("format") != MANIFEST_FORMAT:
        raise DataError("is no manifest of records", path=path, remedy="move it away or convert the data again")
    if document.get("version") not in (MANIFEST_VERSION, UNSEALED_VERSION):
        raise DataError(
            f"has version {document.get('version')}, known is {MANIFEST_VERSION}", path=path, remedy="convert again"
        )
    require_seal(document, path, needed=document["version"] == MANIFEST_VERSION)
    faults = Faults(path)
    rows = faults.parse(
        "shards",
        document.get("shards"),
        lambda record: (record.text("name"), (record.integer("bytes"), record.fields.get("crc32c"))),
    )
    faults.raise_any()
    return dict(rows)


def read_shards(content: bytes, split: str, path: str) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """Return a manifest, and size and CRC-32C of its shards by name, as others wrote it.

    Raises:
        DataError: it is not JSON, as by `parse_manifest`, or a name is that of no shard of the split, or leads
            elsewhere.
    """
    try:
        manifest: dict[str, Any] = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({error})", path=path, remedy="copy it again") from None
    shards = {}
    for name, (size, checksum) in parse_manifest(manifest, path).items():
        is_shard = SHARD_NAME.fullmatch(name) and name.startswith(f"{split}-") and "/" not in name
        if not is_shard or not isinstance(checksum, str):
            raise DataError(
                f"names {shorten(name)} with the CRC-32C {shorten(checksum)}, which is no shard",
                path=path,
                field="shards",
                remedy="convert the data again",
            )
        shards[name] = size, checksum
    return manifest, shards


def list_described(content: bytes, split: str, path: str) -> dict[str, tuple[int, str, str]]:
    """List bytes, kind of hash, and this hash of shards ("crc32c") and index ("sha256") that a manifest tells of.

    Raises:
        DataError: as by `read_shards`.
    """
    manifest, shards = read_shards(content, split, path)
    described = {name: (size, "crc32c", checksum) for name, (size, checksum) in shards.items()}
    if (size := find_index_size(manifest)) is not None:
        described[index_path(Path(), split).name] = size, "sha256", manifest[INDEX]
    return described
