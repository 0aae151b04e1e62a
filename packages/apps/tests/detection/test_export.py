from __future__ import annotations

import copy
import hashlib
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.cli.flags import ExportFormat
from gaudi_apps.detection import detector
from gaudi_apps.detection.detector import DetectorExport, run_export
from gaudi_apps.detection.evaluator import DetectionEvaluator
from gaudi_apps.inference import exporter
from gaudi_apps.inference.converters import Agreement, ExportedNetwork, run_exported, write_tflite
from gaudi_apps.inference.exported_models import open_exported, read_manifests
from gaudi_apps.inference.exporter import (
    Export,
    ExportRequest,
    NetworkModel,
    choose_calibration,
    choose_images,
    list_kinds,
    refuse_foreign,
)
from gaudi_apps.inference.quantization import LITE_TYPES
from gaudi_apps.inference.report_page import describe_export, report_exports
from gaudi_apps.runtime.errors import ExportError
from gaudi_apps.training.run_dir import RunFolder
from gaudi_datasets.detection.coco import Category, parse_coco
from gaudi_datasets.detection.sources import CocoSource, RecordSource, ground_truth
from gaudi_datasets.errors import BadImageError, DataError, FlagError, MissingExtraError, MissingInputError, UnsafeError
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess
from gaudi_distributed.devices.machine import name_processor
from gaudi_models.architectures import SSDArchitecture
from gaudi_models.weights import read_weights
from gaudi_ops.tf.keras_api import keras

pytestmark = pytest.mark.slow

PNG = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
# With a part, unknown and critical, that Pillow passes over: 8 bytes of signature and 25 of IHDR are before it.
REFUSED = PNG[:33] + bytes(4) + b"XXXX" + zlib.crc32(b"XXXX").to_bytes(4, "big") + PNG[33:]
CATEGORIES = (Category(7, "red"), Category(9, "blue"))


def run(
    network: Any, noise_images: list[bytes], folder: Path, *formats: ExportFormat, **request: Any
) -> dict[Path, Export]:
    architecture, asked = SSDArchitecture("resnet18"), ExportRequest(**request)
    where: dict[str, Any] = {"step": 12, "architecture": architecture, "pool_padding": "same"}
    return run_export(network, CATEGORIES, noise_images, folder, formats, **where, request=asked)


@pytest.fixture(scope="module")
def small_detector(small_network: Callable[..., Any]) -> Any:
    """Make a network that costs next to nothing, for what is the same of any; its layers are named as a detector's."""
    return small_network(3, names=("extra7_conv1", "class_head0", "box_head0"))


def test_images_that_define_no_score_pass_no_smaller_precision(
    small_detector: Any, noise_images: list[bytes], records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = RecordSource(records, "val")
    emptied = {**ground_truth(source), "annotations": []}
    monkeypatch.setattr("gaudi_apps.detection.evaluator.ground_truth", lambda _: emptied)
    opened = source, InputOptions(2), RunFolder(tmp_path), source.categories, SingleProcess()
    asked: dict[str, Any] = {"evaluator": DetectionEvaluator(*opened), "max_drop": 1.0}
    (export,) = run(small_detector, noise_images, tmp_path / "a", "saved_model", **asked).values()
    assert (export.score, bool(export.obstacle)) == (None, True)
    with pytest.raises(ExportError) as caught:
        run(small_detector, noise_images, tmp_path / "b", "tflite", precisions=("fp16",), **asked)
    assert "--max_ap_drop" in str(caught.value)
    assert not [*(tmp_path / "b").glob("tflite*")]


def test_exports_are_made_checked_and_described(detector_exports: dict[Path, Export]) -> None:
    folder = next(iter(detector_exports)).parent
    assert [*detector_exports] == [folder / name for name in ("saved_model", "tflite", "safetensors", "onnx")]
    for path, (agreement, score, reference, *_) in detector_exports.items():
        assert agreement.is_close
        assert score is None
        assert reference is None
        assert agreement.compared > 20
        assert describe_export(path, 3, agreement).startswith(f"{path}: {agreement.compared} ")
        manifest = json.loads((path / "export.json").read_text())
        assert (manifest["kind"], manifest["step"], manifest["pool_padding"]) == (path.name, 12, "same")
        assert (manifest["precision"], manifest["checkpoint"]) == ("fp32", "ab12")
        assert manifest["check"]["pictures"] == 3
        assert [one["name"] for one in manifest["classes"]] == ["red", "blue"]
        files = {file for file in path.rglob("*") if file.is_file() and file.name != "export.json"}
        assert {path / name for name in manifest["sha256"]} == files
        assert manifest["bytes"] == sum(file.stat().st_size for file in files)
        for name, sha256 in manifest["sha256"].items():
            assert hashlib.sha256((path / name).read_bytes()).hexdigest() == sha256
    assert (folder / "tflite" / "model.tflite").is_file()
    assert (folder / "onnx" / "model.onnx").is_file()
    weights = read_weights(folder / "safetensors" / "weights.safetensors")
    assert weights.pool_padding == "same"
    assert weights.metadata is not None
    assert [one["name"] for one in weights.metadata.classes] == ["red", "blue"]
    assert sorted(path.name for path in folder.iterdir()) == ["onnx", "safetensors", "saved_model", "tflite"]


def test_the_network_is_compared_in_whole_float32(
    small_detector: Any, noise_images: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortens, find_boxes = [], detector.find_boxes

    def note(*given: Any) -> Any:
        shortens.append(tf.config.experimental.tensor_float_32_execution_enabled())
        return find_boxes(*given)

    monkeypatch.setattr(detector, "find_boxes", note)
    run(small_detector, noise_images, tmp_path, "safetensors")
    assert shortens
    assert not any(shortens)
    assert tf.config.experimental.tensor_float_32_execution_enabled()


def test_an_earlier_export_is_replaced_and_other_files_are_not(
    small_detector: Any, noise_images: list[bytes], tmp_path: Path
) -> None:
    for _ in range(2):
        run(small_detector, noise_images, tmp_path, "safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["safetensors"]
    (tmp_path / "safetensors" / "mine.txt").touch()
    (tmp_path / "tflite").mkdir()
    (tmp_path / "tflite" / "model.tflite").touch()
    (tmp_path / "onnx").touch()
    for name, file in (("safetensors", "mine.txt"), ("tflite", "model.tflite"), ("onnx", "onnx")):
        with pytest.raises(UnsafeError) as caught:
            refuse_foreign(tmp_path / name)
        assert (caught.value.path, caught.value.record) == (str(tmp_path / name), file)
    with pytest.raises(UnsafeError, match="--output_dir"):
        run(small_detector, noise_images, tmp_path, "safetensors")
    assert (tmp_path / "safetensors" / "mine.txt").exists()


@pytest.mark.parametrize("agreement", [Agreement({"difference": 2e-3}, 9), Agreement({"difference": float("nan")}, 9)])
def test_a_difference_is_an_error_and_leaves_nothing(
    small_detector: Any,
    noise_images: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agreement: Agreement,
) -> None:
    def differ(kind: exporter.ExportKind, *arguments: Any) -> Agreement:
        if kind.format != "onnx":
            return right(kind, *arguments)
        arguments[2].joinpath("model.onnx").touch()
        return agreement

    right = exporter.export_format
    monkeypatch.setattr(exporter, "export_format", differ)
    with pytest.raises(ExportError, match="onnx: differs") as caught:
        run(small_detector, noise_images, tmp_path / "new", "safetensors", "onnx")
    assert caught.value.exit_status == 70
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def evaluator(image_dir: Path, annotation_file: Path) -> DetectionEvaluator:
    """Open the evaluator of the five images, whose classes have the numbers of the exports here."""
    document = json.loads(annotation_file.read_text())
    for row, name in ((document["annotations"], "category_id"), (document["categories"], "id")):
        for one in row:
            one[name] = {1: 7, 2: 9}[one[name]]
    source = CocoSource(parse_coco(document, annotation_file), image_dir, keep_empty=True)
    return DetectionEvaluator(source, InputOptions(1), RunFolder(Path("unused")), CATEGORIES, SingleProcess())


@pytest.fixture(scope="module")
def smaller_exports(
    detector_network: Any,
    noise_images: list[bytes],
    evaluator: DetectionEvaluator,
    timed_images: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[Path, Export]:
    """Export the network in fewer bits, into a folder `export`."""
    del timed_images
    return run(
        *(detector_network, noise_images, tmp_path_factory.mktemp("smaller") / "export", "onnx", "tflite"),
        precisions=("int8", "fp16"),
        evaluator=evaluator,
        calibration=noise_images,
        calibration_seed=3,
        max_drop=0.01,
    )


def test_smaller_exports_are_scored_beside_the_network(
    detector_network: Any, smaller_exports: dict[Path, Export], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 8 bits are the network's convolutions; those that predict boxes, and all around the network, are not."""
    import onnx

    assert [path.name for path in smaller_exports] == ["onnx-int8", "tflite-int8", "tflite-fp16"]
    folder = next(iter(smaller_exports)).parent
    manifests = {path.name: json.loads((path / "export.json").read_text()) for path in smaller_exports}
    for path, export in smaller_exports.items():
        manifest = manifests[path.name]
        assert export.score is not None
        assert manifest["evaluation"]["images"] == manifest["evaluation"]["images_total"] == 5
        assert manifest["evaluation"]["AP"] == export.score.value
        speed = manifest["speed"]
        assert speed["latency_ms"]["p50"] > 0
        assert speed["processor"] == name_processor()
        assert (speed["device"], speed["network_device"], speed["included"]) == ("CPU", "CPU", [])
        assert speed["threads"] == speed["network_threads"] > 0
        assert export.agreement.compared > 20
    assert manifests["onnx-int8"]["calibration"] == {"images": 3, "seed": 3}
    assert "calibration" not in manifests["tflite-fp16"]
    full = sum(4 * int(np.prod(one.shape)) for one in detector_network.variables)
    assert manifests["onnx-int8"]["bytes"] < full / 3
    assert manifests["tflite-fp16"]["bytes"] < full / 1.9
    graph = onnx.load(str(folder / "onnx-int8" / "model.onnx")).graph
    made = {name: node.op_type for node in graph.node for name in node.output}
    weights = {node.name: made.get(node.input[1]) for node in graph.node if node.op_type == "Conv"}
    assert {name for name, kind in weights.items() if kind != "DequantizeLinear"} == {
        name for name in weights if "box_head" in name
    }
    report_exports(smaller_exports, 3)
    assert "onnx-int8" in capsys.readouterr().out
    assert [one["kind"] for one in read_manifests(folder.parent).values()] == [
        "onnx-int8",
        "tflite-fp16",
        "tflite-int8",
    ]


def test_tflite_of_8_bits_has_its_convolutions_in_them_but_for_those_of_boxes(
    detector_network: Any, smaller_exports: dict[Path, Export], noise_images: list[bytes]
) -> None:
    network = DetectorExport(detector_network, CATEGORIES)
    (folder,) = (path for path in smaller_exports if path.name == "tflite-int8")
    interpreter = tf.lite.Interpreter(model_path=str(folder / "model.tflite"))
    tensors = {one["index"]: one for one in interpreter.get_tensor_details()}
    outputs = [(one["op_name"], tensors[int(one["outputs"][0])]) for one in interpreter._get_ops_details()]
    convolutions = {one["name"]: one["dtype"] for kind, one in outputs if kind == "CONV_2D"}
    in_float = {name for name, dtype in convolutions.items() if dtype == np.float32}
    assert in_float == {name for name in convolutions if "box_head" in name}
    assert (len(in_float), len(convolutions)) == (6, 37)
    in_8_bits = {kind for kind, one in outputs if one["dtype"] == np.int8}
    # A slice takes the values that there are, of whatever type.
    assert in_8_bits <= {*LITE_TYPES, "QUANTIZE", "STRIDED_SLICE"}
    found = run_exported(open_exported(folder, "tflite", "int8", network.prepare_resized), noise_images)
    expected = run_exported(NetworkModel(network), noise_images)
    assert np.abs(found["scores"] - expected["scores"]).max() < 0.05
    full = sum(4 * int(np.prod(one.shape)) for one in detector_network.variables)
    assert (folder / "model.tflite").stat().st_size < full / 2.5


@pytest.mark.usefixtures("timed_images")
def test_an_export_that_loses_more_than_it_may_is_not_left(
    narrow_network: Any, noise_images: list[bytes], evaluator: DetectionEvaluator, tmp_path: Path
) -> None:
    """No export gains half of all AP."""
    with pytest.raises(ExportError) as caught:
        run(narrow_network, noise_images, tmp_path / "new", "tflite", evaluator=evaluator, max_drop=-0.5)
    assert caught.value.exit_status == 70
    assert "--max_ap_drop" in (caught.value.remedy or "")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_export_is_noticed(
    narrow_network: Any, noise_images: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours in the wrong order, the fault that nobody sees."""

    def write_wrong(network: ExportedNetwork, path: Path, precision: str, quantize: object) -> None:
        assert (precision, quantize) == ("fp32", None)
        wrong = copy.copy(network)
        inputs = keras.Input([300, 300, 3], name="images")
        wrong.model = keras.Model(inputs, network.model(inputs[..., ::-1]))
        write_tflite(wrong, path)

    monkeypatch.setattr(exporter, "write_tflite", write_wrong)
    with pytest.raises(ExportError, match="tflite: differs"):
        run(narrow_network, noise_images, tmp_path, "tflite")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_converter_is_told_before_anything_is_done(
    noise_images: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(wanted: str) -> None:
        raise MissingExtraError(wanted)

    monkeypatch.setattr("gaudi_apps.inference.exporter.require_onnx", refuse)
    with pytest.raises(MissingExtraError):
        run(None, noise_images, tmp_path / "new", "saved_model", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_format_has_some_of_the_precisions_or_is_refused() -> None:
    kinds = list_kinds(("saved_model", "openvino", "onnx"), ("fp32", "int8"))
    assert [str(kind) for kind in kinds] == ["saved_model", "openvino", "openvino-int8", "onnx", "onnx-int8"]
    with pytest.raises(FlagError) as caught:
        list_kinds(("openvino", "saved_model"), ("bf16",))
    assert caught.value.flag == "--export_precision"


def test_images_to_calibrate_on_are_drawn_by_the_seed(records: Path) -> None:
    source = RecordSource(records, "train")
    drawn = [choose_calibration(source, 3, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) == 3
    assert sorted(choose_calibration(source, 9, 0)) == sorted(source.read(n).encoded for n in range(5))


def test_images_to_check_on(image_dir: Path, records: Path, tmp_path: Path) -> None:
    expected = [(image_dir / f"{number}.png").read_bytes() for number in range(1, 6)]
    assert choose_images([str(image_dir)], None) == expected
    assert choose_images([f"{image_dir}/[23].png"], None) == expected[1:3]
    assert choose_images([], RecordSource(records, "val")) == expected
    with pytest.raises(FlagError, match="--inference"):
        choose_images([], None)
    for number in range(20):
        cv2.imwrite(str(tmp_path / f"{number:02}.png"), np.full((4, 4, 3), number, np.uint8))
    chosen = [int(tf.io.decode_png(one)[0, 0, 0]) for one in choose_images([str(tmp_path)], None)]
    assert chosen == [0, 2, 5, 8, 10, 13, 16, 19]
    (tmp_path / "a.mp4").touch()
    with pytest.raises(MissingInputError, match="videos only"):
        choose_images([str(tmp_path / "a.mp4")], None)
    (tmp_path / "00.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"00\.png"):
        choose_images([str(tmp_path)], None)
    (tmp_path / "00.png").write_bytes(REFUSED)
    with pytest.raises(BadImageError) as caught:
        choose_images([str(tmp_path)], None)
    assert caught.value.record == str(tmp_path / "00.png")


def test_an_image_that_only_tensorflow_refuses_is_named(records: Path) -> None:
    source = RecordSource(records, "train")
    example = replace(source.read(0), encoded=REFUSED)
    source.read = lambda index: example  # type: ignore[method-assign]
    for choose in (partial(choose_images, []), partial(choose_calibration, count=1, seed=0)):
        with pytest.raises(BadImageError) as caught:
            choose(source)
        assert str(caught.value.record).startswith(source.name)
