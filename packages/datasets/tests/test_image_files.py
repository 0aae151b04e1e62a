from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import CMYK_FIX, check_image, read_image, stat_image


def encode(mode: str, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((60, 40), 50).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(
    ("mode", "kind", "name"),
    [
        ("RGB", "JPEG", "jpeg"),
        ("L", "JPEG", "jpeg"),
        ("RGB", "MPO", "jpeg"),
        ("RGB", "PNG", "png"),
        ("RGBA", "PNG", "png"),
        ("P", "PNG", "png"),
    ],
)
def test_images_are_told_by_their_content(tmp_path: Path, mode: str, kind: str, name: str, decode: bool) -> None:
    path = tmp_path / "x.dat"
    path.write_bytes(encode(mode, kind))
    image = read_image(path, decode=decode)
    assert (image.format, image.height, image.width, image.fix) == (name, 40, 60, "")
    assert image.encoded == path.read_bytes()


@pytest.mark.parametrize("options", [{"progressive": True}, {"exif": b"Exif\0\0" + bytes(300)}, {"comment": b"hi"}])
def test_usual_jpegs_are_known_without_decoding(options: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode("RGB", "JPEG", **options)
    monkeypatch.setattr(Image, "open", None)
    image = check_image(encoded, "x.jpg", decode=False)
    assert (image.format, image.height, image.width) == ("jpeg", 40, 60)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.95])
def test_a_truncated_image_is_named(tmp_path: Path, kind: str, share: float, decode: bool) -> None:
    encoded = encode("RGB", kind)
    path = tmp_path / "x.jpg"
    path.write_bytes(encoded[: int(len(encoded) * share)])
    with pytest.raises(DataError, match=r"x\.jpg: cannot be decoded"):
        read_image(path, decode=decode)


IMAGES = {kind: encode("RGB", kind) for kind in ("JPEG", "PNG")}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["JPEG", "PNG"]), st.integers(3, 2000))
def test_without_decoding_no_cut_image_passes_that_decoding_refuses(kind: str, cut: int) -> None:
    encoded = IMAGES[kind][:-cut]

    def passes(decode: bool) -> bool:
        try:
            check_image(encoded, "x", decode=decode)
        except DataError:
            return False
        return True

    assert passes(decode=False) == passes(decode=True)


def test_damaged_pixels_of_a_png_are_found_without_decoding() -> None:
    encoded = bytearray(encode("RGB", "PNG"))
    encoded[len(encoded) // 2] ^= 1
    with pytest.raises(DataError, match=r"x\.png: cannot be decoded"):
        check_image(bytes(encoded), "x.png", decode=False)


def test_bytes_after_the_end_are_kept() -> None:
    for kind in ("JPEG", "PNG"):
        encoded = encode("RGB", kind) + b"more"
        assert check_image(encoded, "x", decode=False).encoded == encoded


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("mode", "kind"), [("RGB", "BMP"), ("P", "GIF"), ("RGB", "TIFF"), ("RGB", "WEBP")])
def test_other_images_are_to_be_converted(tmp_path: Path, mode: str, kind: str, decode: bool) -> None:
    path = tmp_path / "x.jpg"
    path.write_bytes(encode(mode, kind))
    with pytest.raises(DataError, match=f"is a {kind} image") as caught:
        read_image(path, decode=decode)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("decode", [False, True])
def test_cmyk_is_made_rgb_the_same_each_time(decode: bool) -> None:
    encoded = encode("CMYK", "JPEG")
    image = check_image(encoded, "x.jpg", decode=decode)
    assert (image.format, image.height, image.width, image.fix) == ("jpeg", 40, 60, CMYK_FIX)
    assert image.encoded == check_image(encoded, "x.jpg").encoded
    fixed, original = (Image.open(io.BytesIO(each)) for each in (image.encoded, encoded))
    assert fixed.mode == "RGB"
    difference = [abs(a - b) for a, b in zip(fixed.tobytes(), original.convert("RGB").tobytes(), strict=True)]
    assert sum(difference) / len(difference) < 3


def test_a_bomb_of_pixels_is_refused() -> None:
    encoded = bytearray(encode("RGB", "JPEG"))
    position = encoded.index(b"\xff\xc0") + 5
    encoded[position : position + 4] = b"\xff\xff\xff\xff"
    with pytest.raises(DataError, match="cannot be decoded"):
        check_image(bytes(encoded), "x.jpg", decode=False)


def test_a_missing_image_and_a_folder_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="there is no") as caught:
        read_image(tmp_path / "x.jpg")
    assert str(caught.value.path).endswith("x.jpg")
    with pytest.raises(MissingInputError, match="there is no") as caught:
        stat_image(tmp_path / "x.jpg")
    assert str(caught.value.path).endswith("x.jpg")
    with pytest.raises(DataError, match="is a folder"):
        read_image(tmp_path)
