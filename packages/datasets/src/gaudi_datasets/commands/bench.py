"""`gaudi-datasets bench`: how fast training gets images from a data set, and what holds it up."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from gaudi_datasets.commands.data_flags import Debug, Switch
from gaudi_datasets.memory import count_processors
from gaudi_datasets.program import make_console
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_datasets.benchmarking.benchmark import Kind

_IMAGE_SIZES = {"detection": 300, "classification": 224}


@dataclass(frozen=True)
class Bench:
    """Measure how fast training gets images from a data set: the whole, reading alone, and each stage."""

    data_dir: Annotated[Path | None, tyro.conf.arg(aliases=["-d"])] = None
    """folder of records, or of folders such as train/ with records or with a folder for each class"""
    split: str = "train"
    """name of the records or of the folder in --data_dir"""
    annotations: Path | None = None
    """COCO annotation file instead of --data_dir; needs --images"""
    images: Path | None = None
    """folder of the images of --annotations"""
    seconds: float = 20.0
    """seconds to measure"""
    batch_size: Annotated[int, tyro.conf.arg(aliases=["-b"])] = 32
    """batch size"""
    data_type: Annotated[Literal["fp32", "bf16"], tyro.conf.arg(aliases=["-t"])] = "fp32"
    """precision of the images; opencv supports fp32 only"""
    image_size: int = 0
    """side of the network's images in pixels; 0: 300 for boxes, 224 for classes"""
    threads: int = 0
    """number of loader threads; 0: one for each usable core"""
    loader: Literal["tensorflow", "opencv"] = "tensorflow"
    """decoder of images with boxes: tensorflow as in ssd_train, opencv as in ssd_mxnet_train"""
    seed: int = 0
    """seed of the data order and the augmentation"""
    json: Switch = False
    """print JSON instead of tables"""
    debug: Debug = False

    def __post_init__(self) -> None:
        if (self.data_dir is None) == (self.annotations is None):
            raise ValueError("--data_dir or --annotations must be given, and not both")
        if (self.annotations is None) != (self.images is None):
            raise ValueError("--annotations and --images go together")
        is_finite = 0 < self.seconds < math.inf
        if not is_finite or self.batch_size < 1 or min(self.image_size, self.threads, self.seed) < 0:
            raise ValueError(
                "--seconds must be above 0 and finite, --batch_size at least 1, --image_size, --threads and --seed at "
                "least 0"
            )

        if self.loader == "opencv" and self.data_type != "fp32":
            raise ValueError("--data_type bf16: needs --loader tensorflow")

    def run(self) -> None:
        """Run the command."""
        source, kind = self._open()
        if kind == "classification" and self.loader != "tensorflow":
            from gaudi_datasets.errors import FlagError

            raise FlagError(
                f"--loader opencv: is for images with boxes; {source.name} has classes, which TensorFlow reads",
                flag="--loader",
            )
        if self.loader == "tensorflow":
            from gaudi_ops.tf import keras_api  # noqa: F401 - says which extra is missing

            import tensorflow as tf  # isort: skip

            # One thread to an operation, as the input pipelines have it.
            with contextlib.suppress(RuntimeError):  # it has started already, in a program that does more
                tf.config.threading.set_intra_op_parallelism_threads(1)
        from gaudi_datasets.benchmarking.benchmark import run_benchmark
        from gaudi_datasets.benchmarking.report import as_json, print_benchmark
        from gaudi_datasets.benchmarking.verdict import judge
        from gaudi_datasets.sampling import InputOptions

        options = InputOptions(
            self.batch_size,
            image_size=self.image_size or _IMAGE_SIZES[kind],
            seed=self.seed,
            threads=self.threads or count_processors(),
            dtype={"fp32": "float32", "bf16": "bfloat16"}[self.data_type],
        )
        with _show_status() as show:
            benchmark = run_benchmark(source, kind, options, seconds=self.seconds, loader=self.loader, say=show)
        verdict = judge(benchmark)
        if self.json:
            say(*json.dumps(as_json(benchmark, verdict), indent=2).splitlines())
        else:
            print_benchmark(benchmark, verdict)

    def _open(self) -> tuple[Any, Kind]:
        """Open the data set, and tell of which kind it is."""
        if self.annotations is not None and self.images is not None:
            from gaudi_datasets.detection.coco import read_coco
            from gaudi_datasets.detection.sources import CocoSource

            return CocoSource(read_coco(self.annotations), self.images, keep_empty=False), "detection"
        from gaudi_datasets.classification.sources import open_split
        from gaudi_datasets.detection.sources import RecordSource
        from gaudi_datasets.records.record_sets import find_kind, has_records

        data_dir = self.data_dir or Path()
        if has_records(data_dir, self.split) and find_kind(data_dir, self.split) == "detection":
            return RecordSource(data_dir, self.split), "detection"
        return open_split(data_dir, self.split), "classification"


@contextlib.contextmanager
def _show_status() -> Iterator[Callable[[str], None]]:
    """Show what is measured on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with make_console(stderr=True).status("opening") as status:
        yield lambda what: status.update(f"measuring {what}")
