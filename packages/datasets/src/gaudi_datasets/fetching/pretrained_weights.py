"""Download pretrained weights, verify them, and write a record of them beside the files."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gaudi_datasets.fetching.checkpoint_files import check_meta_graph, check_shard, check_state_file, read_index
from gaudi_datasets.fetching.downloads import Download, Fetcher, FetchReport, Patience, hash_file
from gaudi_datasets.output_files import hold_lock, write_json

_MOST_BYTES = 2**30

# Files of torchvision carry the first eight digits of their SHA-256 in their names. The whole SHA-256 are those of
# github.com/plai-group/ubc_primitives (primitives/cnn/cnn.py) for resnet34-333f7ec4, and of
# github.com/isarandi/tensorflow-resnetv1.5-like-pytorch (convert_weights.py) for the others; other repositories agree.
#
# No SHA-256 of the original SSD's checkpoint was published. Its MD5 are in the README of release 0.14 of
# github.com/HabanaAI/Model-References (TensorFlow/computer_vision/SSD_ResNet34), for files of the same names on another
# server. So they are compared and shown, and the checksums within the files decide.
TORCHVISION_URL = "https://download.pytorch.org/models"
BACKBONE_URL = "https://storage.googleapis.com/intel-optimized-tensorflow/models/ssd-backbone"
BACKBONE = "model.ckpt-28152"


@dataclass(frozen=True)
class WeightsFile:
    """A file on a server, and what was published about it: SHA-256, MD5 and bytes, empty or 0 where they were not."""

    url: str
    sha256: str = ""
    size: int = 0
    md5: str = ""

    @property
    def name(self) -> str:
        """The last part of the address."""
        return urlsplit(self.url).path.rpartition("/")[2]


@dataclass(frozen=True)
class Weights:
    """Files that belong together.

    Attributes:
        purpose: what they are for.
        files: in the order of fetching.
        licence: what their publisher states.
        usage: the flag that takes them, after the program's name.
        folder: where they go, below the folder that is fetched into; empty for that folder.
    """

    purpose: str
    files: tuple[WeightsFile, ...]
    licence: str
    usage: str
    folder: str = ""


def _torchvision(purpose: str, usage: str, name: str, sha256: str, size: int = 0) -> Weights:
    file = WeightsFile(f"{TORCHVISION_URL}/{name}-{sha256[:8]}.pth", sha256, size)
    return Weights(purpose, (file,), "BSD-3-Clause (torchvision)", usage)


def _classifier(name: str, sha256: str, size: int = 0) -> Weights:
    purpose = "a classifier of ImageNet: torchvision's file"
    return _torchvision(purpose, "resnet_train --fine_tune --pretrained_filepath", name, sha256, size)


WEIGHTS: Mapping[str, Weights] = {
    "resnet34": _torchvision(
        "the SSD's backbone: torchvision's file, which the original in MXNet began with",
        "ssd_mxnet_train --pretrained_backbone",
        "resnet34",
        "333f7ec4c6338da2cbed37f1fc0445f9624f1355633fa1d7eab79a91084c6cef",
        87306240,
    ),
    "resnet34-tensorflow": Weights(
        "the SSD's backbone: the checkpoint that the original in TensorFlow began with",
        (
            WeightsFile(f"{BACKBONE_URL}/{BACKBONE}.index", md5="96080eb2d106f7bd4a682bde003b1436"),
            WeightsFile(f"{BACKBONE_URL}/{BACKBONE}.data-00000-of-00001", md5="1b7fabd0872b765da2fc60af46fe6390"),
            WeightsFile(f"{BACKBONE_URL}/{BACKBONE}.meta", md5="6b31dd1a042cdbbb2fd7fcd6f2c5e843"),
            WeightsFile(f"{BACKBONE_URL}/checkpoint", md5="7e9f4ba94c150b5c0c073cb738e7ad39"),
        ),
        "licence not stated",
        "ssd_train --resnet_checkpoint",
        folder="resnet34-tensorflow",
    ),
    "resnet50": _classifier("resnet50", "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a", 102530333),
    "resnet101": _classifier("resnet101", "63fe2227b86e8f1f2063f43a75c84d195911b6a0eace650907dd3dc62dd49a0a"),
    "resnet152": _classifier("resnet152", "394f9c45966e3651a89bbb78a48410a6755854ce4a5ab64927cf1c7247f85e58"),
}


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
            facts = [self._fetch_file(file, folder) for file in weights.files]
            record = {
                "name": name,
                "purpose": weights.purpose,
                "licence": weights.licence,
                "verified": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "files": facts,
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
        facts: dict[str, Any] = {
            "path": str(path.relative_to(self._output_dir)),
            "url": url,
            "bytes": path.stat().st_size,
            "sha256": hash_file(path, hashlib.sha256()),
            "md5": md5,
            "verified_by": "SHA-256" if file.sha256 else "content",
        }
        how = "SHA-256 verified"
        if not file.sha256:
            facts["md5_is_published"] = md5 == file.md5
            how = "checked by its content (there is no public SHA-256); its MD5 is "
            how += "the published one" if md5 == file.md5 else f"{md5}, and {file.md5 or 'none'} was published"
        self._report.finished(f"{path}: {state}, {facts['bytes']} bytes, {how}")
        return facts


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
