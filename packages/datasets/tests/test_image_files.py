from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import read_image


def encode(mode: str, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((60, 40), 50).convert(mode).save(buffer, kind)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("mode", "kind", "name"),
    [
        ("RGB", "JPEG", "jpeg"),
        ("L", "JPEG", "jpeg"),
        ("RGB", "PNG", "png"),
        ("RGBA", "PNG", "png"),
        ("P", "PNG", "png"),
    ],
)
def test_images_are_told_by_their_content(tmp_path: Path, mode: str, kind: str, name: str) -> None:
    path = tmp_path / "x.dat"
    path.write_bytes(encode(mode, kind))
    image = read_image(path)
    assert (image.format, image.height, image.width) == (name, 40, 60)
    assert image.encoded == path.read_bytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.95])
def test_a_truncated_image_is_named(tmp_path: Path, kind: str, share: float) -> None:
    encoded = encode("RGB", kind)
    path = tmp_path / "x.jpg"
    path.write_bytes(encoded[: int(len(encoded) * share)])
    with pytest.raises(DataError, match=r"x\.jpg: cannot be decoded"):
        read_image(path)


@pytest.mark.parametrize(("mode", "kind"), [("CMYK", "JPEG"), ("RGB", "BMP"), ("P", "GIF")])
def test_other_images_are_to_be_converted(tmp_path: Path, mode: str, kind: str) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(encode(mode, kind))
    with pytest.raises(DataError, match="convert it to"):
        read_image(path)


def test_a_missing_image_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"x\.jpg: there is no such image"):
        read_image(tmp_path / "x.jpg")
    with pytest.raises(DataError, match="is a folder"):
        read_image(tmp_path)
