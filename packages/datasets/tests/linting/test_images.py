from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.linting.images import ImageSet, StoredImage, check_images, find_overlap
from gaudi_datasets.linting.rules import (
    DUPLICATE,
    MISLABELLED,
    MISSING,
    OTHER_SIZE,
    OVERLAP,
    REENCODED,
    TURNED,
    UNREADABLE,
    Finding,
    Rule,
)

Encode = Callable[..., bytes]


def stored(encoded: bytes, file_name: str, annotated_size: tuple[int, int] | None = None) -> StoredImage:
    return encoded, file_name, annotated_size


def hold(*images: StoredImage | Exception) -> ImageSet:
    """Return images in memory; an exception is raised when its turn comes."""

    def read(index: int) -> StoredImage:
        image = images[index]
        if isinstance(image, Exception):
            raise image
        return image

    return ImageSet(len(images), lambda index: f"place {index}", read)


def say(*images: StoredImage | Exception) -> list[tuple[Rule, str]]:
    return summarize(check_images(hold(*images))[0])


def summarize(findings: Sequence[Finding]) -> list[tuple[Rule, str]]:
    """Return the rule of each finding, its place, and the numbers, formats and places that it names."""
    named = re.compile(r"place \d|\d+|EXIF|[A-Z]{3,}")
    return [(one.rule, " ".join([one.where, *named.findall(one.what)])) for one in findings]


def turned(seed: int, turn: int) -> bytes:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = turn
    pixels = np.random.default_rng(seed).integers(0, 256, (60, 80, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()


def test_nothing_is_said_of_usual_images(encode: Encode) -> None:
    images = [
        stored(encode(1), "a.jpg", (60, 80)),
        stored(encode(2, "PNG"), "b.PNG", (60, 80)),
        stored(encode(3, mode="L"), "c.jpeg"),
        stored(encode(4, "PNG", size=(5, 7)), "d"),
    ]
    findings, contents, sizes_hw = check_images(hold(*images))
    assert findings == []
    assert sizes_hw.tolist() == [[60, 80], [60, 80], [60, 80], [7, 5]]
    assert sorted(contents.values()) == [f"place {number}" for number in range(4)]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.95])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_truncated_image_is_unreadable(encode: Encode, kind: str, share: float) -> None:
    whole = encode(1, kind)
    size = int(len(whole) * share)
    ((rule, text),) = say(stored(whole[:size], "a.jpg"))
    assert rule == UNREADABLE
    assert text.startswith("place 0 ")
    assert f" {size}" in text


@pytest.mark.parametrize(("kind", "made"), [("GIF", "PNG"), ("BMP", "PNG"), ("WEBP", "JPEG"), ("TIFF", "PNG")])
def test_other_formats_are_converted_and_told(encode: Encode, kind: str, made: str) -> None:
    assert say(stored(encode(1, kind), f"a.{kind.lower()}", (60, 80))) == [(REENCODED, f"place 0 {kind} {made}")]
    for ending in ("jpg", "jfif"):
        assert (MISLABELLED, f"place 0 {kind} JPEG") in say(stored(encode(1, kind), f"a.{ending}"))


def test_what_cannot_be_read_is_named_once() -> None:
    assert say(
        MissingInputError("is missing", path="place 0"),
        DataError("is damaged", record="shard: record 3"),
        PermissionError(13, "Permission denied", "a.jpg"),
    ) == [
        (MISSING, "place 0"),
        (UNREADABLE, "place 1 3"),
        (UNREADABLE, "place 2 13"),
    ]


def test_oddities_lose_nothing(encode: Encode) -> None:
    findings = say(
        stored(encode(1, mode="CMYK"), "a.jpg"),
        stored(encode(2, "PNG"), "b.jpg"),
        stored(encode(3), "c.png"),
        stored(turned(4, 3), "d.jpg"),
    )
    assert findings == [
        (REENCODED, "place 0 CMYK JPEG RGB"),
        (MISLABELLED, "place 1 PNG JPEG"),
        (MISLABELLED, "place 2 JPEG PNG"),
        (TURNED, "place 3 EXIF 3"),
    ]
    assert not any(rule.loses for rule, _ in findings)


@pytest.mark.parametrize("turn", [1, 9, 0])
def test_no_turn_and_nonsense_in_exif_are_passed_over(turn: int) -> None:
    assert say(stored(turned(1, turn), "a.jpg", (60, 80))) == []


def test_another_size_than_annotated_is_a_loss(encode: Encode) -> None:
    assert say(
        stored(encode(1), "a.jpg", (60, 81)),
        stored(turned(2, 6), "b.jpg", (80, 61)),
        stored(turned(3, 3), "c.jpg", (80, 60)),
    ) == [
        (OTHER_SIZE, "place 0 60 80 60 81"),
        (TURNED, "place 1 EXIF 6"),
        (OTHER_SIZE, "place 1 80 60 80 61"),
        (TURNED, "place 2 EXIF 3"),
        (OTHER_SIZE, "place 2 60 80 80 60"),
    ]


@pytest.mark.parametrize(("size", "with_boxes"), [((80, 60), False), ((60, 80), True), (None, False)])
def test_boxes_of_stored_pixels_are_told(size: tuple[int, int] | None, with_boxes: bool) -> None:
    findings, _, sizes_hw = check_images(hold(stored(turned(1, 6), "a.jpg", size)))
    assert [one.rule for one in findings] == [TURNED]
    assert ("boxes" in findings[0].what) == with_boxes
    assert sizes_hw.tolist() == [[80, 60]]


def test_images_in_records_are_not_turned() -> None:
    images = replace(hold(stored(turned(1, 6), "a.jpg", (60, 80))), upright=False)
    findings, _, sizes_hw = check_images(images)
    assert (findings, sizes_hw.tolist()) == ([], [[60, 80]])


def test_equal_contents_are_found_within_a_set_and_between_two(encode: Encode) -> None:
    one, two, three = (stored(encode(seed), "a.jpg") for seed in (1, 2, 3))
    findings, contents, _ = check_images(hold(one, two, one, one))
    assert summarize(findings) == [(DUPLICATE, "place 2 place 0"), (DUPLICATE, "place 3 place 0")]
    others = hold(three, MissingInputError("is missing", path="place 1"), two)
    found = summarize(find_overlap(contents, others))
    assert found == [(MISSING, "place 1"), (OVERLAP, "place 2 place 1")]


def test_broken_images_of_equal_content_are_duplicates_too() -> None:
    assert [rule for rule, _ in say(stored(b"x", "a.jpg"), stored(b"x", "b.jpg"))] == [
        UNREADABLE,
        UNREADABLE,
        DUPLICATE,
    ]


def test_results_come_in_order_and_progress_counts_all(encode: Encode) -> None:
    """More images than wait at once, with a fault in every hundredth."""
    good = stored(encode(1, size=(2, 2)), "a.jpg")
    images = hold(*(good if number % 100 else DataError("broken") for number in range(2100)))
    seen: list[tuple[int, int]] = []
    findings, _, _ = check_images(images, lambda done, total: seen.append((done, total)))
    broken = [finding.where for finding in findings if finding.rule == UNREADABLE]
    assert broken == [f"place {number}" for number in range(0, 2100, 100)]
    assert seen == [(number + 1, 2100) for number in range(2100)]


def test_an_empty_set_has_no_findings() -> None:
    findings, contents, sizes_hw = check_images(hold())
    assert (findings, contents, sizes_hw.shape) == ([], {}, (0, 2))
    assert find_overlap({}, hold()) == []
