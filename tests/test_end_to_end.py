"""The programs one after another, as a user runs them: scenes, records, training, continuing, scoring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# The smallest network of the program's own, for its size is not what is tested; bf16 is emulated by many processors.
BATCH = ["--batch_size", "2", "--lr_warmup_steps", "2", "--backbone", "resnet18_quarter", "--dtype", "fp32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("user")


def run(folder: Path, program: str, *arguments: str) -> str:
    """Run one of our console scripts in the folder; return what it printed, and fail if it failed."""
    script = Path(sys.executable).parent / program
    done = subprocess.run([script, *arguments], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def test_scenes_become_records(folder: Path) -> None:
    run(folder, "gaudi-datasets", "make-scenes", "--output_dir", "scenes", "--train", "12", "--val", "5")
    for split, images in (("train", 12), ("val", 5)):
        annotations = f"scenes/annotations/instances_{split}.json"
        target = ["--output_dir", "records", "--split", split]
        told = run(
            folder,
            "gaudi-datasets",
            "convert",
            "coco",
            "--annotations",
            annotations,
            "--images",
            f"scenes/{split}",
            *target,
        )
        assert f"{images} of {images} images" in told


def test_training_continues_where_it_ended(folder: Path) -> None:
    common = ["--data_dir", "records", "--model_dir", "run", *BATCH]
    run(folder, "ssd_train", *common, "--steps", "2", "--no_evaluate")
    told = run(folder, "ssd_train", *common, "--steps", "3")
    assert "5/5" in told
    again = run(folder, "ssd_train", *common, "--mode", "eval")
    assert "5/5" in again


def test_detections_are_drawn(folder: Path) -> None:
    common = ["--model_dir", "run", "--mode", "predict"]
    before = set((folder / "run").rglob("*.png")) | set((folder / "run").rglob("*.jpg"))
    run(folder, "ssd_train", *common, "--inference", "scenes/val")
    after = set((folder / "run").rglob("*.png")) | set((folder / "run").rglob("*.jpg"))
    assert len(after - before) >= 5
