"""How large the network is and what it needs, counted from its layers without building it."""

from __future__ import annotations

from dataclasses import dataclass

# Convolutions as (how many, kernel, channels in, channels out, side of the output) at 300x300.
TRUNK = (
    (1, 7, 3, 64, 150),
    (6, 3, 64, 64, 75),
    (1, 3, 64, 128, 38),
    (7, 3, 128, 128, 38),
    (1, 1, 64, 128, 38),
    (1, 3, 128, 256, 38),
    (11, 3, 256, 256, 38),
    (1, 1, 128, 256, 38),
)
EXTRA = (
    (1, 1, 256, 256, 38),
    (1, 3, 256, 512, 19),
    (1, 1, 512, 256, 19),
    (1, 3, 256, 512, 10),
    (1, 1, 512, 128, 10),
    (1, 3, 128, 256, 5),
    (1, 1, 256, 128, 5),
    (1, 3, 128, 256, 3),
    (1, 1, 256, 128, 3),
    (1, 3, 128, 256, 1),
)
# Levels as (channels, side, default boxes a cell).
LEVELS = ((256, 38, 4), (512, 19, 6), (512, 10, 6), (256, 5, 6), (256, 3, 4), (256, 1, 4))


@dataclass(frozen=True)
class NetworkSize:
    """Trainable parameters, and the values that the forward pass of one image keeps for the backward pass."""

    parameters: int
    kept_values: int

    def training_bytes(self, batch_size: int, bytes_per_value: int) -> int:
        """Weights, momentum and gradients in float32, and what the images of a batch keep."""
        return 12 * self.parameters + batch_size * self.kept_values * bytes_per_value

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and momentum in float32."""
        return 8 * self.parameters


def count_network(num_classes: int) -> NetworkSize:
    """Size of SSD-ResNet34 for `num_classes` categories beside the background.

    A convolution keeps two values for each of its outputs: the output itself, and what normalization or ReLU make
    of it.
    """
    parameters = kept = 0
    for many, kernel, channels_in, channels_out, side in TRUNK:
        parameters += many * (kernel * kernel * channels_in * channels_out + 2 * channels_out)
        kept += 2 * many * side * side * channels_out
    for many, kernel, channels_in, channels_out, side in EXTRA:
        parameters += many * (kernel * kernel * channels_in * channels_out + channels_out)
        kept += 2 * many * side * side * channels_out
    for channels, side, boxes in LEVELS:
        outputs = boxes * (num_classes + 1 + 4)
        parameters += 9 * channels * outputs + outputs
        kept += 2 * side * side * outputs
    return NetworkSize(parameters, kept)
