"""The detector in MXNet against the one in TensorFlow: the same weights give the same outputs, losses and figures."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

import gaudi_ops.tf
from gaudi_apps import ssd_train
from gaudi_apps.detection.detections import make_category_config, to_records
from gaudi_apps.detection.detector import Detector as KerasDetector
from gaudi_apps.detection.evaluator import Detection
from gaudi_apps.inference.exported_models import open_exported
from gaudi_apps.mxnet.losses import SSDLoss
from gaudi_apps.mxnet.task import MOMENTUM_NAME, Detector
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_datasets.detection.batches import eval_batches, train_batches
from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.scenes import make_scenes
from gaudi_datasets.detection.scoring import score_detections
from gaudi_datasets.detection.sources import CocoSource, ground_truth
from gaudi_datasets.sampling import PADDING_ID, InputOptions
from gaudi_distributed import Precision
from gaudi_models import architectures, resnet
from gaudi_models.mxnet import ssd as mxnet_ssd
from gaudi_models.mxnet.ssd import SSD, build_ssd
from gaudi_models.mxnet.weights import assign_weights, name_parameters, read_tensors, write_weights
from gaudi_models.padding import SSD_PADDINGS, PoolPadding
from gaudi_models.ssd import build_ssd as build_keras_ssd
from gaudi_models.weights import WeightsFile, WeightsMetadata, read_weights
from gaudi_models.weights import assign_weights as assign_keras_weights
from gaudi_models.weights import write_weights as write_keras_weights

FOLDER = Path(os.environ.get("REAL_DATA", ""))
REAL = (
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get("REAL_DATA"), reason="REAL_DATA is unset; it must name the folder of real data"
    ),
)
BATCH = 4
# As many images as show that detections are the same, where there are more.
SEVERAL = 16

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Pair:
    """One detector in both frameworks, the depth of its backbone, and images to train on and to find things in."""

    net: SSD
    model: Any
    depth: int
    train: CocoSource
    val: CocoSource


def open_split(folder: Path, split: str) -> CocoSource:
    annotations = read_coco(folder / "annotations" / f"instances_{split}.json")
    return CocoSource(annotations, folder / split, keep_empty=split.startswith("val"))


@pytest.fixture(scope="module", params=["scenes", pytest.param("photographs", marks=REAL)])
def origin(request: pytest.FixtureRequest) -> str:
    """Name where the images are from."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def sources(origin: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CocoSource]:
    if origin == "photographs":
        return {split: open_split(FOLDER / "coco_ccby", f"{split}2017") for split in ("train", "val")}
    folder = make_scenes(tmp_path_factory.mktemp("data") / "scenes", train=BATCH, val=BATCH)
    return {split: open_split(folder, split) for split in ("train", "val")}


@pytest.fixture(scope="module", params=["same", "symmetric"])
def pair(
    request: pytest.FixtureRequest,
    origin: str,
    sources: dict[str, CocoSource],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Weights that go from TensorFlow to MXNet with TensorFlow's padding, and the other way with MXNet's.

    The program's own backbone is compared on scenes; what photographs add does not depend on its depth. As long as a
    narrow one is there, all networks that are built have a quarter of the channels in all layers.
    """
    width, _, padding = request.param.rpartition("-")
    pool_padding: PoolPadding = padding
    with pytest.MonkeyPatch.context() as patch:
        if width == "narrow":
            for module in (resnet, mxnet_ssd):
                patch.setattr(module, "STEM_FILTERS", 16)
                patch.setattr(module, "STAGE_FILTERS", (16, 32, 64, 128))
            levels = [(inner // 4, outer // 4, *rest) for inner, outer, *rest in architectures.SSD_EXTRA_LEVELS]
            for module in (architectures, mxnet_ssd):
                patch.setattr(module, "SSD_EXTRA_LEVELS", tuple(levels))
        yield make_pair(pool_padding, origin, sources, tmp_path_factory)


def make_pair(
    pool_padding: PoolPadding,
    origin: str,
    sources: dict[str, CocoSource],
    tmp_path_factory: pytest.TempPathFactory,
) -> Pair:
    """Build both networks with the same weights; see `pair`."""
    depth = 34 if origin == "scenes" else 18
    classes = [{"name": category.name} for category in sources["val"].categories]
    net, model = build(len(classes) + 1, pool_padding, depth)
    drawn = draw_weights(net, next(eval_batches(sources["val"], InputOptions(BATCH)))["images"])
    path = tmp_path_factory.mktemp("weights") / "ssd.safetensors"
    metadata = WeightsMetadata(SSD_PADDINGS[pool_padding], classes, 300)
    if pool_padding == "same":
        assign_keras_weights(model, drawn)
        write_keras_weights(model, path, metadata=metadata)
        report = assign_weights(net, read_weights(path))
    else:
        assign_weights(net, drawn)
        write_weights(net, path, metadata=metadata)
        report = assign_keras_weights(model, read_weights(path))
    assert (len(report.loaded), report.initial, report.skipped) == (len(drawn.tensors), (), {})
    return Pair(net, model, depth, **sources)


def build(num_classes: int, pool_padding: PoolPadding, depth: int) -> tuple[SSD, Any]:
    net = build_ssd(num_classes, depth=depth, pool_padding=pool_padding)
    net.initialize()
    net.hybridize(static_alloc=True, static_shape=True)
    return net, build_keras_ssd(num_classes, depth=depth, pool_padding=pool_padding)


def draw_weights(net: SSD, images: Floats) -> WeightsFile:
    """Weights of a network that finds things in images like these, and is more or less sure of them."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, values in read_tensors(net).items():
        if name.endswith("kernel"):
            drawn = rng.normal(0, np.sqrt(1.5 / np.prod(values.shape[:3])), values.shape)
        elif name.endswith(("gamma", "moving_variance")):
            drawn = rng.uniform(0.5, 1, values.shape)
        else:
            drawn = rng.normal(0, 0.1, values.shape)
        tensors[name] = drawn.astype(np.float32)
    assign_weights(net, WeightsFile("drawn", tensors, net.padding, {}))
    logits, offsets = (output.asnumpy() for output in net(mx.nd.array(images)))
    for name, values in tensors.items():
        if name.startswith("class_head"):
            values *= 2 / logits.std()
            if name.endswith("bias"):
                values.reshape(-1, logits.shape[-1])[:, 0] += 8  # background, nearly everywhere
        elif name.startswith("box_head"):
            values /= offsets.std()
    return WeightsFile("drawn", tensors, net.padding, {})


def put_channels_last(images: Floats) -> Floats:
    return images.transpose(0, 2, 3, 1)


@pytest.mark.slow
def test_outputs_are_the_same(pair: Pair) -> None:
    images = next(eval_batches(pair.val, InputOptions(BATCH)))["images"]
    theirs = pair.model(put_channels_last(images), training=False)
    for ours, expected in zip(pair.net(mx.nd.array(images)), theirs, strict=True):
        assert np.std(expected) > 0.5
        np.testing.assert_allclose(ours.asnumpy(), expected, atol=1e-4)


@pytest.mark.slow
def test_losses_and_gradients_are_the_same(pair: Pair) -> None:
    """Of a step of training, where batches are normalised by their own statistics."""
    batch = next(train_batches(pair.train, InputOptions(BATCH)))
    arrays = {name: mx.nd.array(batch[name]) for name in ("images", "classes", "offsets")}
    before = WeightsFile("before", read_tensors(pair.net), pair.net.padding, {})
    with mx.autograd.record():
        logits, offsets = pair.net(arrays["images"])
    losses, by_outputs = SSDLoss()(logits, offsets, arrays["classes"], arrays["offsets"], batch["num_matched"])
    mx.autograd.backward([logits, offsets], by_outputs)
    with tf.GradientTape() as tape:
        logits, offsets = pair.model(put_channels_last(batch["images"]), training=True)
        expected = gaudi_ops.tf.ssd_loss(logits, offsets, batch["classes"], batch["offsets"], batch["num_matched"])
    variables = pair.model.trainable_variables
    gradients = dict(zip((each.name for each in variables), tape.gradient(expected[0], variables), strict=True))
    assign_weights(pair.net, before)  # the moving statistics
    assign_keras_weights(pair.model, before)

    assert float(expected[0]) > 1
    np.testing.assert_allclose([loss.asscalar() for loss in losses], expected, rtol=1e-5)
    trained = {n: each for n, each in name_parameters(pair.net).items() if each.grad_req != "null"}
    assert {f"{name}:0" for name in trained} == gradients.keys()
    for name, parameter in trained.items():
        ours, theirs = parameter.grad().asnumpy(), gradients[f"{name}:0"].numpy()
        ours = ours.transpose(2, 3, 1, 0) if ours.ndim == 4 else ours
        # Units that are about zero are on in one of the two and off in the other, and add up from layer to layer.
        assert np.linalg.norm(ours - theirs) <= 5e-2 * np.linalg.norm(theirs), name


@pytest.mark.slow
def test_detections_and_figures_are_the_same(pair: Pair) -> None:
    """Against a truth that is near to some of the detections, so that there are figures of all kinds."""
    ours, theirs = find_both(pair)
    truth = several_of(pair.val)
    assert len(theirs) > 100 * len(truth["images"])
    assert_same_detections(ours, theirs)
    truth["annotations"] = move_boxes(theirs[::2])
    assert 0.1 < assert_same_figures(truth, ours, theirs) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("origin", "pair"),
    # Each padding, and people's photographs, of 80 classes, with one of them.
    [("scenes", "narrow-same"), ("scenes", "narrow-symmetric"), pytest.param("photographs", "same", marks=REAL)],
    indirect=True,
)
def test_a_checkpoint_of_mxnet_is_exported_by_ssd_train(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the run goes to ssd_train as it is, and ONNX Runtime finds what MXNet finds."""
    (pool_padding,) = [name for name, padding in SSD_PADDINGS.items() if padding == pair.net.padding]
    model_config = {**make_category_config(pair.val.categories), "pool_padding": pool_padding}
    if pair.depth != 34:  # which ssd_mxnet_train trains alone, and does not name
        model_config["model"] = f"ssd_resnet{pair.depth}"
    tensors = read_tensors(pair.net)
    tensors |= {f"{MOMENTUM_NAME}{name}": np.zeros_like(values) for name, values in tensors.items()}
    CheckpointFolder(tmp_path / "run" / "checkpoints").save(7, tensors, model_config)
    files = [tmp_path / str(place) for place in range(BATCH)]
    for place, file in enumerate(files):
        file.write_bytes(pair.val.read(place).encoded)
    # In this process, whose TensorFlow has started; the type is the program's own.
    started = Precision("bf16", "mixed_bfloat16")
    monkeypatch.setattr("gaudi_apps.runtime.tensorflow.start_tensorflow", lambda settings: started)
    flags = ["--mode", "export", "--export_format", "onnx", "--model_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        ssd_train.main([*flags, "--inference", *map(str, files)])
    assert end.value.code == 0
    folder = tmp_path / "run" / "export" / "onnx"
    assert json.loads((folder / "export.json").read_text())["step"] == 7
    batch = next(eval_batches(pair.val, InputOptions(BATCH)))
    pixels = (put_channels_last(batch["images"]) * STDDEV_RGB + MEAN_RGB) * 255
    found = open_exported(folder, "onnx", "fp32", bytes).compute([*pixels.astype(np.float32)])
    category_ids = np.array([0, *(category.id for category in pair.val.categories)])
    ours = list_detections(Detector(pair.net, mx.cpu()).detect(batch["images"]), batch, category_ids)
    theirs = list_detections((found["boxes_yxyx"], found["labels"], found["scores"]), batch, category_ids)
    assert_same_detections([*ours], [*theirs])


@pytest.mark.parametrize("origin", [pytest.param("photographs", marks=REAL)], indirect=True)
def test_figures_of_what_was_trained_are_the_same(trained_on_photographs: Any, sources: dict[str, CocoSource]) -> None:
    """The checkpoint of ssd_train, read as it is, and the annotations of people."""
    weights = read_weights(CheckpointFolder(trained_on_photographs.model_dir / "checkpoints").path(4))
    net, model = build(81, "same", 18)
    for report in (assign_weights(net, weights), assign_keras_weights(model, weights)):
        assert report.initial == ()
    ours, theirs = find_both(Pair(net, model, 18, **sources))
    assert_same_detections(ours, theirs)
    assert_same_figures(several_of(sources["val"]), ours, theirs)


def several_of(source: CocoSource) -> dict[str, Any]:
    """Return the truth of the first images."""
    truth = ground_truth(source)
    truth["images"] = truth["images"][:SEVERAL]
    shown = {image["id"] for image in truth["images"]}
    return truth | {"annotations": [each for each in truth["annotations"] if each["image_id"] in shown]}


def find_both(pair: Pair) -> tuple[list[Detection], list[Detection]]:
    """Return the detections of MXNet and TensorFlow in the first images."""
    category_ids = np.array([0, *(category.id for category in pair.val.categories)])
    detector, keras_detector = Detector(pair.net, mx.cpu()), KerasDetector(pair.model)
    ours: list[Detection] = []
    theirs: list[Detection] = []
    for batch in eval_batches(pair.val, InputOptions(BATCH), num_images=SEVERAL):
        ours += list_detections(detector.detect(batch["images"]), batch, category_ids)
        theirs += list_detections(keras_detector.detect(put_channels_last(batch["images"])), batch, category_ids)
    return ours, theirs


def list_detections(found: Any, batch: Any, category_ids: npt.NDArray[np.int64]) -> Iterator[Detection]:
    for image_id, size, boxes, labels, scores in zip(batch["image_ids"].tolist(), batch["sizes"], *found, strict=True):
        if image_id != PADDING_ID:
            kept = labels > 0
            yield from to_records(image_id, size, boxes[kept], category_ids[labels[kept]], scores[kept])


def assert_same_detections(ours: list[Detection], theirs: list[Detection]) -> None:
    """All but a few in a thousand, where rounding decides whether two boxes overlap by more than the half."""
    left = [(each, corners_and_score(each)) for each in theirs]
    missing = 0
    by_kind: dict[tuple[int, int], list[Floats]] = {}
    for each, numbers in left:
        by_kind.setdefault((each["image_id"], each["category_id"]), []).append(numbers)
    for each in ours:
        same = by_kind.get((each["image_id"], each["category_id"]), [])
        place = next((n for n, one in enumerate(same) if np.allclose(one, corners_and_score(each), atol=1e-2)), None)
        if place is None:
            missing += 1
        else:
            del same[place]
    assert abs(len(ours) - len(theirs)) <= 2e-3 * len(theirs)
    assert missing <= 2e-3 * len(theirs)


def corners_and_score(detection: Detection) -> Floats:
    """Scale the box to pixels and the score to hundreds, so that one tolerance is 1e-2 pixels and 1e-4."""
    return np.array([*detection["bbox"], 100 * detection["score"]], np.float32)


def move_boxes(detections: list[Detection]) -> list[dict[str, Any]]:
    """Annotations that overlap detections by more or less."""
    rng = np.random.default_rng(0)
    annotations = []
    for number, each in enumerate(detections, 1):
        left, top, width, height = each["bbox"]
        width, height = width * rng.uniform(0.6, 1), height * rng.uniform(0.8, 1)
        box = {"bbox": [left, top, width, height], "area": width * height}
        names = {"id": number, "image_id": each["image_id"], "category_id": each["category_id"], "iscrowd": 0}
        annotations.append({**names, **box})
    return annotations


def assert_same_figures(truth: dict[str, Any], ours: list[Detection], theirs: list[Detection]) -> float:
    """Fail unless all twelve are; return the first."""
    image_ids = [image["id"] for image in truth["images"]]
    figures, expected = (score_detections(truth, found, image_ids=image_ids).figures for found in (ours, theirs))
    known = {name: value for name, value in expected.items() if value is not None}
    assert figures == pytest.approx(expected, abs=1e-3)
    return known["AP"]
