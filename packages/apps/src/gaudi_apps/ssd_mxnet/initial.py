"""The weights that a training in MXNet begins with: drawn by NumPy, so alike on every device."""

from __future__ import annotations

import math

import numpy as np

from gaudi_models.mxnet.ssd import SSD
from gaudi_models.mxnet.weights import read_tensors
from gaudi_models.weights import WeightsFile


def draw_weights(net: SSD, seed: int) -> WeightsFile:
    """Kernels for a detector: He's normal distribution in the trunk, Glorot's uniform one in what has a bias.

    These are the distributions that the TensorFlow program draws from, but for his cut tails. He et al.,
    https://arxiv.org/abs/1502.01852; Glorot and Bengio, "Understanding the difficulty of training deep feedforward
    neural networks", 2010.

    Args:
        net: initialised.
        seed: of the draws; each kernel has draws of its own.
    """
    shapes = {name: tensor.shape for name, tensor in read_tensors(net).items()}
    kernels = [name for name in shapes if name.endswith("/kernel")]
    drawn = {}
    for number, name in enumerate(kernels):
        generator = np.random.default_rng([seed, number])
        height, width, channels_in, channels_out = shapes[name]
        fan_in, fan_out = height * width * channels_in, height * width * channels_out
        if f"{name.removesuffix('kernel')}bias" in shapes:
            bound = math.sqrt(6 / (fan_in + fan_out))
            values = generator.uniform(-bound, bound, shapes[name])
        else:
            values = generator.normal(0, math.sqrt(2 / fan_in), shapes[name])
        drawn[name] = values.astype(np.float32)
    return WeightsFile("new weights", drawn, net.padding, {})
