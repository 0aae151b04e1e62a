"""The images that the flags name: records, or folders of classes, one split or several joined."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource
from gaudi_datasets.classification.splits import open_split
from gaudi_datasets.errors import DataError, MissingInputError

__all__ = ["JoinedSource", "open_source", "open_split"]


def open_source(
    data_dir: str | None, splits: Sequence[str], *, class_names: Sequence[str] | None = None
) -> ClassificationSource:
    """Open some splits of a folder as one data set.

    Args:
        data_dir: folder of records, or of folders of records or classes; see `open_split`.
        splits: names of the records or of the folders in it; `val` and `validation` mean each other.
        class_names: of a model, in the order of its labels, where a split need not have images of each class.

    Raises:
        MissingInputError: there is no --data_dir, or no such split in it.
        DataError: a split is damaged, or has other classes than another.
    """
    if data_dir is None:
        raise MissingInputError(f"--data_dir: is not given; it must be a folder with {', '.join(splits)}")
    first = open_split(Path(data_dir), splits[0], class_names)
    # By the classes of the first one: others need not have images of each.
    others = [open_split(Path(data_dir), split, first.class_names) for split in splits[1:]]
    return JoinedSource([first, *others]) if others else first


class JoinedSource:
    """Several data sets of the same classes, one after the other.

    Image ids are those of the parts, moved on by the number of images before the part.

    Args:
        sources: two or more.

    Raises:
        DataError: their classes differ.
    """

    def __init__(self, sources: Sequence[ClassificationSource]) -> None:
        for source in sources[1:]:
            if source.class_names != sources[0].class_names:
                raise DataError(
                    f"{source.name}: has other classes than {sources[0].name}; give splits of the same ones"
                )
        self._sources = sources
        self._ends = [sum(len(one) for one in sources[: number + 1]) for number in range(len(sources))]
        self.name = " + ".join(source.name for source in sources)
        self.class_names = sources[0].class_names
        self.num_bytes = sum(source.num_bytes for source in sources)
        self.fingerprint = hashlib.sha256("".join(source.fingerprint for source in sources).encode()).hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, index: int) -> ClassificationExample:
        """Read one image with its label."""
        part = bisect.bisect_right(self._ends, index)
        first = self._ends[part - 1] if part else 0
        example = self._sources[part].read(index - first)
        return replace(example, image_id=example.image_id + first)
