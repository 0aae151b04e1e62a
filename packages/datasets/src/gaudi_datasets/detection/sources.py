"""Where training and evaluation get their images and boxes from, read one by one in any order by any thread."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.coco import COCO_CATEGORIES, Category, CocoAnnotations, parse_category
from gaudi_datasets.detection.examples import DetectionExample, decode_example
from gaudi_datasets.documents import Faults
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import EncodedImage, check_image, read_content, read_head, stat_image
from gaudi_datasets.layouts.file_checksums import find_checksums, require_checksum
from gaudi_datasets.records.record_sets import RecordSet
from gaudi_datasets.sampling import find_expect, reading_ahead

__all__ = ["CocoSource", "DetectionExample", "DetectionSource", "RecordSource", "ground_truth"]


# Annotations that say the size of the stored pixels were drawn on these.
WITH_BOXES = "with its boxes"
# It cannot be told on which pixels they were drawn: these are of one size, and so are those of all such images.
UNDECIDED = "with boxes taken for upright"


class DetectionSource(Protocol):
    """A data set for detection with a fixed order."""

    @property
    def name(self) -> str:
        """Return the name of the data set in messages and reports."""

    @property
    def categories(self) -> tuple[Category, ...]:
        """Return the classes in id order; label l is categories[l - 1]."""

    @property
    def fingerprint(self) -> str:
        """Return SHA-256 that is equal for equal data, wherever it is stored."""

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes of all encoded images."""

    def __len__(self) -> int:
        """Return the number of images."""

    def read(self, index: int) -> DetectionExample:
        """Read image `index` of 0..len - 1 with its boxes; safe to call from several threads."""


def read_labels(source: DetectionSource) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Read the class of each object of a data set, which crowds are none of; records are read through for it.

    Returns:
        the image of each object, from 0, and its label, from 1: int64 and int32 [objects].
    """
    if isinstance(source, CocoSource):
        return source.list_labels()
    labels, read = [], reading_ahead(source.read, find_expect(source), np.arange(len(source)))
    for index in range(len(source)):
        example = read(index)
        labels.append(example.labels[~example.is_crowd])
    images = np.repeat(np.arange(len(labels)), [len(each) for each in labels])
    return images, np.concatenate(labels).astype(np.int32)


def name_place(source: DetectionSource, index: int, example: DetectionExample) -> str:
    """Return the name of an image of a source in messages."""
    return f"{source.name}: record {index} (image {example.image_id}, {example.file_name})"


class RecordSource(RecordSet):
    """The records of one split in a folder, as `write_records` or the original program wrote them.

    Without a manifest the classes are the 80 of COCO. Arguments and errors are those of `RecordSet`.
    """

    def __init__(self, data_dir: str | Path, split: str) -> None:
        super().__init__(data_dir, split, kind="detection")
        self.categories = COCO_CATEGORIES
        if self.manifest is not None:
            self.categories = read_categories(self.manifest_path, self.manifest)
        self._label_of_category = {category.id: row + 1 for row, category in enumerate(self.categories)}

    def read(self, index: int) -> DetectionExample:
        """Read one image with its boxes.

        Raises:
            DataError: the record is damaged, or a feature is missing or wrong.
        """
        place, content = self.read_record(index)
        return decode_example(content, self._label_of_category, place)


class _TurnedImages:
    """The turned images of a source, which may tell on which pixels its boxes were drawn.

    Attributes:
        find_others: returns those of the other splits of the data set, which tell where these do not.
    """

    def __init__(self, image_dir: Path, file_names: Sequence[str], sizes: npt.NDArray[np.int64]) -> None:
        self._image_dir, self._file_names, self._sizes = image_dir, file_names, sizes
        self.find_others: Callable[[], Iterable[_TurnedImages]] = tuple

    @functools.cached_property
    def _told_here(self) -> bool | None:
        is_stored = None
        for name, annotated in zip(self._file_names, self._sizes.tolist(), strict=True):
            try:
                size, turn = read_head(self._image_dir / name)
            except (DataError, MissingInputError):  # told when it is read
                continue
            if turn >= 5 and size[0] != size[1]:
                is_stored = list(size) != annotated
                if is_stored:
                    break
        return is_stored

    @functools.cached_property
    def is_drawn_stored(self) -> bool | None:
        """Tell by the annotated sizes whether some boxes were drawn on pixels as they are stored; None: no size tells.

        The heads of all images are read, once, when one is met whose own size does not tell.
        """
        if self._told_here is not None:
            return self._told_here
        told = (each._told_here for each in self.find_others())
        return next((each for each in told if each is not None), None)


def _list_turned(find: Callable[[], Iterable[CocoSource]]) -> list[_TurnedImages]:
    return [each._turned for each in find()]


class CocoSource:
    """The images and boxes of annotations and a folder of image files, without records: the same examples in the same
    order as from the records that `write_records` makes of them.

    Args:
        annotations: as `read_coco` gave them.
        image_dir: the folder that their file names are relative to.
        keep_empty: whether images without any box that is no crowd are kept: for evaluation they are, for training not.
        decode: check each image that is read by decoding it whole, and not by its structure alone.

    Attributes:
        name: what the data set is called in messages.
        categories: the classes in id order.
        num_boxes: of all images together.

    Raises:
        MissingInputError: there is no such folder.
        DataError: no image is kept.
    """

    def __init__(
        self, annotations: CocoAnnotations, image_dir: str | Path, *, keep_empty: bool, decode: bool = False
    ) -> None:
        self._image_dir, self._decode = Path(image_dir), decode
        if not self._image_dir.is_dir():
            raise MissingInputError("there is no such folder", path=image_dir, remedy="give the folder of the images")
        self.name, self.categories = str(annotations.path), annotations.categories
        counts = np.diff(annotations.box_splits)
        row_of_box = np.repeat(np.arange(len(counts)), counts)
        rows = np.arange(len(counts)) if keep_empty else np.unique(row_of_box[~annotations.is_crowd])
        if not len(rows):
            raise DataError(
                f"none of {len(annotations.image_ids)} images has a box to learn from", path=annotations.path
            )
        # Only what examples need, because each process that writes records holds it.
        boxes = np.isin(row_of_box, rows)
        self._image_ids = annotations.image_ids[rows]
        self._file_names = [annotations.file_names[row] for row in rows]
        self._heights, self._widths = annotations.heights[rows], annotations.widths[rows]
        self._turned = _TurnedImages(
            self._image_dir, self._file_names, np.stack([self._heights, self._widths], axis=1).astype(np.int64)
        )
        self._box_splits = np.concatenate([[0], np.cumsum(counts[rows])])
        height, width = annotations.heights[row_of_box[boxes]], annotations.widths[row_of_box[boxes]]
        x, y, box_width, box_height = annotations.boxes_xywh[boxes].T
        corners = [y / height, x / width, (y + box_height) / height, (x + box_width) / width]
        self._boxes_yxyx = np.stack(corners, 1).astype(np.float32)
        category_ids = [category.id for category in annotations.categories]
        self._labels = (np.searchsorted(category_ids, annotations.category_ids[boxes]) + 1).astype(np.int32)
        self._is_crowd, self._areas = annotations.is_crowd[boxes], annotations.areas[boxes].astype(np.float32)
        self.num_boxes = len(self._labels)

    def __len__(self) -> int:
        return len(self._file_names)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return SHA-256 of the annotations of the images, and of the contents of their files.

        Raises:
            MissingInputError: a file is not there.
        """
        return hashlib.sha256(self.former_fingerprint.encode() + self._checksums.astype("<u4").tobytes()).hexdigest()

    @functools.cached_property
    def _checksums(self) -> npt.NDArray[np.uint32]:
        """CRC-32C of the images' files; once they are known, each image that is read is compared with its own."""
        paths = [self.path(index) for index in range(len(self))]
        return find_checksums(
            paths, self._file_names, lambda index: read_content(paths[index]), self.former_fingerprint
        )

    @functools.cached_property
    def former_fingerprint(self) -> str:
        """Return what an earlier release computed, of the annotations and of the sizes of the files."""
        return self._hash("st_size")

    @functools.cached_property
    def num_bytes(self) -> int:
        """Return the number of bytes of all encoded images."""
        return sum(self._stat(name).st_size for name in self._file_names)

    @property
    def file_names(self) -> tuple[str, ...]:
        """Return the file names of the images, in their order."""
        return tuple(self._file_names)

    def list_files(self) -> dict[str, str]:
        """Return what is known of each image by file name: its size, a hash of its annotations, and its CRC-32C."""
        known = {}
        for index, name in enumerate(self._file_names):
            boxes = slice(self._box_splits[index], self._box_splits[index + 1])
            digest = hashlib.sha256()
            for values in (self._boxes_yxyx[boxes], self._labels[boxes], self._is_crowd[boxes], self._areas[boxes]):
                digest.update(values.tobytes())
            size = self._stat(name).st_size
            known_of = size, self._heights[index], self._widths[index], digest.hexdigest()[:12]
            known[name] = f"{' '.join(map(str, known_of))} {self._checksums[index]:08x}"
        return known

    def path(self, index: int) -> Path:
        """Return the path of the file that holds image `index`."""
        return self._image_dir / self._file_names[index]

    def _stat(self, name: str) -> os.stat_result:
        try:
            return stat_image(self._image_dir / name)
        except MissingInputError as error:
            error.remedy = f"fix the image folder, or the file name in {self.name}"
            raise

    def hash_state(self) -> str:
        """Hash the annotations and the files' sizes and times of change."""
        return self._hash("st_size", "st_mtime_ns")

    def _hash(self, *of_file: str) -> str:
        """Hash the annotations and some fields of what the system tells of each file."""
        digest = hashlib.sha256()
        of_images = (self._image_ids, self._heights, self._widths, self._box_splits)
        for values in (*of_images, self._boxes_yxyx, self._labels, self._is_crowd, self._areas):
            digest.update(values.tobytes())
        pick = operator.attrgetter(*of_file)
        files = [(name, pick(self._stat(name))) for name in self._file_names]
        categories = [(each.id, each.name, each.supercategory) for each in self.categories]
        digest.update(json.dumps([files, categories]).encode())
        return digest.hexdigest()

    def read(self, index: int) -> DetectionExample:
        """Read one image with its boxes; raises as `read_image` does."""
        return self.join(index, self.read_image(index))

    def list_labels(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """List image and label of each object, see `read_labels`."""
        images = np.repeat(np.arange(len(self)), np.diff(self._box_splits))
        return images[~self._is_crowd], self._labels[~self._is_crowd]

    def read_image(self, index: int) -> EncodedImage:
        """Read one image without its boxes, upright.

        Raises:
            MissingInputError: the file is not there.
            DataError: it is damaged, no image, or of another size than annotated, both stored and upright.
        """
        path = self._image_dir / self._file_names[index]
        content = read_content(path)
        require_checksum(content, vars(self).get("_checksums"), index, path)
        image = check_image(content, path, decode=self._decode)
        height, width = int(self._heights[index]), int(self._widths[index])
        if (image.height, image.width) != (height, width) == image.stored_size:
            return replace(image, fix=f"{image.fix} {WITH_BOXES}")
        if image.turn != 1 and (image.height, image.width) == (height, width) == image.stored_size:
            what = {True: WITH_BOXES, None: UNDECIDED}.get(self._turned.is_drawn_stored)
            return replace(image, fix=f"{image.fix} {what}") if what else image
        if (image.height, image.width) != (height, width):
            raise DataError(
                f"is {image.height} pixels high and {image.width} wide, annotated (image "
                f"{self._image_ids[index]}) as {height} and {width}",
                path=path,
                remedy="fix one of the two",
            )
        return image

    @staticmethod
    def read_alike(splits: Collection[CocoSource]) -> None:
        """Let the turned images of all splits of a data set tell how those are read whose own split does not."""
        for each in splits:
            each.follow(other for other in splits if other is not each)

    def follow(self, others: Iterable[CocoSource] | Callable[[], Iterable[CocoSource]]) -> None:
        """Let the turned images of the other splits of the data set tell how those are read that do not tell here.

        What opens them, in place of them, is called once an image is met whose own split does not tell.
        """
        if callable(others):
            self._turned.find_others = functools.partial(_list_turned, others)
        else:  # without what else they hold, because each process that writes records gets it
            self._turned.find_others = functools.partial(tuple, [each._turned for each in others])

    def join(self, index: int, image: EncodedImage) -> DetectionExample:
        """Make the example of an image that `read_image` returned."""
        boxes = slice(self._box_splits[index], self._box_splits[index + 1])
        boxes_yxyx = self._boxes_yxyx[boxes]
        if image.fix.endswith(WITH_BOXES):  # annotated as it is stored
            boxes_yxyx = turn_boxes(boxes_yxyx, image.turn)
        return DetectionExample(
            image_id=int(self._image_ids[index]),
            encoded=image.encoded,
            height=image.height,
            width=image.width,
            boxes_yxyx=boxes_yxyx,
            labels=self._labels[boxes],
            is_crowd=self._is_crowd[boxes],
            areas=self._areas[boxes],
            file_name=self._file_names[index],
        )


def turn_boxes(boxes_yxyx: npt.NDArray[np.float32], turn: int) -> npt.NDArray[np.float32]:
    """Turn boxes of stored pixels as an image of EXIF orientation 2..8 is turned: float32 [n, 4] in 0..1."""
    y0, x0, y1, x1 = boxes_yxyx.T
    if turn in (3, 4, 6, 7):  # what was at the bottom comes to the top, or to the left
        y0, y1 = 1 - y1, 1 - y0
    if turn in (2, 3, 7, 8):  # what was at the right comes to the left, or to the top
        x0, x1 = 1 - x1, 1 - x0
    return np.stack([x0, y0, x1, y1] if turn >= 5 else [y0, x0, y1, x1], axis=1)


def ground_truth(source: DetectionSource) -> dict[str, list[dict[str, Any]]]:
    """Make a COCO annotation document of the source's boxes, to score detections against.

    Boxes are left, top, width, height in pixels; annotation ids count from 1.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(len(source)):
        example = source.read(index)
        size = {"height": example.height, "width": example.width}
        images.append({"id": example.image_id, "file_name": example.file_name or f"{example.image_id}", **size})
        scale = (example.height, example.width, example.height, example.width)
        for row, box_yxyx in enumerate(example.boxes_yxyx.astype(float) * scale):
            y0, x0, y1, x1 = box_yxyx.tolist()
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": example.image_id,
                    "category_id": source.categories[example.labels[row] - 1].id,
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": float(example.areas[row]),
                    "iscrowd": int(example.is_crowd[row]),
                }
            )
    categories = [asdict(category) for category in source.categories]
    return {"images": images, "annotations": annotations, "categories": categories}


def read_categories(path: Path, manifest: Mapping[str, Any]) -> tuple[Category, ...]:
    """Read the classes that a manifest names, in id order; `path` is the manifest's name in messages."""
    faults = Faults(path)
    categories = list(faults.parse("categories", manifest.get("categories"), parse_category))
    faults.raise_any()
    if not categories:
        raise DataError("names no categories", path=path, remedy="convert the data again")
    return tuple(sorted(categories, key=lambda category: category.id))
