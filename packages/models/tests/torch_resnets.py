"""Writes what test_torch_weights.py reads; runs where there is PyTorch, and nothing of this project.

ResNet-34, ResNet-50 and ResNeXt-101 (32x4d) with torchvision's names and random weights and statistics, an input, and
what they make of it: the logits, and of ResNet-34 the features of its first three stages, the third with stride 1.
ResNet-34 is saved in both formats of PyTorch and other ways. Usage: python torch_resnets.py FOLDER
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

    expansion = 1

    def __init__(self, into: int, width: int, stride: int, groups: int) -> None:
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
        y = torch.relu_(self.bn1(self.conv1(x)))
        return torch.relu_(self.bn2(self.conv2(y)).add_(shortcut))


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 with the stride, perhaps in groups, and a 1x1, as in the same file."""

    expansion = 4

    def __init__(self, into: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        out, inside = width * self.expansion, width * (2 if groups > 1 else 1)
        self.conv1 = nn.Conv2d(into, inside, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv3 = nn.Conv2d(inside, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1 or into != out:
            self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Any) -> Any:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu_(self.bn1(self.conv1(x)))
        y = torch.relu_(self.bn2(self.conv2(y)))
        return torch.relu_(self.bn3(self.conv3(y)).add_(shortcut))


class ResNet(nn.Module):
    """The networks of that file; `strides` of the stages are changed for the backbone of the detector."""

    def __init__(self, block: Any, blocks: tuple[int, ...], strides: tuple[int, ...], groups: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        into = 64
        for number, (count, stride) in enumerate(zip(blocks, strides, strict=True), 1):
            width = 32 << number
            layer = []
            for index in range(count):
                layer.append(block(into, width, stride if index == 0 else 1, groups))
                into = width * block.expansion
            setattr(self, f"layer{number}", nn.Sequential(*layer))
        self.fc = nn.Linear(into, 1000)

    def backbone(self, x: Any, stages: int) -> Any:
        x = torch.relu_(self.bn1(self.conv1(x)))
        x = nn.functional.max_pool2d(x, 3, 2, 1)
        for number in range(1, stages + 1):
            x = getattr(self, f"layer{number}")(x)
        return x

    def forward(self, x: Any) -> Any:
        return self.fc(self.backbone(x, 4).mean((2, 3)))


def randomize(model: nn.Module) -> nn.Module:
    """Give every convolution and batch norm weights and statistics that a network could have learned."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.2, 0.8)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def write_arrays(path: Path, images: Any, outputs: Any) -> None:
    """Write an input and what was made of it, with the channels last."""
    outputs = outputs.permute(0, 2, 3, 1) if outputs.ndim == 4 else outputs
    np.savez(path, images=images.permute(0, 2, 3, 1).numpy(), outputs=outputs.numpy())


def write_detector_backbone(folder: Path) -> None:
    """Write ResNet-34 in all formats."""
    model = randomize(ResNet(BasicBlock, (3, 4, 6, 3), (1, 2, 1, 2)))
    state = model.state_dict()
    torch.save(state, folder / "resnet34.pth")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(OrderedDict(model.named_parameters()), folder / "parameters.pth")
    bfloat16 = {name: each.bfloat16() if each.is_floating_point() else each for name, each in state.items()}
    torch.save(bfloat16, folder / "bfloat16.pth")
    torch.save(model, folder / "whole_model.pth")
    images = torch.randn(2, 3, 300, 300)
    write_arrays(folder / "features.npz", images, model.backbone(images, 3))


def write_classifier(folder: Path, name: str, blocks: tuple[int, ...], groups: int) -> None:
    """Write a network of bottlenecks, and its logits."""
    model = randomize(ResNet(Bottleneck, blocks, (1, 2, 2, 2), groups))
    torch.save(model.state_dict(), folder / f"{name}.pth")
    images = torch.randn(2, 3, 224, 224)
    write_arrays(folder / f"{name}.npz", images, model(images))


def main(folder: Path) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        write_detector_backbone(folder)
        write_classifier(folder, "resnet50", (3, 4, 6, 3), 1)
        write_classifier(folder, "resnext101", (3, 4, 23, 3), 32)
    print(f"PyTorch {torch.__version__}: {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
