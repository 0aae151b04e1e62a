"""Evaluation on real photographs: every image once and the same figures, whatever the batch size."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(os.environ.get("REAL_DATA", ""))
BCCD, COCO = FOLDER / "bccd" / "BCCD", FOLDER / "coco_ccby"
# One image; sizes that divide 72, 57 and neither; a power of two, and the next size.
BATCH_SIZES = (1, 4, 7, 16, 17, 19)

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get("REAL_DATA"), reason="REAL_DATA is unset; it must name the folder of real data"
    ),
]


def convert_bccd(split: str) -> list[str | Path]:
    return ["convert", "voc", "--voc_dir", BCCD, "--image_sets", "train" if split == "train" else "test"]


def convert_coco(split: str) -> list[str | Path]:
    annotations = COCO / "annotations" / f"instances_{split}2017.json"
    return ["convert", "coco", "--annotations", annotations, "--images", COCO / f"{split}2017"]


def run(module: str, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True, capture_output=True, timeout=600)


@pytest.mark.parametrize(("convert", "images"), [(convert_bccd, 72), (convert_coco, 57)])
def test_figures_do_not_depend_on_the_batch_size(
    convert: Callable[[str], list[str | Path]], images: int, tmp_path: Path
) -> None:
    from gaudi_apps.detection.evaluator import DetectionEvaluator
    from gaudi_apps.training.checkpoint import CheckpointFolder
    from gaudi_apps.training.run_dir import RunFolder
    from gaudi_datasets.detection.sources import RecordSource
    from gaudi_datasets.sampling import InputOptions
    from gaudi_distributed import SingleProcess
    from gaudi_models.ssd import build_ssd

    records, model_dir = tmp_path / "records", tmp_path / "run"
    for split in ("train", "val"):
        run("gaudi_datasets", *convert(split), "--output_dir", records, "--split", split)
    schedule = ["--batch_size", "4", "--steps", "8", "--base_lr", "0.032", "--lr_warmup_steps", "2"]
    others = ["--dtype", "fp32", "--no_evaluate"]
    run("gaudi_apps.ssd_train", "--data_dir", records, "--model_dir", model_dir, *schedule, *others)

    source = RecordSource(records, "val")
    model = build_ssd(len(source.categories) + 1)
    tensors = CheckpointFolder(model_dir / "checkpoints").load_newest().tensors
    for variable in model.variables:
        variable.assign(tensors[variable.name.removesuffix(":0")])
    task = SimpleNamespace(model=model)
    figures = {}
    for batch_size in BATCH_SIZES:
        evaluator = DetectionEvaluator(
            source, InputOptions(batch_size), RunFolder(model_dir), source.categories, SingleProcess()
        )
        scores, _ = evaluator.join([evaluator.evaluate(task)])
        assert (scores.images, scores.images_total) == (images, images)
        figures[batch_size] = {name: value for name, value in scores.figures.items() if value is not None}
    for batch_size in BATCH_SIZES:
        assert figures[batch_size] == pytest.approx(figures[1], abs=1e-6), batch_size
