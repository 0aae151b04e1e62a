"""Small data sets in which what is wrong can be chosen."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

HEIGHT, WIDTH = 60, 80

Box = tuple[int, int, list[float]]  # image id, category id, bbox


def encode_noise(seed: int, kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = (WIDTH, HEIGHT)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def encode() -> Callable[..., bytes]:
    """Noise as an image file: seed, kind, mode, (width, height)."""
    return encode_noise


@pytest.fixture
def write_coco(tmp_path: Path) -> Callable[..., Path]:
    """Write the files `images` (no file for None) and an annotation file; the path of this, beside their folder."""

    def write(
        images: Mapping[str, bytes | None], boxes: Sequence[Box], *, name: str = "train", crowds: Sequence[int] = ()
    ) -> Path:
        (tmp_path / name).mkdir()
        records: list[dict[str, Any]] = []
        for number, (file_name, encoded) in enumerate(images.items(), 1):
            if encoded is not None:
                (tmp_path / name / file_name).write_bytes(encoded)
            records.append({"id": number, "file_name": file_name, "height": HEIGHT, "width": WIDTH})
        annotations = [
            {"id": number, "image_id": image, "category_id": category, "bbox": box, "iscrowd": int(number in crowds)}
            for number, (image, category, box) in enumerate(boxes, 1)
        ]
        categories = [{"id": number, "name": text} for number, text in ((3, "cat"), (5, "dog"), (9, "$owl[/]"))]
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"images": records, "annotations": annotations, "categories": categories}))
        return path

    return write
