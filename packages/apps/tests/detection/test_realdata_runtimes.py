"""Each runtime on real photographs: it detects what TensorFlow detects, with its own decoding and resizing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.detection.detections import make_export_preprocessor
from gaudi_apps.detection.detector import Detector, DetectorExport
from gaudi_apps.inference.converters import find_worst, to_float32
from gaudi_apps.inference.exported_models import FORMATS, open_exported
from gaudi_apps.inference.exporter import export_format, list_kinds
from gaudi_datasets.detection.coco import Category

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.slow,
    pytest.mark.skipif("REAL_DATA" not in os.environ, reason="REAL_DATA is not set"),
]
CATEGORIES = (Category(7, "red"), Category(9, "blue"))
# OpenVINO is in the session `deploy` alone, which leaves the others to `realdata`.
RUNTIMES = ["openvino"] if "DEPLOY" in os.environ else ["onnxruntime", "litert"]
SIDE, SCORE = 1e-3, 0.01  # most that a side, as a share of the image, and a score may differ by
# The network has random weights and 200 detections an image, many of which overlap by nearly half or have nearly the
# least score: there a difference of rounding decides which one is kept.
LEAST_SHARE = 0.99


@pytest.fixture(scope="module")
def network(detector_network: Any) -> DetectorExport:
    """Return the network, which is converted once for all tests."""
    return DetectorExport(to_float32(detector_network), CATEGORIES)


@pytest.fixture(scope="module")
def photos() -> list[bytes]:
    """Return the test images of BCCD, encoded."""
    folder = Path(os.environ["REAL_DATA"]) / "bccd" / "BCCD"
    names = (folder / "ImageSets" / "Main" / "test.txt").read_text().split()
    return [(folder / "JPEGImages" / f"{each}.jpg").read_bytes() for each in names]


@pytest.fixture(scope="module")
def expected(detector_network: Any, photos: list[bytes]) -> list[tuple[bytes, Any]]:
    """Return each photo, and what TensorFlow detects in it."""
    reference = Detector(detector_network, ["red", "blue"])
    found = reference.predict(photos, score_threshold=0.05, batch_size=8)
    return list(zip(photos, found, strict=True))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_all_test_images_of_bccd_have_the_same_detections(
    network: DetectorExport, noise_images: list[bytes], expected: list[tuple[bytes, Any]], tmp_path: Path, runtime: str
) -> None:
    assert len(expected) == 72
    name: Any = FORMATS[runtime]
    (kind,) = list_kinds((name,), ("fp32",))
    export_format(kind, network, noise_images, tmp_path, tmp_path)
    prepare = make_export_preprocessor(300).from_encoded
    model = open_exported(tmp_path, name, "fp32", prepare)
    matched = []
    for encoded, wanted in expected:
        found = model.compute([prepare(encoded)])
        for box, label, score in zip(wanted.boxes_yxyx, wanted.labels, wanted.scores, strict=True):
            same = found["labels"][0] == label
            is_near = np.abs(found["boxes_yxyx"][0][same] - box).max(axis=1, initial=0) <= SIDE
            matched.append(bool((is_near & (np.abs(found["scores"][0][same] - score) <= SCORE)).any()))
    assert len(matched) > 72
    assert np.mean(matched) >= LEAST_SHARE


@pytest.mark.skipif("DEPLOY" not in os.environ, reason="DEPLOY is not set")
def test_bfloat16_finds_the_boxes_of_the_network_in_all_test_images(
    network: DetectorExport, noise_images: list[bytes], photos: list[bytes], tmp_path: Path
) -> None:
    (kind,) = list_kinds(("openvino",), ("bf16",))
    export_format(kind, network, noise_images, tmp_path, tmp_path)
    prepare = make_export_preprocessor(300).from_encoded
    model = open_exported(tmp_path, "openvino", "bf16", prepare)
    agreements = []
    for first in range(0, len(photos), 8):
        pixels = np.stack([prepare(encoded) for encoded in photos[first : first + 8]])
        images = network.normalize(pixels)
        reference = {name: values.numpy() for name, values in network.traced(images).items()}
        agreements.append(network.compare_rounded(images, reference, model.compute(pixels)))
    worst = find_worst(agreements)
    assert worst.compared > 72
    assert worst.differences["box_difference"] <= SIDE
    assert worst.differences["score_difference"] <= SCORE
    assert worst.is_close
