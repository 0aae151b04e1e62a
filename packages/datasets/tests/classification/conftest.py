"""Images, folder trees and tars of ImageNet's form, as small as they can be."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from PIL import Image

Encode = Callable[..., bytes]
Tar = Callable[[Mapping[str, bytes]], bytes]

TRAIN = {"n01440764": (10026, 2, 3), "n02105855": (2933, 7), "n03000247": (1, 5, 9, 11)}
VALIDATION = ("n03000247", "n01440764", "n02105855", "n01440764")


def encode_image(
    seed: int = 0, kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (48, 40), **options: int
) -> bytes:
    """Make an image of smooth colours that depend on the seed; its size is height and width."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).resize(size[::-1], Image.Resampling.BICUBIC).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def pack(files: Mapping[str, bytes]) -> bytes:
    """Make a tar of these files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def image_of(name: str) -> bytes:
    """Return the content of an image of the small ImageNet: one CMYK, one a PNG, the others JPEGs."""
    seed = sum(name.encode())
    if name == "n01440764_2.JPEG":
        return encode_image(seed, mode="CMYK")
    return encode_image(seed, "PNG" if name == "n02105855_2933.JPEG" else "JPEG")


@pytest.fixture
def encode() -> Encode:
    return encode_image


@pytest.fixture
def tar() -> Tar:
    return pack


@pytest.fixture
def class_tree(tmp_path: Path) -> Path:
    """Folders `cat` (3 images), `dog` (2, one a PNG) and `eel` (4)."""
    for label, (name, count) in enumerate({"cat": 3, "dog": 2, "eel": 4}.items()):
        folder = tmp_path / "tree" / name
        folder.mkdir(parents=True)
        for number in range(count):
            kind = "PNG" if (label, number) == (1, 1) else "JPEG"
            (folder / f"{number}.jpg").write_bytes(encode_image(10 * label + number, kind, size=(40 + number, 50)))
    return tmp_path / "tree"


@pytest.fixture
def imagenet_tars(tmp_path: Path) -> Path:
    """Nine training and four validation images in the original's tars, with `synset_labels.txt`."""
    root = tmp_path / "tars"
    root.mkdir()
    inner = {
        f"{synset}.tar": pack({f"{synset}_{number}.JPEG": image_of(f"{synset}_{number}.JPEG") for number in numbers})
        for synset, numbers in TRAIN.items()
    }
    (root / "ILSVRC2012_img_train.tar").write_bytes(pack(inner))
    names = [f"ILSVRC2012_val_{number:08d}.JPEG" for number in range(1, 5)]
    (root / "ILSVRC2012_img_val.tar").write_bytes(pack({name: image_of(name) for name in reversed(names)}))
    (root / "synset_labels.txt").write_text("\n".join(VALIDATION) + "\n")
    return root


@pytest.fixture
def imagenet_folders(tmp_path: Path) -> Path:
    """Write the same images in folders, those of validation in one."""
    root = tmp_path / "folders"
    for synset, numbers in TRAIN.items():
        (root / "train" / synset).mkdir(parents=True)
        for number in numbers:
            name = f"{synset}_{number}.JPEG"
            (root / "train" / synset / name).write_bytes(image_of(name))
    (root / "val").mkdir()
    for number in range(1, 5):
        name = f"ILSVRC2012_val_{number:08d}.JPEG"
        (root / "val" / name).write_bytes(image_of(name))
    (root / "synset_labels.txt").write_text("\n".join(VALIDATION) + "\n")
    return root


def write_shard(path: Path, examples: Iterable[tuple[bytes, int]]) -> None:
    """Write records of the original's layout by the rules of TFRecord and protobuf alone."""

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


@pytest.fixture
def write_original() -> Callable[[Path, Iterable[tuple[bytes, int]]], None]:
    return write_shard
