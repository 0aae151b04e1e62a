"""Draw boxes, labels and captions on images, for people."""

from __future__ import annotations

import bisect
import colorsys
import functools
import io
import itertools
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from gaudi_datasets.errors import DataError
from gaudi_datasets.image_files import READ_FORMATS, to_eight_bits

Colour = tuple[int, int, int]
Plate = tuple[int, int, int, int]  # left, top, right, bottom in pixels

SMALLEST_SIDE, LARGEST_SIDE = 640, 1280
PAPER, INK, FAINT_INK = (255, 255, 255), (30, 30, 30), (110, 110, 110)
HIT, FALSE_ALARM, MISS = (22, 163, 74), (220, 38, 38), (250, 204, 21)
_MARGIN = 8
_DASH = 10
_SPELT = str.maketrans(
    {"ß": "ss", "ẞ": "SS", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D", "ð": "d", "Ð": "D"}
    | {"æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "þ": "th", "Þ": "Th", "\u0131": "i"}
)  # letters that Unicode does not decompose


def decode_image(encoded: bytes, record: str | None = None) -> Image.Image:
    """Decode a JPEG or PNG to RGB as training does, its pixels as they are stored; `check_image` has turned it.

    Raises:
        DataError: it is damaged; `record` is its name.
    """
    try:
        with Image.open(io.BytesIO(encoded), formats=READ_FORMATS) as image:
            return to_eight_bits(image).convert("RGB")
    except MemoryError:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, its own, by the fault and the format
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "fetch or convert it again, or leave it out"
        raise DataError(f"cannot be decoded ({reason})", record=record, remedy=remedy) from None


class Outcomes(NamedTuple):
    """Hold the detections in an image, compared with the truth.

    Attributes:
        boxes_yxyx: float [n, 4] in 0..1, of the detections.
        labels: int [n], 1 for the first class.
        scores: float [n].
        is_hit: bool [n]: a detection found a box of its class; another one is a false alarm.
        missed_yxyx, missed_labels: boxes [m, 4] of the truth that no detection found, and their labels [m].
    """

    boxes_yxyx: npt.NDArray[np.floating[Any]]
    labels: npt.NDArray[np.integer[Any]]
    scores: npt.NDArray[np.floating[Any]]
    is_hit: npt.NDArray[np.bool_]
    missed_yxyx: npt.NDArray[np.floating[Any]]
    missed_labels: npt.NDArray[np.integer[Any]]

    def describe(self) -> str:
        """Return the numbers of hits, false alarms and misses in words."""
        hits, misses = int(self.is_hit.sum()), len(self.missed_labels)
        alarms = len(self.is_hit) - hits
        words = ((hits, "hit", "hits"), (alarms, "false alarm", "false alarms"), (misses, "miss", "misses"))
        return ", ".join(f"{number} {one if number == 1 else many}" for number, one, many in words)


def draw_boxes(
    image: Image.Image,
    boxes_yxyx: npt.NDArray[np.floating[Any]],
    labels: npt.NDArray[np.integer[Any]],
    class_names: Sequence[str],
    is_crowd: npt.NDArray[np.bool_] | None = None,
    *,
    scores: npt.NDArray[np.floating[Any]] | None = None,
    low: int = SMALLEST_SIDE,
    high: int | None = LARGEST_SIDE,
    max_boxes: int | None = None,
) -> Image.Image:
    """Draw boxes with their class names; the image is brought to a readable size first.

    Args:
        image: RGB, of any size.
        boxes_yxyx: float [n, 4], 0..1.
        labels: int [n], 1 for the first of `class_names`.
        class_names: names in the order of the labels.
        is_crowd: bool [n], boxes of crowds, which are drawn dashed; none when None.
        scores: float [n], written after the names; the best is on top. Without them, small boxes are on top.
        low: of the longer side of the result, in pixels.
        high: likewise; None for no bound.
        max_boxes: draw the first ones on top only, and write the number of the others; None: draw all.
    """
    canvas = fit_image(image, low, high)
    corners = _to_corners(canvas, boxes_yxyx)
    crowd = np.zeros(len(corners), np.bool_) if is_crowd is None else is_crowd
    rank = -(corners[:, 2:] - corners[:, :2]).prod(axis=1) if scores is None else np.asarray(scores)
    tags = []
    for row in np.argsort(-rank, kind="stable"):
        label = int(labels[row])
        text = to_drawable(class_names[label - 1], label) + " (crowd)" * bool(crowd[row])
        text += "" if scores is None else f" {scores[row]:.2f}"
        tags.append(_Tag(corners[row], text, class_colour(label), bool(crowd[row])))
    _draw_tags(canvas, tags, max_boxes)
    return canvas


def draw_outcomes(
    image: Image.Image,
    outcomes: Outcomes,
    class_names: Sequence[str],
    *,
    low: int = SMALLEST_SIDE,
    high: int | None = LARGEST_SIDE,
    max_boxes: int | None = None,
) -> Image.Image:
    """Draw hits green, false alarms red, and misses dashed in yellow, with class names and scores.

    Errors are on top of hits, and the first to be drawn where `max_boxes` bounds the number; the other arguments are
    those of `draw_boxes`.
    """
    canvas = fit_image(image, low, high)
    found, missed = _to_corners(canvas, outcomes.boxes_yxyx), _to_corners(canvas, outcomes.missed_yxyx)

    def name(label: int) -> str:
        return to_drawable(class_names[label - 1], label)

    hits: list[_Tag] = []
    alarms: list[_Tag] = []
    for row in np.argsort(-np.asarray(outcomes.scores), kind="stable"):
        text = f"{name(int(outcomes.labels[row]))} {outcomes.scores[row]:.2f}"
        if outcomes.is_hit[row]:
            hits.append(_Tag(found[row], text, HIT, is_dashed=False))
        else:
            alarms.append(_Tag(found[row], text, FALSE_ALARM, is_dashed=False))
    largest_first = np.argsort(-(missed[:, 2:] - missed[:, :2]).prod(axis=1), kind="stable")
    misses = [
        _Tag(missed[row], f"missed {name(int(outcomes.missed_labels[row]))}", MISS, is_dashed=True)
        for row in largest_first
    ]
    errors = [tag for pair in itertools.zip_longest(misses, alarms) for tag in pair if tag is not None]
    _draw_tags(canvas, [*errors, *hits], max_boxes)
    return canvas


class _Tag(NamedTuple):
    """A box with its text; corners are int [4], top, left, bottom and right in pixels."""

    corners: npt.NDArray[np.int_]
    text: str
    colour: Colour
    is_dashed: bool


def _find_unit(size: tuple[int, int]) -> float:
    """Return what letters and lines grow by with an image; those of a long strip would hide it, and take minutes."""
    return min(max(size), max(4 * min(size), SMALLEST_SIDE)) / SMALLEST_SIDE


def _to_corners(canvas: Image.Image, boxes_yxyx: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.int_]:
    bottom, right = canvas.height - 1, canvas.width - 1
    corners = np.clip(np.reshape(boxes_yxyx, (-1, 4)), 0, 1) * [bottom, right, bottom, right]
    return np.rint(corners).astype(int)


def _draw_tags(canvas: Image.Image, tags: Sequence[_Tag], max_boxes: int | None) -> None:
    """Draw boxes, the first one on top, then their texts, and the number of those beyond `max_boxes`."""
    pen, unit = ImageDraw.Draw(canvas), _find_unit(canvas.size)
    shown = tags[:max_boxes]
    for tag in shown[::-1]:
        _draw_frame(pen, tag.corners, tag.colour, round(2 * unit), dashed=tag.is_dashed)
    font = _font(13 * unit)
    ascent, descent = font.getmetrics()
    plates: list[tuple[Plate, str, Colour]] = []
    if rest := len(tags) - len(shown):
        text = f"+{rest} more"
        width, height = round(font.getlength(text)) + 6, ascent + descent
        corner = canvas.width - width, canvas.height - height, canvas.width, canvas.height
        plates.append((corner, text, INK))
    for tag in shown:
        taken = [plate for plate, *_ in plates]
        size = round(font.getlength(tag.text)) + 6, ascent + descent
        plates.append((_place_plate(canvas.size, tag.corners, size, taken), tag.text, tag.colour))
    for (left, top, right, bottom), text, colour in plates[::-1]:
        pen.rectangle((left, top, right - 1, bottom - 1), fill=colour)
        dark = float(np.dot(colour, (0.299, 0.587, 0.114))) <= 140
        pen.text((left + 3, top), text, (255, 255, 255) if dark else (0, 0, 0), font)


def add_caption(image: Image.Image, title: str, detail: str = "") -> Image.Image:
    """Add a bar above the image with a title and, fainter, a detail; text without room is cut.

    Letters that the font lacks are question marks.
    """
    unit = max(1.0, _find_unit(image.size))
    font, margin = _font(14 * unit), round(_MARGIN * unit)
    ascent, descent = font.getmetrics()
    bar = ascent + descent + 2 * margin
    result = Image.new("RGB", (image.width, image.height + bar), PAPER)
    result.paste(image, (0, bar))
    pen, room = ImageDraw.Draw(result), image.width - 2 * margin
    title = _cut(_to_ascii(title), font, room)
    pen.text((margin, margin), title, INK, font)
    used = round(font.getlength(title)) + 2 * margin
    pen.text((margin + used, margin), _cut(_to_ascii(detail), font, room - used), FAINT_INK, font)
    return result


def join_images(images: Sequence[Image.Image]) -> Image.Image:
    """Put images side by side, resized to the height of the highest."""
    height = max(one.height for one in images)
    scaled = [one.resize((max(1, round(one.width * height / one.height)), height)) for one in images]
    result = Image.new("RGB", (sum(one.width + _MARGIN for one in scaled) - _MARGIN, height), PAPER)
    left = 0
    for one in scaled:
        result.paste(one, (left, 0))
        left += one.width + _MARGIN
    return result


def fit_image(image: Image.Image, low: int = SMALLEST_SIDE, high: int | None = LARGEST_SIDE) -> Image.Image:
    """Copy an image, resized so that its longer side has at least `low` and at most `high` pixels (None: any)."""
    longer = max(image.size)
    side = max(longer, low) if high is None else min(max(longer, low), high)
    if side == longer:
        return image.copy()
    width, height = (max(1, round(length * side / longer)) for length in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def class_colour(label: int) -> Colour:
    """Return an RGB colour for a label; neighbours are far apart on the colour circle, for any number of classes."""
    golden_ratio = 0.618033988749895
    red, green, blue = colorsys.hsv_to_rgb(label * golden_ratio % 1.0, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def to_drawable(name: str, label: int) -> str:
    """Return the name without accents, or `#label` where Pillow's font, which is Latin only, lacks a letter of it."""
    plain = _spell(name)
    return plain if plain and plain.isascii() else f"#{label}"


def _to_ascii(text: str) -> str:
    return _spell(text).encode("ascii", "replace").decode()


def _spell(text: str) -> str:
    """Return the text without accents, and with Latin letters in place of those that are made of them."""
    parts = unicodedata.normalize("NFKD", text.translate(_SPELT))
    return "".join(part for part in parts if not unicodedata.combining(part)).strip()


@functools.lru_cache(maxsize=8)
def _font(size: float) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(max(8, round(size)))
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise ImportError("Pillow was built without FreeType, which draws its letters; pip install pillow")
    return font


def _cut(text: str, font: ImageFont.FreeTypeFont, room: float) -> str:
    if font.getlength(text) <= room:
        return text
    kept = bisect.bisect(range(1, len(text)), room, key=lambda length: font.getlength(text[:length] + "..."))
    return text[:kept] + "..." * bool(kept)


def _draw_frame(
    pen: ImageDraw.ImageDraw, corners: npt.NDArray[np.int_], colour: Colour, thickness: int, *, dashed: bool
) -> None:
    top, left, bottom, right = (int(corner) for corner in corners)
    if not dashed:
        pen.rectangle((left - 1, top - 1, right + 1, bottom + 1), outline=(0, 0, 0))  # seen on any ground
        pen.rectangle((left, top, right, bottom), outline=colour, width=thickness)
        return
    pen.rectangle((left, top, right, bottom), outline=(0, 0, 0), width=thickness)  # between the dashes, for the same
    for x in range(left, right, 2 * _DASH):
        for y in (top, bottom):
            pen.line((x, y, min(x + _DASH, right), y), colour, thickness)
    for y in range(top, bottom, 2 * _DASH):
        for x in (left, right):
            pen.line((x, y, x, min(y + _DASH, bottom)), colour, thickness)


def _place_plate(
    size: tuple[int, int], corners: npt.NDArray[np.integer[Any]], plate: tuple[int, int], taken: Sequence[Plate]
) -> Plate:
    """Choose the first free place above, inside or below a box, left or right, else the first within the image.

    `size` and `plate` are width and height in pixels; `corners` are int [4], top, left, bottom and right of the box.
    """
    (width, height), (plate_width, plate_height) = size, plate
    top, left, bottom, right = (int(corner) for corner in corners)
    places = []
    for y in (top - plate_height, top, bottom, bottom - plate_height):
        for x in (left, right - plate_width):
            x = max(0, min(x, width - plate_width))
            if 0 <= y <= height - plate_height:
                places.append((x, y, x + plate_width, y + plate_height))

    def is_free(place: Plate) -> bool:
        x0, y0, x1, y1 = place
        return not any(x0 < other[2] and other[0] < x1 and y0 < other[3] and other[1] < y1 for other in taken)

    free = filter(is_free, places)
    return next(free, places[0] if places else (0, 0, plate_width, plate_height))
