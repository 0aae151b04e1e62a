"""Records as the original program wrote them, by a writer of its own: nothing here is encoded by the package."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.detection.coco import COCO_CATEGORIES
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.errors import DataError

Values = Sequence[bytes] | Sequence[int] | Sequence[float]


def checksum(content: bytes) -> bytes:
    """CRC-32C (RFC 3720, appendix B.4), bit by bit, masked as TFRecord files have it."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out, number = out + bytes([number & 127 | 128]), number >> 7
    return out + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(values: Values, *, packed: bool = True) -> bytes:
    if not values:
        return b""
    if all(isinstance(value, bytes) for value in values):
        return field(1, b"".join(field(1, value) for value in values if isinstance(value, bytes)))
    if any(isinstance(value, float) for value in values):
        floats = [struct.pack("<f", value) for value in values]
        return field(2, field(1, b"".join(floats)) if packed else b"".join(b"\x0d" + each for each in floats))
    integers = [varint(int(value)) for value in values]
    return field(3, field(1, b"".join(integers)) if packed else b"".join(b"\x08" + each for each in integers))


def record(features: Mapping[str, Values], *, packed: bool = True) -> bytes:
    entries = [
        field(1, field(1, name.encode()) + field(2, feature(values, packed=packed)))
        for name, values in features.items()
    ]
    content = field(1, b"".join(entries))
    length = struct.pack("<Q", len(content))
    return length + checksum(length) + content + checksum(content)


def image() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 30, 90)).save(buffer, "JPEG")
    return buffer.getvalue()


def features(image_id: int, labels: Sequence[int]) -> dict[str, Values]:
    return {
        "image/encoded": [image()],
        "image/source_id": [str(image_id).encode()],
        "image/object/bbox/xmin": [0.25] * len(labels),
        "image/object/bbox/xmax": [0.75] * len(labels),
        "image/object/bbox/ymin": [0.0] * len(labels),
        "image/object/bbox/ymax": [0.5] * len(labels),
        "image/object/class/label": list(labels),
        "image/object/is_crowd": [0, 1][: len(labels)],
        "image/object/area": [300.5, 9.0][: len(labels)],
    }


@pytest.mark.parametrize("packed", [False, True])
def test_they_are_read_as_they_are(tmp_path: Path, packed: bool) -> None:
    shards = [[features(9, [1, 90]), features(2, [])], [features(5, [44])]]
    for number, contents in enumerate(shards):
        path = tmp_path / f"train-{number:05d}-of-00002.tfrecord"
        path.write_bytes(b"".join(record(each, packed=packed) for each in contents))
    source = RecordSource(tmp_path, "train")
    assert source.categories == COCO_CATEGORIES
    examples = [source.read(index) for index in range(len(source))]
    assert [example.image_id for example in examples] == [9, 5, 2]
    first = examples[0]
    assert (first.encoded, first.height, first.width) == (image(), 48, 64)
    np.testing.assert_array_equal(first.boxes_yxyx, np.array([[0, 0.25, 0.5, 0.75]] * 2, np.float32))
    assert [source.categories[label - 1].name for label in first.labels] == ["person", "toothbrush"]
    assert (first.is_crowd.tolist(), first.areas.tolist()) == ([False, True], [300.5, 9.0])
    assert source.categories[examples[1].labels[0] - 1].name == "bottle"
    assert examples[2].boxes_yxyx.shape == (0, 4)


def test_what_some_leave_out_is_made_up_for(tmp_path: Path) -> None:
    fewer = {name: value for name, value in features(9, [1]).items() if name.split("/")[-1] not in ("is_crowd", "area")}
    sized: dict[str, Values] = {**fewer, "image/height": [480], "image/width": [640]}
    (tmp_path / "val-00000-of-00001").write_bytes(record(fewer) + record(sized))
    source = RecordSource(tmp_path, "val")
    assert [(each.height, each.width) for each in map(source.read, (0, 1))] == [(48, 64), (480, 640)]
    assert source.read(0).is_crowd.tolist() == [False]
    assert source.read(0).areas.tolist() == [0.5 * 0.5 * 48 * 64]


def test_a_category_that_coco_does_not_have_is_named(tmp_path: Path) -> None:
    (tmp_path / "val-00000-of-00001").write_bytes(record(features(9, [12])))
    with pytest.raises(DataError, match=r"record 0 \(image 9\): .*category 12 is none"):
        RecordSource(tmp_path, "val").read(0)
