"""Training the detector from records on a GPU by the program, to its last evaluation."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.card import open_card
from benchmarks.gpu.programs import find_records, run_program
from benchmarks.measurement import Figure, main

TRAINING = ("--batch_size", 16, "--steps", 400, "--base_lr", 0.064, "--lr_schedule", "cosine", "--lr_warmup_steps", 60)
LEAST_AP50 = 0.8


def run(budget_seconds: float) -> Iterator[Figure]:
    """Train."""
    del budget_seconds
    open_card()
    with tempfile.TemporaryDirectory() as folder:
        yield from train(Path(folder), "gpu")


def train(folder: Path, device: str, flags: tuple[object, ...] = TRAINING) -> Iterator[Figure]:
    """Train, evaluate and predict by the program."""
    records = find_records()
    model = folder / "model"
    common = ("--model_dir", model, "--device", device)
    begun = time.perf_counter()
    run_program("gaudi_apps.ssd_train", "--data_dir", records, "--dtype", "bf16", *map(str, flags), *common)
    seconds = time.perf_counter() - begun
    figures = read_evaluation(model)
    name = "ssd_train on BCCD from records, 400 steps of 16"
    note = f"AP {figures['AP']:.3f}"
    yield Figure(f"{name}: AP50 of the validation", figures["AP50"], "of 1", least=LEAST_AP50, note=note)
    yield Figure(f"{name}: from the command to its end", seconds, "s")


def read_evaluation(model: Path) -> dict[str, float]:
    """Return what the evaluation after the last step of a run found, by name."""
    figures: dict[str, float] = json.loads((model / "evaluation.json").read_text(encoding="utf-8"))["figures"]
    return figures


if __name__ == "__main__":
    main(run)
