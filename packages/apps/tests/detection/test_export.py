from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.cli.flags import ExportFormat
from gaudi_apps.detection.detector import run_export
from gaudi_apps.inference import exporter
from gaudi_apps.inference.converters import Agreement, ExportedNetwork, write_tflite
from gaudi_apps.inference.exporter import choose_images, describe_export, refuse_foreign
from gaudi_apps.runtime.errors import ExportError
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import DataError, FlagError, MissingExtraError, MissingInputError, UnsafeError
from gaudi_models.architectures import SSDArchitecture
from gaudi_models.weights import read_weights
from gaudi_ops.tf.keras_api import keras

pytestmark = pytest.mark.slow

CATEGORIES = (Category(7, "red"), Category(9, "blue"))


def run(network: Any, noise_images: list[bytes], folder: Path, *formats: ExportFormat) -> dict[Path, Agreement]:
    network_name = SSDArchitecture("resnet18")
    return run_export(
        network, CATEGORIES, noise_images, folder, formats, step=12, architecture=network_name, pool_padding="same"
    )


def test_exports_are_made_checked_and_described(
    detector_network: Any, noise_images: list[bytes], tmp_path: Path
) -> None:
    folder = tmp_path / "new" / "export"
    agreements = run(detector_network, noise_images, folder, "saved_model", "tflite", "safetensors")
    assert [*agreements] == [folder / name for name in ("saved_model", "tflite", "safetensors")]
    for path, agreement in agreements.items():
        assert agreement.is_close
        assert agreement.compared > 20
        assert describe_export(path, 3, agreement).startswith(f"{path}: {agreement.compared} ")
        manifest = json.loads((path / "export.json").read_text())
        assert (manifest["kind"], manifest["step"], manifest["pool_padding"]) == (path.name, 12, "same")
        assert manifest["check"]["pictures"] == 3
        assert [one["name"] for one in manifest["classes"]] == ["red", "blue"]
        files = {file for file in path.rglob("*") if file.is_file() and file.name != "export.json"}
        assert {path / name for name in manifest["sha256"]} == files
        for name, sha256 in manifest["sha256"].items():
            assert hashlib.sha256((path / name).read_bytes()).hexdigest() == sha256
    assert (folder / "tflite" / "model.tflite").is_file()
    weights = read_weights(folder / "safetensors" / "weights.safetensors")
    assert weights.pool_padding == "same"
    assert weights.metadata is not None
    assert [one["name"] for one in weights.metadata.classes] == ["red", "blue"]
    assert sorted(path.name for path in folder.iterdir()) == ["safetensors", "saved_model", "tflite"]


def test_an_earlier_export_is_replaced_and_other_files_are_not(
    detector_network: Any, noise_images: list[bytes], tmp_path: Path
) -> None:
    for _ in range(2):
        run(detector_network, noise_images, tmp_path, "safetensors")
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
        run(detector_network, noise_images, tmp_path, "safetensors")
    assert (tmp_path / "safetensors" / "mine.txt").exists()


@pytest.mark.parametrize("agreement", [Agreement({"difference": 2e-3}, 9), Agreement({"difference": float("nan")}, 9)])
def test_a_difference_is_an_error_and_leaves_nothing(
    detector_network: Any,
    noise_images: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agreement: Agreement,
) -> None:
    def differ(name: ExportFormat, *arguments: Any) -> Agreement:
        if name != "onnx":
            return right(name, *arguments)
        arguments[2].joinpath("model.onnx").touch()
        return agreement

    right = exporter.export_format
    monkeypatch.setattr(exporter, "require_onnx", lambda: None)
    monkeypatch.setattr(exporter, "export_format", differ)
    with pytest.raises(ExportError, match="onnx: differs") as caught:
        run(detector_network, noise_images, tmp_path / "new", "safetensors", "onnx")
    assert caught.value.exit_status == 70
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_export_is_noticed(
    detector_network: Any, noise_images: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours in the wrong order, the fault that nobody sees."""

    def write_wrong(network: ExportedNetwork, path: Path) -> None:
        wrong = copy.copy(network)
        inputs = keras.Input([300, 300, 3], name="images")
        wrong.model = keras.Model(inputs, network.model(inputs[..., ::-1]))
        write_tflite(wrong, path)

    monkeypatch.setattr(exporter, "write_tflite", write_wrong)
    with pytest.raises(ExportError, match="tflite: differs"):
        run(detector_network, noise_images, tmp_path, "tflite")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_converter_is_told_before_anything_is_done(
    noise_images: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise MissingExtraError("onnx")

    monkeypatch.setattr("gaudi_apps.inference.exporter.require_onnx", refuse)
    with pytest.raises(MissingExtraError):
        run(None, noise_images, tmp_path / "new", "saved_model", "onnx")
    assert list(tmp_path.iterdir()) == []


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
