from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from gaudi_apps.classification.classifier import Classifier
from gaudi_apps.classification.evaluator import (
    AccuracyEvaluator,
    Predictions,
    analyse,
    as_json,
    draw_report,
    draw_worst,
    print_figures,
)
from gaudi_apps.inference.evaluator import pack_arrays, unpack_arrays
from gaudi_apps.training.run_dir import RunFolder
from gaudi_datasets.classification.sources import open_split
from gaudi_datasets.program import make_console
from gaudi_datasets.sampling import InputOptions
from gaudi_distributed import SingleProcess

NAMES = ("blue", "green", "red")


@pytest.fixture(scope="module")
def network() -> Any:
    """Knows the colours by their mean, but takes green for red."""
    from gaudi_ops.tf.keras_api import keras

    images = keras.Input([32, 32, 3])
    means = keras.layers.GlobalAveragePooling2D()(images)
    kernel = np.array([[0, 0, 1], [0, -0.01, 1], [1, 0, 0]], np.float32) / 10
    dense = keras.layers.Dense(3, use_bias=False, weights=[kernel])
    return keras.Model(images, dense(means))


def open_evaluator(folders: Path, batch_size: int, num_images: int | None = None, **ranks: Any) -> AccuracyEvaluator:
    source, options = open_split(folders, "validation"), InputOptions(batch_size, image_size=32, **ranks)
    return AccuracyEvaluator(source, options, RunFolder(folders), NAMES, SingleProcess(), num_images=num_images)


def evaluate(network: Any, folders: Path, batch_size: int, num_images: int | None = None) -> Predictions:
    evaluator = open_evaluator(folders, batch_size, num_images)
    return evaluator.join([evaluator.evaluate(SimpleNamespace(model=network))])


@pytest.fixture(scope="module")
def predictions(network: Any, folders: Path) -> Predictions:
    return evaluate(network, folders, 4)


@pytest.mark.costly
def test_every_image_is_classified_once(network: Any, folders: Path, predictions: Predictions) -> None:
    source = open_split(folders, "validation")
    assert predictions.labels.tolist() == [source.read(index).label for index in range(9)]
    assert predictions.figures["top_1"] == pytest.approx(6 / 9)
    assert predictions.figures["top_5"] == 1
    assert predictions.classes.shape == (9, 3)
    for batch_size in (1, 9, 16):
        other = evaluate(network, folders, batch_size)
        np.testing.assert_array_equal(other.classes, predictions.classes)
    some = evaluate(network, folders, 4, num_images=5)
    assert (len(some.labels), some.images_total) == (5, 9)


@pytest.mark.costly
@pytest.mark.parametrize(("batch_size", "ranks"), [(1, 2), (2, 4), (4, 4), (16, 2)])
def test_answers_do_not_depend_on_the_number_of_ranks(
    network: Any, folders: Path, predictions: Predictions, batch_size: int, ranks: int
) -> None:
    evaluators = [open_evaluator(folders, batch_size, rank=rank, size=ranks) for rank in range(ranks)]
    parts = [evaluator.evaluate(SimpleNamespace(model=network)) for evaluator in evaluators]
    assert sum(len(part["labels"]) for part in parts) == 9
    joined = evaluators[0].join([unpack_arrays(pack_arrays(part)) for part in parts])
    assert joined.labels.tolist() == predictions.labels.tolist()
    np.testing.assert_array_equal(joined.classes, predictions.classes)
    np.testing.assert_allclose(joined.losses, predictions.losses, rtol=1e-5)
    assert joined.images_total == 9


def test_figures_of_each_class(predictions: Predictions) -> None:
    assert predictions.confusion(3).tolist() == [[3, 0, 0], [0, 0, 3], [0, 0, 3]]
    document = as_json(predictions, NAMES)
    assert [row["accuracy"] for row in document["classes"]] == [1, 0, 1]
    assert document["classes"][1]["taken_for"] == {"red": 3}
    text = io.StringIO()
    print_figures(predictions, NAMES, make_console(file=text, width=100))
    assert "9/9 images: top-1 0.6667, top-5 1.0000" in text.getvalue()
    assert text.getvalue().index("green") < text.getvalue().index("blue")  # the worst first


def test_the_analysis_counts_answers_and_those_that_are_right(predictions: Predictions) -> None:
    analysis = analyse(predictions, NAMES)
    scores = predictions.probabilities[:, 0]
    for place in (0, 30, 50, 90, 100):
        reached = scores >= place / 100 - 1e-7
        assert analysis["answered"][place] == reached.sum()
        assert analysis["right"][place] == (reached & predictions.are_right).sum()
    assert analysis["confusion"]["matrix"] == predictions.confusion(3).tolist()
    assert (analysis["confusion"]["names"], analysis["confusion"]["background"]) == (list(NAMES), False)
    bins = analysis["calibration"]["bins"]
    assert sum(one["count"] for one in bins) == 9
    assert sum(one["count"] * one["right"] for one in bins) == pytest.approx(6)
    assert sum(one["count"] * one["score"] for one in bins) == pytest.approx(scores.sum(), rel=1e-6)
    gaps = sum(one["count"] * abs(one["score"] - one["right"]) for one in bins)
    assert analysis["calibration"]["ece"] == pytest.approx(gaps / 9)


def test_ties_go_to_the_lower_label_and_losses_are_cross_entropy() -> None:
    from gaudi_ops.tf.keras_api import keras

    images = keras.Input([32, 32, 3])
    flat = keras.Model(images, keras.layers.Dense(8, kernel_initializer="zeros")(images[:, 0, 0]))
    probabilities, classes, losses = Classifier(flat).answer(np.zeros((2, 32, 32, 3), np.float32), np.array([3, 7]))
    assert classes.tolist() == [[0, 1, 2, 3, 4]] * 2
    np.testing.assert_allclose(losses, np.log(8), rtol=1e-6)
    figures = Predictions(np.array([3, 7], np.int32), probabilities, classes, losses, 2).figures
    assert (figures["top_1"], figures["top_5"]) == (0, 0.5)


def test_the_most_confident_mistakes_come_first() -> None:
    classes = np.array([[0], [1], [0], [1]], np.int32)
    probabilities = np.array([[0.5], [0.6], [0.9], [0.7]], np.float32)
    labels = np.array([1, 0, 1, 1], np.int32)
    predictions = Predictions(labels, probabilities, classes, np.zeros(4, np.float32), 4)
    assert predictions.find_mistakes(2).tolist() == [2, 1]


@pytest.mark.costly
def test_names_of_classes_are_no_markup(folders: Path, predictions: Predictions, tmp_path: Path) -> None:
    names = ["dog [brown]", "$1_$5", "$5-$10"]
    text = io.StringIO()
    print_figures(predictions, names, make_console(file=text))
    assert all(name in text.getvalue() for name in names)
    named: Any = SimpleNamespace(class_names=names, read=open_split(folders, "validation").read)
    assert all(path.exists() for path in draw_report(tmp_path, named, predictions))


@pytest.mark.costly
def test_images_are_drawn_and_those_of_before_go(folders: Path, predictions: Predictions, tmp_path: Path) -> None:
    source = open_split(folders, "validation")
    (tmp_path / "mistake-01-image-99.png").touch()
    paths = draw_report(tmp_path, source, predictions)
    assert [path.name[:10] for path in paths] == ["class_accu", "confusion_", *(f"mistake-{n:02}" for n in (1, 2, 3))]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    worst = draw_worst(tmp_path / "small", source, predictions)
    assert [(row["truth"], row["taken_for"]) for row in worst] == [("green", "red")] * 3
    assert [tmp_path / row["image"] for row in worst] == sorted((tmp_path / "small").iterdir())
    assert all(cv2.imread(str(path)).shape[0] > 100 for path in paths)
    examples = [source.read(index) for index in range(9)]
    greens = {Path(example.file_name).stem for example in examples if example.label == 1}
    assert {path.stem.split("-", 2)[2] for path in paths[2:]} == greens
