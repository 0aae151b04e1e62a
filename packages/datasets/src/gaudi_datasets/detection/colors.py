"""From decoded pixels to what the network takes: resizing, mirroring, colours and normalisation, in OpenCV.

OpenCV's loops are vectorised and run without Python's lock, so this takes a third of what `tf.image` takes. Pixels stay
uint8 until the colours change. Both together are within 4/255 of the same in float32 by `tf.image`, and on
photographs within 0.5/255 on average; the difference is the rounding to uint8.
"""

from __future__ import annotations

import threading

import cv2
import numpy as np
import numpy.typing as npt

# Of ImageNet, RGB, for values in 0..1; the networks' pretrained weights expect them.
MEAN_RGB = np.array([0.485, 0.456, 0.406], np.float32)
STDDEV_RGB = np.array([0.229, 0.224, 0.225], np.float32)

_LEVELS = np.arange(256, dtype=np.float32)[:, None] / 255

_threads = threading.local()

# One image a thread is fastest, and threads of OpenCV's own would come on top of those that the user allows.
cv2.setNumThreads(1)


def finish_image(
    pixels: npt.NDArray[np.uint8], flip: bool, colors: npt.NDArray[np.float32], side: int
) -> npt.NDArray[np.float32]:
    """Resize, mirror, change colours, clip to 0..1 and normalise.

    Args:
        pixels: uint8 [height, width, 3], RGB.
        flip: whether to mirror left to right.
        colors: float32 [4]: what is added for brightness, in 0..1; the factors of contrast, around each channel's mean,
            and of saturation; what is added to the hue, in turns.
        side: of the result in pixels.

    Returns:
        float32 [side, side, 3], RGB, normalised.
    """
    resized = cv2.resize(pixels, (side, side), interpolation=cv2.INTER_LINEAR)
    if flip:
        resized = cv2.flip(resized, 1)
    image = _jitter_colors(resized, *colors.tolist())
    rows, one = image.reshape(side, -1), np.ones(3 * side, np.float32)
    np.minimum(np.maximum(rows, 0 * one, out=rows), one, out=rows)
    rows -= np.tile(MEAN_RGB, side)
    rows *= np.tile(1 / STDDEV_RGB, side)
    return image


def _jitter_colors(
    pixels: npt.NDArray[np.uint8], brightness: float, contrast: float, saturation: float, hue: float
) -> npt.NDArray[np.float32]:
    """Brightness, contrast, saturation and hue, in this order: from uint8 to float32 in 0..1 and somewhat beyond."""
    mean = np.array(cv2.mean(pixels)[:3]) / 255
    levels = _LEVELS * contrast + (mean * (1 - contrast) + brightness)
    image = cv2.LUT(pixels, levels.astype(np.float32)[:, None])
    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV, dst=_scratch(image.shape))
    # NumPy is fast on whole rows, not on an inner axis of 3; and splitting would allocate.
    width = image.shape[1]
    rows = hsv.reshape(-1, 3 * width)
    rows *= np.tile(np.array([1, saturation, 1], np.float32), width)
    rows += np.tile(np.array([360 * hue, 0, 0], np.float32), width)
    np.minimum(rows, np.tile(np.array([np.inf, 1, np.inf], np.float32), width), out=rows)
    result: npt.NDArray[np.float32] = cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB, dst=image)
    return result


def _scratch(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """An array of this thread, to be written over: a new megabyte costs more than what is done in it."""
    array: npt.NDArray[np.float32] | None = getattr(_threads, "array", None)
    if array is None or array.shape != shape:
        array = _threads.array = np.empty(shape, np.float32)
    return array
