"""ImageNet's records as the originals wrote them, and the images that they were made of, are trained and scored on."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cv2
import google_crc32c
import numpy as np
import pytest

Program = Callable[..., Any]
FLAGS = ("--image_size", 32, "--batch_size", 4, "--train_epochs", 1)


def encode_image(number: int, kind: str = ".jpg") -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (48, 40, 3), np.uint8)
    return cv2.imencode(kind, pixels)[1].tobytes()


def write_shard(path: Path, examples: Iterable[tuple[bytes, int]]) -> None:
    """Write a shard by the rules of TFRecord and protobuf alone."""

    def checksum(content: bytes) -> bytes:
        crc = google_crc32c.value(content)
        return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)

    def varint(number: int) -> bytes:
        low = number & 127
        return bytes([low]) if number < 128 else bytes([low | 128]) + varint(number >> 7)

    def field(number: int, content: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(content)) + content

    def feature(name: bytes, value: bytes | int) -> bytes:
        one = field(1, field(1, value)) if isinstance(value, bytes) else field(3, field(1, varint(value)))
        return field(1, field(1, name) + field(2, one))

    with path.open("wb") as file:
        for encoded, label in examples:
            features: dict[bytes, bytes | int] = {
                b"image/height": 48,
                b"image/width": 40,
                b"image/colorspace": b"RGB",
                b"image/channels": 3,
                b"image/class/label": label,
                b"image/class/synset": b"n01440764",
                b"image/format": b"JPEG",
                b"image/filename": b"n01440764_1.JPEG",
                b"image/encoded": encoded,
            }
            content = field(1, b"".join(feature(name, value) for name, value in features.items()))
            length = struct.pack("<Q", len(content))
            file.write(length + checksum(length) + content + checksum(content))


@pytest.fixture(scope="module")
def tf_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folders of the original preparation of ImageNet, of eight training and three validation images."""
    root = tmp_path_factory.mktemp("original") / "tf_records"
    for split, total, filled in (("train", 1024, 8), ("validation", 128, 3)):
        (root / split).mkdir(parents=True)
        for shard in range(total):
            images = [(encode_image(shard), 1000 - 100 * shard)] if shard < filled else []
            write_shard(root / split / f"{split}-{shard:05d}-of-{total:05d}", images)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("program", ["resnet_train", "resnext_train"])
def test_records_of_the_originals_train_and_evaluate(
    run_classifier: Program, tf_records: Path, tmp_path: Path, program: str
) -> None:
    done = run_classifier("--data_dir", tf_records, "--model_dir", tmp_path, *FLAGS, program=program)
    assert done.status == 0, done.err
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert (evaluation["images"], evaluation["images_total"]) == (3, 3)
    assert {row["name"] for row in evaluation["classes"] if row["images"]} == {"1000", "900", "800"}
    done = run_classifier(
        *("--data_dir", tf_records, "--model_dir", tmp_path, "--mode", "eval", "--batch_size", 2), program=program
    )
    assert done.status == 0, done.err


def test_a_missing_shard_is_told_before_anything_begins(
    run_classifier: Program, tf_records: Path, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    for shard in range(3):
        name = f"train-{shard:05d}-of-01024"
        (tmp_path / "train" / name).write_bytes((tf_records / "train" / name).read_bytes())
    done = run_classifier("--data_dir", tmp_path, "--mode", "plan", *FLAGS)
    assert done.status == 66
    assert "has 3 of 1024 files" in done.err
    assert "train-00003-of-01024" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.slow
def test_the_images_of_the_preparation_train_and_evaluate(run_classifier: Program, tmp_path: Path) -> None:
    synsets = ("n01440764", "n02105855")
    for number, synset in enumerate(synsets):
        (tmp_path / "img_train" / synset).mkdir(parents=True)
        for image in range(4):
            path = tmp_path / "img_train" / synset / f"{synset}_{image}.JPEG"
            path.write_bytes(encode_image(10 * number + image))
    (tmp_path / "img_val").mkdir()
    for image in range(3):
        (tmp_path / "img_val" / f"ILSVRC2012_val_{image + 1:08d}.JPEG").write_bytes(encode_image(50 + image, ".png"))
    (tmp_path / "synset_labels.txt").write_text("\n".join([synsets[1], synsets[0], synsets[1]]))
    done = run_classifier("--data_dir", tmp_path, "--model_dir", tmp_path / "run", *FLAGS)
    assert done.status == 0, done.err
    evaluation = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert {row["name"]: row["images"] for row in evaluation["classes"]} == {synsets[0]: 1, synsets[1]: 2}
