"""ImageNet as it is handed out: its tars, read without unpacking them, or the folders that people make of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from gaudi_datasets.classification.class_folders import check_folder, list_flat, list_folders
from gaudi_datasets.classification.imagenet_labels import SYNSET, read_validation_labels
from gaudi_datasets.classification.listed_files import FileList, ListedSource
from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.fetching.archive_formats import Member
from gaudi_datasets.fetching.archives import Limits, list_members
from gaudi_datasets.split_folders import Content, inspect_folder, name_folders

Split = Literal["train", "validation"]

SHARDS: Mapping[Split, int] = {"train": 1024, "validation": 128}  # of the original's records

_TRAIN_TAR, _VALIDATION_TAR = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar"
_TRAIN_IMAGE = re.compile(r"(n\d{8})_\d+\.JPEG")
_VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_\d{8}\.JPEG")
_TAR_LIMITS = Limits(members=100_000, member_bytes=2**31, total_bytes=2**38)  # the train tar has 138 GiB

_Listing = list[tuple[str, str, int, int, int]]  # synset, file name, size, time of change, and offset in a tar or 0


def open_imagenet(root: str | Path, split: Split) -> ListedSource:
    """Open ImageNet's images of a split, in the original's order: sorted by synset and name, then shuffled with seed 0.

    Labels go by the sorted synsets. JPEGs in CMYK and the PNG that is named JPEG are read as RGB JPEGs.

    Args:
        root: the folder that holds `ILSVRC2012_img_train.tar`, or `train` with a folder for each synset; and
            `ILSVRC2012_img_val.tar`, or `validation` (or `val`) with a folder for each synset or with the images alone.
            Labels of images alone are in `root` too: see `read_validation_labels`. The folders of the originals'
            preparation, `img_train` and `img_val`, and Kaggle's are known as well: see `name_folders`.
        split: "train" or "validation".

    Raises:
        MissingInputError: there is no such folder, or nothing of the split in it.
        DataError: an archive is damaged; a synset is none, or is another than its images'; a file is no image of
            ImageNet; the labels do not fit; or a folder is empty or holds records.
        UnsafeError: a member of an archive is no plain file, is too large, or has a name that leaves the folder.
        MissingExtraError: the labels can only be read with SciPy.
    """
    root = check_folder(Path(root), "ImageNet")
    if split == "train":
        return _open_train(root)
    return _open_validation(root)


def _open_train(root: Path) -> ListedSource:
    tar = root / _TRAIN_TAR
    if tar.exists():
        found: _Listing = []
        for member in _list_synset_tars(tar):
            synset, time_ns = member.name.removesuffix(".tar"), tar.stat().st_mtime_ns
            for image in list_members(tar, _TAR_LIMITS, within=member):
                _check_train_image(f"{tar}: {member.name}: member {shorten(image.name)}", image.name, synset)
                found.append((synset, image.name, image.size, time_ns, image.offset or 0))
        return _make_source(tar, found, sorted({synset for synset, *_ in found}), is_tar=True)
    folder, _ = _find_images(root, "train", _TRAIN_TAR)
    found = _list_synset_folders(folder)
    for synset, name, *_ in found:
        _check_train_image(f"{folder}: {synset}/{name}", name, synset)
    return _make_source(folder, found, sorted({synset for synset, *_ in found}))


def _open_validation(root: Path) -> ListedSource:
    tar = root / _VALIDATION_TAR
    if tar.exists():
        members = sorted(list_members(tar, _TAR_LIMITS), key=lambda member: member.name)
        names = [member.name for member in members]
        _check_validation_images(tar, names)
        labels = read_validation_labels(root, names)
        time_ns, pairs = tar.stat().st_mtime_ns, zip(labels, members, strict=True)
        found = [(label, each.name, each.size, time_ns, each.offset or 0) for label, each in pairs]
        return _make_source(tar, found, _find_synsets(root, labels, tar), is_tar=True)
    folder, content = _find_images(root, "validation", _VALIDATION_TAR)
    if content == "images":
        return open_validation_images(folder, root)
    found = _list_synset_folders(folder)
    _check_validation_images(folder, [name for _, name, *_ in found])
    return _make_source(folder, found, _find_synsets(root, [synset for synset, *_ in found], folder))


def open_validation_images(folder: Path, root: Path, synsets: Sequence[str] | None = None) -> ListedSource:
    """Open ImageNet's validation images that lie in one folder without folders for their synsets.

    Their labels (see `read_validation_labels`) and the training images are in `root`. `synsets` are in the order of
    their labels; None: those of the training images, sorted. Errors are those of `open_imagenet`.
    """
    files = list_flat(folder)
    names = [name for name, *_ in files]
    _check_validation_images(folder, names)
    labels = read_validation_labels(root, names)
    found = [(label, *file, 0) for label, file in zip(labels, files, strict=True)]
    return _make_source(folder, found, _find_synsets(root, labels, folder, synsets), flat=True)


def _make_source(
    root: Path, found: _Listing, synsets: Sequence[str], *, is_tar: bool = False, flat: bool = False
) -> ListedSource:
    found = sorted(found)
    label_of = {synset: label for label, synset in enumerate(synsets)}
    files = FileList(
        root,
        tuple(synsets),
        np.array([name.encode() for _, name, *_ in found], np.bytes_),
        np.array([label_of[synset] for synset, *_ in found], np.int32),
        np.array([size for *_, size, _, _ in found], np.int64),
        np.array([time_ns for *_, time_ns, _ in found], np.int64),
        offsets=np.array([offset for *_, offset in found], np.int64) if is_tar else None,
        in_class_folders=not flat,
    )
    return ListedSource(files, only_jpeg=True, upright=False)


def _list_synset_tars(tar: Path) -> list[Member]:
    """List the tars in the tar of the training images, each named by its synset."""
    members = list_members(tar, _TAR_LIMITS)
    for member in members:
        if not member.name.endswith(".tar") or not SYNSET.fullmatch(member.name.removesuffix(".tar")):
            raise DataError(f"member {shorten(member.name)} is not named by a synset, such as n01440764.tar", path=tar)
    return members


def _list_synset_folders(folder: Path) -> _Listing:
    files, found = list_folders(folder), []
    for row in range(len(files)):
        synset, _, name = files.name(row).partition("/")
        found.append((synset, name, int(files.sizes[row]), int(files.times_ns[row]), 0))
    wrong = next((name for name in files.class_names if not SYNSET.fullmatch(name)), None)
    if wrong is not None:
        raise DataError(
            f"{shorten(wrong)} is no synset, n and eight digits", path=folder, remedy="rename it or move it away"
        )
    return found


def _check_train_image(place: str, name: str, synset: str) -> None:
    match = _TRAIN_IMAGE.fullmatch(name)
    if match is None or match[1] != synset:
        raise DataError(
            f"is no image of synset {synset}, such as {synset}_1.JPEG", path=place, remedy="move it where it belongs"
        )


def _check_validation_images(place: Path, names: Sequence[str]) -> None:
    wrong = next((name for name in names if not _VALIDATION_IMAGE.fullmatch(name)), None)
    if wrong is not None or not names:
        what = "it is empty" if wrong is None else f"{shorten(wrong)} is none"
        raise DataError(f"must hold images such as ILSVRC2012_val_00000001.JPEG and nothing else; {what}", path=place)


def _find_synsets(root: Path, labels: Sequence[str], place: Path, wanted: Sequence[str] | None = None) -> Sequence[str]:
    """Return the given synsets, or those of the training images if they are there too, or those of the labels."""
    if wanted is not None:
        known = wanted
    elif (root / _TRAIN_TAR).exists():
        known = sorted(member.name.removesuffix(".tar") for member in _list_synset_tars(root / _TRAIN_TAR))
    else:
        folder = next((folder for folder, content in _list_images(root, "train") if content == "class folders"), None)
        known = sorted(entry.name for entry in folder.iterdir() if SYNSET.fullmatch(entry.name)) if folder else []
    known = known or sorted(set(labels))
    unknown = sorted(set(labels) - set(known))
    if unknown:
        raise DataError(f"has images of synset {unknown[0]}, which is none of the {len(known)} to train on", path=place)
    return known


def _list_images(root: Path, split: Split) -> list[tuple[Path, Content]]:
    """List the folders of a split that hold images, with what they hold; there may be records beside them."""
    folders = [root / name for name in name_folders(split) if (root / name).is_dir()]
    contents = [(folder, inspect_folder(folder)) for folder in folders]
    return [(folder, content) for folder, content in contents if content != "records"]


def _find_images(root: Path, split: Split, tar: str) -> tuple[Path, Content]:
    found = _list_images(root, split)
    if found:
        return found[0]
    records = next((root / name for name in name_folders(split) if (root / name).is_dir()), None)
    if records is not None:
        raise DataError("holds records, which are read as they are; to convert, name a folder of images", path=records)
    kind, names = {"train": "training"}.get(split, split), " or ".join(name_folders(split))
    raise MissingInputError(f"has no {kind} images", path=root, remedy=f"put {tar} there, or a folder {names}")
