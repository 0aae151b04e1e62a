"""Draw the figures of the site with the functions that they are about; the same sources give the same files."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from gaudi_datasets.detection.augmentation import WHOLE_IMAGE, Draws, draw_crop
from gaudi_datasets.detection.batches import cut_window, decode_example_pixels
from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.examples import DetectionExample
from gaudi_datasets.detection.samples import Sample, Tile, draw_sample
from gaudi_datasets.detection.scenes import make_scenes
from gaudi_datasets.detection.sources import CocoSource
from gaudi_datasets.sampling import InputOptions
from gaudi_ops import (
    SSD300,
    default_boxes,
    encode_targets,
    iou,
    match_boxes,
    non_max_suppression,
    reference,
    schedules,
)

Pixels = npt.NDArray[np.uint8]
Boxes = npt.NDArray[np.floating[Any]]

SCENES = 12
SIDE = 300
BLUE, ORANGE, GREEN, RED = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030"
WEBP_QUALITY = 72


class Scenes:
    """The scenes that the figures show: drawn digits, made anew from a seed, so that nobody's photo is needed."""

    def __init__(self, folder: Path) -> None:
        make_scenes(folder, train=SCENES, val=1, seed=3)
        coco = read_coco(folder / "annotations" / "instances_train.json")
        self.source = CocoSource(coco, folder / "train", keep_empty=False)

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> DetectionExample:
        """Return a scene."""
        return self.source.read(index)

    def decode(self, tile: Tile) -> Pixels:
        """Return the pixels of a tile of a sample."""
        return cut_window(decode_example_pixels(tile.example, "scene"), tile.decoded)

    def pixels(self, index: int) -> Pixels:
        """Return the pixels of a scene, uint8 [300, 300, 3], RGB."""
        pixels: Pixels = np.ascontiguousarray(decode_example_pixels(self.read(index), "scene")[..., ::-1])
        return pixels

    def render(self, sample: Sample, side: int = SIDE) -> Pixels:
        """Return what the network gets of a sample, without the normalisation."""
        image = sample.render(self.decode, side) * STDDEV_RGB + MEAN_RGB
        return np.rint(np.clip(image, 0, 1) * 255).astype(np.uint8)


def draw_figures() -> Mapping[str, bytes]:
    """Draw all figures: the content of each file by its name."""
    style = {
        "svg.hashsalt": "gaudi",
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "figure.facecolor": "white",
    }
    with tempfile.TemporaryDirectory() as folder, mpl.rc_context(style):
        scenes = Scenes(Path(folder) / "scenes")
        return {
            "crops.webp": _draw_crops(scenes),
            "augmentation.webp": _draw_augmentation(scenes),
            "zoom_and_mosaic.webp": _draw_compositions(scenes),
            "default_boxes.webp": _draw_default_boxes(scenes),
            "matching.webp": _draw_matching(scenes),
            "hard_negatives.webp": _draw_hard_negatives(scenes),
            "suppression.webp": _draw_suppression(scenes),
            "schedules.svg": _draw_schedules(),
            "huber.svg": _draw_losses(),
            "pruning.webp": _draw_pruning(),
        }


def _save(figure: Figure, name: str) -> bytes:
    """Return a figure as a file: WebP of pixels, or SVG without a date."""
    content = io.BytesIO()
    if name == "svg":
        figure.savefig(content, format="svg", metadata={"Date": None}, bbox_inches="tight")
        return content.getvalue()
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png")
    with Image.open(pixels) as image:
        image.convert("RGB").save(content, "WEBP", quality=WEBP_QUALITY, method=6)
    return content.getvalue()


def _make_panels(rows: int, columns: int, side: float = 2.0) -> tuple[Figure, list[Any]]:
    """Return a figure with panels for images, row by row."""
    figure = Figure(figsize=(columns * side, rows * (side + 0.28)), dpi=110, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for panel in panels:
        panel.set_axis_off()
    return figure, panels


def _show(panel: Any, pixels: Pixels, boxes: Boxes, title: str, color: str = ORANGE) -> None:
    """Show an image with boxes [n, 4], y0, x0, y1, x1 as fractions of it."""
    height, width = pixels.shape[:2]
    panel.imshow(pixels)
    panel.set_title(title, fontsize=8)
    _outline(panel, boxes * [height, width, height, width], color)


def _outline(panel: Any, boxes: Boxes, color: str, **style: Any) -> None:
    for y0, x0, y1, x1 in boxes.tolist():
        look = {"fill": False, "linewidth": 1.2, **style}
        panel.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, edgecolor=color, **look))


def _draw_crops(scenes: Scenes) -> bytes:
    figure, panels = _make_panels(2, 4)
    example, pixels = scenes.read(0), scenes.pixels(0)
    _show(panels[0], pixels, example.boxes_yxyx, "a scene and its objects")
    _show(panels[4], pixels, np.zeros((0, 4)), "windows of 8 epochs")
    generator = np.random.default_rng(1)
    windows = np.stack([draw_crop(example.boxes_yxyx, generator) for _ in range(8)])
    _outline(panels[4], windows * SIDE, BLUE)
    rest = [panel for row, panel in enumerate(panels) if row not in (0, 4)]
    for epoch, panel in enumerate(rest):
        sample = draw_sample(scenes.read, 0, epoch, InputOptions(batch_size=1), len(scenes))
        _show(panel, scenes.render(sample), sample.boxes_yxyx, f"epoch {epoch + 1}")
    return _save(figure, "webp")


def _draw_augmentation(scenes: Scenes) -> bytes:
    """Show one draw at a time, at the ends of its range."""
    plain: dict[str, Any] = {"flip": False, "brightness": 0.0, "contrast": 1.0, "saturation": 1.0, "hue": 0.0}
    shown: dict[str, dict[str, Any]] = {
        "as it is": {}, "mirrored": {"flip": True},
        "brightness -0.125": {"brightness": -0.125}, "brightness +0.125": {"brightness": 0.125},
        "contrast x 0.5": {"contrast": 0.5}, "contrast x 1.5": {"contrast": 1.5},
        "saturation x 0.5": {"saturation": 0.5}, "saturation x 1.5": {"saturation": 1.5},
        "hue -0.05": {"hue": -0.05}, "hue +0.05": {"hue": 0.05},
    }  # fmt: skip
    figure, panels = _make_panels(2, 5, side=1.7)
    example = scenes.read(5)
    tile = Tile(5, example, np.array([0, 0, example.height, example.width], np.int32), WHOLE_IMAGE, WHOLE_IMAGE)
    for panel, (title, changed) in zip(panels, shown.items(), strict=True):
        sample = Sample((tile,), Draws(WHOLE_IMAGE, **(plain | changed)), example.boxes_yxyx, example.labels)
        _show(panel, scenes.render(sample, 200), np.zeros((0, 4)), title)
    return _save(figure, "webp")


def _draw_compositions(scenes: Scenes) -> bytes:
    """Show samples with each option of composition, of the first images that it changes."""
    figure, panels = _make_panels(2, 4)
    for row, (name, options) in enumerate(
        (
            ("zoom_out 3", InputOptions(batch_size=1, zoom_out=3.0)),
            ("mosaic 1", InputOptions(batch_size=1, mosaic=1.0)),
        )
    ):
        samples = (draw_sample(scenes.read, index, 1, options, len(scenes)) for index in range(len(scenes)))
        changed = [sample for sample in samples if not sample.tiles[0].fills_sample]
        for panel, sample in zip(panels[4 * row : 4 * row + 4], changed, strict=False):
            _show(panel, scenes.render(sample), sample.boxes_yxyx, f"--{name}")
    return _save(figure, "webp")


def _draw_default_boxes(scenes: Scenes) -> bytes:
    """Show the default boxes of the cell in the middle of each level, and all centres of the level."""
    figure, panels = _make_panels(2, 3, side=2.4)
    pixels, boxes, first = scenes.pixels(2), default_boxes(), 0
    for level, (panel, size) in enumerate(zip(panels, SSD300.feature_sizes, strict=True)):
        per_cell = 2 + 2 * len(SSD300.aspect_ratios[level])
        cells = boxes[first : first + size * size * per_cell].reshape(size, size, per_cell, 4)
        first += size * size * per_cell
        _show(panel, pixels, np.zeros((0, 4)), f"{size} x {size} cells, {per_cell} boxes each: {cells[..., 0].size}")
        centers = cells[:, :, 0].reshape(-1, 4) * SIDE
        panel.plot((centers[:, 1] + centers[:, 3]) / 2, (centers[:, 0] + centers[:, 2]) / 2, ".", ms=1.4, color=BLUE)
        _outline(panel, cells[size // 2, size // 2] * SIDE, ORANGE)
        panel.set_xlim(-20, SIDE + 20)
        panel.set_ylim(SIDE + 20, -20)
    return _save(figure, "webp")


def _draw_matching(scenes: Scenes) -> bytes:
    """Show the default boxes that objects are assigned to, and one object that only its best default box takes."""
    figure, panels = _make_panels(1, 3, side=2.8)
    example, pixels = scenes.read(2), scenes.pixels(2)
    boxes, objects = default_boxes(), example.boxes_yxyx
    matches = match_boxes(objects)
    counts = np.bincount(matches[matches >= 0], minlength=len(objects))
    most, least = int(counts.argmax()), int(counts.argmin())
    _show(panels[0], pixels, objects, f"{len(objects)} objects, {int(counts.sum())} of 8732 default boxes matched")
    _outline(panels[0], boxes[matches >= 0] * SIDE, "white", linewidth=0.5)
    for panel, row in zip(panels[1:], (most, least), strict=True):
        taken = boxes[matches == row]
        overlaps = iou(objects[row : row + 1], taken)[0]
        title = f"default boxes of one object: {len(taken)}, IoU {overlaps.min():.2f} to {overlaps.max():.2f}"
        _show(panel, pixels, objects[row : row + 1], title)
        _outline(panel, taken * SIDE, "white", linewidth=0.9)
    return _save(figure, "webp")


def _draw_hard_negatives(scenes: Scenes) -> bytes:
    """Show the losses of default boxes of a network that takes whatever overlaps an object a little for the object."""
    figure, panels = _make_panels(1, 3, side=2.8)
    example, pixels = scenes.read(2), scenes.pixels(2)
    boxes, objects = default_boxes(), example.boxes_yxyx
    classes, _, matched = encode_targets(objects, example.labels)
    logits = np.random.default_rng(0).normal(0, 0.5, (len(boxes), 2)).astype(np.float32)
    logits[:, 1] += 8 * iou(objects, boxes).max(axis=0) - 3
    losses = reference.softmax_cross_entropy(logits, (classes > 0).astype(np.int32))
    negatives = np.where(classes > 0, -np.inf, losses)
    hardest = reference.topk_mask(negatives[np.newaxis], 3 * int(matched))[0]
    _show(panels[0], pixels, boxes[classes > 0], f"{int(matched)} positives", "white")
    cells = SSD300.feature_sizes[0]
    largest = np.zeros((cells, cells), np.float32)
    rows, columns = np.clip((boxes[:, :2] + boxes[:, 2:]) / 2 * cells, 0, cells - 1).astype(int).T
    np.maximum.at(largest, (rows, columns), np.maximum(negatives, 0))
    panels[1].imshow(largest, cmap="inferno", extent=(0, SIDE, SIDE, 0))
    panels[1].set_title("largest loss of the others, by their centres", fontsize=8)
    _show(panels[2], pixels, objects, f"the {int(hardest.sum())} hardest of {int((classes == 0).sum())}")
    _outline(panels[2], boxes[hardest] * SIDE, "white", linewidth=0.3)
    return _save(figure, "webp")


def _draw_suppression(scenes: Scenes) -> bytes:
    """Show boxes before and after suppression: each object was found several times, a little beside it."""
    figure, panels = _make_panels(1, 2, side=2.8)
    example, pixels = scenes.read(4), scenes.pixels(4)
    generator = np.random.default_rng(0)
    objects = np.repeat(example.boxes_yxyx, 8, axis=0)
    sides = np.tile(objects[:, 2:] - objects[:, :2], 2)
    found = np.clip(objects + sides * generator.normal(0, 0.06, objects.shape), 0, 1).astype(np.float32)
    scores = generator.uniform(0.3, 1, len(found)).astype(np.float32)
    both = np.stack([1 - scores, scores], axis=1)
    kept, _, _ = non_max_suppression(found, both, iou_threshold=0.5)
    _show(panels[0], pixels, found, f"{len(found)} boxes", BLUE)
    _show(panels[1], pixels, kept, f"{len(kept)} are left at an IoU of .5")
    return _save(figure, "webp")


def _draw_schedules() -> bytes:
    total, warmup = 1000, 100
    shown: dict[str, Callable[[Any], Any]] = {
        "piecewise_constant": schedules.piecewise_constant(1.0, (400, 700, 900), (0.1, 0.01, 0.001)),
        "cosine, with linear_warmup": schedules.linear_warmup(schedules.cosine(1.0, total), warmup),
        "polynomial of power 2, with linear_warmup": schedules.linear_warmup(
            schedules.polynomial(1.0, total - warmup, first_step=warmup), warmup
        ),
        "triangular, decay .5": schedules.triangular(0.1, 1.0, 167, decay=0.5),
    }
    figure = Figure(figsize=(7.2, 2.9), layout="constrained")
    panel = figure.subplots()
    steps = range(0, total + 1, 5)
    for (name, schedule), color in zip(shown.items(), (BLUE, ORANGE, GREEN, RED), strict=True):
        panel.plot(steps, [schedule(step) for step in steps], label=name, color=color)
    panel.set_xlabel("step")
    panel.set_ylabel("learning rate")
    panel.legend(fontsize=7)
    return _save(figure, "svg")


def _draw_losses() -> bytes:
    """Show Huber's loss beside half the square, and the cross entropy by the probability of the true class."""
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    errors = np.linspace(-3, 3, 121, dtype=np.float32)
    _plot(left, errors, {"Huber": reference.huber(errors), "half the square": errors**2 / 2}, "error of an offset")
    left.set_ylim(0, 3)
    logits = np.linspace(-4, 4, 81, dtype=np.float32)
    values = reference.softmax_cross_entropy(np.stack([np.zeros_like(logits), logits], axis=1), np.ones(81, np.int32))
    shares = 1 / (1 + np.exp(-logits))
    _plot(right, shares, {"cross entropy": values}, "probability of the true class")
    return _save(figure, "svg")


def _plot(panel: Any, places: npt.ArrayLike, lines: Mapping[str, npt.ArrayLike], label: str) -> None:
    for (name, values), color in zip(lines.items(), _colors(), strict=False):
        panel.plot(places, values, label=name, color=color)
    panel.set_xlabel(label)
    panel.legend(fontsize=7)


def _colors() -> Sequence[str]:
    return BLUE, ORANGE, GREEN, RED


def _draw_pruning() -> bytes:
    """Show which weights magnitude pruning keeps."""
    figure, panels = _make_panels(1, 3, side=2.0)
    weights = np.random.default_rng(0).normal(size=(24, 24)).astype(np.float32)
    for panel, sparsity in zip(panels, (0.0, 0.5, 0.9), strict=True):
        kept = reference.magnitude_mask(weights, sparsity)
        panel.imshow(np.where(kept, weights, np.nan), cmap="RdBu", vmin=-3, vmax=3)
        panel.set_title(f"sparsity {sparsity:g}: {int(kept.sum())} of {kept.size} are left", fontsize=8)
    return _save(figure, "webp")
