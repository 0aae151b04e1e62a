"""Exports of the detector in turns: what ONNX Runtime, OpenVINO and LiteRT make of a SavedModel, and from a cold start.

The exports get decoded and resized images; the SavedModel decodes and resizes them itself. All have as many threads.
The cold start is `ssd_train --mode predict` on one image, as a user runs it, with each runtime.

It needs OpenVINO, which cannot be installed beside MXNet, so it is none of `nox -s bench`: it runs in the environment
of `nox -s deploy`. Weights are random, and so is what 8 bits are calibrated on; AP is what `--mode export` tells.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from benchmarks.measurement import Figure, compare, describe_rates, interleave, main

if TYPE_CHECKING:
    from gaudi_apps.inference.exported_models import ExportedModel

BATCHES = (1, 16)
REPEATS, STARTS = 30, 5
# By kind, what the export is at least over the SavedModel on processors whose 8 and 16 bits are fast; see the notes.
LEAST = {"openvino-int8": ("avx512_vnni", 3.5), "openvino-bf16": ("avx512_bf16", 1.9)}
FORMATS: Sequence[Any] = ("saved_model", "onnx", "openvino", "tflite")
RUNTIMES = ("tensorflow", "onnxruntime", "openvino", "litert")
CLASSES = 3


class Timed:
    """Call a function, and add up the processor time of this process, or of those that it starts and waits for."""

    def __init__(self, function: Callable[[], object], who: int = resource.RUSAGE_SELF) -> None:
        self._function, self._who = function, who
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """Call it once."""
        before = resource.getrusage(self._who)
        self._function()
        after = resource.getrusage(self._who)
        self.seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def measure_exports(budget_seconds: float) -> Iterator[Figure]:
    """Each export over the SavedModel, at both batches; then each runtime over TensorFlow, from a cold start."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        candidates = build_candidates(Path(folder))
        for batch in BATCHES:
            calls = {name: Timed(partial(candidate, batch)) for name, candidate in candidates.items()}
            timings = interleave(calls, REPEATS, budget_seconds=budget_seconds / 3)
            note = f"{describe_rates(timings, batch)}; {describe_processor_time(calls, batch)}; {describe_processor()}"
            for name in candidates:
                if name != "saved_model":
                    title = f"SSD, batch {batch}: {name} over the SavedModel"
                    yield compare(title, timings, "saved_model", name, least=find_least(name), note=note)
    with tempfile.TemporaryDirectory() as folder:
        run, photo = make_run(Path(folder))
        starts = {name: Timed(partial(predict, run, photo, name), resource.RUSAGE_CHILDREN) for name in RUNTIMES}
        left = budget_seconds - (time.perf_counter() - started)
        timings = interleave(starts, STARTS, budget_seconds=max(left, budget_seconds / 3))
        rates = ", ".join(f"{name} {timing.median:.3g} s" for name, timing in timings.items())
        note = f"{rates}; {describe_processor_time(starts, 1)}"
        for name in RUNTIMES[1:]:
            yield compare(
                f"ssd_train predicts one image: {name} over tensorflow", timings, "tensorflow", name, note=note
            )


def describe_processor_time(calls: Mapping[str, Timed], amount: int) -> str:
    """Return the median processor time of an image, after the round that does not count, for a note."""
    texts = [f"{name} {statistics.median(one.seconds[1:]) / amount:.3g}" for name, one in calls.items()]
    return f"processor seconds an image: {', '.join(texts)}"


def read_flags() -> set[str]:
    """Return the instructions that the processor says it has."""
    from gaudi_distributed.devices.machine import Machine, gather_processor

    return set(gather_processor(Machine(), os.sched_getaffinity(0)).flags)


def describe_processor() -> str:
    """Tell which instructions for 8 and 16 bits the processor has, for a note."""
    from gaudi_apps.inference.exported_models import name_processor

    names = ("avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "amx_bf16")
    found = ", ".join(name for name in names if name in read_flags())
    return f"{name_processor()}, {len(os.sched_getaffinity(0))} processors, {found or 'no VNNI, AMX or bfloat16'}"


def find_least(name: str) -> float | None:
    """Return the target of an export; None where the processor has no instruction for its precision."""
    instruction, least = LEAST.get(name, ("", None))
    return least if instruction in read_flags() else None


def build_candidates(folder: Path) -> dict[str, Callable[[int], object]]:
    """Export the detector in each kind; return functions that compute a batch of images, by the names of the kinds."""
    from gaudi_apps.detection.detector import DetectorExport
    from gaudi_apps.inference.exported_models import find_obstacle, open_exported
    from gaudi_apps.inference.exporter import export_format, find_threads, list_kinds
    from gaudi_apps.inference.quantization import Calibration
    from gaudi_datasets.detection.coco import Category
    from gaudi_models.ssd import build_ssd

    encoded = make_images(16)
    categories = [Category(label, f"class {label}") for label in range(1, CLASSES + 1)]
    network = DetectorExport(build_ssd(CLASSES + 1), categories)
    candidates: dict[str, Callable[[int], object]] = {}
    for kind in list_kinds(FORMATS, ("fp32", "bf16", "int8")):
        if obstacle := find_obstacle(*kind):
            print(f"{kind}: {obstacle}", file=sys.stderr)
            continue
        export = folder / str(kind)
        (export / "scratch").mkdir(parents=True)
        export_format(kind, network, encoded[:1], export, export / "scratch", Calibration(encoded, 0))
        model = open_exported(export, *kind, network.prepare_resized, find_threads())
        inputs = [model.prepare(one) for one in encoded]
        candidates[str(kind)] = partial(compute, model, inputs)
    return candidates


def make_images(count: int) -> list[bytes]:
    """Make JPEGs of noise, 300 pixels square."""
    generator = np.random.default_rng(0)
    images = (generator.integers(0, 256, (300, 300, 3), np.uint8) for _ in range(count))
    return [cv2.imencode(".jpg", image)[1].tobytes() for image in images]


def compute(model: ExportedModel, inputs: Sequence[Any], batch: int) -> object:
    """Compute the first inputs at once."""
    return model.compute(inputs[:batch])


def make_run(folder: Path) -> tuple[Path, Path]:
    """Train a detector for a step by the program, and export it for each runtime; return its folder and an image."""
    photos = folder / "photos"
    photos.mkdir()
    images, boxes = [], []
    for number, encoded in enumerate(make_images(2), 1):
        (photos / f"{number}.jpg").write_bytes(encoded)
        images.append({"id": number, "file_name": f"{number}.jpg", "height": 300, "width": 300})
        boxes.append({"id": number, "image_id": number, "category_id": 1, "bbox": [30, 30, 150, 150]})
    annotations = folder / "annotations.json"
    document = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "noise"}]}
    annotations.write_text(json.dumps(document), encoding="utf-8")
    run = folder / "run"
    train = ["--train_annotations", annotations, "--train_images", photos, "--steps", 1, "--batch_size", 1]
    start("--model_dir", run, *train, "--no_evaluate")
    validate = ["--val_annotations", annotations, "--val_images", photos]
    formats = ["--export_format", "onnx", "openvino", "tflite"]
    start("--mode", "export", "--model_dir", run, *validate, *formats, "--max_ap_drop", 1)
    return run, photos / "1.jpg"


def predict(run: Path, photo: Path, runtime: str) -> None:
    """Predict on one image by the program."""
    start("--mode", "predict", "--model_dir", run, "--inference", photo, "--runtime", runtime)


def start(*arguments: object) -> None:
    """Run ssd_train, and raise its errors."""
    command = [sys.executable, "-m", "gaudi_apps.ssd_train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


if __name__ == "__main__":
    main(measure_exports)
