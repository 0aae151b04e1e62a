from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.detection.detector import (
    FIELDS,
    DetectionArrays,
    Detector,
    DetectorExport,
    compare_detections,
    compare_rows,
    find_raw,
)
from gaudi_apps.inference.converters import (
    decode_pixels,
    hold_stderr,
    require_onnx,
    run_onnx,
    run_tflite,
    to_float32,
    write_onnx,
    write_tflite,
)
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.pipeline import prepare_image
from gaudi_datasets.errors import MissingExtraError

CATEGORIES = (Category(7, "red"), Category(9, "blue"))


@pytest.fixture(scope="module")
def images(noise_images: list[bytes]) -> Any:
    return np.stack([prepare_image(one) for one in noise_images])


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
    detector_network: Any, noise_images: list[bytes], images: Any, tmp_path: Path
) -> None:
    import onnxruntime

    path = tmp_path / "model.onnx"
    write_onnx(DetectorExport(detector_network, CATEGORIES), path)
    reference = DetectionArrays(*Detector(detector_network).detect(images))
    agreement = DetectorExport(detector_network, CATEGORIES).compare(reference._asdict(), run_onnx(path, noise_images))
    assert agreement.is_close
    assert agreement.compared > 20

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    batch = np.stack([decode_pixels(one) for one in noise_images])
    found = DetectionArrays(*session.run([*FIELDS], {"images": batch}))
    assert compare_detections(reference, found).is_close
    assert found.labels.shape == (3, 200)
    assert [one["name"] for one in json.loads(session.get_modelmeta().custom_metadata_map["classes"])] == [
        "red",
        "blue",
    ]


def test_onnx_without_the_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("gaudi_apps.inference.converters.importlib.import_module", refuse)
    with pytest.raises(MissingExtraError, match=r"onnx cannot .* pip install 'gaudi-apps\[export\]'"):
        require_onnx()


@pytest.mark.slow
def test_tflite_computes_what_the_network_computes(
    detector_network: Any, noise_images: list[bytes], images: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model.tflite"
    network = DetectorExport(to_float32(detector_network), CATEGORIES)
    write_tflite(network, path)
    expected = [output.numpy() for output in find_raw(detector_network, images)]
    for count in (3, 1):
        resized = np.stack([network.resize(decode_pixels(one)) for one in noise_images[:count]])
        found = run_tflite(path, resized)
        assert compare_rows([one[:count] for one in expected], [found["boxes_yxyx"], found["scores"]]).is_close
