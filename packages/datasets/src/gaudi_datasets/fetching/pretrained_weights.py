"""Download pretrained weights, verify them, and write a record of them beside the files."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gaudi_datasets.fetching.checkpoint_files import check_meta_graph, check_shard, check_state_file, read_index
from gaudi_datasets.fetching.downloads import Download, Fetcher, FetchReport, Patience, hash_file
from gaudi_datasets.fetching.weights_table import BACKBONE, WEIGHTS, Weights, WeightsFile
from gaudi_datasets.output_files import hold_lock, write_json

_MOST_BYTES = 2**30


class WeightsFetcher:
    """Fetches weights into a folder.

    Args:
        output_dir: the folder.
        report: told of the progress.
        mirror: what stands in place of the servers of the addresses; it must have the same paths.
        weights: what there is, by name.
        patience: how long a server is waited for.
    """

    def __init__(
        self,
        output_dir: Path,
        report: FetchReport,
        *,
        mirror: str = "",
        weights: Mapping[str, Weights] = WEIGHTS,
        patience: Patience | None = None,
    ) -> None:
        self._output_dir, self._report, self._mirror, self._weights = output_dir, report, mirror.rstrip("/"), weights
        self._fetcher = Fetcher(patience, progress=report.transferred)

    def fetch(self, name: str) -> None:
        """Fetch the files of these weights that are not there, verify all, and write `NAME.fetched.json`.

        Files without a public SHA-256 are checked by what is in them: a TensorFlow checkpoint by its own checksums.

        Raises:
            DataError, MissingInputError, TransferError, UnsafeError: as `Fetcher.fetch`.
        """
        weights = self._weights[name]
        folder = self._output_dir / weights.folder
        with hold_lock(self._output_dir / ".fetch.lock", waiting=self._say_waiting):
            entries = [self._fetch_file(file, folder) for file in weights.files]
            record = {
                "name": name,
                "purpose": weights.purpose,
                "licence": weights.licence,
                "verified": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "files": entries,
            }
            path = self._output_dir / f"{name}.fetched.json"
            write_json(path, record, durable=True)
        used = folder if weights.folder else folder / weights.files[0].name
        self._report.finished(f"{path}: what was fetched; to use it: {weights.usage} {used}")

    def _say_waiting(self) -> None:
        self._report.finished(f"{self._output_dir}: another process fetches into it; waiting until it is done")

    def _fetch_file(self, file: WeightsFile, folder: Path) -> dict[str, Any]:
        """Fetch a file, say so, and give what is to be written down about it."""
        path = folder / file.name
        url = f"{self._mirror}{urlsplit(file.url).path}" if self._mirror else file.url
        check = None if file.sha256 else functools.partial(_check_content, file.name, folder)
        download = Download(url, path, file.sha256, file.size or None, check, _MOST_BYTES)
        state = "fetched" if self._fetcher.fetch(download) else "there already"
        md5 = hash_file(path, hashlib.md5(usedforsecurity=False))
        entry: dict[str, Any] = {
            "path": str(path.relative_to(self._output_dir)),
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
        self._report.finished(f"{path}: {state}, {entry['bytes']} bytes, {how}")
        return entry


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
