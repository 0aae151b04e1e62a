"""The records of one split, read one by one in any order by any thread."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gaudi_datasets.documents import CHECKSUM, load_json
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.fetching.stores import is_url
from gaudi_datasets.image_files import IMAGE_ENDINGS
from gaudi_datasets.records.conversion import unfinished_folder
from gaudi_datasets.records.manifests import (
    DECODED,
    INDEX,
    JOB_IDENTITY,
    UNSEALED_VERSION,
    find_index_size,
    index_path,
    parse_manifest,
)
from gaudi_datasets.records.ranged_reader import RangedReader
from gaudi_datasets.records.remote_records import RemoteRecords
from gaudi_datasets.records.tfrecords import (
    ExampleFeatures,
    RecordPlace,
    decode_index,
    holds_records,
    join_checksums,
    read_record,
    scan_records,
)
from gaudi_datasets.split_folders import SHARD_NAME, locate_records
from gaudi_ops.files import read_file
from gaudi_ops.program import say

RecordKind = Literal["detection", "classification"]

_KINDS: tuple[RecordKind, ...] = ("detection", "classification")
_SPLIT_NAMES = {"train": ("train",), "val": ("val", "validation", "valid"), "test": ("test",)}
_NAMED_SHARDS = 3  # of those that are missing, in a message
_FILES_AT_ONCE = 8  # waited for, where the files are far away and not in memory


class RecordSet:
    """The records of one split in a folder, as `write_shards` or one of the original programs wrote them.

    They come in the order of what they were made of: the first of each shard, then the second of each, and so on. So
    neither the number of shards nor whether there are records at all changes the order of a data set.

    Args:
        data_dir: the folder of the records, or the one that holds a folder of records for each split; or its URL, see
            `RemoteRecords` for what is done then, and raised.
        split: what the names of the shards begin with; see `locate_records` for those in a folder of their own.
        kind: what the records must be of.

    Attributes:
        name: what the set is called in messages.
        paths: the shards.
        manifest_path: where the manifest is, if there is one.
        manifest: what it tells, or None.
        fingerprint: SHA-256 that is equal for equal records, wherever they are.
        former_fingerprint: what an earlier release computed, of less.
        is_decoded: whether each image was decoded whole when the records were written.
        unchecked: what nothing tells of, for messages; empty where the manifest tells of all.

    Raises:
        MissingInputError: there is no such folder, there are no records of the split, or shards are missing.
        DataError: `data_dir` is a file, a conversion into it was stopped, shards of two conversions are there, the
            manifest or a header of a record is broken, a shard is another than that of the manifest, or the records
            are of another kind or none.
    """

    def __init__(self, data_dir: str | Path, split: str, *, kind: RecordKind) -> None:
        self._reader: RangedReader | None = None  # of shards that are in a store alone
        if is_url(data_dir):
            remote = RemoteRecords(str(data_dir), split, kind=kind)
            folder, split, self.name = remote.fetch(), remote.split, f"{remote.url}:{remote.split}"
            self._reader = remote.open_reader(folder)
        else:
            folder, split = locate_records(Path(data_dir), split)
            self.name = f"{folder}:{split}"
        self.manifest_path = folder / f"{split}.json"
        self.manifest: dict[str, Any] | None
        if self._reader is not None:
            self.manifest, self.paths = remote.manifest, [folder / name for name in remote.shards]
        else:
            self.paths = _find_shards(folder, split)
            self.manifest = read_manifest(self.manifest_path, self.paths)
        if self.manifest is not None and self.manifest["kind"] != kind:
            raise DataError(
                f"tells of {self.manifest['kind']} records; {kind} records are needed", path=self.manifest_path
            )
        # Shard, number in it, first byte, length, CRC-32C: int64 [records, 5].
        indexed = None if self.manifest is None else _read_index(self.manifest, index_path(folder, split), self.paths)
        if self.manifest is not None and indexed is not None:
            self._places = _order_records(indexed)
            self._checksums = {row["name"]: str(row.get("crc32c")) for row in self.manifest["shards"]}
        elif self._reader is not None:
            fault = "is damaged, and without it records have to be in the cache"
            raise DataError(fault, path=index_path(folder, split), field=INDEX, remedy=f"remove {folder}")
        else:
            self._places, checksums = _index_shards(self.paths)
            self._checksums = {path.name: f"{one:08x}" for path, one in zip(self.paths, checksums, strict=True)}
        self._sizes = _find_sizes(self.manifest, self.paths)
        self.former_fingerprint = _hash([*self._sizes.items()])
        self.fingerprint = _hash([self.former_fingerprint, self._checksums])
        self.is_decoded = self.manifest is not None and self.manifest.get(DECODED) is True
        self.unchecked = "no manifest tells which shards and classes these are"
        if self.manifest is not None:
            _require_checksums(self.manifest, folder, self._checksums)
            no_data = (JOB_IDENTITY, CHECKSUM, DECODED, INDEX)
            identity = {name: value for name, value in self.manifest.items() if name not in no_data}
            # Equal to that of the same records with a manifest of the version before.
            self.fingerprint = self.former_fingerprint = _hash({**identity, "version": UNSEALED_VERSION})
            is_sealed = CHECKSUM in self.manifest
            self.unchecked = "" if is_sealed else "its manifest is of an earlier release, without a checksum of its own"
        if not len(self._places):
            raise DataError(f"the records of split {split!r} are empty", path=data_dir, remedy="convert the data again")

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all records together."""
        return int(self._places[:, 3].sum())

    def list_files(self) -> dict[str, str]:
        """Return what is known of each shard by file name: its row of the manifest, or its size and its checksum."""
        shards = {} if self.manifest is None else {row["name"]: row for row in self.manifest["shards"]}
        sizes = {name: f"{size} {self._checksums[name]}" for name, size in self._sizes.items()}
        return {name: str(shards.get(name, size)) for name, size in sizes.items()}

    def keep(self, rows: npt.NDArray[np.int64]) -> None:
        """Leave out all records but these, int64 [records], in this order."""
        self._places = self._places[rows]
        kept = rows.astype("<i8").tobytes()
        self.fingerprint = hashlib.sha256(self.fingerprint.encode() + kept).hexdigest()
        self.former_fingerprint = hashlib.sha256(self.former_fingerprint.encode() + kept).hexdigest()

    def path(self, index: int) -> Path:
        """Return the path of the file that holds record `index`."""
        return self.paths[self._places[index, 0]]

    def read_record(self, index: int) -> tuple[RecordPlace, bytes]:
        """Read record `index` of 0..len - 1, and return where it lies, too.

        Raises:
            DataError: it is damaged.
            AccessError, TransferError, MissingInputError: it is in a store alone, which does not give it.
        """
        place = self._look_up(index)
        if self._reader is not None and place.path.name in self._reader.names:
            return place, self._reader.read(place)
        return place, read_record(place)

    def expect(self, indices: npt.NDArray[np.int64]) -> None:
        """Begin to read records that will be asked for, int64 [n], in this order, where they are in a store alone."""
        if self._reader is not None:
            self._reader.expect(map(self._look_up, indices.tolist()))

    def _look_up(self, index: int) -> RecordPlace:
        shard, *place_in_shard = self._places[index].tolist()
        return RecordPlace(self.paths[shard], *place_in_shard)


def has_records(data_dir: str | Path, split: str) -> bool:
    """Tell whether there are records of a split, in the folder or in one of the split below it."""
    if is_url(data_dir):
        try:
            return bool(RemoteRecords(str(data_dir), split).manifest)
        except MissingInputError:
            return False
    folder, split = locate_records(Path(data_dir), split)
    return any(path.is_file() for path in folder.glob(f"{split}-*"))


def find_splits(data_dir: Path, kind: RecordKind) -> dict[str, str]:
    """Find the records of one kind in a folder: of "train", "val" and "test", the names that they have there.

    Raises:
        MissingInputError, DataError: as by `RecordSet`.
    """
    found = {}
    for split, names in _SPLIT_NAMES.items():
        for name in names:
            folder, there = locate_records(data_dir, name)
            paths = [path for path in folder.glob(f"{there}-*") if path.is_file()]
            if any(SHARD_NAME.fullmatch(path.name) and path.suffix.lower() not in IMAGE_ENDINGS for path in paths):
                if find_kind(data_dir, name) == kind:
                    found[split] = name
                break
    return found


def check_shards(data_dir: str | Path, split: str) -> None:
    """Compare names and sizes of the shards of a split with each other and with the manifest, and read no record.

    Raises:
        MissingInputError, DataError: as by `RecordSet`.
    """
    if is_url(data_dir):
        RemoteRecords(str(data_dir), split)
        return
    folder, split = locate_records(Path(data_dir), split)
    read_manifest(folder / f"{split}.json", _find_shards(folder, split))


def find_kind(data_dir: str | Path, split: str) -> RecordKind:
    """Find the kind of the records of a split: by their manifest, or else by the first record's features.

    Raises:
        MissingInputError, DataError: as by `RecordSet`.
    """
    if is_url(data_dir):
        remote_kind: RecordKind = RemoteRecords(str(data_dir), split).manifest["kind"]
        return remote_kind
    folder, split = locate_records(Path(data_dir), split)
    paths = _find_shards(folder, split)
    manifest = read_manifest(folder / f"{split}.json", paths)
    if manifest is not None:
        kind: RecordKind = manifest["kind"]
        return kind
    for path in paths:
        for *place_in_shard, _ in scan_records(path):
            place = RecordPlace(path, 0, *place_in_shard)
            features = ExampleFeatures(read_record(place), place)
            return "detection" if "image/object/bbox/ymin" in features else "classification"
    raise DataError(f"the records of split {split!r} are empty", path=folder, remedy="convert the data again")


def _find_shards(folder: Path, split: str) -> list[Path]:
    """List the shards of a split, all of which must be there."""
    if folder.exists() and not folder.is_dir():
        raise DataError("is a file", path=folder, remedy="give the folder that holds the records")
    paths = sorted(path for path in folder.glob(f"{split}-*") if path.is_file())
    if not paths:
        state = "has no" if folder.is_dir() else "is not there; it should have"
        raise MissingInputError(
            f"{state} records {split}-*", path=folder, remedy="write them with gaudi-datasets convert"
        )
    # All shards must be there, of one conversion; names that count no shards are not looked at.
    shards = [match for path in paths if (match := SHARD_NAME.fullmatch(path.name))]
    endings = sorted({f"-of-{match['total']}{match['suffix']}" for match in shards})
    if len(endings) > 1:
        fault = f"has files {split}-* of several conversions ({', '.join(endings)})"
        raise DataError(fault, path=folder, remedy="leave those of one there")
    total = shards[0]["total"] if shards else "0"
    there = {number for match in shards if (number := int(match["number"])) < int(total)}
    missing = int(total) - len(there)
    if missing:  # not listed: a name can tell of any number
        first = itertools.islice((number for number in range(int(total)) if number not in there), _NAMED_SHARDS)
        named = ", ".join(f"{split}-{number:0{len(total)}d}{endings[0]}" for number in first)
        more = f" and {missing - _NAMED_SHARDS} more" if missing > _NAMED_SHARDS else ""
        raise MissingInputError(
            f"has {len(shards)} of {int(total)} files {split}-*; missing: {named}{more}",
            path=folder,
            remedy=(
                "copy or convert them again, or, to do without, rename those that are there to "
                f"{split}-*-of-{len(shards):0{len(total)}d}"
            ),
        )
    if unfinished_folder(folder, split).exists() and not (folder / f"{split}.json").exists():
        raise DataError(
            f"the conversion of split {split!r} was stopped", path=folder, remedy="repeat the command that made it"
        )
    return paths


def read_manifest(path: Path, shards: Sequence[Path]) -> dict[str, Any] | None:
    """Read the manifest, and compare it with the shards."""
    if not path.exists():
        return None
    manifest: dict[str, Any] = load_json(path)
    sizes = {name: size for name, (size, _) in parse_manifest(manifest, path).items()}
    if manifest.get("kind") not in _KINDS or sizes.keys() != {shard.name for shard in shards}:
        raise DataError("does not tell of the records beside it", path=path, remedy="convert the data again")
    for shard in shards:
        if shard.stat().st_size != sizes[shard.name]:
            raise DataError(
                f"has not the {sizes[shard.name]} bytes of its manifest", path=shard, remedy="copy or convert it again"
            )
    return manifest


def _find_sizes(manifest: Mapping[str, Any] | None, shards: Sequence[Path]) -> dict[str, int]:
    """Return the bytes of each shard by its name: what the manifest tells, which was compared, or what is there."""
    if manifest is None:
        return {shard.name: shard.stat().st_size for shard in shards}
    told = {row["name"]: int(row["bytes"]) for row in manifest["shards"]}
    return {shard.name: told[shard.name] for shard in shards}


def _require_checksums(manifest: Mapping[str, Any], folder: Path, checksums: Mapping[str, str]) -> None:
    """Compare the shards with the CRC-32C that a manifest has of each."""
    for shard in manifest["shards"]:
        name = shard["name"]
        if shard.get("crc32c") != checksums[name]:
            raise DataError(
                f"has not the CRC-32C {shard.get('crc32c')} of its manifest, but {checksums[name]}",
                path=folder / name,
                field="crc32c",
                remedy="it was replaced or is damaged: copy or convert it again",
            )


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _read_index(manifest: Mapping[str, Any], path: Path, shards: Sequence[Path]) -> list[npt.NDArray[np.int64]] | None:
    """Read the index that a manifest tells of; None, with a line that says why, if it is not of these shards.

    Its first and last record of each shard are compared with the shard; every other one is when it is read.
    """
    expected = manifest.get(INDEX)
    if expected is None:
        return None  # of an earlier release
    records = {row["name"]: row.get("records") for row in manifest["shards"]}
    counts, sizes = [records[shard.name] for shard in shards], [*_find_sizes(manifest, shards).values()]
    tables, index_size = None, find_index_size(manifest)
    if not path.is_file():
        fault = "is not there"
    elif index_size is None or path.stat().st_size != index_size:
        fault = "has not as many records as its manifest"
    elif hashlib.sha256(content := read_file(path, limit=index_size)).hexdigest() != expected:
        fault = "has not the SHA-256 of its manifest"
    else:
        fault = "tells of other records than those beside it"
        tables = decode_index(content, counts, sizes)
    if tables is not None:
        with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(shards))) as pool:
            here = [number for number, shard in enumerate(shards) if shard.exists()]
            if all(pool.map(holds_records, [shards[number] for number in here], [tables[number] for number in here])):
                return tables
    say(f"{path}: {fault}, so each record is looked up in its shard", error=True)
    return None


def _index_shards(paths: Sequence[Path]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Index the records of shards; no content is read.

    Returns:
        Shard, number in it, first byte, length and CRC-32C of each record, int64 [records, 5], round after round; and
        the CRC-32C of each shard.
    """

    def index(path: Path) -> npt.NDArray[np.int64]:
        return np.array(list(scan_records(path)), np.int64).reshape(-1, 4)

    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(paths))) as pool:
        tables = list(pool.map(index, paths))
    sizes = [path.stat().st_size for path in paths]
    return _order_records(tables), join_checksums(list(zip(tables, sizes, strict=True)))


def _order_records(tables: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Return shard and number before the first three columns of each shard's table, int64 [records, 5], in rounds."""
    counts = [len(table) for table in tables]
    shards = np.repeat(np.arange(len(tables)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    places = np.column_stack([shards, numbers, np.concatenate(tables)[:, :3]]).astype(np.int64)
    rounds: npt.NDArray[np.int64] = places[np.argsort(numbers, kind="stable")]
    return rounds
