from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.detection.agreement import DETECTED, DetectionArrays, compare_detections
from gaudi_apps.detection.detector import Detector, DetectorExport
from gaudi_apps.inference.converters import (
    decode_pixels,
    hold_stderr,
    make_onnx,
    require_onnx,
    run_exported,
)
from gaudi_apps.inference.exported_models import OnnxModel, open_exported
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image
from gaudi_datasets.errors import MissingExtraError

CATEGORIES = (Category(7, "red"), Category(9, "blue"))


@pytest.fixture(scope="module")
def images(noise_images: list[bytes]) -> Any:
    return np.stack([prepare_image(one) for one in noise_images])


def find_export(exports: dict[Path, Any], name: str) -> Path:
    return next(path for path in exports if path.name == name)


def test_what_a_converter_writes_is_shown_with_its_error_only(capfd: pytest.CaptureFixture[str]) -> None:
    @hold_stderr()
    def convert(divisor: int) -> float:
        os.write(2, b"from C++\n")
        return 1 / divisor

    convert(1)
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
    with pytest.raises(ZeroDivisionError):
        convert(0)
    assert capfd.readouterr().err == "from C++\n"


@pytest.mark.slow
def test_onnx_finds_what_the_network_finds(
    narrow_network: Any, detector_exports: dict[Path, Any], noise_images: list[bytes], images: Any
) -> None:
    import onnxruntime

    path = find_export(detector_exports, "onnx") / "model.onnx"
    reference = DetectionArrays(*Detector(narrow_network).detect(images))
    for threads in (1, 2):
        opened: Any = OnnxModel(path, bytes, threads)
        assert opened._session.get_session_options().intra_op_num_threads == opened.threads == threads
    as_written = run_exported(OnnxModel(path, decode_pixels, takes_floats=False), noise_images)
    agreement = DetectorExport(narrow_network, CATEGORIES).compare(reference._asdict(), as_written)
    assert agreement.is_close
    assert agreement.compared > 20

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    batch = np.stack([decode_pixels(one) for one in noise_images])
    found = DetectionArrays(*session.run([*DETECTED], {"images": batch}))
    assert compare_detections(reference, found).is_close
    assert found.labels.shape == (3, 200)
    assert [one["name"] for one in json.loads(session.get_modelmeta().custom_metadata_map["classes"])] == [
        "red",
        "blue",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [None, "FALSE"])
def test_an_optimizer_of_onnx_that_fails_is_left_out_unless_the_user_says_otherwise(
    small_network: Any, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    from tf2onnx import optimizer

    failed: list[object] = []

    def fail(*given: object) -> None:
        failed.append(given)
        raise ArithmeticError("planted")

    monkeypatch.delenv("TF2ONNX_CATCH_ERRORS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TF2ONNX_CATCH_ERRORS", chosen)
    monkeypatch.setattr(optimizer.IdentityOptimizer, "optimize", fail)
    network = DetectorExport(small_network(3), CATEGORIES)
    if chosen is None:
        assert {*DETECTED} <= {output.name for output in make_onnx(network).graph.output}
        assert len(failed) > 1  # first where it ends the conversion
    else:
        with pytest.raises(ArithmeticError, match="planted"):
            make_onnx(network)
        assert len(failed) == 1
    assert os.environ.get("TF2ONNX_CATCH_ERRORS") == chosen


def test_onnx_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("gaudi_datasets.errors.importlib.import_module", refuse)
    with pytest.raises(MissingExtraError, match=r"onnx cannot .*; pip install 'gaudi-apps\[export\]'"):
        require_onnx()


@pytest.mark.slow
def test_tflite_detects_by_builtin_operations_what_the_network_detects(
    narrow_network: Any, detector_exports: dict[Path, Any], noise_images: list[bytes], images: Any
) -> None:
    network, folder = DetectorExport(narrow_network, CATEGORIES), find_export(detector_exports, "tflite")
    reference = DetectionArrays(*Detector(narrow_network).detect(images))
    model = open_exported(folder, "tflite", "fp32", network.prepare_resized)
    for count in (3, 1):
        found = run_exported(model, noise_images[:count])
        agreement = network.compare({name: one[:count] for name, one in reference._asdict().items()}, found)
        assert agreement.is_close
        assert agreement.compared > 20 * count
        np.testing.assert_array_equal(found["num_detections"], (found["labels"] > 0).sum(axis=1))
    interpreter = tf.lite.Interpreter(model_path=str(folder / "model.tflite"))
    names = {one["op_name"] for one in interpreter._get_ops_details()}
    assert "WHILE" in names
    assert not [name for name in names if name.startswith(("Flex", "TFLite_Detection", "CUSTOM"))]
