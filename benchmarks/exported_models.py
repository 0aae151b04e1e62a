"""Exports of the detector in turns, without decoding and resizing: what ONNX Runtime and OpenVINO make of a SavedModel.

It needs OpenVINO, which cannot be installed beside MXNet, so it is none of `nox -s bench`: it runs in the environment
of `nox -s deploy`. Weights are random, and so is what 8 bits are calibrated on; AP is what `--mode export` tells.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from benchmarks.measurement import Figure, compare, describe_rates, interleave, main

if TYPE_CHECKING:
    from gaudi_apps.inference.exported_models import ExportedModel

BATCHES = (1, 16)
REPEATS = 30
LEAST = {"openvino-int8": 3.5, "openvino-bf16": 1.9}
CLASSES = 3


def measure_exports(budget_seconds: float) -> Iterator[Figure]:
    """Each export over the SavedModel, at both batches."""
    with tempfile.TemporaryDirectory() as folder:
        candidates = build_candidates(Path(folder))
        for batch in BATCHES:
            calls = {name: partial(candidate, batch) for name, candidate in candidates.items()}
            timings = interleave(calls, REPEATS, budget_seconds=budget_seconds / len(BATCHES))
            note = describe_rates(timings, batch)
            for name in candidates:
                if name != "saved_model":
                    title = f"SSD, batch {batch}: {name} over the SavedModel"
                    yield compare(title, timings, "saved_model", name, least=LEAST.get(name), note=note)


def build_candidates(folder: Path) -> dict[str, Callable[[int], object]]:
    """Export the detector in each kind; return functions that compute a batch of images, by the names of the kinds."""
    from gaudi_apps.detection.detector import DetectorExport
    from gaudi_apps.inference.exported_models import open_exported
    from gaudi_apps.inference.exporter import export_format, list_kinds
    from gaudi_apps.inference.quantization import Calibration
    from gaudi_datasets.detection.coco import Category
    from gaudi_models.ssd import build_ssd

    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (300, 300, 3), np.uint8) for _ in range(16)]
    encoded = [cv2.imencode(".jpg", image)[1].tobytes() for image in images]
    categories = [Category(label, f"class {label}") for label in range(1, CLASSES + 1)]
    network = DetectorExport(build_ssd(CLASSES + 1), categories)
    candidates: dict[str, Callable[[int], object]] = {}
    for kind in list_kinds(("saved_model", "onnx", "openvino"), ("fp32", "bf16", "int8")):
        export = folder / str(kind)
        (export / "scratch").mkdir(parents=True)
        export_format(kind, network, encoded[:1], export, export / "scratch", Calibration(encoded, 0))
        model = open_exported(export, *kind, network.prepare_resized)
        inputs = [model.prepare(one) for one in encoded]
        candidates[str(kind)] = partial(compute, model, inputs)
    return candidates


def compute(model: ExportedModel, inputs: Sequence[Any], batch: int) -> object:
    """Compute the first inputs at once."""
    return model.compute(inputs[:batch])


if __name__ == "__main__":
    main(measure_exports)
