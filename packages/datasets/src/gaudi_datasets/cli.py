"""The program `gaudi-datasets`: convert data sets to records, make scenes, score detections."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import tyro

from gaudi_datasets.flags import parse_flags
from gaudi_datasets.program import run_program

if TYPE_CHECKING:
    from gaudi_datasets.coco import CocoAnnotations

PROGRAM = "gaudi-datasets"

Switch = tyro.conf.FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class _RecordFlags:
    """The records to write."""

    output_dir: Path
    """folder of the records"""
    split: Literal["train", "val"]
    """train leaves out images without any box; val keeps all"""
    shards: int = 0
    """how many files; 0: one for each 64 images, at most 256"""
    overwrite: Switch = False
    """replace an earlier conversion of this split"""

    def __post_init__(self) -> None:
        if self.shards < 0:
            raise ValueError(f"--shards is {self.shards}; it must be at least 0")

    def write(self, annotations: CocoAnnotations, image_dir: Path) -> None:
        """Write the records and print the report."""
        from gaudi_datasets.records import write_records

        keep_empty, progress = self.split == "val", _show_progress if sys.stderr.isatty() else None
        report = write_records(
            annotations,
            image_dir,
            self.output_dir,
            self.split,
            shards=self.shards,
            keep_empty=keep_empty,
            overwrite=self.overwrite,
            progress=progress,
        )
        print(report.describe())


@dataclass(frozen=True)
class _ConvertCoco:
    """Write the records of a COCO annotation file and its images."""

    annotations: Path
    """annotation file, such as instances_train2017.json"""
    images: Path
    """folder of the images"""
    records: _RecordFlags
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.coco import read_coco

        self.records.write(read_coco(self.annotations), self.images)


@dataclass(frozen=True)
class _ConvertVoc:
    """Write the records of a Pascal VOC folder."""

    voc_dir: Path
    """folder that holds Annotations/, ImageSets/Main/ and JPEGImages/"""
    image_sets: tuple[str, ...]
    """names of the image sets to convert together, such as: train val"""
    records: _RecordFlags
    class_names: tuple[str, ...] = ()
    """classes in the order of their ids; none: all in the folder, sorted"""
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.coco import parse_coco
        from gaudi_datasets.voc import IMAGE_FOLDER, read_voc

        document = read_voc(self.voc_dir, self.image_sets, self.class_names or None)
        self.records.write(parse_coco(document, self.voc_dir), self.voc_dir / IMAGE_FOLDER)


@dataclass(frozen=True)
class _MakeScenes:
    """Make a data set of scenes with handwritten digits, with COCO annotations."""

    output_dir: Path
    """folder to make"""
    train: int = 1200
    """number of training scenes"""
    val: int = 200
    """number of validation scenes"""
    seed: int = 0
    """what everything drawn depends on"""
    image_size: tuple[int, int] = (300, 300)
    """height and width in pixels"""
    debug: Switch = False
    """show the traceback of an error"""

    def __post_init__(self) -> None:
        if min(self.train, self.val) < 1 or min(self.image_size) < 100 or self.seed < 0:
            raise ValueError("--train and --val must be at least 1, --image_size at least 100 100, --seed at least 0")

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.scenes import make_scenes

        make_scenes(self.output_dir, train=self.train, val=self.val, seed=self.seed, image_size=self.image_size)
        print(f"{self.output_dir}: {self.train} training scenes and {self.val} validation scenes")


@dataclass(frozen=True)
class _Score:
    """Print the COCO figures of detections."""

    ground_truth: Path
    """COCO annotation file"""
    detections: Path
    """COCO results file: a list of image_id, category_id, bbox and score"""
    json: Switch = False
    """print JSON instead of a table"""
    debug: Switch = False
    """show the traceback of an error"""

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.scoring import score_detections

        scores = score_detections(self.ground_truth, self.detections)
        print(json.dumps(scores.as_json(), indent=2) if self.json else scores.describe())


_Command = (
    Annotated[_ConvertCoco, tyro.conf.subcommand("convert-coco")]
    | Annotated[_ConvertVoc, tyro.conf.subcommand("convert-voc")]
    | Annotated[_MakeScenes, tyro.conf.subcommand("make-scenes")]
    | Annotated[_Score, tyro.conf.subcommand("score")]
)


def main() -> NoReturn:
    """Run the program with the process's arguments and leave with its exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing half-written stays
    run_program(_run, prog=PROGRAM, debug="--debug" in sys.argv)


def _run() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before anything imports TensorFlow, which else talks at start
    description = "Convert detection data sets to records, make scenes, score detections."
    parse_flags(_Command, sys.argv[1:], prog=PROGRAM, description=description).run()


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{done}/{total} images", end=end, file=sys.stderr, flush=True)
