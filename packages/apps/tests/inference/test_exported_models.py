from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.inference.exported_models import import_runtime, open_exported
from gaudi_apps.inference.media import resize_pixels
from gaudi_datasets.errors import DataError, MissingExtraError


@pytest.mark.parametrize("shape", [(480, 640), (37, 900), (300, 300), (1, 5)])
def test_images_are_resized_as_tensorflow_does(shape: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    resized = resize_pixels(pixels, 300)
    assert resized.dtype == np.float32
    np.testing.assert_allclose(resized, tf.image.resize(pixels, [300, 300]), atol=0.02)
    if shape == (300, 300):
        np.testing.assert_array_equal(resized, pixels)


def test_a_damaged_onnx_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"nothing")
    with pytest.raises(DataError) as caught:
        open_exported(tmp_path, "onnx", "fp32", bytes)
    assert caught.value.path == str(tmp_path / "model.onnx")


def test_weights_compute_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="safetensors"):
        open_exported(tmp_path, "safetensors", "fp32", bytes)


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("gaudi_apps.inference.exported_models.importlib.import_module", refuse)
    for name, extra in (("nncf", "openvino"), ("onnxruntime", "export")):
        with pytest.raises(MissingExtraError, match=rf"gaudi-apps\[{extra}\]"):
            import_runtime(name)


class Means(tf.Module):
    """Return the mean of each image, after some work."""

    @tf.function(input_signature=[tf.TensorSpec([None, 64, 64, 3], tf.float32, name="images")])
    def compute(self, images: Any) -> Any:
        return {"means": tf.reduce_mean(tf.nn.avg_pool2d(images, 9, 1, "SAME"), [1, 2, 3])}


@pytest.mark.costly
def test_threads_that_share_an_interpreter_wait_for_each_other(tmp_path: Path) -> None:
    network = Means()
    signatures = [network.compute.get_concrete_function()]
    converter = tf.lite.TFLiteConverter.from_concrete_functions(signatures, network)
    (tmp_path / "model.tflite").write_bytes(converter.convert())
    model = open_exported(tmp_path, "tflite", "fp32", bytes, threads=1)

    def use(number: int) -> list[Any]:
        images = [np.full([64, 64, 3], number, np.float32)] * number
        return [model.compute(images)["means"] for _ in range(60)]

    with ThreadPoolExecutor(2) as pool:
        for number, found in zip((3, 4), pool.map(use, (3, 4)), strict=True):
            np.testing.assert_allclose(found, np.full([60, number], number), rtol=1e-5)
