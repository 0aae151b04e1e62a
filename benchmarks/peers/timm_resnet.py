"""ResNet-18 of timm from random weights, by its own augmentation, optimizers and schedule, on folders of classes.

Recipe ``sgd`` is that of the defaults of timm's train.py: a rate of .1 for 256 images a step, which is scaled to the
batch here, Nesterov momentum .9, weight decay 2e-5, crops of .08 to 1 of the area, flips, colours by .4, label
smoothing .1, and a cosine after a warm-up. ``adamw`` is a milder one for small data. The warm-up takes a tenth of the
epochs, because five, the default, would be half of a short training. Images are kept decoded in memory. Runs where
there is timm, and nothing of this project. Usage: python timm_resnet.py train|classify --data DATA --output FOLDER
--recipe sgd|adamw --dtype fp32|bf16 [--epochs N] [--seed N]
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import timm  # type: ignore[import-not-found]
import torch  # type: ignore[import-not-found]
from PIL import Image
from program import BEGINS, parse  # type: ignore[import-not-found]
from timm.data import create_transform  # type: ignore[import-not-found]
from timm.loss import LabelSmoothingCrossEntropy  # type: ignore[import-not-found]
from timm.optim import create_optimizer_v2  # type: ignore[import-not-found]
from timm.scheduler import CosineLRScheduler  # type: ignore[import-not-found]

BATCH, SIDE, SMOOTHING = 32, 128, 0.1
STORED = 256  # pixels of the shorter side of the images in memory: more is not seen in crops of 128
OPTIMIZERS = {
    "sgd": {"opt": "sgd", "lr": 0.1 * BATCH / 256, "momentum": 0.9, "weight_decay": 2e-5},
    "adamw": {"opt": "adamw", "lr": 1e-3, "weight_decay": 0.05},
}
DTYPES = ("fp32", "bf16")
SCALES = {"sgd": (0.08, 1.0), "adamw": (0.35, 1.0)}


class Photos(torch.utils.data.Dataset):
    """Images of folders of classes, kept decoded in memory.

    Args:
        folder: of the folders of classes.
        transform: of each image.
    """

    def __init__(self, folder: Path, transform: Any) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.paths = sorted(path for path in folder.glob("*/*") if path.is_file())
        self.images = [self._read(path) for path in self.paths]
        self.transform = transform

    def _read(self, path: Path) -> Any:
        image = Image.open(path).convert("RGB")
        factor = STORED / min(image.size)
        return (
            image.resize([round(side * factor) for side in image.size], Image.Resampling.BICUBIC)
            if factor < 1
            else image
        )

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        """Return an image, and the number of its class."""
        return self.transform(self.images[index]), self.classes.index(self.paths[index].parent.name)


def train(data: Path, output: Path, recipe: str, epochs: int, seed: int, dtype: str) -> None:
    """Train for some epochs, and write the weights."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # timm draws by it
    transform = create_transform(SIDE, is_training=True, scale=SCALES[recipe], hflip=0.5, color_jitter=0.4)
    photos = Photos(data / "train", transform)
    loader = torch.utils.data.DataLoader(photos, BATCH, shuffle=True, drop_last=True)
    model = timm.create_model("resnet18", num_classes=len(photos.classes)).train().to(memory_format=torch.channels_last)
    optimizer = create_optimizer_v2(model, **OPTIMIZERS[recipe])
    scheduler = CosineLRScheduler(
        optimizer, t_initial=epochs * len(loader), warmup_t=max(1, epochs * len(loader) // 10), t_in_epochs=False
    )
    compute_loss, step = LabelSmoothingCrossEntropy(SMOOTHING), 0
    print(BEGINS, flush=True)
    for epoch in range(epochs):
        for images, labels in loader:
            scheduler.step_update(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                loss = compute_loss(model(images.to(memory_format=torch.channels_last)).float(), labels)
            loss.backward()
            optimizer.step()
            step += 1
        print(f"epoch {epoch + 1}/{epochs} loss {loss.item():.3f}", flush=True)
    torch.save({"classes": photos.classes, "weights": model.state_dict()}, output / "weights.pt")


@torch.no_grad()
def classify(data: Path, output: Path) -> None:
    """Write the classes of the test images, the best first."""
    stored = torch.load(output / "weights.pt")
    model = timm.create_model("resnet18", num_classes=len(stored["classes"]))
    model.load_state_dict(stored["weights"])
    model.eval()
    photos = Photos(data / "test", create_transform(SIDE, is_training=False, crop_pct=0.875))
    named = {}
    for path, image in zip(photos.paths, photos.images, strict=True):
        order = model(photos.transform(image)[None])[0].argsort(descending=True).tolist()
        named[path.relative_to(data / "test").as_posix()] = [stored["classes"][place] for place in order]
    (output / "classes.json").write_text(json.dumps(named), encoding="utf-8")


def main() -> None:
    """Train or classify, as the command line says."""
    options = parse(__doc__, tuple(OPTIMIZERS), DTYPES)
    torch.set_num_threads(1)
    if options.mode == "train":
        train(options.data, options.output, options.recipe, options.epochs, options.seed, options.dtype)
    else:
        classify(options.data, options.output)


if __name__ == "__main__":
    main()
