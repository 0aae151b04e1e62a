"""Fetch COCO 2017 from its server or a mirror: the whole of it as archives, or a part of it image by image."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Event, local
from typing import Any
from urllib.parse import quote

import numpy as np

from gaudi_datasets.detection.coco import parse_coco
from gaudi_datasets.documents import load_json
from gaudi_datasets.errors import DataError, FlagError, UnsafeError
from gaudi_datasets.fetching.archives import extract
from gaudi_datasets.fetching.display import FetchDisplay, lock_folder
from gaudi_datasets.fetching.downloads import Download, Fetcher, Patience
from gaudi_datasets.image_files import read_image
from gaudi_ops.files import write_file

COCO_URL = "http://images.cocodataset.org"

_ANNOTATIONS = "annotations"
_THREADS = 8  # an image is mostly waiting for the server
_MOST_IMAGE_BYTES = 2**26


@dataclass(frozen=True)
class ArchiveFile:
    """A zip on the server: its path there, its size and SHA-256, and the one folder in it with its number of files."""

    path: str
    size: int
    sha256: str
    folder: str
    files: int


# Sizes and SHA-256: github.com/tensorflow/datasets, tensorflow_datasets/url_checksums/coco2017.txt
COCO_ARCHIVES: Mapping[str, ArchiveFile] = {
    _ANNOTATIONS: ArchiveFile(
        "annotations/annotations_trainval2017.zip",
        252907541,
        "113a836d90195ee1f884e704da6304dfaaecff1f023f49b6ca93c4aaae470268",
        "annotations",
        6,
    ),
    "train": ArchiveFile(
        "zips/train2017.zip",
        19336861798,
        "69a8bb58ea5f8f99d24875f21416de2e9ded3178e903f1f7603e283b9e06d929",
        "train2017",
        118287,
    ),
    "val": ArchiveFile(
        "zips/val2017.zip",
        815585330,
        "4f7e2ccb2866ec5041993c9cf2a952bbed69647b115d0f74da7ce8f4bef82f05",
        "val2017",
        5000,
    ),
}


class CocoFetcher:
    """Fetches COCO 2017 into a folder: annotations/, train2017/ and val2017/ below it.

    Args:
        output_dir: the folder.
        display: told of the progress.
        url: the beginning of all addresses; a mirror must have the same paths below it.
        archives: what is there under "annotations" and under the name of each split.
        keep_archives: leave the zips in `output_dir` when they are unpacked.
        patience: how long the server is waited for.
    """

    def __init__(
        self,
        output_dir: Path,
        display: FetchDisplay,
        *,
        url: str = COCO_URL,
        archives: Mapping[str, ArchiveFile] = COCO_ARCHIVES,
        keep_archives: bool = False,
        patience: Patience | None = None,
    ) -> None:
        self._output_dir, self._display, self._url = output_dir, display, url.rstrip("/")
        self._archives, self._keep_archives, self._patience = archives, keep_archives, patience

    def fetch(self, splits: Sequence[str], *, max_images: int = 0, classes: Sequence[str] = ()) -> None:
        """Fetch the annotations and the images of these splits, all or a part.

        What is there already is not fetched again. Of a part, the annotations that belong to it are written to
        annotations/instances_<split>2017_subset.json, without masks. There is no public checksum of single images:
        each is decoded, and must have the size that the annotations say.

        Args:
            splits: "train" and "val", or one of them.
            max_images: take the first ones of each split, in the annotations' order; 0: all.
            classes: take only images that show one of these; none: any.

        Raises:
            FlagError: there is no class of that name.
            DataError, MissingInputError, TransferError, UnsafeError: as `Fetcher.fetch` and `extract`; and UnsafeError
                when a folder that is there holds less than the archive.
        """
        with lock_folder(self._output_dir, self._display):
            self._fetch_archive(self._archives[_ANNOTATIONS])
            for split in splits:
                if max_images or classes:
                    self._fetch_part(self._archives[split].folder, max_images, classes)
                else:
                    self._fetch_archive(self._archives[split])

    def _fetch_archive(self, archive: ArchiveFile) -> None:
        target = self._output_dir / archive.folder
        if target.exists():
            count = sum(1 for _ in target.iterdir())
            if count < archive.files:
                raise UnsafeError(
                    f"holds {count} files and {archive.path} {archive.files}",
                    path=target,
                    remedy="move it away, or give another --output_dir",
                )
            self._display.finished(f"{target}: there already, {count} files")
            return
        path = self._output_dir / Path(archive.path).name
        download = Download(f"{self._url}/{archive.path}", path, archive.sha256, archive.size)
        Fetcher(self._patience, progress=self._display.transferred).fetch(download)

        def unpacked(done: int, total: int) -> None:
            self._display.transferred(f"{path.name}, unpacked", done, total)

        files = extract(path, target, folder=archive.folder, progress=unpacked)
        if not self._keep_archives:
            path.unlink()
        self._display.finished(f"{target}: {files} files of {path.name}, SHA-256 verified")

    def _fetch_part(self, name: str, max_images: int, classes: Sequence[str]) -> None:
        annotations = self._output_dir / _ANNOTATIONS / f"instances_{name}.json"
        document = select_part(load_json(annotations), annotations, max_images, classes)
        coco = parse_coco(document, annotations)
        downloads = [
            Download(
                f"{self._url}/{name}/{quote(file_name)}",
                self._output_dir / name / file_name,
                check=functools.partial(_check_size, int(height), int(width)),
                most_bytes=_MOST_IMAGE_BYTES,
            )
            for file_name, height, width in zip(coco.file_names, coco.heights, coco.widths, strict=True)
        ]

        def count(done: int) -> None:
            self._display.counted(f"{name}: images", done, len(downloads))

        distinct = {download.path: download for download in downloads}  # two threads would write one file
        fetched = fetch_many(list(distinct.values()), self._patience, count)
        subset = annotations.with_name(f"instances_{name}_subset.json")
        write_file(subset, json.dumps(document))
        self._display.finished(
            f"{self._output_dir / name}: {len(coco.image_ids)} images, {fetched} of them fetched now, decoded to "
            f"verify them (there are no public checksums); their annotations: {subset}"
        )


def fetch_many(downloads: Sequence[Download], patience: Patience | None, progress: Callable[[int], None]) -> int:
    """Fetch many small files in threads; the first error ends it. Returns how many were not there already."""
    stop, own = Event(), local()

    def fetch(download: Download) -> bool:
        if not hasattr(own, "fetcher"):
            own.fetcher = Fetcher(patience, stop=stop)
        return bool(own.fetcher.fetch(download))

    fetched = 0
    with ThreadPoolExecutor(_THREADS) as pool:
        try:
            for done, future in enumerate(as_completed([pool.submit(fetch, each) for each in downloads]), start=1):
                fetched += future.result()
                progress(done)
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return fetched


def select_part(document: Any, path: Path, max_images: int, names: Sequence[str]) -> dict[str, Any]:
    """Select the images, classes and boxes of a COCO document that belong to a part; see `CocoFetcher.fetch`.

    Raises:
        FlagError: there is no class of that name.
        DataError: the document has faults, as `parse_coco`, or nothing in it belongs to the part.
    """
    coco = parse_coco(document, path)
    ids = {category.name: category.id for category in coco.categories}
    for name in names:
        if name not in ids:
            nearest = difflib.get_close_matches(name, ids, n=1, cutoff=0.5)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else f"they are in {coco.path}"
            raise FlagError(f"--classes: {name!r} is no class; {remedy}", flag="--classes")
    classes = {ids[name] for name in names or ids}
    shown = np.isin(coco.category_ids, sorted(classes)) & ~coco.is_crowd
    rows = np.repeat(np.arange(len(coco.image_ids)), np.diff(coco.box_splits))[shown]
    chosen = np.unique(rows) if names else np.arange(len(coco.image_ids))
    image_ids = set(coco.image_ids[chosen][: max_images or None].tolist())
    if not image_ids:
        raise DataError(f"no image shows {', '.join(names)}", path=path, remedy="choose other --classes")
    return {
        **{name: document[name] for name in ("info", "licenses") if name in document},
        "images": [one for one in document["images"] if one["id"] in image_ids],
        "annotations": [
            one for one in document["annotations"] if one["image_id"] in image_ids and one["category_id"] in classes
        ],
        "categories": [one for one in document["categories"] if one["id"] in classes],
    }


def _check_size(height: int, width: int, path: Path) -> None:
    image = read_image(path)
    if (height, width) not in ((image.height, image.width), image.stored_size):
        raise DataError(f"is {image.height}x{image.width}; the annotations say {height}x{width}", path=path)
