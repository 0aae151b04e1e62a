from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.detection.agreement import DetectionArrays
from gaudi_apps.detection.detector import Detector, DetectorExport
from gaudi_apps.inference.converters import run_saved_model, write_saved_model
from gaudi_apps.runtime.errors import ExportError
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image
from gaudi_ops.program import exit_status_of

pytestmark = pytest.mark.slow


def test_a_saved_model_is_run_by_relative_paths(
    narrow_network: Any, noise_images: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has another working folder, and the default folder of a run is relative."""
    monkeypatch.chdir(tmp_path)
    Path("scratch").mkdir()
    network = DetectorExport(narrow_network, [Category(1, "red"), Category(2, "blue")])
    write_saved_model(network, Path("saved"))
    images = np.stack([prepare_image(image) for image in noise_images])
    reference = DetectionArrays(*Detector(narrow_network).detect(images))
    for found in run_saved_model(Path("saved"), noise_images, Path("scratch")):
        agreement = network.compare(reference._asdict(), found)
        assert agreement.is_close
        assert agreement.compared > 20


def test_a_saved_model_that_the_disk_does_not_take_is_an_error_of_the_disk(
    small_network: Callable[..., Any], tmp_path: Path
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="TensorFlow cannot") as caught:
            write_saved_model(DetectorExport(small_network(3), [Category(1, "red")]), tmp_path / "saved")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert exit_status_of(caught.value) == 74
    assert caught.value.filename == str(tmp_path / "saved")


def test_a_saved_model_that_cannot_be_run_is_an_error(noise_images: list[bytes], tmp_path: Path) -> None:
    tf.saved_model.save(tf.Module(), str(tmp_path / "empty"))
    with pytest.raises(ExportError, match=r"cannot be run .*: KeyError: .*serving_default"):
        run_saved_model(tmp_path / "empty", noise_images, tmp_path)
