"""Exports for OpenVINO, which is not installed beside MXNet: the session `deploy` of nox runs these tests."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.cli.flags import ExportPrecision
from gaudi_apps.detection.agreement import DetectionArrays, compare_detections
from gaudi_apps.detection.detector import Detector, DetectorExport, run_export
from gaudi_apps.detection.evaluator import DetectionEvaluator
from gaudi_apps.inference.converters import run_exported
from gaudi_apps.inference.exported_models import ExportedModel, open_exported, read_manifests
from gaudi_apps.inference.exporter import ExportRequest, NetworkModel
from gaudi_apps.inference.quantization import AccuracyBound, write_openvino
from gaudi_apps.inference.report_page import tabulate
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
SMALL_PROGRAM = Path(__file__).parents[1] / "small_ssd.py"
CATEGORIES = (Category(7, "red"), Category(9, "blue"))
# Most that boxes and scores of random weights, which are worse than trained ones, may differ by.
BOUNDS: dict[ExportPrecision, tuple[float, float]] = {
    "fp32": (1e-3, 1e-3),
    "fp16": (2e-3, 2e-3),
    "bf16": (1e-3, 0.01),
    "int8": (0.3, 0.3),
}


@pytest.fixture(scope="module")
def exported(detector_network: Any, noise_images: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    request = ExportRequest([*BOUNDS], None, noise_images)
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
    assert check["box_difference"] <= BOUNDS[precision][0]
    assert check["score_difference"] <= BOUNDS[precision][1]
    network = DetectorExport(detector_network, CATEGORIES)
    model = open_exported(folder, "openvino", precision, network.prepare_resized)
    together = run_exported(model, noise_images)
    assert together["boxes_yxyx"].shape == (3, 200, 4)
    # No model computes one image twice in a row; each would then have a model of that size.
    models = [open_exported(folder, "openvino", precision, network.prepare_resized) for _ in noise_images]
    one_by_one = [run_exported(model, [one]) for model, one in zip(models, noise_images, strict=True)]
    alone = {name: np.concatenate([one[name] for one in one_by_one]) for name in together}
    assert network.compare(together, alone).is_close
    one_by_one = [run_exported(model, [one]) for one in noise_images]
    sized = {name: np.concatenate([one[name] for one in one_by_one]) for name in together}
    differences = network.compare(together, sized).differences
    assert differences["box_difference"] <= 1e-3
    # The model of a size rounds to another level of 8 bits here and there.
    assert differences["score_difference"] <= (5e-3 if precision == "int8" else 1e-3)


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
    assert sizes["int8"] < 0.28 * sizes["fp32"]


def read_filters(folder: Path) -> dict[str, tuple[bool, str]]:
    """Return by the name of each convolution whether it computes in 8 bits, and the type that its filters are of."""
    import openvino

    found = {}
    for operation in openvino.Core().read_model(str(folder / "model.xml")).get_ordered_ops():
        if operation.get_type_name() == "Convolution":
            values, filters = (operation.input_value(place).get_node() for place in (0, 1))
            while values.get_type_name() in ("MaxPool", "Transpose"):
                values = values.input_value(0).get_node()
            while filters.get_type_name() != "Constant":
                filters = filters.input_value(0).get_node()
            kind = filters.get_element_type().get_type_name()
            found[operation.get_friendly_name()] = values.get_type_name() == "FakeQuantize", kind
    return found


def test_convolutions_have_8_bits_but_for_those_of_boxes(exported: Path) -> None:
    filters = read_filters(exported / "openvino-int8")
    in_float = {name for name, (is_quantized, _) in filters.items() if not is_quantized}
    assert in_float == {name for name in filters if "box_head" in name}
    assert len(in_float) == 6
    assert {kind for _, kind in filters.values()} == {"i8"}


def test_bfloat16_is_for_what_is_between_the_first_and_the_last_layers(exported: Path) -> None:
    import openvino

    path, hint = exported / "openvino-bf16" / "model.xml", {"INFERENCE_PRECISION_HINT": "bf16"}
    compiled = openvino.Core().compile_model(str(path), "CPU", hint)
    if compiled.get_property("INFERENCE_PRECISION_HINT").to_string() != "bf16":
        pytest.skip("this processor computes everything in float32")
    kinds = {}
    for operation in compiled.get_runtime_model().get_ordered_ops():
        told = operation.get_rt_info()
        if str(told["layerType"].value) in ("Convolution", "Pooling"):
            kinds[operation.get_friendly_name().split("/")[1]] = str(told["primitiveType"].value).split("_")[-1]
    in_float = {name for name, kind in kinds.items() if kind == "f32"}
    heads = {f"{kind}_head{number}" for kind in ("box", "class") for number in range(1, 7)}
    assert in_float == {"conv1", "pool", *heads}
    assert {*kinds.values()} == {"f32", "bf16"}


def test_layers_that_cost_too_much_get_their_precision_back(
    narrow_network: Any, noise_images: list[bytes], tmp_path: Path
) -> None:
    network = DetectorExport(narrow_network, CATEGORIES)
    expected = run_exported(NetworkModel(network), noise_images)

    def measure(model: ExportedModel, places: Sequence[int]) -> float:
        found = run_exported(model, [noise_images[place] for place in places])
        return 1 - float(np.abs(found["scores"] - expected["scores"][[*places]]).mean())

    scores = []
    for name, most_lost in (("all", None), ("restored", 1e-4)):
        (tmp_path / name).mkdir()
        bound = None if most_lost is None else AccuracyBound(measure, most_lost, 3, noise_images.__getitem__)
        restored = write_openvino(network, tmp_path / name, "int8", noise_images, bound)
        scores.append(measure(open_exported(tmp_path / name, "openvino", "int8", network.prepare_resized), range(3)))
        assert bool(restored) == (bound is not None)
    assert scores[0] < scores[1] <= 1
    assert 0 < len(restored) <= 8 * 3  # groups, each of which shares a quantizer
    assert not [name for name in restored if "box_head" in name]
    filters = read_filters(tmp_path / "restored")
    assert {filters[name] for name in restored if name in filters} == {(False, "f16")}


def test_what_the_processor_does_not_compute_is_not_evaluated(run: Path) -> None:
    """OpenVINO takes the hint of bfloat16 everywhere, and computes in float32 where the processor has none."""
    import openvino

    manifests = {one["kind"]: one for one in read_manifests(run).values()}
    path = run / "export" / "openvino-bf16" / "model.xml"
    hint = {"INFERENCE_PRECISION_HINT": "bf16"}
    computed = openvino.Core().compile_model(str(path), "CPU", hint).get_property("INFERENCE_PRECISION_HINT")
    has_bfloat16 = computed.to_string() == "bf16"
    assert ("evaluation" in manifests["openvino-bf16"]) == has_bfloat16
    assert ("not_evaluated" in manifests["openvino-bf16"]) != has_bfloat16
    table = tabulate([*manifests.values()])
    assert table is not None
    rows = {row[0]: row for row in table.rows}
    assert ("-" in rows["openvino-bf16"][3:7]) != has_bfloat16
    assert table.note.split()[2:8] == ["1", "on", "5", "of", "5", "val"]


def test_threads_reach_openvino(exported: Path) -> None:
    for threads in (1, 2):
        model: Any = open_exported(exported / "openvino", "openvino", "fp32", bytes, threads)
        assert model._compiled[0].get_property("INFERENCE_NUM_THREADS") == model.threads == threads


def test_batches_side_by_side_are_those_alone(exported: Path) -> None:
    alone = open_exported(exported / "openvino", "openvino", "fp32", bytes, 2)
    both: Any = open_exported(exported / "openvino", "openvino", "fp32", bytes, 2, 4)
    assert (alone.side_by_side, both.side_by_side) == (1, both._compiled[4].get_property("NUM_STREAMS"))
    generator = np.random.default_rng(0)
    size = json.loads((exported / "openvino" / "export.json").read_text())["image_size"]
    images = generator.uniform(0, 255, (19, size, size, 3)).astype(np.float32)
    batches = np.split(images, [4, 8, 12, 16])  # the last one is smaller
    with ThreadPoolExecutor(4) as executor:  # more than it computes at once, which wait
        for batch, found in zip(batches, executor.map(both.compute, batches), strict=True):
            for name, values in alone.compute(batch).items():
                np.testing.assert_allclose(found[name], values, atol=1e-4)
                assert len(found[name]) == len(batch)
    assert [*both._compiled] == [4]
    np.testing.assert_allclose(both.compute(images[:5])["scores"], alone.compute(images[:5])["scores"], atol=1e-4)
    assert [*both._compiled] == [4, 0]  # one of any size for what is larger than was announced


def test_conversions_are_not_reported(exported: Path) -> None:
    assert exported.is_dir()
    openvino_telemetry = importlib.import_module("openvino_telemetry")
    assert not openvino_telemetry.Telemetry().consent  # of the one that the conversion has made


def test_one_thread_computes_nothing_side_by_side(exported: Path) -> None:
    model: Any = open_exported(exported / "openvino", "openvino", "fp32", bytes, 1, 4)
    assert (model.side_by_side, [*model._compiled]) == (1, [0])


def test_sizes_that_come_again_are_compiled_for_and_change_no_detections(exported: Path) -> None:
    model: Any = open_exported(exported / "openvino", "openvino", "fp32", bytes, 2)
    image_size = json.loads((exported / "openvino" / "export.json").read_text())["image_size"]
    images = np.random.default_rng(0).uniform(0, 255, (5, image_size, image_size, 3)).astype(np.float32)
    first = model.compute(images)
    assert [*model._compiled] == [0]
    for size in (5, 1, 2, 1, 2, 1, 1, 2, 2, 3, 3, 4, 4):  # more sizes than it keeps models of
        found = model.compute(images[:size])
        for name, values in first.items():
            np.testing.assert_allclose(found[name], values[:size], atol=1e-4)
    assert [*model._compiled] == [0, 5, 1, 2]
    with pytest.raises(RuntimeError):
        model.compute(images[:2, :9])
    np.testing.assert_array_equal(model.compute(images[:2])[name], found[name][:2])


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


@pytest.fixture(scope="module")
def run(
    narrow_network: Any,
    noise_images: list[bytes],
    records: Path,
    timed_images: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Make a run with exports of a network that detects, under the name of a checkpoint that costs nothing to train."""
    del timed_images
    run, source = tmp_path_factory.mktemp("exports") / "run", RecordSource(records, "val")
    command = [sys.executable, str(SMALL_PROGRAM), "--model_dir", str(run), "--data_dir", str(records)]
    command += ["--steps", "1", "--batch_size", "2", "--no_evaluate"]
    subprocess.run(command, check=True, capture_output=True)
    sha256 = load_checkpoint(find_checkpoints(run, "newest")[0]).sha256
    evaluator = DetectionEvaluator(source, InputOptions(1), RunFolder(run), source.categories, SingleProcess())
    where: dict[str, Any] = {"step": 1, "architecture": SSDArchitecture("resnet18"), "pool_padding": "same"}
    request = ExportRequest(("fp32", "bf16"), evaluator, max_drop=1, checkpoint=sha256)
    formats: Any = ("openvino", "onnx", "tflite")
    run_export(narrow_network, source.categories, noise_images, run / "export", formats, **where, request=request)
    for path in (run / "export").glob("*/export.json"):  # so that `auto` takes one in fp32, whatever else runs here
        manifest = json.loads(path.read_text())
        if "speed" in manifest:
            manifest["speed"]["of_network"] = 0
            manifest["speed"]["images_per_second"]["1"] *= manifest["precision"] == "fp32"
        path.write_text(json.dumps(manifest))
    return run


@pytest.fixture(scope="module")
def photos(noise_images: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write images of noise, for equal scores of flat images are suppressed in any order."""
    folder = tmp_path_factory.mktemp("photos")
    for number, encoded in enumerate(noise_images):
        (folder / f"{number}.png").write_bytes(encoded)
    return folder


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ssd_train; the last line of its errors tells whether TensorFlow was imported."""
    command = [sys.executable, "-c", LOADED, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime", "litert", "auto"])
def test_runtimes_detect_what_the_network_detects_and_import_no_tensorflow(
    run: Path, photos: Path, narrow_network: Any, tmp_path: Path, runtime: Any
) -> None:
    expected = Detector(narrow_network, ["red", "blue"]).predict(photos, score_threshold=0.05)
    predict = ("--mode", "predict", "--model_dir", run, "--inference", photos, "--save", "json", "--runtime", runtime)
    done = start(*predict, "--output_dir", tmp_path)
    assert done.stderr.splitlines()[-1] == "False"
    found = json.loads((tmp_path / "detections.json").read_text())
    loaded = Detector.load(run, runtime=runtime).predict(photos, score_threshold=0.05)
    for image_id, (one, other) in enumerate(zip(expected, loaded, strict=True), 1):
        agreement = compare_detections(
            *(DetectionArrays(each.boxes_yxyx[None], each.labels[None], each.scores[None]) for each in (one, other))
        )
        assert agreement.is_close
        assert agreement.compared > 10
        scores = [row["score"] for row in found if row["image_id"] == image_id]
        np.testing.assert_allclose(sorted(scores), sorted(other.scores), atol=1e-5)


@pytest.mark.parametrize(("runtime", "kind"), [("openvino", "openvino"), ("onnxruntime", "onnx"), ("litert", "tflite")])
def test_an_export_is_evaluated_without_tensorflow_as_it_was_when_it_was_exported(
    run: Path, records: Path, runtime: str, kind: str
) -> None:
    done = start("--mode", "eval", "--model_dir", run, "--data_dir", records, "--runtime", runtime)
    assert done.stderr.splitlines()[-1] == "False"
    scores = json.loads((run / "evaluation.json").read_text())
    manifest = json.loads((run / "export" / kind / "export.json").read_text())
    assert (scores["export"], scores["step"], scores["split"]) == (kind, 1, "val")
    assert scores["figures"]["AP"] == pytest.approx(manifest["evaluation"]["AP"], abs=1e-3)
    assert (run / "report.html").is_file()


def test_a_changed_file_is_named(run: Path, photos: Path, tmp_path: Path, ssd_train: Callable[..., Any]) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(run, copied)
    path = copied / "export" / "openvino" / "model.bin"
    path.write_bytes(b"other")
    failed = ssd_train("--mode", "predict", "--model_dir", copied, "--inference", photos, "--runtime", "openvino")
    assert (failed.status, failed.error.path) == (65, str(path))
