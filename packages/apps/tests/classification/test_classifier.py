from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest

import gaudi_apps
from gaudi_apps.classification.classifier import make_preprocessor
from gaudi_apps.inference.visualizer import decode_image
from gaudi_datasets.errors import DataError
from gaudi_models.classifiers import build_classifier
from gaudi_models.weights import WeightsMetadata, write_weights
from gaudi_ops.tf.keras_api import keras

NAMES = ("blue", "green", "red")


@pytest.mark.costly
def test_an_export_is_loaded_and_classifies_files_and_pixels(folders: Path, tmp_path: Path) -> None:
    keras.utils.set_random_seed(2)
    model = build_classifier("resnet18", 3, image_size=32, padding="symmetric")
    classes = [{"name": name} for name in NAMES]
    metadata = WeightsMetadata("symmetric", classes, 32, "resnet18")
    write_weights(model, tmp_path / "weights.safetensors", metadata=metadata)
    paths = sorted((folders / "validation" / "red").iterdir())
    expected = [
        gaudi_apps.Classifier(model).classify(make_preprocessor(32).from_encoded(path.read_bytes())[None])
        for path in paths
    ]
    classifier = gaudi_apps.Classifier.load(tmp_path)
    assert classifier.class_names == NAMES
    for one, (probabilities, labels) in zip(classifier.predict(paths, top=2, batch_size=2), expected, strict=True):
        np.testing.assert_array_equal(one.labels, labels[0, :2])
        np.testing.assert_allclose(one.probabilities, probabilities[0, :2], atol=1e-5)
        assert one.names == tuple(NAMES[label] for label in labels[0, :2])
    for top in (0, -1, 6, 1.5):
        with pytest.raises(ValueError, match=f"top is {top}"):
            classifier.predict(paths, top=cast("int", top))
    (of_pixels,) = classifier.predict([decode_image(paths[0].read_bytes())])
    assert of_pixels.probabilities.sum() == pytest.approx(1)


@pytest.mark.costly
def test_what_is_no_classifier_is_refused(tmp_path: Path) -> None:
    model = build_classifier("resnet18", 2, image_size=32)
    write_weights(model, tmp_path / "x", metadata=WeightsMetadata("same", [{"name": "a"}, {"name": "b"}]))
    with pytest.raises(DataError) as caught:
        gaudi_apps.Classifier.load(tmp_path / "x")
    assert caught.value.path == str(tmp_path / "x")
    with pytest.raises(DataError, match="uint8"):
        gaudi_apps.Classifier(model, "ab").predict([np.zeros([8, 8, 3], np.float32)])
