"""Texts about ImageNet: the synsets of its validation images, in any of the usual forms, and lists of images."""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gaudi_datasets.documents import shorten
from gaudi_datasets.errors import DataError, MissingExtraError, MissingInputError
from gaudi_datasets.fetching.archives import Limits, extract
from gaudi_ops.files import read_file

SYNSET = re.compile(r"n\d{8}")

_MOST_BYTES = 2**26  # the list of all training images has about 55 million
_DEVKIT = "ILSVRC2012_devkit_t12"
_DEVKIT_LIMITS = Limits(members=1000, member_bytes=_MOST_BYTES, total_bytes=_MOST_BYTES)
_GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"


def read_validation_labels(root: Path, image_names: Sequence[str]) -> list[str]:
    """Read the synset of each validation image.

    Read from the first of these in `root` that is there: `synset_labels.txt`, a synset a line in the order of the
    sorted file names, as TensorFlow's scripts take it (also by its name in TensorFlow's repository,
    `imagenet_2012_validation_synset_labels.txt`); `LOC_val_solution.csv`, as Kaggle gives it; or the original
    `ILSVRC2012_devkit_t12.tar.gz`, which needs SciPy.

    Args:
        root: the folder.
        image_names: file names of the images, sorted.

    Raises:
        MissingInputError: there is none of these files.
        DataError: it is not UTF-8, has other than a synset where one should be, or does not fit the images.
        UnsafeError: a member of the devkit's archive is refused.
        MissingExtraError: there is only the devkit, and SciPy is not installed.
    """
    for name, read in _READERS.items():
        path = root / name
        if path.exists():
            return read(path, image_names)
    raise MissingInputError(
        "has no labels of the validation images", path=root, remedy=f"put one of these there: {', '.join(_READERS)}"
    )


def read_image_list(path: Path) -> list[str]:
    """Read the file names in a text file with one a line.

    Raises:
        MissingInputError: there is no such file.
        DataError: it is not UTF-8, or too large to be a list.
    """
    if not path.is_file():
        raise MissingInputError(
            "there is no such file", path=path, remedy="give a text file that names an image a line"
        )
    return [line.strip() for line in _read_text(path).splitlines() if line.strip()]


def _read_lines(path: Path, image_names: Sequence[str]) -> list[str]:
    synsets = [line.strip() for line in _read_text(path).splitlines()]
    for number, synset in enumerate(synsets, 1):
        _check_synset(f"{path}: line {number}", synset)
    return _check_count(path, synsets, image_names)


def _read_solution(path: Path, image_names: Sequence[str]) -> list[str]:
    """Read rows of ImageId (the stem of a file's name) and PredictionString (a synset and a box, once or more)."""
    synsets: dict[str, str] = {}
    rows = csv.DictReader(_read_text(path).splitlines())
    try:
        table = list(rows)
    except csv.Error as error:
        raise DataError(f"is no table ({error})", path=path, record=f"line {rows.line_num}") from None
    for row in table:
        image, prediction = row.get("ImageId") or "", row.get("PredictionString") or ""
        synset = prediction.partition(" ")[0]
        _check_synset(f"{path}: image {shorten(image)}", synset)
        synsets[image] = synset
    missing = next((name for name in image_names if Path(name).stem not in synsets), None)
    if missing is not None:
        raise DataError(
            f"has no label for the validation image {missing}", path=path, remedy="get the file from its source again"
        )
    return [synsets[Path(name).stem] for name in image_names]


def _read_devkit(path: Path, image_names: Sequence[str]) -> list[str]:
    """Read numbers of synsets, one a line, and the MATLAB file that tells which number is which synset."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise MissingExtraError(
            "needs SciPy to be read",
            path=path,
            remedy="pip install 'gaudi-datasets[imagenet]', or put synset_labels.txt there",
        ) from error
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / _DEVKIT
        extract(path, folder, _DEVKIT_LIMITS, folder=_DEVKIT)
        truth, table = folder / "data" / _GROUND_TRUTH, folder / "data" / "meta.mat"
        if not truth.is_file() or not table.is_file():
            raise DataError(
                f"has no data/{_GROUND_TRUTH} or no data/meta.mat", path=path, remedy="get it from its source again"
            )
        try:
            synsets = loadmat(str(table), squeeze_me=True)["synsets"]
            synset_of = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
        except Exception as error:  # whatever SciPy raises about bytes that are not what they should be
            raise DataError(
                f"meta.mat is not as it should be ({type(error).__name__})", path=path, remedy="get it again"
            ) from None
        lines = _read_text(truth).splitlines()
    found = [synset_of.get(int(line), "") if re.fullmatch(r"\s*\d{1,9}\s*", line) else "" for line in lines]
    for number, synset in enumerate(found, 1):
        _check_synset(f"{path}: {_GROUND_TRUTH}: line {number}", synset)
    return _check_count(path, found, image_names)


_READERS: Mapping[str, Callable[[Path, Sequence[str]], list[str]]] = {
    "synset_labels.txt": _read_lines,
    "imagenet_2012_validation_synset_labels.txt": _read_lines,
    "LOC_val_solution.csv": _read_solution,
    f"{_DEVKIT}.tar.gz": _read_devkit,
}


def _read_text(path: Path) -> str:
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"has {path.stat().st_size} bytes; a file of labels has at most {_MOST_BYTES}", path=path)
    content = read_file(path)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"line {line} is not UTF-8", path=path, remedy="get the file from its source again") from None


def _check_synset(place: str, synset: str) -> None:
    if not SYNSET.fullmatch(synset):
        raise DataError(
            f"{shorten(synset)} is no synset, which is n and eight digits", record=place, remedy="get the file again"
        )


def _check_count(path: Path, synsets: list[str], image_names: Sequence[str]) -> list[str]:
    if len(synsets) != len(image_names):
        raise DataError(
            f"has {len(synsets)} labels for {len(image_names)} validation images", path=path, remedy="get both whole"
        )
    return synsets
