from __future__ import annotations

import errno
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gaudi_datasets.drawing import decode_image
from gaudi_datasets.errors import BadImageError, DataError, MissingInputError
from gaudi_datasets.image_files import (
    CMYK_FIX,
    CONVERTED,
    DEPTH_FIX,
    TURN_FIX,
    _lacks_pixels,
    _try_jpeg,
    check_image,
    check_pixels,
    read_image,
    read_size,
    stat_image,
)


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


def encode_photo(**options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((160, 120), Image.Resampling.BICUBIC).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def take_pixels(encoded: bytes, how: str) -> bytes:
    """Return a JPEG that decoders take for whole, though most of its pixels are gone."""
    start = encoded.index(b"\xff\xda") + 14
    if how == "random":
        noise = np.random.default_rng(0).integers(0, 255, len(encoded) - start - 2, np.uint8).tobytes()
        return encoded[:start] + noise + b"\xff\xd9"
    if how == "large":
        return encoded.replace(struct.pack(">HH", 120, 160), struct.pack(">HH", 1200, 1600))
    return encoded[: start + (len(encoded) - start) // 3] + b"\xff\xd9"


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}])
@pytest.mark.parametrize("how", ["third", "random", "large"])
def test_a_jpeg_without_most_of_its_pixels_is_refused(how: str, options: dict[str, object]) -> None:
    encoded = take_pixels(encode_photo(**options), how)
    assert check_image(encoded, "x.jpg", decode=False).format == "jpeg"
    for check in (check_image, check_pixels):
        with pytest.raises(BadImageError) as caught:
            check(encoded, Path("x.jpg"))
        assert caught.value.path == "x.jpg"


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_spare_bytes_and_rare_colors_take_no_pixels(mode: str) -> None:
    encoded = encode(mode, "JPEG", quality=100)
    padded = encoded[:-2] + bytes(9) + encoded[-2:]
    assert not _lacks_pixels(padded, _try_jpeg(padded, strict=True))
    check_pixels(encoded[:-2] + bytes(9) + encoded[-2:], "x.jpg")
    check_pixels(encoded + bytes(99), "x.jpg")
    check_pixels(encode(mode, "JPEG", keep_rgb=True) if mode == "RGB" else encoded, "x.jpg")


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
@pytest.mark.parametrize(
    ("mode", "kind", "made"),
    [
        ("RGB", "BMP", "png"),
        ("P", "GIF", "png"),
        ("RGB", "TIFF", "png"),
        ("L", "PPM", "png"),
        ("RGB", "WEBP", "jpeg"),
        ("RGBA", "WEBP", "jpeg"),
    ],
)
def test_other_formats_are_converted(mode: str, kind: str, made: str, decode: bool) -> None:
    encoded = encode(mode, kind)
    image = check_image(encoded, "x", decode=decode)
    assert (image.format, image.height, image.width, image.stored_format) == (made, 40, 60, kind.lower())
    assert image.fix == f"{kind} made {CONVERTED[kind]}"
    found, wanted = (np.asarray(Image.open(io.BytesIO(one)).convert("RGB"), int) for one in (image.encoded, encoded))
    assert np.abs(found - wanted).max() <= (0 if made == "png" else 40)
    assert check_image(image.encoded, "x", decode=decode).fix == ""


def test_of_an_animation_the_first_frame_is_taken() -> None:
    buffer, frames = io.BytesIO(), [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    image = check_image(buffer.getvalue(), "x")
    assert np.asarray(Image.open(io.BytesIO(image.encoded)))[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_the_upper_8_of_16_bits_are_kept(kind: str, decode: bool) -> None:
    values, buffer = np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27, io.BytesIO()
    Image.fromarray(values).save(buffer, kind)
    image = check_image(buffer.getvalue(), "x", decode=decode)
    assert image.format == "png"
    assert DEPTH_FIX in image.fix
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(image.encoded))), values >> 8)


@pytest.mark.parametrize(("bits", "white"), [(12, 1), (16, 0), (16, 1)])
def test_a_tiff_of_more_than_8_bits_is_as_bright_as_it_says(bits: int, white: int) -> None:
    shown = np.arange(0, 240, 4, dtype=np.uint16).reshape(6, 10)
    stored = (shown if white else 255 - shown) << (bits - 8)
    rows = np.unpackbits(stored.astype(">u2").view(np.uint8)).reshape(60, 16)[:, 16 - bits :]
    pixels = np.packbits(rows).tobytes() if bits == 12 else stored.astype("<u2").tobytes()
    sizes = [(256, 10), (257, 6), (258, bits), (259, 1)]
    tags = [*sizes, (262, white), (273, 122), (277, 1), (278, 6), (279, len(pixels))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    content = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels
    image = check_image(content, "x")
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(image.encoded))), shown)


def test_floating_point_images_are_refused() -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.ones((4, 5), np.float32)).save(buffer, "TIFF")
    with pytest.raises(DataError) as caught:
        check_image(buffer.getvalue(), "x")
    assert caught.value.remedy


def test_numbers_with_a_sign_are_refused() -> None:
    """As of a scanner that counts from -1000: the lowest would all be black, and the rest nearly so."""
    pixels = np.arange(-1000, 1000, dtype="<i2").tobytes()
    sizes = [(256, 50), (257, 40), (258, 16), (259, 1)]
    tags = [*sizes, (262, 1), (273, 134), (277, 1), (278, 40), (279, len(pixels)), (339, 2)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    with pytest.raises(DataError) as caught:
        check_image(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + pixels, "x")
    assert caught.value.remedy == "scale them to 0..255 and write a PNG"


@pytest.mark.parametrize("bits", [16, 32])
def test_only_16_bits_of_a_tiff_are_read(bits: int) -> None:
    """Where 32 bits are used is not known: their upper 8 would mostly be black, their lower 16 mostly white."""
    buffer = io.BytesIO()
    kind = {16: np.uint16, 32: np.int32}[bits]
    Image.fromarray(np.arange(20, dtype=kind).reshape(4, 5) << (bits - 6)).save(buffer, "TIFF")
    if bits == 16:
        assert DEPTH_FIX in check_image(buffer.getvalue(), "x").fix
        return
    with pytest.raises(DataError) as caught:
        check_image(buffer.getvalue(), "x")
    assert caught.value.remedy


def test_postscript_is_not_interpreted() -> None:
    """Pillow would run Ghostscript on it."""
    with pytest.raises(DataError, match="cannot be decoded"):
        check_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n", "x.jpg")


CORNERS = np.zeros((32, 48, 3), np.uint8)
CORNERS[:16, :16] = 255  # in an upright image, white at the top left, and green at the top right
CORNERS[:16, 32:, 1] = 255


def mark(kind: str, turn: int, xmp: bool) -> bytes:
    """Return an image that shows CORNERS once it is turned by its mark."""
    stored = Image.fromarray(CORNERS)
    for method in {
        1: (),
        2: (Image.Transpose.FLIP_LEFT_RIGHT,),
        3: (Image.Transpose.ROTATE_180,),
        4: (Image.Transpose.FLIP_TOP_BOTTOM,),
        5: (Image.Transpose.TRANSPOSE,),
        6: (Image.Transpose.ROTATE_90,),
        7: (Image.Transpose.TRANSVERSE,),
        8: (Image.Transpose.ROTATE_270,),
    }[turn]:
        stored = stored.transpose(method)
    options: dict[str, object] = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
    if not xmp:
        marks = Image.Exif()
        marks[0x0112] = turn
        options["exif"] = marks.tobytes()
    buffer = io.BytesIO()
    stored.save(buffer, kind, **options)
    encoded = buffer.getvalue()
    if xmp:  # not every Pillow writes it
        content = b"http://ns.adobe.com/xap/1.0/\0" + f'<x xmlns:tiff="t"><d tiff:Orientation="{turn}"/></x>'.encode()
        encoded = encoded[:2] + b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content + encoded[2:]
    return encoded


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize(
    ("kind", "xmp"), [("JPEG", False), ("PNG", False), ("WEBP", False), ("TIFF", False), ("JPEG", True)]
)
def test_images_are_turned_as_people_see_them(tmp_path: Path, kind: str, xmp: bool, turn: int, decode: bool) -> None:
    path = tmp_path / "x"
    path.write_bytes(mark(kind, turn, xmp))
    image = read_image(path, decode=decode)
    assert (image.height, image.width, image.turn) == (32, 48, turn)
    assert (TURN_FIX in image.fix) == (turn != 1)
    assert image.stored_size == ((48, 32) if turn >= 5 else (32, 48))
    assert read_size(path) == (32, 48)
    pixels = np.asarray(Image.open(io.BytesIO(image.encoded)).convert("RGB"), int)
    assert np.abs(pixels - CORNERS).mean() < 3
    again = check_image(image.encoded, "x", decode=decode)
    assert (again.fix, again.encoded) == ("", image.encoded)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("turn", [3, 6])
def test_records_are_not_turned(turn: int, decode: bool) -> None:
    encoded = mark("JPEG", turn, xmp=False)
    image = check_image(encoded, "x", decode=decode, upright=False)
    assert (image.encoded, image.turn, image.fix) == (encoded, 1, "")


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


@pytest.mark.parametrize(("kind", "value"), [(2, b"6\0"), (7, b"6\0"), (3, b"\0\0"), (3, b"\x09\0"), (11, b"\0\0")])
def test_an_odd_orientation_is_none(kind: int, value: bytes, tmp_path: Path) -> None:
    count = 2 if kind in (2, 7) else 1
    entry = struct.pack("<HHHI4sI", 1, 0x0112, kind, count, value.ljust(4, b"\0"), 0)
    Image.new("RGB", (9, 5)).save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0" + entry)
    assert (read_image(tmp_path / "a.jpg").turn, read_size(tmp_path / "a.jpg")) == (1, (5, 9))
    assert read_image(tmp_path / "a.jpg", decode=False).turn == 1


@pytest.mark.posix
def test_a_pipe_is_no_image(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    os.mkfifo(path)
    for read in (read_image, read_size):
        with pytest.raises(DataError) as caught:
            read(path)
        assert caught.value.path == str(path)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "fails"), OSError(errno.EMFILE, "too many")])
def test_no_image_is_blamed_for_the_system(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    path = tmp_path / "a.png"
    Image.new("RGB", (3, 2)).save(path)
    content = path.read_bytes()
    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(type(error)) as caught:
        read_size(path)
    assert getattr(caught.value, "filename", str(path)) == str(path)
    if isinstance(error, MemoryError):
        with pytest.raises(MemoryError):
            check_image(content, "a.png")
        with pytest.raises(MemoryError):
            decode_image(content)


def test_an_image_of_too_many_pixels_is_told_as_such(tmp_path: Path) -> None:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 20000, 10000, 8, 2, 0, 0, 0)
    head = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    (tmp_path / "large.png").write_bytes(head + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT")))
    with pytest.raises(DataError) as error:
        read_size(tmp_path / "large.png")
    assert error.value.path == str(tmp_path / "large.png")
    assert str(20000 * 10000) in str(error.value)
