"""Changes of colour of the classifier's training images, drawn in NumPy: one affine map of RGB values for an image.

Brightness, contrast, saturation and hue are each an affine map of a pixel's three values, so all four together are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# The map to the mean of the three values; the rest of a value is its colour.
_GRAY = np.full((3, 3), 1 / 3)
# A right angle about the gray axis: the part of a rotation that its sine is multiplied with.
_QUARTER_TURN = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]]) / np.sqrt(3)


@dataclass(frozen=True)
class ColorRange:
    """Which changes of colour are drawn; none by default.

    Args:
        strength: brightness, contrast and saturation are multiplied by 1 - strength to 1 + strength, and the hue is
            turned by up to so many quarter turns to either side.
        gray_probability: share of the images that lose all colour.
    """

    strength: float = 0.0
    gray_probability: float = 0.0

    def __bool__(self) -> bool:
        """Whether anything is changed."""
        return self.strength > 0 or self.gray_probability > 0


def draw_colors(
    generators: Sequence[np.random.Generator], colors: ColorRange, middle: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Draw a map for each of n images, each with a generator of its own.

    Args:
        generators: n.
        colors: what is drawn.
        middle: float32 [3], the values that the contrast leaves as they are.

    Returns:
        float32 [n, 3, 4]: RGB values become ``map[:, :3] @ values + map[:, 3]``.
    """
    uniform = np.stack([generator.random(5) for generator in generators])
    brightness, contrast, saturation, turn = (colors.strength * (2 * uniform[:, :4] - 1)).T
    saturation = np.where(uniform[:, 4] < colors.gray_probability, -1.0, saturation)
    angle = (turn * np.pi / 2)[:, None, None]
    rotation = np.cos(angle) * (np.eye(3) - _GRAY) + np.sin(angle) * _QUARTER_TURN
    linear = _GRAY + (1 + saturation)[:, None, None] * rotation
    linear = ((1 + brightness) * (1 + contrast))[:, None, None] * linear
    shift = -((1 + brightness) * contrast)[:, None] * middle
    return np.concatenate([linear, shift[..., None]], axis=2).astype(np.float32)
