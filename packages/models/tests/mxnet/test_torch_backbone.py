"""The backbone that PyTorch wrote, in MXNet; see test_torch_weights.py."""

from __future__ import annotations

import os
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

from gaudi_models.mxnet.ssd import build_ssd
from gaudi_models.mxnet.weights import assign_weights
from gaudi_models.weights import read_weights
from gaudi_models.weights.reading import convert_weights

pytestmark = pytest.mark.skipif(
    "TORCH_WEIGHTS" not in os.environ, reason="TORCH_WEIGHTS names no folder of torch_resnets.py; nox -s torch_weights"
)


def test_features_are_those_of_pytorch(tmp_path: Path) -> None:
    """The backbone as torchvision has it, converted, and read again."""
    folder = Path(os.environ["TORCH_WEIGHTS"])
    with np.load(folder / "features.npz") as arrays:
        images, expected = arrays["images"], arrays["outputs"]
    convert_weights(folder / "resnet34.pth", tmp_path / "resnet34.safetensors")
    net = build_ssd(3, pool_padding="symmetric")
    net.initialize()
    report = assign_weights(net, read_weights(tmp_path / "resnet34.safetensors"))
    assert (len(report.loaded), report.other_shape) == (29 * 5, {})
    features = net.levels[0](mx.nd.array(images.transpose(0, 3, 1, 2))).asnumpy().transpose(0, 2, 3, 1)
    difference = np.abs(features - expected).max()
    print(f"features differ by {difference:.2e} at most; they are {expected.std():.2f} wide")
    assert difference < 1e-4
