"""Real data that several tests read: converted once, trained on once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("REAL_DATA", ""))


@dataclass(frozen=True)
class Trained:
    """A run of the detector.

    Attributes:
        records: folder of the records that it trained on.
        model_dir: its folder.
        output: what it printed.
    """

    records: Path
    model_dir: Path
    output: str


def run_module(module: str, *arguments: str | Path) -> str:
    """Run one of the programs; return what it printed, and fail if it failed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="session")
def blood_cells(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert BCCD to records: 292 images to train on, 72 to score on; no test changes them."""
    folder = tmp_path_factory.mktemp("blood_cells") / "records"
    for split, sets, told in [
        ("train", ["train", "val"], "train: kept 292 of 292 images and 3941 of 3943 boxes"),
        ("val", ["test"], "val: kept 72 of 72 images and 945 of 945 boxes"),
    ]:
        voc: list[str | Path] = ["--voc_dir", FOLDER / "bccd" / "BCCD", "--output_dir", folder, "--split", split]
        assert told in run_module("gaudi_datasets", "convert", "voc", *voc, "--image_sets", *sets)
    return folder


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Convert photographs of COCO to records: 79 to train on, 57 to score on; no test changes them."""
    source, folder = FOLDER / "coco_ccby", tmp_path_factory.mktemp("photographs") / "records"
    for split, told in [
        ("train", "train: kept 79 of 80 images and 770 of 770 boxes"),
        ("val", "val: kept 57 of 57 images and 517 of 517 boxes"),
    ]:
        files: list[str | Path] = ["--annotations", source / "annotations" / f"instances_{split}2017.json"]
        files += ["--images", source / f"{split}2017", "--output_dir", folder, "--split", split]
        assert told in run_module("gaudi_datasets", "convert", "coco", *files)
    return folder


@pytest.fixture(scope="session")
def trained_on_blood_cells(blood_cells: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train the smallest network 12 steps and evaluate; no test changes the run.

    It is the program's own type, bf16, but on processors that would take 18 times as long for it.
    """
    instructions = set(Path("/proc/cpuinfo").read_text().split())
    model_dir = tmp_path_factory.mktemp("blood_cells") / "run"
    schedule = ["--batch_size", "4", "--steps", "12", "--base_lr", "0.016", "--lr_warmup_steps", "4"]
    schedule += ["--backbone", "resnet18_quarter"]
    schedule += [] if {"amx_bf16", "avx512_bf16"} & instructions else ["--dtype", "fp32"]
    output = run_module("gaudi_apps.ssd_train", "--data_dir", blood_cells, "--model_dir", model_dir, *schedule)
    return Trained(blood_cells, model_dir, output)


@pytest.fixture(scope="session")
def trained_on_photographs(photographs: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train the smallest network of the program's for 4 steps in float32, and evaluate; no test changes the run."""
    model_dir = tmp_path_factory.mktemp("photographs") / "run"
    schedule = ["--batch_size", "4", "--steps", "4", "--base_lr", "0.032", "--lr_warmup_steps", "4"]
    paths: list[str | Path] = ["--data_dir", photographs, "--model_dir", model_dir]
    network = ["--backbone", "resnet18", "--dtype", "fp32"]
    output = run_module("gaudi_apps.ssd_train", *paths, *schedule, *network)
    return Trained(photographs, model_dir, output)
