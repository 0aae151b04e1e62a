"""Define the flags that say where data comes from and where records go, shared by the commands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from gaudi_datasets.fetching.stores import DEFAULT_GB, check_records_url
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_datasets.classification.class_folders import FolderSource
    from gaudi_datasets.classification.layouts import ClassificationData
    from gaudi_datasets.classification.sources import RecordSource as ClassificationRecords
    from gaudi_datasets.detection.coco import CocoAnnotations
    from gaudi_datasets.detection.layouts import DetectionData
    from gaudi_datasets.detection.sources import CocoSource
    from gaudi_datasets.detection.sources import RecordSource as DetectionRecords
    from gaudi_datasets.showing import Source

ListIds = Callable[[], Sequence[int]]
"""Returns the ids of all images of a source, in their order."""

Switch = tyro.conf.FlagCreatePairsOff[bool]
Debug = Annotated[Switch, tyro.conf.arg(help="show the traceback of errors")]


class AnnotatedImages:
    """Annotations of boxes, with a folder of images."""

    def read(self) -> tuple[CocoAnnotations, Path]:
        """Read the annotations; return them with the folder that their file names are relative to."""
        raise NotImplementedError

    def open(self) -> tuple[CocoSource, ListIds]:
        """Open the images, those without a box too."""
        from gaudi_datasets.detection.sources import CocoSource

        annotations, image_dir = self.read()
        return CocoSource(annotations, image_dir, keep_empty=True), annotations.image_ids.tolist


@dataclass(frozen=True)
class CocoFlags(AnnotatedImages):
    """A COCO annotation file with its images."""

    annotations: str
    """annotation file, such as instances_train2017.json, or its URL"""
    images: Path
    """folder of the images"""

    def read(self) -> tuple[CocoAnnotations, Path]:
        """Read the annotation file."""
        from gaudi_datasets.detection.coco import read_coco

        return read_coco(self.annotations), self.images


@dataclass(frozen=True)
class VocFlags(AnnotatedImages):
    """A Pascal VOC folder."""

    voc_dir: Path
    """folder that holds Annotations/, ImageSets/Main/ and JPEGImages/"""
    image_sets: tuple[str, ...]
    """names of the image sets to take together, such as: train val"""
    class_names: tuple[str, ...] = ()
    """classes in the order of their ids; none: all in the folder, sorted"""

    def read(self) -> tuple[CocoAnnotations, Path]:
        """Read the annotations of the image sets."""
        from gaudi_datasets.detection.coco import parse_coco
        from gaudi_datasets.detection.voc import IMAGE_FOLDER, read_voc

        document = read_voc(self.voc_dir, self.image_sets, self.class_names or None)
        return parse_coco(document, self.voc_dir), self.voc_dir / IMAGE_FOLDER


@dataclass(frozen=True)
class YoloFlags(AnnotatedImages):
    """A YOLO data set: its YAML file, and labels/ beside images/."""

    data: Path
    """YAML file that names the classes and the folders of images, by custom data.yaml"""
    image_set: Literal["train", "val", "test"]
    """which of the YAML file's folders"""

    def read(self) -> tuple[CocoAnnotations, Path]:
        """Read the labels of the image set."""
        from gaudi_datasets.detection.coco import parse_coco
        from gaudi_datasets.detection.yolo import read_yolo

        document, image_dir = read_yolo(self.data, self.image_set)
        return parse_coco(document, self.data), image_dir


@dataclass(frozen=True)
class FoldersFlags:
    """One folder a class."""

    folder: Path
    """folder that holds a folder of images for each class"""

    def open(self) -> tuple[FolderSource, ListIds]:
        """Open the images."""
        from gaudi_datasets.classification.class_folders import FolderSource

        source = FolderSource(self.folder)
        return source, source.rows.tolist


@dataclass(frozen=True)
class RecordsFlags:
    """Records that were converted before."""

    data_dir: str
    """folder of the records, or its URL, such as s3://bucket/records"""
    records: str
    """their split: the first part of the file names, such as train or val"""
    cache_dir: Path | None = None
    """folder for what is fetched from a URL, shared by all processes of a host; by default in the user's cache"""
    cache_gb: float = DEFAULT_GB
    """most GB in --cache_dir; records that nothing reads make room for others"""

    def __post_init__(self) -> None:
        check_records_url(self.data_dir, self.cache_dir, self.cache_gb)

    def open(self) -> tuple[DetectionRecords | ClassificationRecords, ListIds]:
        """Open the records, of either kind."""
        from gaudi_datasets.classification.sources import RecordSource as ClassificationRecords
        from gaudi_datasets.detection.sources import RecordSource as DetectionRecords
        from gaudi_datasets.records.record_sets import find_kind
        from gaudi_datasets.records.remote_records import use_cache

        use_cache(self.cache_dir, self.cache_gb)
        kind = find_kind(self.data_dir, self.records)
        source = (DetectionRecords if kind == "detection" else ClassificationRecords)(self.data_dir, self.records)
        return source, lambda: [source.read(index).image_id for index in range(len(source))]


@dataclass(frozen=True)
class AutoFlags:
    """A data set in any known layout, recognised by content."""

    data: Path
    """folder of the data set, or a YAML, JSON, CSV or XML file of annotations"""
    split: Literal["train", "val", "test"] = "train"
    """which images, as found or as split here"""
    val_share: float = 0.2
    """share of the training images for validation, if there is none"""
    split_seed: int = 0
    """seed of the split"""

    def open(self) -> tuple[Source, ListIds]:
        """Open the images, and print what was recognised on standard error."""
        from gaudi_datasets.errors import MissingInputError

        data = open_any(self.data, val_share=self.val_share, seed=self.split_seed)
        print_layout(data)
        source = getattr(data, self.split)
        if source is None:
            raise MissingInputError(f"has no split {self.split}", path=self.data, remedy="choose another --split")
        return source, lambda: [source.read(index).image_id for index in range(len(source))]


def open_any(path: Path, *, val_share: float, seed: int) -> DetectionData | ClassificationData:
    """Open a data set of either kind; what has no annotations of boxes is one of classes.

    Raises:
        MissingInputError, DataError, FlagError: as by `open_data` of its kind.
        DataError: there is one class, and a table or labels which may be of its boxes, but are not understood.
    """
    from gaudi_datasets.classification import layouts as classification
    from gaudi_datasets.detection import layouts as detection
    from gaudi_datasets.layouts.recognition import find_candidates
    from gaudi_datasets.records.record_sets import find_splits

    if path.is_dir() and not find_splits(path, "detection") and not find_candidates(path):
        _require_no_boxes(path)
        return classification.open_data(path, val_share=val_share, seed=seed)
    return detection.open_data(path, val_share=val_share, seed=seed)


def _require_no_boxes(path: Path) -> None:
    from gaudi_datasets.classification.layouts import find_only_class
    from gaudi_datasets.errors import DataError
    from gaudi_datasets.layouts import inventory, recognition, tables

    folder = find_only_class(path)
    if folder is None:
        return
    place = folder.parent if inventory.split_of_path(f"{folder.parent.name}/x") else path
    if unknown := tables.explain_rejected(place) or recognition.explain_unknown(place, folder):
        raise DataError(
            f"one folder of images, {folder.name}/, is beside annotations that are not understood: {unknown[0]}",
            path=path,
            remedy="make boxes of them, or move them away if the images are of one class",
        )


def print_layout(data: DetectionData | ClassificationData) -> None:
    """Print what was recognised, and each note, on standard error."""
    for line in (data.layout, *(f"  {note}" for note in data.notes)):
        say(line, error=True)


AnnotationFlags = TypeVar("AnnotationFlags", CocoFlags, VocFlags, YoloFlags)
SourceFlags = TypeVar("SourceFlags", CocoFlags, VocFlags, YoloFlags, FoldersFlags, RecordsFlags, AutoFlags)


@dataclass(frozen=True)
class AugmentationFlags:
    """The training input of a detector, as ssd_train's flags of these names have it."""

    image_size: Literal[300, 512] = 300
    """side of the network's images, in pixels"""
    zoom_in: float = 0.3
    """smallest side of a crop, as a share of the image's"""
    zoom_out: float = 1.0
    """largest side of a blank canvas around half of the images, in sides of the image; 1: none"""
    mosaic: float = 0.0
    """share of the images that are composed with crops of three others"""

    def __post_init__(self) -> None:
        if not (0 < self.zoom_in <= 1 <= self.zoom_out <= 16 and 0 <= self.mosaic <= 1):
            raise ValueError("--zoom_in must be above 0 and up to 1, --zoom_out in 1..16, --mosaic in 0..1")

    def list_given(self) -> dict[str, Any]:
        """Return the flags that have another value than by default."""
        return {name: value for name, value in asdict(self).items() if value != getattr(AugmentationFlags, name)}


@dataclass(frozen=True)
class ShardFlags:
    """The records to write."""

    output_dir: str
    """folder of the records, or its URL, such as s3://bucket/records, which gets each shard as soon as it is written"""
    shards: int = 0
    """number of files; 0: chosen by the size of the data"""
    processes: int = 0
    """number of processes; 0: one for each usable core"""
    decode: Switch = False
    """decode every image, instead of checking its structure only"""
    overwrite: Switch = False
    """replace existing records of this split"""

    def __post_init__(self) -> None:
        if min(self.shards, self.processes) < 0:
            raise ValueError("--shards and --processes must be at least 0")


def subcommand(flags: Any, name: str, description: str | None = None) -> Any:
    """Return the dataclass of flags as a subcommand; its help begins with the description, else with its docstring."""
    return Annotated[flags, tyro.conf.subcommand(name, description=description)]
