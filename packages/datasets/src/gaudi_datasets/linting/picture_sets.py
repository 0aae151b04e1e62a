"""The pictures of each kind of data set, as lint reads them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gaudi_datasets.classification.examples import ClassificationSource
from gaudi_datasets.classification.listed_files import ListedSource
from gaudi_datasets.detection.coco import Category, CocoAnnotations, parse_coco
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.sources import DetectionSource, ground_truth
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.linting.pictures import StoredPicture


class AnnotatedFiles:
    """The pictures that annotations name, in their order."""

    def __init__(self, annotations: CocoAnnotations, image_dir: str | Path) -> None:
        self._annotations, self._image_dir = annotations, Path(image_dir)

    def __len__(self) -> int:
        return len(self._annotations.image_ids)

    def where(self, index: int) -> str:
        """The path of the file."""
        return str(self._image_dir / self._annotations.file_names[index])

    def read(self, index: int) -> StoredPicture:
        """Read a file; see `PictureSet`."""
        of, path = self._annotations, Path(self.where(index))
        try:
            encoded = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise MissingInputError(f"{path}: there is no such file") from None
        except IsADirectoryError:
            raise DataError(f"{path}: is a folder; it must be an image file") from None
        return StoredPicture(encoded, path.name, (int(of.heights[index]), int(of.widths[index])))


@dataclass(frozen=True)
class ListedFiles:
    """The files of class folders, by their sorted names."""

    source: ListedSource

    def __len__(self) -> int:
        return len(self.source.files)

    def where(self, index: int) -> str:
        """The path of the file."""
        return self.source.reader.place(self.source.files, index)

    def read(self, index: int) -> StoredPicture:
        """Read a file; see `PictureSet`."""
        return StoredPicture(self.source.reader.read(self.source.files, index), self.source.files.name(index))


@dataclass(frozen=True)
class RecordPictures:
    """The pictures in records, which tell their sizes; those of another's records may tell 0 for unknown."""

    source: DetectionSource | ClassificationSource

    def __len__(self) -> int:
        return len(self.source)

    def where(self, index: int) -> str:
        """The records and the number of the picture."""
        return f"{self.source.name}: picture {index}"

    def read(self, index: int) -> StoredPicture:
        """Read a record; see `PictureSet`."""
        example = self.source.read(index)
        size = (example.height, example.width)
        return StoredPicture(example.encoded, example.file_name, size if all(size) else None)


def annotations_of_records(source: DetectionSource) -> CocoAnnotations:
    """What the records say of boxes; records that cannot be read are left out, for `RecordPictures` to tell.

    Raises:
        DataError: two records have the same image id.
    """
    return parse_coco(ground_truth(_Boxes(source)), Path(source.name))


class _Boxes:
    """The examples that can be read, without their pictures, which would fill the memory."""

    def __init__(self, source: DetectionSource) -> None:
        self.name, self.fingerprint, self.num_bytes = source.name, source.fingerprint, 0
        self.categories: tuple[Category, ...] = source.categories
        self._examples: list[DetectionExample] = []
        for index in range(len(source)):
            try:
                self._examples.append(replace(source.read(index), encoded=b""))
            except DataError:
                continue

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> DetectionExample:
        """The example without its picture."""
        return self._examples[index]


def labels_of_records(source: ClassificationSource) -> list[int]:
    """The labels of the records that can be read."""
    labels = []
    for index in range(len(source)):
        try:
            labels.append(source.read(index).label)
        except DataError:
            continue
    return labels
