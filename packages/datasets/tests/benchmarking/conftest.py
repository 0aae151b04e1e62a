"""Eight JPEGs of different sizes with a box each, as COCO and as class folders, and clocks that go by calls."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gaudi_datasets.benchmarking.measurement import Clocks

COUNT = 8


def encode(number: int, kind: str = "JPEG") -> bytes:
    colours = np.random.default_rng(number).integers(0, 256, (3, 4, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(colours).resize((60 + number, 48), Image.Resampling.BICUBIC).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with `images/`, `gt.json`, and `train/cat` and `train/dog`."""
    root = tmp_path_factory.mktemp("images")
    for name in ("images", "train/cat", "train/dog"):
        (root / name).mkdir(parents=True)
    for number in range(COUNT):
        (root / "images" / f"{number}.jpg").write_bytes(encode(number))
        (root / "train" / ("cat" if number % 2 else "dog") / f"{number}.jpg").write_bytes(encode(number))
    images = [{"id": 10 + n, "file_name": f"{n}.jpg", "height": 48, "width": 60 + n} for n in range(COUNT)]
    boxes = [{"id": n, "image_id": 10 + n, "category_id": 7, "bbox": [10, 5, 30, 30]} for n in range(COUNT)]
    document = {"images": images, "annotations": boxes, "categories": [{"id": 7, "name": "cat"}]}
    (root / "gt.json").write_text(json.dumps(document))
    return root


@pytest.fixture
def encode_image() -> Callable[..., bytes]:
    return encode


@pytest.fixture
def clocks() -> Clocks:
    """Each call of the wall's clock is a second after the one before, each of the processors' a quarter."""
    wall, processor = itertools.count(), itertools.count()
    return Clocks(lambda: float(next(wall)), lambda: next(processor) / 4)
