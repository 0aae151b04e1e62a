"""A run by --data reports, exports and evaluates its best network, on images that did not choose it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.training.checkpoint import CheckpointFolder

pytestmark = pytest.mark.slow

FLAGS = ("-bs", 4, "--image_size", 32, "--log_steps", 1, "--device", "cpu", "--steps", 2, "--save_checkpoints_steps", 1)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_report_and_the_export_at_the_end_are_of_the_best_checkpoint(
    run_classifier: Callable[..., Any], folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gaudi_apps.classification.evaluator import AccuracyEvaluator

    for name, split in (("train", "train"), ("validation", "validation"), ("more", "test")):
        shutil.copytree(folders / name, tmp_path / "data" / split)
    given, summarize = [0.9, 0.1], AccuracyEvaluator.summarize
    monkeypatch.setattr(
        AccuracyEvaluator,
        "summarize",
        lambda self, result: replace(summarize(self, result), value=given.pop(0) if given else 0.0),
    )
    run = tmp_path / "run"
    paths = ("--data", tmp_path / "data", "--model_dir", run)
    done = run_classifier(*paths, *FLAGS, "--eval_epochs", 0.34, "--enable_checkpoint_and_export")
    assert done.status == 0, done.err
    assert [CheckpointFolder(run / name).steps() for name in ("checkpoints", "best")] == [[1, 2], [1]]
    assert read(run / "export" / "saved_model" / "export.json")["step"] == 1
    evaluation = read(run / "evaluation.json")
    assert (evaluation["step"], evaluation["split"], evaluation["images"]) == (1, "test", 6)

    # Of all checkpoints the images of validation choose the best one; of the chosen one those of test are scored.
    for which, step, images in (("all", 2, 9), ("best", 1, 6)):
        done = run_classifier(*paths, "--mode", "eval", "--checkpoint", which)
        assert done.status == 0, done.err
        evaluation = read(run / "evaluation.json")
        assert (evaluation["step"], evaluation["images"], evaluation["split"] == "test") == (step, images, images == 6)
