"""Training steps of PyTorch to compare with: channels last, autocast; some for each line that comes in.

It answers with the loss and the most memory until then, of the card or of this process, in GiB. Runs where there is
PyTorch, and nothing of this project. Usage: python torch_step.py NETWORK fp32|tf32|bf16 BATCH cpu|cuda STEPS
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "models" / "tests"))
from torch_resnets import BasicBlock, Bottleneck, ResNet  # type: ignore[import-not-found]

CLASSES = 81
ROWS = 8732
EXTRAS = ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
BOXES = (4, 6, 6, 6, 4, 4)


class SSD(nn.Module):
    """The detector, with the levels and heads of the paper."""

    def __init__(self) -> None:
        super().__init__()
        self.resnet = ResNet(BasicBlock, (3, 4, 6, 3), (1, 2, 1, 2))
        del self.resnet.layer4, self.resnet.fc
        channels, into = [256], 256
        self.extras = nn.ModuleList()
        for narrow, wide, stride, pad in EXTRAS:
            convolutions = nn.Conv2d(into, narrow, 1), nn.ReLU(), nn.Conv2d(narrow, wide, 3, stride, pad), nn.ReLU()
            self.extras.append(nn.Sequential(*convolutions))
            channels.append(into := wide)
        pairs = list(zip(channels, BOXES, strict=True))
        self.class_heads = nn.ModuleList([nn.Conv2d(width, boxes * CLASSES, 3, 1, 1) for width, boxes in pairs])
        self.box_heads = nn.ModuleList([nn.Conv2d(width, boxes * 4, 3, 1, 1) for width, boxes in pairs])

    def forward(self, images: Any) -> tuple[Any, Any]:
        """Logits and offsets."""
        levels = [self.resnet.backbone(images, 3)]
        for extra in self.extras:
            levels.append(extra(levels[-1]))
        outputs = []
        for heads, columns in ((self.class_heads, CLASSES), (self.box_heads, 4)):
            maps = [head(level) for head, level in zip(heads, levels, strict=True)]
            outputs.append(torch.cat([each.permute(0, 2, 3, 1).reshape(len(images), -1, columns) for each in maps], 1))
        return outputs[0], outputs[1]


def detection_loss(outputs: tuple[Any, Any], classes: Any, target_offsets: Any) -> Any:
    """Compute the loss of logits and offsets, with hard negatives by the rank of a rank."""
    logits, offsets = (output.float() for output in outputs)
    entropy = nn.functional.cross_entropy(logits.transpose(1, 2), classes, reduction="none")
    positive = classes > 0
    ranks = entropy.detach().masked_fill(positive, 0).argsort(1, descending=True).argsort(1)
    hard = ranks < 3 * positive.sum(1, keepdim=True)
    class_loss = (entropy * (positive | hard)).sum(1)
    box_errors = nn.functional.smooth_l1_loss(offsets, target_offsets, reduction="none").sum(2)
    return ((class_loss + (box_errors * positive).sum(1)) / positive.sum(1)).mean()


def build(network: str, batch: int) -> tuple[nn.Module, Any, Callable[[Any], Any]]:
    """Make a network, images for it, and the loss of its outputs."""
    if network == "ssd":
        classes = torch.zeros(batch, ROWS, dtype=torch.long)
        classes[:, ::200] = torch.randint(1, CLASSES, (batch, len(range(0, ROWS, 200))))
        target_offsets = torch.randn(batch, ROWS, 4)
        return SSD(), torch.randn(batch, 3, 300, 300), lambda result: detection_loss(result, classes, target_offsets)
    blocks, groups = {"resnet50": ((3, 4, 6, 3), 1), "resnext101": ((3, 4, 23, 3), 32)}[network]
    labels = torch.randint(0, 1000, (batch,))
    model = ResNet(Bottleneck, blocks, (1, 2, 2, 2), groups)
    return model, torch.randn(batch, 3, 224, 224), lambda result: nn.functional.cross_entropy(result, labels)


def main(network: str, dtype: str, batch: int, device: str, steps: int) -> None:
    """Train on noise, some steps a line; what is made is made on the device."""
    torch.set_default_device(device)
    torch.backends.cudnn.benchmark = True  # the fastest kernel of each convolution, as TensorFlow chooses it
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = dtype != "fp32"
    model, images, compute_loss = build(network, batch)
    model = model.train().to(memory_format=torch.channels_last)
    images = images.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    for _ in sys.stdin:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bf16"):
                loss = compute_loss(model(images))
            loss.backward()
            optimizer.step()
        if device == "cuda":
            memory = torch.cuda.max_memory_allocated() / 2**30
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
        print(loss.item(), memory, flush=True)


if __name__ == "__main__":
    network, dtype, batch, device, steps = sys.argv[1:]
    main(network, dtype, int(batch), device, int(steps))
