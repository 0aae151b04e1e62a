"""Writes what test_torch_weights.py reads; runs where there is PyTorch, and nothing of this project.

A ResNet-34 with torchvision's names and random weights and statistics, saved in both formats of PyTorch, an input, and
the features of its first three stages, the third with stride 1. Usage: python torch_resnet34.py FOLDER
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from torch import nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, as in torchvision/models/resnet.py."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1 or into != width:
            self.downsample = nn.Sequential(nn.Conv2d(into, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Any) -> Any:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + shortcut)


class ResNet34(nn.Module):
    """All of torchvision's resnet34 is saved; `forward` is the trunk of the detector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        into = 64
        for number, (width, blocks, stride) in enumerate(((64, 3, 1), (128, 4, 2), (256, 6, 1), (512, 3, 2)), 1):
            layer = [
                BasicBlock(into if block == 0 else width, width, stride if block == 0 else 1) for block in range(blocks)
            ]
            setattr(self, f"layer{number}", nn.Sequential(*layer))
            into = width
        self.fc = nn.Linear(512, 1000)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = nn.functional.max_pool2d(x, 3, 2, 1)
        return self.layer3(self.layer2(self.layer1(x)))


def randomize(model: nn.Module) -> None:
    """Give every convolution and batch norm weights and statistics that a network could have learned."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.2, 0.8)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model = ResNet34().eval()
    randomize(model)
    images = torch.randn(2, 3, 300, 300)
    with torch.no_grad():
        features = model(images)
    torch.save(model.state_dict(), folder / "resnet34.pth")
    torch.save(model.state_dict(), folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(OrderedDict(model.named_parameters()), folder / "parameters.pth")
    torch.save(
        {k: v.bfloat16() if v.is_floating_point() else v for k, v in model.state_dict().items()},
        folder / "bfloat16.pth",
    )
    torch.save(model, folder / "whole_model.pth")
    nhwc = {"images": images.permute(0, 2, 3, 1), "features": features.permute(0, 2, 3, 1)}
    np.savez(folder / "features.npz", **{name: values.numpy() for name, values in nhwc.items()})
    print(f"PyTorch {torch.__version__}: {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
