from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.examples import DetectionExample, decode_example, encode_example
from gaudi_datasets.errors import DataError

CATEGORIES = (Category(0, "ant"), Category(7, "bee"), Category(90, "cat"))
LABELS = {0: 1, 7: 2, 90: 3}
EXAMPLE = DetectionExample(
    image_id=42,
    encoded=b"jpeg bytes",
    height=40,
    width=60,
    boxes_yxyx=np.array([[0, 0, 1, 1], [0.25, 0.125, 0.5, 0.75]], np.float32),
    labels=np.array([3, 1], np.int32),
    is_crowd=np.array([False, True]),
    areas=np.array([2400, 3.5], np.float32),
    file_name="ä.jpg",
)


def encode(example: DetectionExample = EXAMPLE) -> bytes:
    return encode_example(example, image_format="jpeg", categories=CATEGORIES)


def edited(name: str, feature: tf.train.Feature | None) -> bytes:
    message = tf.train.Example.FromString(encode())
    del message.features.feature[name]
    if feature is not None:
        message.features.feature[name].CopyFrom(feature)
    return bytes(message.SerializeToString())


def floats(*values: float) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def integers(*values: int) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def texts(*values: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def test_what_was_encoded_is_decoded() -> None:
    example = decode_example(encode(), LABELS, "x")
    for name in ("image_id", "encoded", "height", "width", "file_name"):
        assert getattr(example, name) == getattr(EXAMPLE, name)
    for name in ("boxes_yxyx", "labels", "is_crowd", "areas"):
        array, expected = getattr(example, name), getattr(EXAMPLE, name)
        assert array.dtype == expected.dtype
        assert array.tolist() == expected.tolist()


def test_a_name_that_is_no_utf8_stays() -> None:
    example = replace(EXAMPLE, file_name="ä\udcfe.jpg")
    assert decode_example(encode(example), LABELS, "x").file_name == example.file_name


def test_an_image_may_have_no_box() -> None:
    none = {name: getattr(EXAMPLE, name)[:0] for name in ("boxes_yxyx", "labels", "is_crowd", "areas")}
    example = decode_example(encode(replace(EXAMPLE, **none)), LABELS, "x")
    assert example.boxes_yxyx.shape == (0, 4)
    assert len(example.labels) == len(example.areas) == len(example.is_crowd) == 0


def test_the_features_are_those_of_object_detection_records() -> None:
    feature = tf.train.Example.FromString(encode()).features.feature
    assert set(feature) == {
        *(f"image/{name}" for name in ("height", "width", "filename", "source_id", "encoded", "format")),
        *(f"image/object/bbox/{side}" for side in ("xmin", "xmax", "ymin", "ymax")),
        *(f"image/object/{name}" for name in ("class/text", "class/label", "is_crowd", "area")),
    }
    assert list(feature["image/source_id"].bytes_list.value) == [b"42"]
    assert list(feature["image/object/class/label"].int64_list.value) == [90, 0]
    assert list(feature["image/object/class/text"].bytes_list.value) == [b"cat", b"ant"]
    assert list(feature["image/object/bbox/ymax"].float_list.value) == [1, 0.5]


def test_crowds_and_areas_may_be_missing() -> None:
    assert decode_example(edited("image/object/is_crowd", None), LABELS, "x").is_crowd.tolist() == [
        False,
        False,
    ]
    assert decode_example(edited("image/object/area", None), LABELS, "x").areas.tolist() == [2400, 375]


@pytest.mark.parametrize(
    ("name", "feature", "message"),
    [
        ("image/encoded", None, "is missing"),
        ("image/source_id", None, "is missing"),
        ("image/object/bbox/xmin", None, "is missing"),
        ("image/object/class/label", None, "is missing"),
        ("image/encoded", integers(3), "is a int64_list"),
        ("image/object/bbox/xmin", floats(0.5), "has 1 values"),
        ("image/object/class/label", integers(90, 8), "category 8 is none"),
        ("image/source_id", texts(b"COCO_1"), 'is "COCO_1"'),
        ("image/source_id", texts(b"9" * 19), 'is "99'),
        ("image/source_id", texts(b"9" * 5000), 'is "99'),
        ("image/source_id", texts(b"-1"), 'is "-1"'),
        ("image/height", integers(), "has 0 values"),
        ("image/height", integers(0), "is 0"),
        ("image/width", integers(-3), "is -3"),
        ("image/width", integers(2**31), "is 2147483648"),
    ],
)
def test_faults_name_the_feature(name: str, feature: tf.train.Feature | None, message: str) -> None:
    with pytest.raises(DataError) as error:
        decode_example(edited(name, feature), LABELS, "x.tfrecord: record 3")
    assert str(error.value.record).startswith("x.tfrecord: record 3 (image ")
    assert f": feature {name}: {message}" in str(error.value)


def test_a_size_of_0_is_that_of_the_image() -> None:
    feature = tf.train.Example.FromString(
        encode(replace(EXAMPLE, encoded=tf.io.encode_jpeg(np.zeros((3, 5, 3), np.uint8)).numpy()))
    ).features.feature
    for name in ("image/height", "image/width"):
        feature[name].int64_list.value[:] = [0]
    content = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
    example = decode_example(content, LABELS, "x")
    assert (example.height, example.width) == (3, 5)


@pytest.mark.parametrize("xmax", [(1.0, 0.125), (1.0, 1.5), (1.0, float("nan"))])
def test_bad_boxes_are_refused(xmax: tuple[float, float]) -> None:
    with pytest.raises(DataError, match=r"x \(image 42\): .* 0 <= min < max <= 1"):
        decode_example(edited("image/object/bbox/xmax", floats(*xmax)), LABELS, "x")


def test_other_bytes_are_refused() -> None:
    with pytest.raises(DataError, match=r"is no tf\.train\.Example") as caught:
        decode_example(b"no message of protobuf", LABELS, "x")
    assert caught.value.record == "x"
