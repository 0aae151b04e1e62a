"""Records with classes, read one by one in any order by any thread."""

from __future__ import annotations

from pathlib import Path

from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource, decode_example
from gaudi_datasets.errors import DataError
from gaudi_datasets.json_records import shorten
from gaudi_datasets.record_sets import RecordSet, has_records

__all__ = ["ClassificationExample", "ClassificationSource", "RecordSource"]

_IMAGENET_CLASSES = 1000
OTHER_NAMES = {"val": "validation", "validation": "val"}  # ours, and that of the original's ImageNet records


class RecordSource:
    """The records of one split in a folder, as `write_records` or the original's script for ImageNet wrote them.

    Args:
        data_dir: the folder of the records, or the one that holds a folder of records for each split.
        split: the beginning of the records' names; `val` and `validation` mean each other where only one is there.

    Raises:
        MissingInputError: there is no such folder, there are no records of the split, or a shard is missing.
        DataError: `data_dir` is a file, the manifest or a header of a record is broken, or the records are of boxes.
    """

    def __init__(self, data_dir: str | Path, split: str) -> None:
        other = OTHER_NAMES.get(split)
        if other and not has_records(Path(data_dir), split) and has_records(Path(data_dir), other):
            split = other
        self._records = RecordSet(data_dir, split, kind="classification")
        self.name = self._records.name
        self.fingerprint = self._records.fingerprint
        self.class_names = self._find_classes()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Of all records together."""
        return self._records.num_bytes

    def path(self, index: int) -> Path:
        """The file that image `index` is read from."""
        return self._records.place(index).path

    def read(self, index: int) -> ClassificationExample:
        """Read one image with its label.

        Raises:
            DataError: the record is damaged, or a feature is missing or wrong.
        """
        place, content = self._records.read(index)
        return decode_example(content, len(self.class_names), place, image_id=index)

    def _find_classes(self) -> tuple[str, ...]:
        """As the manifest tells; without one the labels 1 to 1000 of ImageNet, by their numbers."""
        if self._records.manifest is None:
            return tuple(str(number) for number in range(1, _IMAGENET_CLASSES + 1))
        names = self._records.manifest.get("classes")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise DataError(
                f"{self._records.manifest_path}: classes is {shorten(names)}; it must be a list of names: convert again"
            )
        return tuple(names)
