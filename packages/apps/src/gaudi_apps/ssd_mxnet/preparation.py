"""Pictures as the detector takes them, decoded by OpenCV, as in its training."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gaudi_apps.inputs import Preparation
from gaudi_apps.pictures import Picture, decode_picture
from gaudi_datasets.detection.batches import Layout, prepare_pixels


def make_preparation(layout: Layout) -> Preparation:
    """For a network of images of a layout."""
    axes = (2, 0, 1) if layout == "NCHW" else (0, 1, 2)

    def of_pixels(pixels: Picture) -> npt.NDArray[np.float32]:
        return np.ascontiguousarray(prepare_pixels(pixels).transpose(axes))

    return Preparation(lambda encoded: of_pixels(decode_picture(encoded)), of_pixels)
