"""Exports of two networks in turns: what ONNX Runtime, OpenVINO and LiteRT make of a SavedModel, and from a cold start.

The exports get decoded and resized images; the SavedModel decodes and resizes them itself. All have as many threads.
Beside them OpenVINO computes one large convolution in each precision, which is the most that the machine is seen to do:
shares are of that, by the multiplications of the network's convolutions and matrices. The cold start is
`ssd_train --mode predict` on one image, as a user runs it, with each runtime, and the folder is the same on many JPEGs.

It needs OpenVINO, which cannot be installed beside MXNet, so it is none of `nox -s bench`: it runs in the environment
of `nox -s deploy`. Weights are random, and so is what 8 bits are calibrated on; AP is what `--mode export` tells.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from benchmarks.measurement import Figure, compare, describe_rates, describe_timings, interleave, main
from gaudi_apps.classification.flags import PROBABILITIES
from gaudi_apps.classification.task import ClassifierExport
from gaudi_apps.detection.detector import DetectorExport
from gaudi_apps.inference.exported_models import OPENVINO_HINTS, find_obstacle, open_exported
from gaudi_apps.inference.exporter import ExportKind, export_format, find_threads, list_kinds
from gaudi_datasets.detection.coco import Category
from gaudi_distributed.devices.machine import Machine, gather_processor, name_processor
from gaudi_models.classifiers import build_classifier
from gaudi_models.ssd import build_ssd

if TYPE_CHECKING:
    from gaudi_apps.inference.converters import ExportedNetwork
    from gaudi_apps.inference.exported_models import ExportedModel

BATCHES = (1, 16)
REPEATS, STARTS, ROUNDS = 30, 5, 7
# By kind, what the export is at least over the SavedModel on processors whose 8 and 16 bits are fast; see the notes.
LEAST = {"openvino-int8": ("avx512_vnni", 3.5), "openvino-bf16": ("avx512_bf16", 1.9)}
FORMATS: Sequence[Any] = ("saved_model", "onnx", "openvino", "tflite")
RUNTIMES = ("tensorflow", "onnxruntime", "openvino", "litert")
CLASSES = 3
FEW, MANY = 16, 144  # photos, of which the program predicts the difference after it has started
PEAK_SHAPE = (8, 256, 56, 56)  # of what the large convolution takes and gives: 29.6 billion operations
PRECISIONS: Sequence[Any] = ("fp32", "bf16", "int8")


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
    """Each export over the SavedModel, and its share of the peak; then the program by each runtime."""
    for network in ("SSD", "ResNet-50"):
        yield from measure_network(network, budget_seconds / 4)
    with tempfile.TemporaryDirectory() as folder:
        run, photos = make_run(Path(folder))
        one = photos / "few" / "1.jpg"
        starts = {name: Timed(partial(predict, run, one, name), resource.RUSAGE_CHILDREN) for name in RUNTIMES}
        timings = interleave(starts, STARTS, budget_seconds=budget_seconds / 6)
        rates = ", ".join(f"{name} {timing.median:.3g} s" for name, timing in timings.items())
        note = f"{rates}; {describe_processor_time(starts, 1)}"
        for name in RUNTIMES[1:]:
            title = f"ssd_train predicts one image: {name} over tensorflow"
            yield compare(title, timings, "tensorflow", name, note=note)
        kinds = [kind for kind in list_kinds(["openvino"], PRECISIONS) if not find_obstacle(*kind)]
        for kind in kinds:
            yield measure_folder(keep_one(run, kind), kind, photos, budget_seconds / 3 / len(kinds))


def measure_network(network: str, budget_seconds: float) -> Iterator[Figure]:
    """Each export of a network over the SavedModel, at both batches, and what OpenVINO computes of the peak."""
    peaks = {f"peak {precision}": compile_convolution(precision) for precision in PRECISIONS}
    peak_operations = 2 * math.prod(PEAK_SHAPE) * PEAK_SHAPE[1] * 9
    with tempfile.TemporaryDirectory() as folder:
        candidates = build_candidates(Path(folder), network)
        operations = count_operations(Path(folder) / "openvino" / "model.xml")
        for batch in BATCHES:
            calls = {name: Timed(partial(candidate, batch)) for name, candidate in candidates.items()}
            timings = interleave(calls | peaks, REPEATS, budget_seconds=budget_seconds / len(BATCHES))
            timed = {name: timings[name] for name in candidates}
            note = f"{describe_rates(timed, batch)}; {describe_processor_time(calls, batch)}; {describe_processor()}"
            for name in candidates:
                if name != "saved_model":
                    title = f"{network}, batch {batch}: {name} over the SavedModel"
                    yield compare(title, timings, "saved_model", name, least=find_least(name), note=note)
            for precision in PRECISIONS:
                name = str(ExportKind("openvino", precision))
                if name in candidates:
                    peak = peak_operations / timings[f"peak {precision}"].median
                    done = operations * batch / timings[name].median
                    title = f"{network}, batch {batch}: {name}, share of the large convolution"
                    yield Figure(title, done / peak, note=f"{done / 1e9:.0f} of {peak / 1e9:.0f} billion a second")


def measure_folder(run: Path, kind: ExportKind, photos: Path, budget_seconds: float) -> Figure:
    """Predict on a folder of JPEGs by the program, over the network alone on as many images that are ready.

    What the program takes to start is in both folders, and their difference is without it. The ratio is taken within
    each round, in which all three run one after the other.
    """
    encoded = [path.read_bytes() for path in sorted((photos / "few").iterdir())]
    network, folder = make_network("SSD"), run / "export" / str(kind)
    model = open_exported(folder, *kind, network.prepare_resized, find_threads())
    inputs = [model.prepare(one) for one in encoded]
    amount = MANY - FEW
    network_calls = Timed(lambda: [compute(model, inputs, FEW) for _ in range(amount // FEW)])
    few, many = (Timed(partial(predict, run, photos / name, "openvino"), resource.RUSAGE_CHILDREN)
                 for name in ("few", "many"))  # fmt: skip
    timings = interleave({"few": few, "many": many, "network": network_calls}, ROUNDS, budget_seconds=budget_seconds)
    used = statistics.median(np.subtract(many.seconds, few.seconds)[1:]) / amount
    spent = statistics.median(network_calls.seconds[1:]) / amount
    folder_seconds = np.subtract(timings["many"].seconds, timings["few"].seconds)
    ratios = timings["network"].seconds / folder_seconds
    return Figure(
        f"ssd_train predicts a folder by {kind}: over the network alone",
        float(np.median(ratios)),
        spread=float(np.ptp(ratios)),
        least=0.9,
        note=f"{amount / np.median(folder_seconds):.3g} images/s from JPEGs of 640 x 480, "
        f"{amount / timings['network'].median:.3g} of the network; "
        f"processor seconds an image: {used:.3g}, {spent:.3g} of the network",
        details=describe_timings(timings),
    )


def keep_one(run: Path, kind: ExportKind) -> Path:
    """Copy a run with one of its exports, which is then the fastest one."""
    copied = run.with_name(f"{run.name}-{kind}")
    shutil.copytree(run, copied, ignore=shutil.ignore_patterns("export"))
    shutil.copytree(run / "export" / str(kind), copied / "export" / str(kind))
    return copied


def compile_convolution(precision: Any) -> Callable[[], object]:
    """Return a function that computes a convolution of 3 x 3 by OpenVINO, with as many threads as the exports have."""
    import nncf
    import openvino
    from openvino import opset13

    nncf.set_log_level(logging.ERROR)
    generator = np.random.default_rng(0)
    image = generator.standard_normal(PEAK_SHAPE, np.float32)
    kernel = generator.standard_normal((PEAK_SHAPE[1], PEAK_SHAPE[1], 3, 3), np.float32)
    given = opset13.parameter(PEAK_SHAPE, np.float32)
    found = opset13.convolution(given, opset13.constant(kernel), [1, 1], [1, 1], [1, 1], [1, 1])
    # What it gives is made small, so that it is not the copy of the result that is measured.
    whole = opset13.reduce_max(opset13.relu(found), opset13.constant(np.array([2, 3])))
    model = openvino.Model([whole], [given])
    if precision == "int8":
        with contextlib.redirect_stdout(io.StringIO()):  # NNCF draws progress there
            model = nncf.quantize(model, nncf.Dataset([image]), subset_size=1)
    options = {"INFERENCE_PRECISION_HINT": OPENVINO_HINTS[precision], "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(model, "CPU", {**options, "INFERENCE_NUM_THREADS": str(find_threads())})
    return partial(compiled, [image], share_inputs=True)


def count_operations(path: Path) -> int:
    """Count multiplications and additions of an OpenVINO model on one image, of convolutions and matrices."""
    import openvino

    model = openvino.Core().read_model(str(path))
    (image,) = model.inputs
    model.reshape([1, *(length.get_length() for length in [*image.partial_shape][1:])])
    total = 0
    for operation in model.get_ops():
        kind = operation.get_type_name()
        if kind == "Convolution":  # its kernel: outputs, inputs, height, width
            total += 2 * math.prod(operation.output(0).shape) * math.prod([*operation.input_value(1).get_shape()][1:])
        elif kind == "MatMul":
            total += 2 * math.prod(operation.output(0).shape) * [*operation.input_value(0).get_shape()][-1]
    return total


def describe_processor_time(calls: Mapping[str, Timed], amount: int) -> str:
    """Return the median processor time of an image, after the round that does not count, for a note."""
    texts = [f"{name} {statistics.median(one.seconds[1:]) / amount:.3g}" for name, one in calls.items()]
    return f"processor seconds an image: {', '.join(texts)}"


def read_flags() -> set[str]:
    """Return the instructions that the processor says it has."""
    return set(gather_processor(Machine(), os.sched_getaffinity(0)).flags)


def describe_processor() -> str:
    """Tell which instructions for 8 and 16 bits the processor has, for a note."""
    names = ("avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "amx_bf16")
    found = ", ".join(name for name in names if name in read_flags())
    return f"{name_processor()}, {len(os.sched_getaffinity(0))} processors, {found or 'no VNNI, AMX or bfloat16'}"


def find_least(name: str) -> float | None:
    """Return the target of an export; None where the processor has no instruction for its precision."""
    instruction, least = LEAST.get(name, ("", None))
    return least if instruction in read_flags() else None


def make_network(name: str) -> ExportedNetwork:
    """Make a network of random weights: SSD, or ResNet-50."""
    if name == "SSD":
        categories = [Category(label, f"class {label}") for label in range(1, CLASSES + 1)]
        return DetectorExport(build_ssd(CLASSES + 1), categories)
    classes = [{"name": f"class {label}"} for label in range(1000)]
    config: Any = {"model": "resnet50", "padding": "symmetric", "image_size": 224, "classes": classes}
    return ClassifierExport(build_classifier("resnet50", 1000, padding="symmetric"), PROBABILITIES, config)


def build_candidates(folder: Path, name: str) -> dict[str, Callable[[int], object]]:
    """Export a network in each kind; return functions that compute a batch of images, by the names of the kinds."""
    encoded, network = make_images(16), make_network(name)
    candidates: dict[str, Callable[[int], object]] = {}
    for kind in list_kinds(FORMATS, PRECISIONS):
        if obstacle := find_obstacle(*kind):
            print(f"{kind}: {obstacle}", file=sys.stderr)
            continue
        export = folder / str(kind)
        (export / "scratch").mkdir(parents=True)
        export_format(kind, network, encoded[:1], export, export / "scratch", encoded)
        prepare = network.prepare_onnx if kind.format == "onnx" else network.prepare_resized
        model = open_exported(export, *kind, prepare, find_threads())
        inputs = [model.prepare(one) for one in encoded]
        candidates[str(kind)] = partial(compute, model, inputs)
    return candidates


def make_images(count: int, height: int = 300, width: int = 300) -> list[bytes]:
    """Make JPEGs of soft blobs, which are as smooth as photos are."""
    generator = np.random.default_rng(0)
    blobs = (generator.integers(0, 256, (height // 10, width // 10, 3), np.uint8) for _ in range(count))
    return [cv2.imencode(".jpg", cv2.resize(one, (width, height)))[1].tobytes() for one in blobs]


def compute(model: ExportedModel, inputs: Sequence[Any], batch: int) -> object:
    """Compute the first inputs at once."""
    return model.compute(inputs[:batch])


def make_run(folder: Path) -> tuple[Path, Path]:
    """Train a detector for a step by the program, and export it for each runtime.

    Returns:
        the folder of the run, and the folder of the folders ``few`` and ``many`` of photos.
    """
    photos = folder / "photos"
    images, boxes = [], []
    for number, encoded in enumerate(make_images(MANY, 480, 640), 1):
        for name in ("many", *(("few",) if number <= FEW else ())):
            (photos / name).mkdir(parents=True, exist_ok=True)
            (photos / name / f"{number}.jpg").write_bytes(encoded)
        images.append({"id": number, "file_name": f"{number}.jpg", "height": 480, "width": 640})
        boxes.append({"id": number, "image_id": number, "category_id": 1, "bbox": [30, 30, 150, 150]})
    annotations = folder / "annotations.json"
    document = {"images": images[:FEW], "annotations": boxes[:FEW], "categories": [{"id": 1, "name": "blobs"}]}
    annotations.write_text(json.dumps(document), encoding="utf-8")
    run = folder / "run"
    train = ["--train_annotations", annotations, "--train_images", photos / "few"]
    start("--model_dir", run, *train, "--steps", 1, "--batch_size", 1, "--no_evaluate")
    validate = ["--val_annotations", annotations, "--val_images", photos / "few"]
    formats = ["--export_format", "onnx", "openvino", "tflite", "--export_precision", *PRECISIONS]
    start("--mode", "export", "--model_dir", run, *train, *validate, *formats, "--max_ap_drop", 1)
    return run, photos


def predict(run: Path, photos: Path, runtime: str) -> None:
    """Predict on an image, or those of a folder, by the program."""
    start("--mode", "predict", "--model_dir", run, "--inference", photos, "--runtime", runtime, "--save", "json")


def start(*arguments: object) -> None:
    """Run ssd_train, and raise its errors."""
    command = [sys.executable, "-m", "gaudi_apps.ssd_train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)


if __name__ == "__main__":
    main(measure_exports)
