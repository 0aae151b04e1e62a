"""Exports for OpenVINO, which is not installed beside MXNet: the session `deploy` of nox runs these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.cli.flags import ExportPrecision
from gaudi_apps.detection.detector import DetectionArrays, Detector, DetectorExport, compare_detections, run_export
from gaudi_apps.detection.evaluator import DetectionEvaluator
from gaudi_apps.inference.converters import make_onnx, run_exported
from gaudi_apps.inference.exported_models import ExportedModel, open_exported
from gaudi_apps.inference.exporter import ExportRequest, NetworkModel
from gaudi_apps.inference.quantization import AccuracyBound, Calibration, write_openvino
from gaudi_apps.inference.visualizer import decode_like_tensorflow
from gaudi_apps.training.checkpoint import find_checkpoints, load_checkpoint
from gaudi_apps.training.run_dir import RunFolder
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess
from gaudi_models.architectures import SSDArchitecture

pytestmark = pytest.mark.skipif("DEPLOY" not in os.environ, reason="DEPLOY is not set; nox -s deploy sets it")
CATEGORIES = (Category(7, "red"), Category(9, "blue"))
# Most that boxes and scores of random weights, which are worse than trained ones, may differ by.
BOUNDS: dict[ExportPrecision, float] = {"fp32": 1e-3, "fp16": 2e-3, "bf16": 0.2, "int8": 0.3}


@pytest.fixture(scope="module")
def exported(detector_network: Any, noise_images: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    request = ExportRequest([*BOUNDS], None, Calibration(noise_images, 0))
    where: dict[str, Any] = {"step": 1, "architecture": SSDArchitecture("resnet18"), "pool_padding": "same"}
    found = run_export(detector_network, CATEGORIES, noise_images, folder, ("openvino",), **where, request=request)
    assert [path.name for path in found] == ["openvino", "openvino-fp16", "openvino-bf16", "openvino-int8"]
    return folder


@pytest.mark.parametrize("precision", BOUNDS)
def test_exports_detect_what_the_network_detects(
    exported: Path, detector_network: Any, noise_images: list[bytes], precision: ExportPrecision
) -> None:
    folder = exported / ("openvino" if precision == "fp32" else f"openvino-{precision}")
    check = json.loads((folder / "export.json").read_text())["check"]
    assert check["compared"] > 20
    assert max(check["box_difference"], check["score_difference"]) <= BOUNDS[precision]
    network = DetectorExport(detector_network, CATEGORIES)
    model = open_exported(folder, "openvino", precision, network.prepare_resized)
    together = run_exported(model, noise_images)
    assert together["boxes_yxyx"].shape == (3, 200, 4)
    one_by_one = [run_exported(model, [one]) for one in noise_images]
    alone = {name: np.concatenate([one[name] for one in one_by_one]) for name in together}
    assert network.compare(together, alone).is_close


def test_files_name_classes_and_precision_and_are_smaller(exported: Path) -> None:
    import openvino

    sizes = {}
    for precision in BOUNDS:
        folder = exported / ("openvino" if precision == "fp32" else f"openvino-{precision}")
        assert sorted(path.name for path in folder.iterdir()) == ["export.json", "model.bin", "model.xml"]
        model = openvino.Core().read_model(str(folder / "model.xml"))
        assert model.get_rt_info(["gaudi_apps", "precision"]).astype(str) == precision
        classes = json.loads(model.get_rt_info(["gaudi_apps", "classes"]).astype(str))
        assert [one["name"] for one in classes] == ["red", "blue"]
        sizes[precision] = json.loads((folder / "export.json").read_text())["bytes"]
    assert sizes["fp16"] < 0.52 * sizes["fp32"]
    assert sizes["int8"] < 0.3 * sizes["fp32"]


def test_convolutions_have_8_bits_but_for_those_of_boxes(exported: Path) -> None:
    import openvino

    operations = openvino.Core().read_model(str(exported / "openvino-int8" / "model.xml")).get_ordered_ops()
    convolutions = [one for one in operations if one.get_type_name() == "Convolution"]
    weights = {one.get_friendly_name(): one.input_value(1).get_node().get_type_name() for one in convolutions}
    in_float = {name for name, kind in weights.items() if kind == "Constant"}  # others are scaled from 8 bits
    assert in_float == {name for name in weights if "box_head" in name}
    assert len(in_float) == 6


def test_layers_that_cost_too_much_get_their_precision_back(
    detector_network: Any, noise_images: list[bytes], tmp_path: Path
) -> None:
    network = DetectorExport(detector_network, CATEGORIES)
    expected = run_exported(NetworkModel(network), noise_images)

    def measure(model: ExportedModel) -> float:
        found = run_exported(model, noise_images)
        return 1 - float(np.abs(found["scores"] - expected["scores"]).mean())

    scores = []
    for name, most_lost in (("all", None), ("restored", 1e-4)):
        (tmp_path / name).mkdir()
        bound = None if most_lost is None else AccuracyBound(measure, most_lost)
        converted = make_onnx(network, resized=True)
        write_openvino(converted, network, tmp_path / name, "int8", Calibration(noise_images, 0), bound)
        scores.append(measure(open_exported(tmp_path / name, "openvino", "int8", network.prepare_resized)))
    assert scores[0] < scores[1] <= 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.xml").write_text("<net>")
    with pytest.raises(DataError) as caught:
        open_exported(tmp_path, "openvino", "fp32", bytes)
    assert caught.value.path == str(tmp_path / "model.xml")


def test_images_are_decoded_to_the_pixels_of_tensorflow() -> None:
    generator = np.random.default_rng(0)
    smooth = cv2.resize(generator.integers(0, 256, (9, 12, 3), np.uint8), (157, 121), interpolation=cv2.INTER_CUBIC)
    for ending, options in ((".jpg", []), (".jpg", [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]), (".png", [])):
        encoded = cv2.imencode(ending, smooth, options)[1].tobytes()
        expected = tf.io.decode_image(encoded, channels=3, expand_animations=False).numpy()
        np.testing.assert_array_equal(decode_like_tensorflow(encoded), expected)
    gray = cv2.imencode(".jpg", smooth[..., 0])[1].tobytes()
    np.testing.assert_array_equal(decode_like_tensorflow(gray), tf.io.decode_jpeg(gray, channels=3).numpy())
    spare = gray[:-2] + b"\0" + gray[-2:]  # as some cameras write it; reading an image lets it through
    np.testing.assert_array_equal(decode_like_tensorflow(spare), decode_like_tensorflow(gray))
    with pytest.raises(DataError):
        decode_like_tensorflow(gray[:100])


LOADED = """
import sys
from gaudi_apps import ssd_train
try:
    ssd_train.main(sys.argv[1:])
finally:
    print("tensorflow" in sys.modules, file=sys.stderr)
"""


def test_runtimes_detect_what_the_network_detects_and_import_no_tensorflow(
    ssd_train: Callable[..., Any],
    detector_network: Any,
    noise_images: list[bytes],
    records: Path,
    tmp_path: Path,
) -> None:
    """The exports are of a network that detects, under the name of a checkpoint that costs nothing to train."""
    run, source = tmp_path / "run", RecordSource(records, "val")
    flags = ("--model_dir", run, "--data_dir", records, "--steps", 1, "--batch_size", 2, "--no_evaluate")
    assert ssd_train(*flags).status == 0
    sha256 = load_checkpoint(find_checkpoints(run, "newest")[0]).sha256
    evaluator = DetectionEvaluator(source, InputOptions(1), RunFolder(run), source.categories, SingleProcess())
    where: dict[str, Any] = {"step": 1, "architecture": SSDArchitecture("resnet18"), "pool_padding": "same"}
    request = ExportRequest(evaluator=evaluator, checkpoint=sha256)
    formats: Any = ("openvino", "onnx")
    run_export(detector_network, source.categories, noise_images, run / "export", formats, **where, request=request)
    photos = tmp_path / "photos"  # of noise, for equal scores of flat images are suppressed in any order
    photos.mkdir()
    for number, encoded in enumerate(noise_images):
        (photos / f"{number}.png").write_bytes(encoded)
    network = Detector(detector_network, ["red", "blue"])
    expected = network.predict(photos, score_threshold=0.05)
    predict = ["--mode", "predict", "--model_dir", run, "--inference", photos, "--save", "json"]
    for runtime in ("openvino", "onnxruntime"):
        arguments = [*predict, "--runtime", runtime, "--output_dir", tmp_path / runtime]
        command = [sys.executable, "-c", LOADED, *map(str, arguments)]
        alone = subprocess.run(command, check=True, capture_output=True, text=True)
        assert alone.stderr.splitlines()[-1] == "False"
        found = json.loads((tmp_path / runtime / "detections.json").read_text())
        loaded = Detector.load(run, runtime=runtime).predict(photos, score_threshold=0.05)
        for image_id, (one, other) in enumerate(zip(expected, loaded, strict=True), 1):
            agreement = compare_detections(
                *(DetectionArrays(each.boxes_yxyx[None], each.labels[None], each.scores[None]) for each in (one, other))
            )
            assert agreement.is_close
            assert agreement.compared > 10
            scores = [row["score"] for row in found if row["image_id"] == image_id]
            np.testing.assert_allclose(sorted(scores), sorted(other.scores), atol=1e-5)
    folder = run / "export" / "openvino"
    (folder / "model.bin").write_bytes(b"other")
    failed = ssd_train(*predict, "--runtime", "openvino")
    assert (failed.status, failed.error.path) == (65, str(folder / "model.bin"))
