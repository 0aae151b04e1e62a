"""SSDLite320 with MobileNetV3 and SSD300 with VGG-16 from torchvision, by its reference scripts, from random weights.

Recipe ``ssdlite``: SGD with a rate of .15 for 192 images a step, weight decay 4e-5, a cosine by epochs, crops by
overlap and flips. ``ssd300``: a rate of .002 for 32, weight decay 5e-4, a tenth of the rate after two thirds of the
epochs and a hundredth after eleven twelfths, colours and larger canvases in addition. Momentum is .9, rates are scaled
to the batch, and the first epoch is a warm-up. Runs where there is torchvision, and nothing of this project. Usage:
python torchvision_ssd.py train|detect --data DATA --output FOLDER --recipe ssdlite|ssd300 [--epochs N] [--seed N]
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch  # type: ignore[import-not-found]
from PIL import Image
from program import BEGINS, parse, read_category_ids, read_images, to_records, write_detections  # type: ignore[import-not-found]
from torchvision import tv_tensors  # type: ignore[import-not-found]
from torchvision.models.detection import (  # type: ignore[import-not-found]
    ssd300_vgg16,
    ssdlite320_mobilenet_v3_large,
)
from torchvision.transforms import v2  # type: ignore[import-not-found]

MOMENTUM = 0.9


class Recipe(NamedTuple):
    """The rules of a training; `before` is done to images before they are cropped."""

    batch: int
    rate: float
    weight_decay: float
    before: tuple[Any, ...]


CANVAS = v2.RandomZoomOut(fill={tv_tensors.Image: (123, 117, 104), "others": 0})  # of ImageNet's mean colour
RECIPES = {
    "ssdlite": Recipe(24, 0.15 * 24 / 192, 4e-5, ()),
    "ssd300": Recipe(16, 0.002 * 16 / 32, 5e-4, (v2.RandomPhotometricDistort(), CANVAS)),
}


class Boxes(torch.utils.data.Dataset):
    """Images of a split with their boxes, kept decoded in memory.

    Args:
        data: folder of the data set.
        split: of it.
        before: what is done to an image before it is cropped.
    """

    def __init__(self, data: Path, split: str, before: tuple[Any, ...]) -> None:
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
        steps = (v2.ToImage(), *before, v2.RandomIoUCrop(), v2.RandomHorizontalFlip(p=0.5))
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


def build(data: Path, name: str) -> Any:
    """Build the network of a recipe for the classes of a data set."""
    make = {"ssdlite": ssdlite320_mobilenet_v3_large, "ssd300": ssd300_vgg16}[name]
    return make(weights=None, weights_backbone=None, num_classes=len(read_category_ids(data)) + 1)


def find_share(name: str, part: float) -> float:
    """Return the share of the highest rate when a part of all epochs, in 0..1, is over."""
    if name == "ssdlite":
        return 0.5 * (1 + math.cos(math.pi * part))
    return 0.1 ** ((part >= 2 / 3) + (part >= 11 / 12))


def train(data: Path, output: Path, epochs: int, seed: int, name: str) -> None:
    """Train for some epochs, and write the weights."""
    torch.manual_seed(seed)
    random.seed(seed)
    batch, peak, decay, before = RECIPES[name]
    dataset = Boxes(data, "train", before)
    loader = torch.utils.data.DataLoader(dataset, batch, shuffle=True, collate_fn=lambda rows: tuple(zip(*rows)))  # noqa: B905
    model = build(data, name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=peak, momentum=MOMENTUM, weight_decay=decay)
    rising, step = max(1, len(loader) - 1), 0
    print(BEGINS, flush=True)
    for epoch in range(epochs):
        rate = peak * find_share(name, epoch / epochs)
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
def detect(data: Path, output: Path, name: str) -> None:
    """Detect on the test images."""
    model = build(data, name)
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
    options = parse(__doc__, tuple(RECIPES))
    torch.set_num_threads(1)
    if options.mode == "train":
        train(options.data, options.output, options.epochs, options.seed, options.recipe)
    else:
        detect(options.data, options.output, options.recipe)


if __name__ == "__main__":
    main()
