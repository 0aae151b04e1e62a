"""Programs import nothing heavy where there is nothing to compute; benchmarks/startup.py measures the time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOR_HELP = {"rich", "yaml", "numpy"}  # what help does without
HEAVY = {"tensorflow", "mxnet", "tf_keras", "cv2", "matplotlib", "sklearn", "pycocotools"}


def start(arguments: list[str], folder: Path) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run a module as a program; return what came of it and the top-level packages that it imported."""
    command = [sys.executable, "-X", "importtime", "-m", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return done, set(re.findall(r"^import time:.*\| +(\w+)$", done.stderr, re.MULTILINE))


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["gaudi_apps.ssd_train", "--help"], 0),
        (["gaudi_apps.ssd_train", "--mode", "plan", "--use_fake_data"], 0),
        (["gaudi_apps.ssd_train", "--batch_sice", "8"], 64),
        (["gaudi_apps.resnet_train", "--help"], 0),
        (["gaudi_apps.resnet_train", "--mode", "plan", "--use_synthetic_data"], 0),
        (["gaudi_apps.resnext_train", "--mode", "plan", "--use_synthetic_data"], 0),
        (["gaudi_apps.resnext_train", "-bs", "0"], 64),
        (["gaudi_apps.ssd_mxnet_train", "--help"], 0),
        (["gaudi_apps.ssd_mxnet_train", "--mode", "plan", "--synthetic", "--system", "DSS8440"], 0),
        (["gaudi_apps.ssd_mxnet_train", "--batch-size", "0"], 64),
        (["gaudi_datasets", "--help"], 0),
        (["gaudi_datasets", "make-scenes", "--sede", "1"], 64),
    ],
)
def test_nothing_heavy_is_imported(tmp_path: Path, arguments: list[str], status: int) -> None:
    done, imported = start(arguments, tmp_path)
    assert done.returncode == status, done.stderr[-500:]
    assert "tyro" in imported
    assert imported & HEAVY == set()
    if "--help" in arguments and arguments[0] != "gaudi_datasets":
        assert imported & FOR_HELP == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_names_that_need_tensorflow_are_imported_without_its_notes() -> None:
    code = (
        "import gaudi_apps, os; gaudi_apps.Detector, gaudi_apps.Classifier; print('TF_CPP_MIN_LOG_LEVEL' in os.environ)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")
