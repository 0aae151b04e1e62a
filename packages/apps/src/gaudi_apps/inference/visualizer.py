"""Draw detections on images, beside the ground truth."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from gaudi_datasets.drawing import INK, PAPER, Plate, class_colour, ink_on, place_plate, to_drawable
from gaudi_datasets.output_files import write_atomically

Image = NDArray[np.uint8]
Boxes = NDArray[np.floating[Any]]
Labels = NDArray[np.integer[Any]]
Scores = NDArray[np.floating[Any]]

FONT = cv2.FONT_HERSHEY_SIMPLEX
SMALLEST_SIDE = 600
MARGIN = 8


def draw_detections(
    image: Image,
    boxes_yxyx: Boxes,
    labels: Labels,
    scores: Scores | None,
    class_names: Sequence[str],
) -> Image:
    """Draw boxes with class name and score, the best score on top; a small image is enlarged first, to be readable.

    Args:
        image: uint8 [height, width, 3], RGB.
        boxes_yxyx: float [n, 4], 0..1.
        labels: int [n], 1 for the first of `class_names`.
        scores: float [n] in 0..1; None for ground truth.
        class_names: names in the order of the labels.

    Returns:
        A new image, uint8 [h, w, 3], RGB, in the proportions of the given one.
    """
    canvas = enlarge(image)
    best_first = np.arange(len(labels)) if scores is None else np.argsort(-np.asarray(scores), kind="stable")
    corners = _to_pixels(boxes_yxyx, canvas.shape)
    for index in best_first[::-1]:
        _draw_frame(canvas, corners[index], class_colour(int(labels[index])))
    tags: list[tuple[Plate, str, int]] = []
    for index in best_first:
        label = int(labels[index])
        name = to_drawable(class_names[label - 1], label)
        text = name if scores is None else f"{name} {scores[index]:.2f}"
        taken = [plate for plate, *_ in tags]
        size = canvas.shape[1], canvas.shape[0]
        tags.append((place_plate(size, corners[index], _measure_plate(canvas, text), taken), text, label))
    for plate, text, label in tags[::-1]:
        _draw_tag(canvas, plate, text, class_colour(label))
    return canvas


def compare_images(left: Image, right: Image, *, left_title: str, right_title: str) -> Image:
    """Put two images of one size side by side, each under its title."""
    if left.shape != right.shape:
        raise ValueError(f"images are {left.shape} and {right.shape}; give two of the same size")
    columns = [add_title(left, left_title), add_title(right, right_title)]
    gap = np.full((columns[0].shape[0], MARGIN, 3), PAPER, np.uint8)
    return np.hstack([columns[0], gap, columns[1]])


def write_image(path: Path, image: Image) -> None:
    """Write uint8 [height, width, 3] RGB as PNG or JPEG, by the ending of the path."""
    done, encoded = cv2.imencode(path.suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    if not done:
        raise ValueError(f"{path}: OpenCV cannot write {path.suffix} files; use .png or .jpg")
    with write_atomically(path) as temporary:
        temporary.write_bytes(encoded.tobytes())


def decode_image(encoded: bytes) -> Image:
    """Decode an image to uint8 [height, width, 3], RGB; orientation tags are not applied, as in training."""
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)


def enlarge(image: Image) -> Image:
    """Copy an image, enlarged until its longer side has at least SMALLEST_SIDE pixels."""
    height, width = image.shape[:2]
    scale = SMALLEST_SIDE / max(height, width)
    if scale <= 1:
        return np.ascontiguousarray(image).copy()
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    return np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_CUBIC), np.uint8)


def _to_pixels(boxes_yxyx: Boxes, shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Convert boxes to corners in pixels, within the canvas."""
    height, width = shape[:2]
    corners = np.round(np.reshape(boxes_yxyx, (-1, 4)) * [height, width, height, width])
    return np.clip(corners, 0, [height - 1, width - 1, height - 1, width - 1]).astype(np.int64)


def _find_scale(canvas: Image) -> float:
    return max(canvas.shape[:2]) / SMALLEST_SIDE


def _text_style(canvas: Image) -> tuple[float, int]:
    """Return size (of OpenCV's font) and thickness (pixels) of the letters."""
    return 0.45 * _find_scale(canvas), max(1, round(_find_scale(canvas)))


def _draw_frame(canvas: Image, corners: NDArray[np.int64], colour: tuple[int, int, int]) -> None:
    top, left, bottom, right = (int(corner) for corner in corners)
    thickness = max(2, round(2 * _find_scale(canvas)))
    cv2.rectangle(canvas, (left, top), (right, bottom), colour, thickness, cv2.LINE_AA)


def _measure_plate(canvas: Image, text: str) -> tuple[int, int]:
    """Return width and height in pixels of the plate of a text."""
    (width, height), baseline = cv2.getTextSize(text, FONT, *_text_style(canvas))
    return width + 6, height + baseline + 3


def _draw_tag(canvas: Image, plate: Plate, text: str, colour: tuple[int, int, int]) -> None:
    """Draw text in black or white on a plate of the class's color."""
    size, thickness = _text_style(canvas)
    left, top, right, bottom = plate
    (_, text_height), _ = cv2.getTextSize(text, FONT, size, thickness)
    cv2.rectangle(canvas, (left, top), (right, bottom), colour, cv2.FILLED)
    cv2.putText(canvas, text, (left + 3, top + text_height + 2), FONT, size, ink_on(colour), thickness, cv2.LINE_AA)


def add_title(image: Image, title: str) -> Image:
    """Put a line of text above an image; letters that OpenCV's font lacks are left out."""
    title = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    size = 0.6 * _find_scale(image)
    thickness = max(1, round(_find_scale(image)))
    (_, text_height), baseline = cv2.getTextSize(title, FONT, size, thickness)
    bar = np.full((text_height + baseline + 2 * MARGIN, image.shape[1], 3), PAPER, np.uint8)
    cv2.putText(bar, title, (MARGIN, MARGIN + text_height), FONT, size, INK, thickness, cv2.LINE_AA)
    return np.vstack([bar, image])
