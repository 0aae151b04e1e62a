"""The step of PyTorch for resnet_step.py: channels last, autocast; one for each line that comes in.

Runs where there is PyTorch, and nothing of this project. Usage: python torch_resnet_step.py fp32|bf16 BATCH
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch  # type: ignore[import-not-found]

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "models" / "tests"))
from torch_resnets import Bottleneck, ResNet  # type: ignore[import-not-found]


def main(dtype: str, batch: int) -> None:
    """Train on noise, a step a line."""
    model = ResNet(Bottleneck, (3, 4, 6, 3), (1, 2, 2, 2)).train().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randn(batch, 3, 224, 224).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (batch,))
    for _ in sys.stdin:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        print(loss.item(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
