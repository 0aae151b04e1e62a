"""Download pretrained weights, verify them, and write a record of them beside the files."""

from __future__ import annotations

import functools
import hashlib
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gaudi_datasets.fetching.checkpoint_files import check_meta_graph, check_shard, check_state_file, read_index
from gaudi_datasets.fetching.display import FetchDisplay, lock_folder
from gaudi_datasets.fetching.downloads import Download, Fetcher, hash_file
from gaudi_datasets.fetching.weights_table import BACKBONE, WEIGHTS
from gaudi_datasets.output_files import write_json

_MOST_BYTES = 2**30


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
            md5 = hash_file(path, hashlib.md5(usedforsecurity=False))
            entry: dict[str, Any] = {
                "path": str(path.relative_to(output_dir)),
                "url": url,
                "bytes": path.stat().st_size,
                "sha256": hash_file(path, hashlib.sha256()),
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
