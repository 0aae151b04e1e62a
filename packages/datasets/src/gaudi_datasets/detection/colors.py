"""Resize, mirror, change the colours of and normalise the detector's images, by OpenCV.

OpenCV's loops are vectorised and run without Python's lock, and take a third of the time of `tf.image`. Resized pixels
are uint8, which is less to move through memory; the rest is float32. Of values in 0..1, colours are within 2e-4 of
those by `tf.image` in float32; with the rounding when resizing, images are within 4/255, and within 0.5/255 on average.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from gaudi_datasets.detection.augmentation import Draws

Floats = npt.NDArray[np.float32]

# Of ImageNet, RGB, for values in 0..1; the networks' pretrained weights expect them.
MEAN_RGB = np.array([0.485, 0.456, 0.406], np.float32)
STDDEV_RGB = np.array([0.229, 0.224, 0.225], np.float32)

# Of what no image covers; about 0 once it is normalised.
BLANK_RGB = np.rint(MEAN_RGB * 255).astype(np.uint8)

_LONGEST_WARPED = 32766  # pixels of a side; OpenCV counts them in 16 bits

_threads = threading.local()

# One image a thread is fastest, and threads of OpenCV's own would come on top of those that the user allows.
cv2.setNumThreads(1)


def finish_image(pixels: npt.NDArray[np.uint8], draws: Draws, side: int) -> Floats:
    """Resize, mirror, change colours, clip to 0..1 and normalise a crop, uint8 [height, width, 3] in RGB.

    Returns:
        float32 [side, side, 3], RGB, normalised.
    """
    return color_image(resize_image(pixels, side), draws)


def resize_image(pixels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """Resize bilinearly to a square, uint8 [side, side, 3]: the first part of `finish_image`."""
    resized: npt.NDArray[np.uint8] = cv2.resize(pixels, (side, side), interpolation=cv2.INTER_LINEAR)
    return resized


def place_window(
    canvas: npt.NDArray[np.uint8],
    pixels: npt.NDArray[np.uint8],
    decoded: npt.NDArray[np.int32],
    size: tuple[int, int],
    window_yxyx: npt.NDArray[np.float32],
    place_yxyx: npt.NDArray[np.float32],
) -> None:
    """Resize a window of an image bilinearly into a place of a canvas; what is outside of the image is left there.

    Args:
        canvas: uint8 [side, side, 3], changed in place.
        pixels: uint8 [height, width, 3], the part of the image that was decoded.
        decoded: int32 [4], that part in pixels of the image: y0, x0, height and width.
        size: height and width of the image.
        window_yxyx: [4], as fractions of the image; it may reach beyond it.
        place_yxyx: [4], as fractions of the canvas.
    """
    starts, spans, scales, offsets = [], [], [], []
    for axis in range(2):
        first, last = (round(float(place_yxyx[axis + corner]) * canvas.shape[axis]) for corner in (0, 2))
        low, high = (float(window_yxyx[axis + corner]) * size[axis] for corner in (0, 2))
        scale = (high - low) / max(1, last - first)  # pixels of the image in one of the canvas
        # Pixels of the canvas whose centres are in the image.
        begin = max(0, math.ceil(-low / scale - 0.5))
        end = min(last - first, math.ceil((size[axis] - low) / scale - 0.5))
        starts.append(first + begin)
        spans.append(end - begin)
        scales.append(scale)
        offsets.append(low + (begin + 0.5) * scale - 0.5 - float(decoded[axis]))
    if min(spans) <= 0:
        return
    shrunk = [-(-length // _LONGEST_WARPED) for length in pixels.shape[:2]]
    if max(shrunk) > 1:
        height, width = (max(1, length // by) for length, by in zip(pixels.shape[:2], shrunk, strict=True))
        for axis, (length, kept) in enumerate(zip(pixels.shape[:2], (height, width), strict=True)):
            scales[axis], offsets[axis] = scales[axis] * kept / length, (offsets[axis] + 0.5) * kept / length - 0.5
        pixels = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    from_canvas = np.array([[scales[1], 0, offsets[1]], [0, scales[0], offsets[0]]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    part = cv2.warpAffine(pixels, from_canvas, (spans[1], spans[0]), flags=flags, borderMode=cv2.BORDER_REPLICATE)
    canvas[starts[0] : starts[0] + spans[0], starts[1] : starts[1] + spans[1]] = part


def color_image(resized: npt.NDArray[np.uint8], draws: Draws) -> Floats:
    """Mirror, change colours, clip to 0..1 and normalise, float32 [side, side, 3]: the second part."""
    image, other = _scratch("image", resized.shape), _scratch("other", resized.shape)
    np.copyto(image, cv2.flip(resized, 1) if draws.flip else resized)
    _jitter_colors(image, other, draws)
    cv2.threshold(image, 0, 0, cv2.THRESH_TOZERO, dst=image)
    cv2.threshold(image, 1, 0, cv2.THRESH_TRUNC, dst=image)
    return _map_channels(image, 1 / STDDEV_RGB, -MEAN_RGB / STDDEV_RGB, np.empty_like(image))


def _jitter_colors(image: Floats, other: Floats, draws: Draws) -> None:
    """Change brightness, contrast, saturation and hue, in this order and in place: from 0..255 to about 0..1.

    `image` is float32 [side, side, 3], RGB; `other`, of the same shape, is written over.
    """
    rows = other.reshape(len(other), -1)  # NumPy is fast on whole rows, not on an inner axis of 3
    mean = image.reshape(rows.shape).mean(axis=0).reshape(-1, 3).mean(axis=0) / 255
    summands = draws.gain * mean * (1 - draws.contrast) + draws.brightness
    _map_channels(image, np.full(3, draws.gain * draws.contrast / 255), summands, other)
    cv2.cvtColor(other, cv2.COLOR_RGB2HSV, dst=image)
    # Modulo 1, for OpenCV takes no negative hue; one of more than a turn is fine.
    _map_channels(image, np.array([1, draws.saturation, 1]), np.array([360 * (draws.hue % 1), 0, 0]), other)
    np.minimum(rows, np.tile(np.array([np.inf, 1, np.inf], np.float32), len(other)), out=rows)
    cv2.cvtColor(other, cv2.COLOR_HSV2RGB, dst=image)


def _map_channels(image: Floats, factors: npt.NDArray[Any], summands: npt.NDArray[Any], result: Floats) -> Floats:
    """Multiply each channel by its factor and add its summand, into `result`, which must be another array."""
    cv2.transform(image, np.column_stack([np.diag(factors), summands]), dst=result)
    return result


def _scratch(name: str, shape: tuple[int, ...]) -> Floats:
    """Return an array of this thread to write over: a new megabyte costs more than the work on it."""
    array: Floats | None = getattr(_threads, name, None)
    if array is None or array.shape != shape:
        array = np.empty(shape, np.float32)
        setattr(_threads, name, array)
    return array
