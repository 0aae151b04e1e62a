"""Training images of a detector by torchvision's v2 transforms and PyTorch's loader, the augmentation of its SSD300.

That is its reference scripts' "ssd" without zooming out: colours, crops by overlap, flips, then the size and the
normalisation of the network, on tensors. Boxes are matched in its network, so no targets are encoded here. Runs where
there is torchvision, and nothing of this project.
Usage: python torchvision_input.py ANNOTATIONS IMAGES BATCH STEPS WORKERS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from torchvision import io, tv_tensors  # type: ignore[import-not-found]
from torchvision.transforms import v2  # type: ignore[import-not-found]

SIDE = 300


class Photographs(torch.utils.data.Dataset):
    """Images with boxes, as encoded bytes in memory, time and again.

    Args:
        annotations: a file in COCO's format.
        images: folder of its files.
        length: of the data set.
    """

    def __init__(self, annotations: Path, images: Path, length: int) -> None:
        document = json.loads(annotations.read_text(encoding="utf-8"))
        boxes: dict[int, list[Any]] = {}
        for one in document["annotations"]:
            left, top, width, height = one["bbox"]
            if not one["iscrowd"]:
                boxes.setdefault(one["image_id"], []).append([left, top, left + width, top + height])
        used = [image for image in document["images"] if image["id"] in boxes]
        contents = [(images / image["file_name"]).read_bytes() for image in used]
        self.encoded = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
        self.boxes = [torch.tensor(boxes[image["id"]]) for image in used]
        self.length = length
        steps = (v2.RandomPhotometricDistort(), v2.RandomIoUCrop(), v2.RandomHorizontalFlip(p=0.5))
        resize = v2.Resize((SIDE, SIDE), antialias=False)
        normalise = v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        to_float = v2.ToDtype(torch.float32, scale=True)
        self.transform = v2.Compose([*steps, resize, v2.SanitizeBoundingBoxes(), to_float, normalise])

    def __len__(self) -> int:
        """Return the number of images."""
        return self.length

    def __getitem__(self, index: int) -> Any:
        """Return an image with its boxes, augmented."""
        place = index % len(self.encoded)
        image = tv_tensors.Image(io.decode_image(self.encoded[place], io.ImageReadMode.RGB))
        boxes = tv_tensors.BoundingBoxes(self.boxes[place], format="XYXY", canvas_size=image.shape[-2:])
        return self.transform(image, {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)})


def collate(rows: Any) -> Any:
    """Stack the images of a batch."""
    images, targets = zip(*rows, strict=True)
    return torch.stack(images), targets


def main(annotations: Path, images: Path, batch: int, steps: int, workers: int) -> None:
    """Read some batches."""
    torch.set_num_threads(1)
    dataset = Photographs(annotations, images, batch * steps)
    for _ in torch.utils.data.DataLoader(dataset, batch, shuffle=True, num_workers=workers, collate_fn=collate):
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
