"""An embedded data set: scenes with handwritten digits at many sizes on varied backgrounds, with COCO annotations.

It needs no download: the digits are the 1797 of 8x8 pixels that scikit-learn brings (UCI's "Optical Recognition of
Handwritten Digits"). Training and validation scenes are made of different digits.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from gaudi_datasets.documents import load_json
from gaudi_datasets.errors import DataError, UnsafeError, import_extra
from gaudi_ops.files import staging_folder, write_file

SPLITS = ("train", "val")

_JPEG_QUALITY = 90
_VALIDATION_SHARE = 0.2  # of the digits
_DIGITS_PER_SCENE = (5, 14)  # at least, below
_SMALL_SHARE = 0.1
_SMALL_PIXELS = (24, 60)  # the height of a digit's strokes
_LARGE_PIXELS = (48, 120)
_PLACING_TRIES = 20
_MAX_OVERLAP = 0.05  # of the smaller of two boxes
_MIN_CONTRAST = 110  # between the grey values of ink and background, of 255
_INK = 0.5  # coverage from which a pixel counts as ink

Pixels = npt.NDArray[np.float32]  # [height, width, 3] in 0..255
Coverage = npt.NDArray[np.float32]  # [height, width] in 0..1


_Digits = tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]  # images [n, 8, 8] in 0..16 and labels [n]


def make_scenes(
    output_dir: str | Path,
    *,
    train: int = 1200,
    val: int = 200,
    seed: int = 0,
    image_size: tuple[int, int] = (300, 300),
) -> Path:
    """Make the scenes, or find them made.

    Writes `train/*.jpg`, `val/*.jpg` and `annotations/instances_{train,val}.json` with ten categories, "0" to "9" with
    ids 1 to 10. Boxes are tight around the ink that is visible. The same arguments give the same files.

    Args:
        output_dir: a folder to make; when it holds the scenes of the same arguments, nothing is done.
        train: how many scenes to learn from; their image ids are 1..train.
        val: how many scenes to evaluate on; their image ids go on from there.
        seed: what everything drawn depends on.
        image_size: height and width in pixels.

    Returns:
        `output_dir`.

    Raises:
        MissingExtraError: scikit-learn is not installed.
        UnsafeError: the folder holds something else.
    """
    output_dir = Path(output_dir)
    counts = dict(zip(SPLITS, (train, val), strict=True))
    info = {"description": "handwritten digit scenes", "seed": seed, "image_size": list(image_size), **counts}
    if output_dir.is_dir() and any(output_dir.iterdir()):
        try:
            there = load_json(output_dir / "annotations" / "instances_train.json").get("info")
        except (OSError, DataError, AttributeError):
            there = None
        if there != info:
            raise UnsafeError(
                "holds other files than these scenes", path=output_dir, remedy="name another folder or remove it"
            )
        return output_dir
    digits = dict(zip(SPLITS, _load_digits(seed), strict=True))
    with staging_folder(output_dir) as staging:
        (staging / "annotations").mkdir()
        first_id = 1
        for split in SPLITS:
            (staging / split).mkdir()
            document = _make_split(staging / split, digits[split], first_id, counts[split], seed, image_size)
            annotations = staging / "annotations" / f"instances_{split}.json"
            write_file(annotations, json.dumps({"info": info, **document}))
            first_id += counts[split]
        for name in (*SPLITS, "annotations"):
            (staging / name).rename(output_dir / name)
    return output_dir


def _load_digits(seed: int) -> tuple[_Digits, _Digits]:
    data = import_extra("sklearn.datasets", "gaudi-datasets[scenes]", "scenes").load_digits()
    order = np.random.default_rng([seed, 0]).permutation(len(data.target))
    parts = np.split(order, [int(len(order) * (1 - _VALIDATION_SHARE))])
    train, val = ((data.images[part], data.target[part]) for part in parts)
    return train, val


def _make_split(
    folder: Path, digits: _Digits, first_id: int, count: int, seed: int, image_size: tuple[int, int]
) -> dict[str, list[dict[str, Any]]]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id in range(first_id, first_id + count):
        pixels, boxes_xywh, labels = draw_scene(np.random.default_rng([seed, image_id]), digits, image_size)
        name = f"{image_id:06d}.jpg"
        Image.fromarray(pixels).save(buffer := io.BytesIO(), "JPEG", quality=_JPEG_QUALITY)
        write_file(folder / name, buffer.getvalue(), durable=False)
        images.append({"id": image_id, "file_name": name, "height": image_size[0], "width": image_size[1]})
        for box, label in zip(boxes_xywh.tolist(), labels, strict=True):
            annotations.append(
                {"id": len(annotations) + 1, "image_id": image_id, "category_id": label + 1}
                | {"bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            )
    categories = [{"id": digit + 1, "name": str(digit), "supercategory": "digit"} for digit in range(10)]
    return {"images": images, "annotations": annotations, "categories": categories}


def draw_scene(
    random: np.random.Generator, digits: _Digits, image_size: tuple[int, int]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], list[int]]:
    """Draw one scene.

    Returns:
        pixels uint8 [height, width, 3]; boxes of the visible ink [n, 4] as left, top, width, height in pixels; the n
        digits, 0..9.
    """
    images, digits_shown = digits
    pixels = _background(random, image_size)
    owner = np.zeros(image_size, np.int64)  # of each pixel: which digit's ink it is, from 1; 0 is background
    placed: list[npt.NDArray[np.int64]] = []
    labels: list[int] = []
    for _ in range(int(random.integers(*_DIGITS_PER_SCENE))):
        index = int(random.integers(len(images)))
        coverage = _ink_coverage(random, images[index], max_side=min(image_size) - 8)
        corner = _free_corner(random, coverage.shape, image_size, placed)
        if corner is None:
            continue
        (y, x), (height, width) = corner, coverage.shape
        window = (slice(y, y + height), slice(x, x + width))
        grey = float(pixels[window].mean(axis=(0, 1)).mean())
        colour = random.uniform(0, 255, 3)
        while abs(colour.mean() - grey) < _MIN_CONTRAST:
            colour = random.uniform(0, 255, 3)
        colour = colour.astype(np.float32)
        pixels[window] += coverage[..., None] * (colour - pixels[window])
        labels.append(int(digits_shown[index]))
        owner[window][coverage >= _INK] = len(labels)
        placed.append(np.array([y, x, y + height, x + width]))
    boxes = []
    for number in range(1, len(labels) + 1):
        rows, columns = (np.flatnonzero((owner == number).any(axis=axis)) for axis in (1, 0))
        boxes.append((columns[0], rows[0], columns[-1] - columns[0] + 1, rows[-1] - rows[0] + 1))
    return np.clip(pixels, 0, 255).round().astype(np.uint8), np.array(boxes, np.int64).reshape(-1, 4), labels


def _ink_coverage(random: np.random.Generator, digit: npt.NDArray[np.float64], max_side: int) -> Coverage:
    """Enlarge an 8x8 digit to a drawn size, turned and stretched a little, its strokes made crisp; cut to its ink."""
    low, high = _SMALL_PIXELS if random.random() < _SMALL_SHARE else _LARGE_PIXELS
    framed = np.pad(digit, 1)  # so that strokes along the edge end round
    height = round(random.integers(low, min(high, max_side) + 1) * len(framed) / len(digit))
    width = round(height * random.uniform(0.85, 1.15))
    image = Image.fromarray((framed * (255 / 16)).round().astype(np.uint8))
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    image = image.rotate(random.uniform(-10, 10), Image.Resampling.BICUBIC, expand=True)
    coverage = np.clip((np.asarray(image, np.float32) / 255 - 0.4) * 6, 0, 1)
    rows, columns = (np.flatnonzero((coverage >= _INK).any(axis=axis)) for axis in (1, 0))
    return coverage[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1][:max_side, :max_side]


def _free_corner(
    random: np.random.Generator,
    shape: tuple[int, ...],
    image_size: tuple[int, int],
    placed: list[npt.NDArray[np.int64]],
) -> tuple[int, int] | None:
    """Draw where a digit of this height and width may stand; None when no place is found in a few tries."""
    for _ in range(_PLACING_TRIES):
        y, x = (int(random.integers(0, side - own + 1)) for side, own in zip(image_size, shape, strict=True))
        box = np.array([y, x, y + shape[0], x + shape[1]])
        if all(_overlap(box, other) <= _MAX_OVERLAP for other in placed):
            return y, x
    return None


def _overlap(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> float:
    """Return the intersection over the smaller area of two boxes y0 x0 y1 x1."""
    sides = np.clip(np.minimum(first[2:], second[2:]) - np.maximum(first[:2], second[:2]), 0, None)
    return float(sides.prod() / min((box[2:] - box[:2]).prod() for box in (first, second)))


def _background(random: np.random.Generator, image_size: tuple[int, int]) -> Pixels:
    """Draw a colour that is dark or light, varied by one of the textures."""
    base = random.uniform(20, 90, 3) if random.random() < 0.5 else random.uniform(165, 235, 3)
    texture = _TEXTURES[int(random.integers(len(_TEXTURES)))](random, image_size)
    tint = random.uniform(10, 35, 3)
    return (base + texture[..., None] * tint + random.normal(0, 3, (*image_size, 3))).astype(np.float32)


def _gradient(random: np.random.Generator, image_size: tuple[int, int]) -> npt.NDArray[np.float64]:
    y, x = np.meshgrid(*(np.linspace(-1, 1, side) for side in image_size), indexing="ij")
    angle = random.uniform(0, 2 * np.pi)
    return np.asarray(np.sin(angle) * y + np.cos(angle) * x) / np.sqrt(2)


def _stripes(random: np.random.Generator, image_size: tuple[int, int]) -> npt.NDArray[np.float64]:
    return np.asarray(np.sin(_gradient(random, image_size) * random.uniform(10, 60) + random.uniform(0, 6)))


def _noise(random: np.random.Generator, image_size: tuple[int, int]) -> npt.NDArray[np.float64]:
    return random.uniform(-1, 1, image_size)


def _blobs(random: np.random.Generator, image_size: tuple[int, int]) -> npt.NDArray[np.float64]:
    coarse = Image.fromarray(random.uniform(0, 255, (7, 7)).astype(np.uint8))
    smooth = coarse.resize((image_size[1], image_size[0]), Image.Resampling.BICUBIC)
    return np.asarray(smooth, np.float64) / 127.5 - 1


_Texture = Callable[[np.random.Generator, tuple[int, int]], npt.NDArray[np.float64]]
_TEXTURES: tuple[_Texture, ...] = (_gradient, _stripes, _noise, _blobs)
