from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from gaudi_models.errors import WeightsError
from gaudi_models.padding import PADDING_RULES, Padding
from gaudi_models.resnet import ResNetBackbone
from gaudi_models.ssd import build_ssd
from gaudi_models.weights import LoadReport, WeightsFile, WeightsMetadata, assign_weights
from gaudi_models.weights.assignment import match_weights
from gaudi_ops.tf.keras_api import keras

RNG = np.random.default_rng(1)


@functools.cache
def build(padding: Padding = "same_pool", stages: int = 2, depth: int = 18) -> Any:
    """Build a backbone once for all; no test looks at the weights that it begins with."""
    images = keras.Input([32, 32, 3])
    backbone = ResNetBackbone(depth, stage_strides=(1, 2, 2, 2)[:stages], padding=padding)
    return keras.Model(images, backbone(images))


@functools.cache
def build_detector() -> Any:
    """Build a detector of three classes once for all; no test looks at the weights that it begins with."""
    return build_ssd(4, depth=18)


def read_variables(model: Any) -> dict[str, Any]:
    return {variable.name.removesuffix(":0"): variable.numpy() for variable in model.variables}


def make_file(
    model: Any, padding: Padding | None = "same_pool", skipped: Mapping[str, str] = MappingProxyType({})
) -> WeightsFile:
    """Random weights and statistics for all variables of a model, others in each file."""
    tensors = {name: RNG.random(values.shape, np.float32) for name, values in read_variables(model).items()}
    return WeightsFile("x.pth (test)", tensors, padding, skipped)


@pytest.mark.costly
def test_everything_fits() -> None:
    model = build()
    weights = make_file(model)
    report = assign_weights(model, weights)
    assert report == LoadReport("x.pth (test)", tuple(weights.tensors), {}, {}, ())
    number = len(weights.tensors)
    assert report.describe().startswith(f"x.pth (test): {number} of the model's {number} ")
    for name, values in read_variables(model).items():
        np.testing.assert_array_equal(values, weights.tensors[name])


@pytest.mark.costly
def test_a_backbone_of_more_stages_is_used_as_far_as_it_goes() -> None:
    model = build(stages=2)
    longer = make_file(build(stages=3), skipped={"fc.weight": "the classifier"})
    report = assign_weights(model, longer)
    assert set(report.loaded) == set(read_variables(model))
    stage3 = [name for name in longer.tensors if name.startswith("stage3")]
    assert report.skipped.keys() == {"fc.weight", *stage3}
    assert report.skipped["fc.weight"] == "the classifier"
    assert f"\n  {len(stage3)} skipped, " in report.describe()
    assert f": {stage3[0]}, " in report.describe()


@pytest.mark.costly
def test_other_classes_keep_all_but_the_class_heads(detector: Callable[[int], Any]) -> None:
    coco, blood = detector(18), build_detector()
    weights = make_file(coco)
    before = read_variables(blood)
    report = assign_weights(blood, weights)
    heads = {name for name in before if name.startswith("class_head")}
    assert set(report.other_shape) == heads
    assert len(heads) == 12
    assert report.other_shape["class_head2/bias"] == ((486,), (24,))
    assert set(report.loaded) == set(before) - heads
    for name, values in read_variables(blood).items():
        np.testing.assert_array_equal(values, before[name] if name in heads else weights.tensors[name])
    shown = report.describe()
    assert {word for word in ("class_head1/kernel", "3x3x256x324", "3x3x256x16") if word not in shown} == set()


@pytest.mark.costly
def test_a_backbone_leaves_the_rest_of_a_detector_as_it_is() -> None:
    model = build_detector()
    report = assign_weights(model, make_file(build(stages=3)))
    assert report.initial
    assert {name.split("_")[0].rstrip("12345") for name in report.initial} == {"extra", "class", "box"}
    assert f"\n  {len(report.initial)} not in" in report.describe()
    assert "extra1_conv1/kernel" in report.describe()


def test_what_fits_nothing_is_an_error_and_changes_nothing() -> None:
    model = build()
    before = read_variables(model)
    tensors = {"class_head1/kernel": np.zeros([1], np.float32), "logits/bias": np.zeros([3], np.float32)}
    with pytest.raises(WeightsError, match="none of its") as caught:
        assign_weights(model, WeightsFile("x (test)", tensors, "same_pool", {}, path="x"))
    assert caught.value.path == "x"
    for name, values in read_variables(model).items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.costly
@pytest.mark.parametrize(("depth", "record", "words"), [
    (34, "stage1", "3 blocks in"),
    (50, "stage1_block1_conv1/kernel", "1x1x64x64 in"),
])  # fmt: skip
def test_weights_of_another_network_are_refused(depth: int, record: str, words: str) -> None:
    model = build()
    before = read_variables(model)
    with pytest.raises(WeightsError, match=words) as caught:
        assign_weights(model, make_file(build(depth=depth)))
    assert caught.value.record == record
    for name, values in read_variables(model).items():
        np.testing.assert_array_equal(values, before[name])


@pytest.mark.costly
@pytest.mark.parametrize("of_file", PADDING_RULES)
@pytest.mark.parametrize("of_model", PADDING_RULES)
def test_weights_of_another_padding_are_refused(of_file: Padding, of_model: Padding) -> None:
    model = build(of_model)
    before = read_variables(model)
    if of_file == of_model:
        assign_weights(model, make_file(model, of_file))
        return
    with pytest.raises(WeightsError, match=f"'{of_file}'") as caught:
        assign_weights(model, make_file(model, of_file))
    rules = PADDING_RULES[of_file], PADDING_RULES[of_model]
    assert rules[0][caught.value.field or ""] != rules[1][caught.value.field or ""]
    for name, values in read_variables(model).items():
        np.testing.assert_array_equal(values, before[name])


def test_what_of_the_padding_a_backbone_has_not_does_not_matter() -> None:
    model = build("same_pool", stages=1)  # no convolution of it strides but the stem's
    assign_weights(model, make_file(model, "same_pool"))
    assign_weights(model, make_file(model, "symmetric_stem"))


def test_an_unknown_padding_is_not_checked() -> None:
    for padding in PADDING_RULES:
        model = build(padding)
        assert assign_weights(model, make_file(model, None)).initial == ()


@pytest.mark.parametrize(
    ("of_file", "has_head"), [(["cat", "dog"], True), (["dog", "cat"], False), (["a"], False), ([], True)]
)
def test_heads_of_other_classes_are_left_out(of_file: list[str], has_head: bool) -> None:
    names = ("logits/kernel", "class_head0/bias", "box_head0/bias", "conv1/kernel")
    metadata = WeightsMetadata("same", [{"name": name} for name in of_file])
    weights = WeightsFile("x", {name: np.zeros(2, np.float32) for name in names}, "same", {"a": "b"}, metadata)
    found = weights.for_classes(["cat", "dog"])
    assert list(found.tensors) == [name for name in names if has_head or name not in names[:2]]
    assert [*found.skipped] == ["a", *([] if has_head else names[:2])]
    plain = WeightsFile("x", weights.tensors, "same", {})
    assert plain.for_classes(["cat"]) is plain


@pytest.mark.parametrize(
    ("of_file", "record"),
    [
        (("conv2_block1_1_conv/kernel", "conv2_block2_1_conv/kernel"), "conv2"),
        (("conv2_block1_1_conv/kernel", "conv2_block1_preact_bn/beta"), None),
    ],
)
def test_weights_of_another_network_of_keras_are_refused(of_file: tuple[str, ...], record: str | None) -> None:
    tensors = {name: np.zeros([2], np.float32) for name in of_file}
    for file, model in ((of_file, of_file[:1]), (of_file[:1], of_file)):
        weights = WeightsFile("x", {name: tensors[name] for name in file}, None, {}, path="x")
        with pytest.raises(WeightsError) as caught:
            match_weights(weights, dict.fromkeys(model, (2,)), {})
        assert (caught.value.record, caught.value.path) == (record, "x")
    match_weights(WeightsFile("x", tensors, None, {}), dict.fromkeys(of_file, (2,)), {})
