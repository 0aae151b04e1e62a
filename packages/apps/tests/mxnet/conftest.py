"""The program within this process, with a small network, and the five images as a data set in a folder."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL_PROGRAM = Path(__file__).parents[1] / "small_ssd_mxnet.py"


@pytest.fixture(scope="session")
def coco_root(image_dir: Path, annotation_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the images, for training and for validation, named as `--dataset plain` has them."""
    root = tmp_path_factory.mktemp("plain")
    (root / "annotations").mkdir()
    for split in ("train", "val"):
        shutil.copytree(image_dir, root / split)
        shutil.copy(annotation_file, root / "annotations" / f"instances_{split}.json")
    return root


@pytest.fixture
def ssd_mxnet_train(
    coco_root: Path, monkeypatch: pytest.MonkeyPatch, run_main: Callable[..., Any]
) -> Callable[..., Any]:
    """Run the program on the images, two of them a step, unless other flags say otherwise."""
    from gaudi_apps import ssd_mxnet_train as program

    monkeypatch.setattr("gaudi_apps.mxnet.task.build_ssd", runpy.run_path(str(SMALL_PROGRAM))["build_small_ssd"])
    # A test of another program may have imported TensorFlow, after which no variable may change.
    monkeypatch.setenv("OPENCV_FFMPEG_LOGLEVEL", "-8")

    def run(*argv: object, data: bool = True) -> Any:
        given = ["--dataset", "plain", "--coco-root", coco_root] if data else []
        return run_main(program.main, (*given, "--batch-size", 2, "--log-interval", 1, "-j", 2, *argv))

    return run
