from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gaudi_datasets.classification.examples import ClassificationExample, decode_example, encode_example
from gaudi_datasets.errors import DataError
from gaudi_datasets.records.tfrecords import ExampleFeatures, encode_features

Encode = Callable[..., bytes]


def make_example(encoded: bytes, label: int = 2) -> ClassificationExample:
    return ClassificationExample(17, encoded, 48, 40, label, "cat/1.jpg")


def test_an_example_comes_back_from_its_record(encode: Encode) -> None:
    example = make_example(encode())
    content = encode_example(example, image_format="jpeg", class_name="Katze ä")
    assert vars(decode_example(content, 3, "here", image_id=99)) == vars(example)
    features = ExampleFeatures(content, "here")
    assert features.one("int64", "image/class/label") == 3
    assert features.one("bytes", "image/class/synset").decode() == "Katze ä"
    assert features.one("bytes", "image/format") == b"JPEG"
    assert features.one("bytes", "image/colorspace") == b"RGB"


def test_the_original_s_records_need_neither_id_nor_size(encode: Encode) -> None:
    content = encode_features(
        {"image/encoded": ("bytes", [encode(size=(31, 77))]), "image/class/label": ("int64", [1000])}
    )
    example = decode_example(content, 1000, "here", image_id=5)
    assert (example.image_id, example.height, example.width, example.label) == (5, 31, 77, 999)


@pytest.mark.parametrize("text", [b"n01440764_1", b"", b"9" * 30, b"-4"])
def test_a_source_id_that_is_no_number_is_no_id(text: bytes, encode: Encode) -> None:
    features: dict[str, Any] = {
        "image/encoded": ("bytes", [encode()]),
        "image/class/label": ("int64", [1]),
        "image/source_id": ("bytes", [text]),
    }
    assert decode_example(encode_features(features), 2, "here", image_id=5).image_id == 5
    sized = {"image/height": ("int64", [0]), "image/width": ("int64", [0])}
    assert decode_example(encode_features(features | sized), 2, "here", image_id=5).height > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image/class/label": None}, "feature image/class/label: is missing"),
        ({"image/encoded": None}, "feature image/encoded: is missing"),
        ({"image/class/label": ("int64", [0])}, r"image/class/label: is 0"),
        ({"image/class/label": ("int64", [4])}, r"image/class/label: is 4"),
        ({"image/class/label": ("int64", [1, 2])}, "image/class/label: has 2 values"),
        ({"image/class/label": ("bytes", [b"1"])}, "image/class/label: is a bytes_list"),
        ({"image/encoded": ("bytes", [b"GIF89a"])}, "here: cannot be"),
    ],
)
def test_a_wrong_record_is_named(changes: dict[str, Any], message: str, encode: Encode) -> None:
    features: dict[str, Any] = {"image/encoded": ("bytes", [encode()]), "image/class/label": ("int64", [1])}
    features = {name: value for name, value in (features | changes).items() if value is not None}
    with pytest.raises(DataError, match=message):
        decode_example(encode_features(features), 3, "here", image_id=5)


def test_what_is_no_example_is_named() -> None:
    with pytest.raises(DataError, match=r"is no tf\.train\.Example") as caught:
        decode_example(b"\xff\xff\xff", 3, "here", image_id=5)
    assert caught.value.record == "here"
