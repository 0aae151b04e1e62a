"""The program `gaudi-datasets`: data sets fetched, checked, converted, shown and measured, static batches and scenes
made, and detections scored. The larger commands are modules in `commands/`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro

from gaudi_datasets.arguments import OFF, ON, FormerFlag, is_switch_on, rename
from gaudi_datasets.commands.bench import Bench
from gaudi_datasets.commands.convert import CONVERT, ConvertImagenet
from gaudi_datasets.commands.data_flags import AugmentationFlags, Debug, Switch, subcommand
from gaudi_datasets.commands.fetch import FETCH
from gaudi_datasets.commands.lint import LINT
from gaudi_datasets.commands.show import SHOW
from gaudi_datasets.flags import parse_flags
from gaudi_datasets.memory import count_processors
from gaudi_datasets.program import ProgressLine, count_things
from gaudi_ops.program import run_program, say

PROGRAM = "gaudi-datasets"


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
    """seed of everything random"""
    image_size: tuple[int, int] = (300, 300)
    """height and width in pixels"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if min(self.train, self.val) < 1 or min(self.image_size) < 100 or self.seed < 0:
            raise ValueError("--train and --val must be at least 1, --image_size at least 100 100, --seed at least 0")

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.detection.scenes import make_scenes

        make_scenes(self.output_dir, train=self.train, val=self.val, seed=self.seed, image_size=self.image_size)
        say(f"{self.output_dir}: {self.train} training scenes and {self.val} validation scenes")


@dataclass(frozen=True)
class _MakeStaticBatches:
    """Write training batches for `ssd_train --static`; a stopped call continues when it is called again."""

    input_pattern: Annotated[Path, tyro.conf.arg(aliases=["-i"])]
    """folder and prefix of the records' names, such as: records/train"""
    output_dir: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """folder of the batches"""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])]
    """batch size of one worker; each file holds one batch"""
    steps: Annotated[int, tyro.conf.arg(aliases=["-s"])]
    """number of training steps"""
    workers: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 1
    """number of workers; each gets its own batches"""
    seed: int = 0
    """seed of the data order and the augmentation"""
    flip_probability: float = 0.5
    """probability that an image is mirrored; 0 where left and right matter, as in text"""
    augmentation: AugmentationFlags = field(default_factory=AugmentationFlags)
    overwrite: Switch = False
    """replace batches of other data or flags"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if min(self.batch_size, self.steps, self.workers) < 1 or self.seed < 0:
            raise ValueError("--batch_size, --steps and --workers must be at least 1, --seed at least 0")
        if not 0 <= self.flip_probability <= 1:
            raise ValueError(f"--flip_probability is {self.flip_probability}; it must be in 0..1")

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.detection.sources import RecordSource
        from gaudi_datasets.detection.static_batches import write_static_batches
        from gaudi_datasets.sampling import InputOptions
        from gaudi_ops import SSD_SPECS

        source = RecordSource(self.input_pattern.parent, self.input_pattern.name.rstrip("-*"))
        progress = ProgressLine("writing", "batch")
        for rank in range(self.workers):
            options = InputOptions(
                self.batch_size,
                seed=self.seed,
                rank=rank,
                size=self.workers,
                threads=count_processors(),
                flip_probability=self.flip_probability,
                **asdict(self.augmentation),
            )
            kept = write_static_batches(
                source,
                self.output_dir,
                options,
                steps=self.steps,
                overwrite=self.overwrite,
                progress=progress,
                spec=SSD_SPECS[self.augmentation.image_size],
            )
            there = f", {kept} of them there already" if kept else ""
            say(f"{self.output_dir / f'worker_{rank}'}: {count_things(self.steps, 'batch')}{there}")


@dataclass(frozen=True)
class _Score:
    """Print the COCO figures of detections."""

    ground_truth: Path
    """COCO annotation file"""
    detections: Path
    """COCO results file: a list of image_id, category_id, bbox and score"""
    json: Switch = False
    """print JSON instead of a table"""
    debug: Debug = False

    def run(self) -> None:
        """Run the command."""
        from gaudi_datasets.detection.scoring import score_detections

        scores = score_detections(self.ground_truth, self.detections)
        say(*(json.dumps(scores.as_json(), indent=2) if self.json else scores.describe()).splitlines())


_COMMANDS = (
    subcommand(FETCH, "fetch", "Download data sets, weights and files, and verify them.")
    | subcommand(
        CONVERT, "convert", "Write records and their manifest; a stopped conversion continues when it is called again."
    )
    | subcommand(ConvertImagenet, "imagenet")
    | subcommand(LINT, "lint", "Check a data set, and report faults, oddities and statistics.")
    | subcommand(SHOW, "show", "Show images of a data set with their boxes or labels.")
    | subcommand(Bench, "bench")
    | subcommand(_MakeScenes, "make-scenes")
    | subcommand(_MakeStaticBatches, "make-static-batches")
    | subcommand(_Score, "score")
)


def main() -> NoReturn:
    """Run the program with the process's arguments and leave with its exit status."""
    run_program(_run, prog=PROGRAM, debug=is_switch_on(sys.argv, "debug"))


def _run() -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before anything imports TensorFlow, which else talks at start
    parse_arguments(sys.argv[1:]).run()


def parse_arguments(argv: Sequence[str]) -> Any:
    """Return the command that arguments ask for; see `gaudi_datasets.flags.parse_flags` for what is raised."""
    return parse_flags(
        _COMMANDS,
        argv,
        prog=PROGRAM,
        description="Fetch, check, convert, show and measure data sets, make batches and scenes, score detections.",
        former_flags=find_former_flags(argv),
    )


_UPLOAD = "copy the records by your cloud's own program"
_CORNERS = "boxes are always corners, as fractions of the image; leave it out"
_AS_THEY_ARE = "annotations are read as they are, without a preparation"

PREPROCESS_IMAGENET = (
    FormerFlag("--raw_data_dir", "give --from", default="none", replace=rename("--from")),
    FormerFlag("--local_scratch_dir", "give --output_dir", default="none", replace=rename("--output_dir")),
    FormerFlag("--gcs_upload", _UPLOAD, default=ON, meant=(OFF,)),
    FormerFlag("--project", _UPLOAD, default="none"),
    FormerFlag("--gcs_output_path", _UPLOAD, default="none"),
)
CREATE_TFRECORD = (
    FormerFlag("--images-dir", "give --images", "-i", "required", replace=rename("--images")),
    FormerFlag("--annotations-file", "give --annotations", "-a", "required", replace=rename("--annotations")),
    FormerFlag("--num-shards", "give --shards", "-n", "1", replace=rename("--shards")),
    FormerFlag("--output", "give --output_dir", "-o", "required", replace=rename("--output_dir")),
    FormerFlag("--ltrb", _CORNERS, meant=(ON,)),
    FormerFlag("--ratio", _CORNERS, meant=(ON,)),
    FormerFlag("--skip-empty", "give `--split train`, which leaves out images without boxes; `--split val` keeps them"),
    FormerFlag(
        "--size-threshold", "boxes of no size are left out and counted; leave it out", default="0.0", meant=("0",)
    ),
    FormerFlag(
        "--seed",
        "records are in the order of the annotations, and a training draws its own; leave it out",
        "-s",
        "none",
    ),
)
PREPARE_JSON = (
    FormerFlag("input_file", _AS_THEY_ARE, default="required"),
    FormerFlag("output_file", _AS_THEY_ARE, default="required"),
    FormerFlag("--keep-keys", _AS_THEY_ARE, "-k"),
    FormerFlag("--pretty-print", _AS_THEY_ARE, "-p"),
)
_PROFILE = "profile a training by `resnext_train --profile_steps 5,8`"
BENCHMARK_DATALOADER = (
    FormerFlag("--max_train_steps", "give --seconds, seconds to measure", "-s", "none"),
    FormerFlag("--enable_profiling", _PROFILE, "-p"),
    FormerFlag("--profiling_iter_cnt", _PROFILE, "-c", "20"),
    FormerFlag("--profiling_warmup_steps", _PROFILE, "-w", "20"),
    FormerFlag(
        "--experimental_preloading",
        "what is measured ends before the device; leave it out",
        "-e",
        "1",
        meant=("0", "1"),
    ),
)
_BY_COMMAND = {
    ("imagenet",): PREPROCESS_IMAGENET,
    ("convert", "imagenet"): PREPROCESS_IMAGENET,
    ("convert", "coco"): (*CREATE_TFRECORD, *PREPARE_JSON),
    ("bench",): BENCHMARK_DATALOADER,
}


def find_former_flags(argv: Sequence[str]) -> Sequence[FormerFlag]:
    """Return the flags of the tool that the command of these arguments replaces."""
    return next((table for words, table in _BY_COMMAND.items() if tuple(argv[: len(words)]) == words), ())
