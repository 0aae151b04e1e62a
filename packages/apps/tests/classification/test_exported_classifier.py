"""Classifiers in all formats that compute, and in 8 bits; those for OpenVINO in the session `deploy` of nox."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from gaudi_apps.classification.classifier import Classifier
from gaudi_apps.classification.evaluator import AccuracyEvaluator
from gaudi_apps.classification.flags import PROBABILITIES
from gaudi_apps.classification.task import ClassifierExport, run_export
from gaudi_apps.cli.flags import ExportFormat
from gaudi_apps.inference.converters import run_exported, to_float32
from gaudi_apps.inference.exported_models import FORMATS as FORMATS_OF_RUNTIMES
from gaudi_apps.inference.exported_models import open_exported
from gaudi_apps.inference.exporter import ExportRequest, NetworkModel
from gaudi_apps.inference.serving.models import ServedModel
from gaudi_apps.training.checkpoint import CheckpointFolder, find_checkpoints, load_checkpoint
from gaudi_apps.training.run_dir import RunFolder
from gaudi_datasets.classification.examples import ClassificationExample
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess
from gaudi_models.classifiers import build_classifier
from gaudi_ops.tf.keras_api import keras

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("timed_images")]
NAMES = ("red", "green", "blue")
CONFIG: Any = {
    "model": "resnet18",
    "padding": "same",
    "image_size": 64,
    "classes": [{"name": name} for name in NAMES],
}
in_deploy = pytest.mark.skipif("DEPLOY" not in os.environ, reason="DEPLOY is not set; nox -s deploy sets it")
FORMATS = ["onnx", "tflite", pytest.param("openvino", marks=in_deploy)]


class NoiseSource:
    """Hold images of noise, each of the class that a network finds in it."""

    name, class_names, fingerprint = "noise", NAMES, "noise"

    def __init__(self, encoded: list[bytes], labels: list[int]) -> None:
        self._examples = [
            ClassificationExample(place, one, 120, 150, label, f"{place}.png")
            for place, (one, label) in enumerate(zip(encoded, labels, strict=True), 1)
        ]

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, index: int) -> ClassificationExample:
        return self._examples[index]


@pytest.fixture(scope="module")
def images() -> list[bytes]:
    """Three encoded images of soft blobs, red, green and blue, as smooth as photos are."""
    shares = np.eye(3)[:, ::-1] * 0.8 + 0.2  # OpenCV writes blue, green, red
    return [cv2.imencode(".png", draw_blobs(seed) * share)[1].tobytes() for seed, share in enumerate(shares)]


def draw_blobs(seed: int) -> Any:
    """Draw blobs of random colours, uint8 [120, 150, 3]."""
    return cv2.resize(np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8), (150, 120))


@pytest.fixture(scope="module")
def classifier(images: list[bytes]) -> Any:
    keras.utils.set_random_seed(2)
    with pytest.MonkeyPatch.context() as patch:  # a quarter of the channels, for it is converted many times
        patch.setattr("gaudi_models.resnet.STEM_FILTERS", 16)
        patch.setattr("gaudi_models.resnet.STAGE_FILTERS", (16, 32, 64, 128))
        model = to_float32(build_classifier("resnet18", 3, padding="same", image_size=64))
    kernel, bias = model.variables[-2:]  # of the head: random features are large, which makes one class certain
    kernel.assign(kernel / 100)
    found = run_exported(NetworkModel(ClassifierExport(model, PROBABILITIES, CONFIG)), images)[PROBABILITIES]
    logits = np.log(found) - np.log(found).mean(axis=0)  # which differ between these images alone
    kernel.assign(kernel / logits.std())
    bias.assign(-np.log(found).mean(axis=0) / logits.std())
    return model


@pytest.fixture(scope="module")
def exported(
    request: pytest.FixtureRequest, classifier: Any, images: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Make the folder of a run, named by the format of the parameter, with exports to it in float and in 8 bits.

    The images of the evaluation are of the classes that the network finds in them.
    """
    name: ExportFormat = request.param
    run = tmp_path_factory.mktemp("exported") / name
    tensors = {variable.name.removesuffix(":0"): variable.numpy() for variable in classifier.variables}
    CheckpointFolder(run / "checkpoints").save(3, tensors, CONFIG)
    sha256 = load_checkpoint(find_checkpoints(run, "newest")[0]).sha256
    found = run_exported(NetworkModel(ClassifierExport(classifier, PROBABILITIES, CONFIG)), images)[PROBABILITIES]
    source: Any = NoiseSource(images, found.argmax(axis=1).tolist())
    evaluator = AccuracyEvaluator(source, InputOptions(1), RunFolder(run), NAMES, SingleProcess())
    asked = ExportRequest(["fp32", "int8"], evaluator, images, 0.5, sha256)
    exports = run_export(
        *(classifier, CONFIG, images, run / "export", (name,)), step=3, with_features=False, request=asked
    )
    assert [path.name for path in exports] == [name, f"{name}-int8"]
    path = run / "export" / f"{name}-int8" / "export.json"
    manifest = json.loads(path.read_text())
    manifest["speed"]["images_per_second"]["1"] = 0  # so that a runtime takes the other, whatever else runs here
    path.write_text(json.dumps(manifest))
    return run


@pytest.mark.parametrize(
    "exported", ["onnx", *(pytest.param(each, marks=in_deploy) for each in ("tflite", "openvino"))], indirect=True
)
def test_a_runtime_classifies_as_the_network_does(classifier: Any, images: list[bytes], exported: Path) -> None:
    runtime: Any = next(each for each, form in FORMATS_OF_RUNTIMES.items() if form == exported.name)
    pixels = draw_blobs(3)[:, :100]
    networks = Classifier(classifier, NAMES), Classifier.load(exported, runtime=runtime)
    expected, found = (one.predict([*images, pixels]) for one in networks)
    for one, other in zip(expected, found, strict=True):
        shares = dict(zip(other.names, other.probabilities, strict=True))
        np.testing.assert_allclose(one.probabilities, [shares[each] for each in one.names], atol=2e-3)
    served = ServedModel.load(exported, runtime=runtime, top=2, max_pixels=10**6)
    answers = [served.describe(one)["classes"] for one in served.predict([served.prepare(each) for each in images])]
    assert [[row["class"] for row in rows] for rows in answers] == [list(one.names[:2]) for one in found[:3]]


@pytest.mark.parametrize("exported", FORMATS, indirect=True)
def test_8_bits_are_checked_and_scored_as_those_of_detectors_are(
    classifier: Any, images: list[bytes], exported: Path
) -> None:
    network, name = ClassifierExport(classifier, PROBABILITIES, CONFIG), exported.name
    expected = run_exported(NetworkModel(network), images)[PROBABILITIES]
    folders = [exported / "export" / each for each in (name, f"{name}-int8")]
    manifests = [json.loads((path / "export.json").read_text()) for path in folders]
    assert manifests[1]["bytes"] < 0.3 * manifests[0]["bytes"]
    assert manifests[0]["evaluation"]["top_1"] == manifests[0]["evaluation"]["of_network"] == 1
    prepare: Any = network.prepare_onnx if name == "onnx" else network.prepare_resized
    form: Any = name
    found = run_exported(open_exported(folders[1], form, "int8", prepare), images)[PROBABILITIES]
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 0.3
    assert np.abs(found - expected).max() > 0  # they are of 8 bits
