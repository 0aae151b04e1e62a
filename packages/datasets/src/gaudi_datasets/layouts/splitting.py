"""Images split into training and validation: by class, equal images on one side, the same wherever the files are."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from gaudi_datasets.errors import DataError, FlagError
from gaudi_datasets.image_files import stat_image
from gaudi_datasets.layouts.threads import map_threads
from gaudi_datasets.program import ProgressLine, count_things
from gaudi_ops.files import open_regular_file

_OVERSHOOT = 0.5 + 1e-9  # images of validation above its share
_HEAD = 2**14
_PIECE = 2**20


Source = TypeVar("Source", covariant=True)


@dataclass(frozen=True, eq=False)
class SplitData(Generic[Source]):
    """Images for training, validation and test, with their classes or boxes.

    Attributes:
        layout: what was recognised, on one line.
        train: images of training; of a data set with boxes, those with one to learn from.
        val: images of validation; None only where nothing may be split.
        test: images of the test set, if there is one.
        notes: what was left out, changed or guessed, named and counted.
        split: file names by "train" and "val" where they were split here; else empty.
    """

    layout: str
    train: Source
    val: Source | None = None
    test: Source | None = None
    notes: tuple[str, ...] = ()
    split: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def sources(self) -> dict[str, Source]:
        """Return the sources that there are, by "train", "val" and "test"."""
        found = {"train": self.train, "val": self.val, "test": self.test}
        return {split: source for split, source in found.items() if source is not None}


def require_share(share: float) -> None:
    """Raise FlagError for a share of validation that is not in 0..1."""
    if not 0 <= share < 1:
        raise FlagError(f"--val_share is {share:g}; it must be at least 0 and below 1", flag="--val_share")


def require_training(splits: Mapping[str, object], path: Path, remedy: str) -> None:
    """Raise DataError where there are splits, and none is that of training."""
    if "train" not in splits:
        raise DataError(f"has images for {', '.join(splits)} and none for training", path=path, remedy=remedy)


def split_records(
    sources: dict[str, Any],
    open_training: Callable[[], Any],
    list_classes: Callable[[Any], Sequence[int]],
    *,
    share: float,
    seed: int,
    name: str,
) -> dict[str, list[str]]:
    """Split validation off the records of training, if there is none; return the names of both.

    `open_training` opens the records once more, `list_classes` returns the classes of an example. The others are those
    of `choose_validation`; with a share of 0 nothing is split.
    """
    if "val" in sources or not share:
        return {}
    train, progress = sources["train"], ProgressLine("splitting", "record")
    examples, contents = [], list[Hashable]()
    for row in range(len(train)):
        example = train.read(row)
        contents += hash_records([example.encoded])
        examples.append(replace(example, encoded=b""))  # all images may not fit into memory
        progress(row + 1, len(train))
    in_val = choose_validation(
        [list_classes(example) for example in examples],
        [str(example.image_id) for example in examples],
        contents,
        share=share,
        seed=seed,
        name=name,
    )
    sources["val"] = open_training()
    split_names = {}
    for split, kept in (("train", ~in_val), ("val", in_val)):
        rows = np.flatnonzero(kept)
        sources[split].keep(rows)
        split_names[split] = [examples[row].file_name or f"record {row}" for row in rows]
    return split_names


def note_split(split_names: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Note how many images were split."""
    if not split_names:
        return ()
    train = count_things(len(split_names["train"]), "image")
    return (f"split here: {train} for training, {len(split_names['val'])} for validation",)


def choose_validation(
    classes: Sequence[Sequence[int]],
    names: Sequence[str],
    contents: Sequence[Hashable],
    *,
    share: float,
    seed: int,
    name: str,
) -> npt.NDArray[np.bool_]:
    """Choose the images of validation, so that each class has its share of them there: bool [images].

    Images of equal content stay together. The choice is that of iterative stratification (Sechidis, Tsoumakas and
    Vlahavas, "On the Stratification of Multi-Label Data", 2011): the rarest class is dealt first, and each image goes
    where more of that class is still wanted. Draws depend on the names and the seed, and not on the order of images.

    Args:
        classes: of each image, which may repeat; none are a class of their own.
        names: of the images, unique.
        contents: equal for equal images, as `hash_files` returns them.
        share: of the images that go to validation, in 0..1.
        seed: of the draws.
        name: of the data set in messages.

    Raises:
        FlagError: the share is not in 0..1.
        DataError: fewer than two different images.
    """
    if not 0 < share < 1:
        raise FlagError(f"--val_share is {share:g}; it must be above 0 and below 1", flag="--val_share")
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for row, content in enumerate(contents):
        groups[content].append(row)
    if len(groups) < 2:
        raise DataError(
            f"{name} has {len(groups)} image; training and validation need at least 2 that differ",
            remedy="add images, or name data for validation",
        )
    keys = {content: min(_draw(seed, names[row]) for row in rows) for content, rows in groups.items()}
    order = sorted(groups, key=lambda content: keys[content])
    members = [groups[content] for content in order]
    present = [_count_classes([classes[row] for row in rows]) for rows in members]
    in_val = _deal(present, [len(rows) for rows in members], share)
    chosen = np.zeros(len(contents), np.bool_)
    for rows, side in zip(members, in_val, strict=True):
        chosen[rows] = side
    return chosen


def hash_files(paths: Sequence[Path]) -> list[Hashable]:
    """Return what is equal for files of equal content; files are read only as far as they are alike.

    Raises:
        MissingInputError: a file is not there.
    """
    found: list[Hashable] = [stat_image(path).st_size for path in paths]
    for read in (lambda path: _hash(path, _HEAD), lambda path: _hash(path, None)):
        rows_of: dict[Hashable, list[int]] = defaultdict(list)
        for row, content in enumerate(found):
            rows_of[content].append(row)
        alike = [row for rows in rows_of.values() if len(rows) > 1 for row in rows]
        for row, digest in zip(alike, map_threads(read, [paths[row] for row in alike]), strict=True):
            found[row] = (found[row], digest)
    return found


def hash_records(encoded: Sequence[bytes]) -> list[Hashable]:
    """Return what is equal for equal images in memory."""
    return [hashlib.sha256(content).digest() for content in encoded]


def _deal(present: Sequence[Mapping[int, int]], sizes: Sequence[int], share: float) -> list[bool]:
    """Deal groups of images to validation (True) or training, the rarest class first."""
    shares = {True: share, False: 1 - share}
    wanted = {side: part * sum(sizes) for side, part in shares.items()}
    totals: dict[int, int] = defaultdict(int)
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, counts in enumerate(present):
        for label, count in counts.items():
            totals[label] += count
            rows_of[label].append(row)
    wanted_of = {side: {label: part * total for label, total in totals.items()} for side, part in shares.items()}
    sides: dict[int, bool] = {}
    left = {label: len(rows) for label, rows in rows_of.items()}
    while len(sides) < len(present):
        label = min((label for label in left if left[label]), key=lambda label: (left[label], label))
        for row in rows_of[label]:
            if row in sides:
                continue
            # Equally wanted, it goes to training, as does what would make validation too large.
            to_val = (wanted_of[True][label], wanted[True]) > (wanted_of[False][label], wanted[False])
            to_val = to_val and wanted[True] - sizes[row] >= -_OVERSHOOT
            sides[row] = to_val
            wanted[to_val] -= sizes[row]
            for other, count in present[row].items():
                wanted_of[to_val][other] -= count
                left[other] -= 1
    chosen = [sides[row] for row in range(len(present))]
    if len(set(chosen)) == 1:  # so few that a share of each class is nobody's: the first goes to the other side
        chosen[0] = not chosen[0]
    return chosen


def _count_classes(classes: Sequence[Sequence[int]]) -> dict[int, int]:
    """Count the images that show each class; -1 stands for images that show none."""
    counts: dict[int, int] = defaultdict(int)
    for labels in classes:
        for label in set(labels) or {-1}:
            counts[label] += 1
    return counts


def _draw(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed} {name}".encode(errors="surrogateescape")).digest()


def _hash(path: Path, length: int | None) -> bytes:
    digest = hashlib.sha256()
    with open_regular_file(path, buffering=0) as file:
        while piece := file.read(length or _PIECE):
            digest.update(piece)
            if length:
                break
    return digest.digest()
