"""Fetch the files of a list: a YAML file with an address and a SHA-256 for each, or pretrained weights by name.

Beside weights a record of them is written.
"""

from __future__ import annotations

import functools
import re
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from gaudi_datasets.documents import Faults, Record, RecordError, load_yaml, shorten
from gaudi_datasets.errors import DataError
from gaudi_datasets.fetching.archives import check_inner_name, fold_name
from gaudi_datasets.fetching.checkpoint_files import check_meta_graph, check_shard, check_state_file, read_index
from gaudi_datasets.fetching.display import FetchDisplay, lock_folder
from gaudi_datasets.fetching.downloads import Download, Fetcher, is_web_address
from gaudi_datasets.fetching.weights_table import BACKBONE, WEIGHTS
from gaudi_datasets.output_files import write_json
from gaudi_ops.files import hash_file

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = ("url", "sha256", "name")
_MOST_BYTES = 2**30  # of a file of weights


def read_file_list(path: Path, output_dir: Path) -> list[Download]:
    """Read a list of files.

    Args:
        path: a YAML file: a list of mappings with `url`, `sha256` (64 hexadecimal digits), and `name`, the file's name
            below `output_dir`; without it the last part of the address.
        output_dir: the folder of the files.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is no such list, or its entries have faults: the first is named.
    """
    entries = load_yaml(path)
    if not isinstance(entries, list) or not entries:
        raise DataError("is no list of files", path=path, remedy="write `- url: ...` and `  sha256: ...` for each")
    faults = Faults(path)
    taken: set[str] = set()

    def parse(record: Record) -> Download:
        if unknown := [str(name) for name in record.fields if name not in _FIELDS]:
            raise RecordError(
                f"{shorten(unknown[0])} is no field of a file; there are {', '.join(_FIELDS)}", field=unknown[0]
            )
        url, sha256 = record.text("url"), record.text("sha256")
        if not is_web_address(url):
            raise RecordError(f"url is {shorten(url)}; it must begin with http:// or https:// and a host", field="url")
        if not _SHA256.fullmatch(sha256):
            raise RecordError(f"sha256 is {shorten(sha256)}; it must be 64 hexadecimal digits", field="sha256")
        name = record.text("name", default="") or unquote(PurePosixPath(urlsplit(url).path).name)
        try:
            inner = check_inner_name(name)
        except ValueError as rule:
            raise RecordError(f"name {shorten(name)} {rule}", field="name") from None
        if fold_name(inner) in taken:
            raise RecordError(
                f"name {shorten(name)} was given before", field="name", remedy="give each file a `name` of its own"
            )
        taken.add(fold_name(inner))
        return Download(url, output_dir / inner, sha256.lower())

    downloads = list(faults.parse("files", entries, parse))
    faults.raise_any()
    return downloads


def fetch_list(path: Path, output_dir: Path, display: FetchDisplay) -> None:
    """Fetch every file of a list (see `read_file_list`) that is not there already; two processes take turns.

    Raises:
        MissingInputError, DataError: as `read_file_list`.
        MissingInputError, DataError, TransferError, UnsafeError: as `Fetcher.fetch`.
    """
    downloads = read_file_list(path, output_dir)
    fetcher = Fetcher(progress=display.transferred)
    with lock_folder(output_dir, display):
        for download in downloads:
            state = "fetched" if fetcher.fetch(download) else "there already"
            display.finished(f"{download.path}: {state}, {download.path.stat().st_size} bytes, SHA-256 verified")


def fetch_weights(name: str, output_dir: Path, display: FetchDisplay, *, mirror: str = "") -> None:
    """Fetch the files of these weights that are not there, verify all, and write `NAME.fetched.json`.

    Files without a public SHA-256 are checked by what is in them: a TensorFlow checkpoint by its own checksums.

    Args:
        name: of the weights, in `WEIGHTS`.
        output_dir: the folder to fetch into.
        display: told of the progress.
        mirror: what stands in place of the servers of the addresses; it must have the same paths.

    Raises:
        DataError, MissingInputError, TransferError, UnsafeError: as `Fetcher.fetch`.
    """
    mirror = mirror.rstrip("/")
    weights, fetcher = WEIGHTS[name], Fetcher(progress=display.transferred)
    folder, entries = output_dir / weights.folder, []
    with lock_folder(output_dir, display):
        for file in weights.files:
            path = folder / file.name
            url = f"{mirror}{urlsplit(file.url).path}" if mirror else file.url
            check = None if file.sha256 else functools.partial(_check_content, file.name, folder)
            download = Download(url, path, file.sha256, file.size or None, check, _MOST_BYTES)
            state = "fetched" if fetcher.fetch(download) else "there already"
            md5 = hash_file(path, "md5")
            entry: dict[str, Any] = {
                "path": str(path.relative_to(output_dir)),
                "url": url,
                "bytes": path.stat().st_size,
                "sha256": hash_file(path),
                "md5": md5,
                "verified_by": "SHA-256" if file.sha256 else "content",
            }
            how = "SHA-256 verified"
            if not file.sha256:
                entry["md5_is_published"] = md5 == file.md5
                how = "checked by its content (there is no public SHA-256); its MD5 is "
                how += "the published one" if md5 == file.md5 else f"{md5}, and {file.md5 or 'none'} was published"
            display.finished(f"{path}: {state}, {entry['bytes']} bytes, {how}")
            entries.append(entry)
        record = {
            "name": name,
            "purpose": weights.purpose,
            "licence": weights.licence,
            "verified": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "files": entries,
        }
        path = output_dir / f"{name}.fetched.json"
        write_json(path, record)
    used = folder if weights.folder else folder / weights.files[0].name
    display.finished(f"{path}: what was fetched; to use it: {weights.usage} {used}")


def _check_content(name: str, folder: Path, path: Path) -> None:
    """Raise DataError unless the file at `path` is the part of a checkpoint in `folder` that its name says."""
    prefix, _, part = name.rpartition(".")
    if part == "index":
        read_index(path)
    elif part == "meta":
        check_meta_graph(path)
    elif part.startswith("data-"):
        check_shard(path, read_index(folder / f"{prefix}.index"))
    else:
        check_state_file(path, BACKBONE)
