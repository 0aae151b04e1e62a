"""Fetch the files of a list: a YAML file with an address and a SHA-256 for each."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from gaudi_datasets.documents import Faults, Record, RecordError, load_yaml, shorten
from gaudi_datasets.errors import DataError
from gaudi_datasets.fetching.archives import check_inner_name, fold_name
from gaudi_datasets.fetching.display import FetchDisplay, lock_folder
from gaudi_datasets.fetching.downloads import Download, Fetcher, is_web_address

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = ("url", "sha256", "name")


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
