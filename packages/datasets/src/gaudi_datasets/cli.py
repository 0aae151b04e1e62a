"""The program `gaudi-datasets`: convert data sets to records, make static batches and scenes, score detections."""

from __future__ import annotations

import functools
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
    from gaudi_datasets.detection.coco import CocoAnnotations

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
        from gaudi_datasets.detection.records import write_records

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
        from gaudi_datasets.detection.coco import read_coco

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
        from gaudi_datasets.detection.coco import parse_coco
        from gaudi_datasets.detection.voc import IMAGE_FOLDER, read_voc

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
        from gaudi_datasets.detection.scenes import make_scenes

        make_scenes(self.output_dir, train=self.train, val=self.val, seed=self.seed, image_size=self.image_size)
        print(f"{self.output_dir}: {self.train} training scenes and {self.val} validation scenes")


@dataclass(frozen=True)
class _MakeStaticBatches:
    """Write the batches of a training, for `ssd_train --static`; call it again to go on where it stopped."""

    input_pattern: Annotated[Path, tyro.conf.arg(aliases=["-i"])]
    """folder and beginning of the records' names, such as: records/train"""
    output_dir: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """folder of the batches"""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])]
    """images of a worker in a step; each file holds one batch"""
    steps: Annotated[int, tyro.conf.arg(aliases=["-s"])]
    """number of training steps"""
    workers: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 1
    """number of workers, each of which gets batches of its own"""
    seed: int = 0
    """where data order and augmentation start from"""
    flip_probability: float = 0.5
    """share of the images that are mirrored; 0 where left and right matter, as in text"""
    overwrite: Switch = False
    """replace batches made of other data or with other flags"""
    debug: Switch = False
    """show the traceback of an error"""

    def __post_init__(self) -> None:
        if min(self.batch_size, self.steps, self.workers) < 1 or self.seed < 0:
            raise ValueError("--batch_size, --steps and --workers must be at least 1, --seed at least 0")
        if not 0 <= self.flip_probability <= 1:
            raise ValueError(f"--flip_probability is {self.flip_probability}; it must be in 0..1")

    def run(self) -> None:
        """Do it."""
        from gaudi_datasets.detection.sources import RecordSource
        from gaudi_datasets.detection.static_batches import write_static_batches
        from gaudi_datasets.sampling import InputOptions

        source = RecordSource(self.input_pattern.parent, self.input_pattern.name.rstrip("-*"))
        progress = functools.partial(_show_progress, unit="batches") if sys.stderr.isatty() else None
        for rank in range(self.workers):
            options = InputOptions(
                self.batch_size,
                seed=self.seed,
                rank=rank,
                size=self.workers,
                threads=len(os.sched_getaffinity(0)),
                flip_probability=self.flip_probability,
            )
            report = write_static_batches(
                source, self.output_dir, options, steps=self.steps, overwrite=self.overwrite, progress=progress
            )
            print(report.describe())


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
        from gaudi_datasets.detection.scoring import score_detections

        scores = score_detections(self.ground_truth, self.detections)
        print(json.dumps(scores.as_json(), indent=2) if self.json else scores.describe())


_Command = (
    Annotated[_ConvertCoco, tyro.conf.subcommand("convert-coco")]
    | Annotated[_ConvertVoc, tyro.conf.subcommand("convert-voc")]
    | Annotated[_MakeScenes, tyro.conf.subcommand("make-scenes")]
    | Annotated[_MakeStaticBatches, tyro.conf.subcommand("make-static-batches")]
    | Annotated[_Score, tyro.conf.subcommand("score")]
)


def main() -> NoReturn:
    """Run the program with the process's arguments and leave with its exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing half-written stays
    run_program(_run, prog=PROGRAM, debug="--debug" in sys.argv)


def _run() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before anything imports TensorFlow, which else talks at start
    description = "Convert detection data sets to records, make static batches and scenes, score detections."
    parse_flags(_Command, sys.argv[1:], prog=PROGRAM, description=description).run()


def _show_progress(done: int, total: int, *, unit: str = "images") -> None:
    end = "\n" if done == total else ""
    print(f"\r{done}/{total} {unit}", end=end, file=sys.stderr, flush=True)
