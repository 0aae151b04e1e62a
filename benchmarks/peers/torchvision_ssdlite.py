"""SSDLite320 with MobileNetV3 from torchvision, by the settings of its reference scripts, from random weights.

Those are: SGD with a rate of .15 for 192 images a step, which is scaled to the batch here, momentum .9, weight decay
4e-5, a cosine by epochs, a warm-up of the first epoch, and the augmentation "ssdlite" (crops by overlap, flips). Runs
where there is torchvision, and nothing of this project. Usage: python torchvision_ssdlite.py train|detect --data DATA
--output FOLDER [--epochs N] [--seed N]
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from PIL import Image
from program import parse, read_category_ids, read_images, to_records, write_detections  # type: ignore[import-not-found]
from torchvision import tv_tensors  # type: ignore[import-not-found]
from torchvision.models.detection import ssdlite320_mobilenet_v3_large  # type: ignore[import-not-found]
from torchvision.transforms import v2  # type: ignore[import-not-found]

BATCH = 24
PEAK_RATE = 0.15 * BATCH / 192
MOMENTUM, WEIGHT_DECAY = 0.9, 4e-5


class Boxes(torch.utils.data.Dataset):
    """Images of a split with their boxes, kept decoded in memory.

    Args:
        data: folder of the data set.
        split: of it.
    """

    def __init__(self, data: Path, split: str) -> None:
        labels = {category_id: label for label, category_id in enumerate(read_category_ids(data), 1)}
        document = json.loads((data / f"{split}.json").read_text(encoding="utf-8"))
        self.targets: dict[int, list[Any]] = {image["id"]: [] for image in document["images"]}
        for one in document["annotations"]:
            left, top, width, height = one["bbox"]
            if not one["iscrowd"]:
                box = [left, top, left + width, top + height], labels[one["category_id"]]
                self.targets[one["image_id"]].append(box)
        files = [(image, path) for image, path in read_images(data, split) if self.targets[image["id"]]]
        self.images = [(image, Image.open(path).convert("RGB")) for image, path in files]
        steps = (v2.RandomIoUCrop(), v2.RandomHorizontalFlip(p=0.5), v2.ToImage())
        self.transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.SanitizeBoundingBoxes()])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        """Return an image with its boxes, augmented."""
        record, image = self.images[index]
        boxes, labels = zip(*self.targets[record["id"]], strict=True)
        size = record["height"], record["width"]
        target = {
            "boxes": tv_tensors.BoundingBoxes(torch.tensor(boxes), format="XYXY", canvas_size=size),
            "labels": torch.tensor(labels),
        }
        return self.transform(image, target)


def build(data: Path) -> Any:
    """Build the network for the classes of a data set."""
    classes = len(read_category_ids(data)) + 1
    return ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=classes)


def train(data: Path, output: Path, epochs: int, seed: int) -> None:
    """Train for some epochs, and write the weights."""
    torch.manual_seed(seed)
    random.seed(seed)
    dataset = Boxes(data, "train")
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, collate_fn=lambda rows: tuple(zip(*rows)))  # noqa: B905
    model = build(data).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)
    rising, step = max(1, len(loader) - 1), 0
    for epoch in range(epochs):
        rate = PEAK_RATE * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for images, targets in loader:
            share = max(1e-3, min(1.0, step / rising))
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            loss = sum(model(list(images), list(targets)).values())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        print(f"epoch {epoch + 1}/{epochs} loss {loss.item():.3f}", flush=True)
    torch.save(model.state_dict(), output / "weights.pt")


@torch.no_grad()
def detect(data: Path, output: Path) -> None:
    """Detect on the test images."""
    model = build(data)
    model.load_state_dict(torch.load(output / "weights.pt"))
    model.eval()
    category_ids, records = read_category_ids(data), []
    to_tensor = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    for image, path in read_images(data, "test"):
        (found,) = model([to_tensor(Image.open(path).convert("RGB"))])
        ids = [category_ids[label - 1] for label in found["labels"].tolist()]
        records += to_records(image["id"], found["boxes"].tolist(), ids, found["scores"].tolist())
    write_detections(output / "detections.json", records)


def main() -> None:
    """Train or detect, as the command line says."""
    options = parse(__doc__)
    torch.set_num_threads(1)
    if options.mode == "train":
        train(options.data, options.output, options.epochs, options.seed)
    else:
        detect(options.data, options.output)


if __name__ == "__main__":
    main()
