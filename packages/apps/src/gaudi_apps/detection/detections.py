"""Detections in one image: drawn, cut out, in the forms of other programs, chosen by class, followed through videos."""

from __future__ import annotations

import base64
import difflib
import html
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import PIL.Image

from gaudi_apps.inference.exported_models import CheckedExport, open_model
from gaudi_apps.inference.media import Preprocessor, resize_pixels
from gaudi_apps.inference.tiles import Rows, Tiles, suppress_across_classes
from gaudi_apps.inference.visualizer import Image, decode_like_tensorflow, draw_detections
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.drawing import fit_image
from gaudi_datasets.errors import DataError, FlagError, import_extra

if TYPE_CHECKING:
    from gaudi_apps.inference.media import InputImage
    from gaudi_apps.training.checkpoint import ModelConfig

# Detects in a batch: boxes [batch, n, 4] (y0, x0, y1, x1 in 0..1), labels [batch, n], 0 for padding, and scores.
Detect: TypeAlias = Callable[[Any], tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]]

DRAWN_PER_IMAGE = 50
NOTEBOOK_SIDE, NOTEBOOK_ROWS = 640, 10
"""The longer side in pixels of an image in a notebook, and the most rows of its table."""


class Detection(NamedTuple):
    """One object: name and label of its class, score, box in pixels, and the number of its track in a video."""

    name: str
    label: int
    score: float
    box_xyxy: tuple[float, float, float, float]
    track_id: int | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ObjectDetections:
    """The detections in one image, best first; `len` counts them, and a loop yields each as a `Detection`.

    Attributes:
        boxes_yxyx: float32 [n, 4], top, left, bottom and right as fractions of the image.
        labels: int32 [n], from 1; label l is class l - 1.
        scores: float32 [n], from 0 to 1.
        names: of the classes of the labels, [n].
        file_name: of the image, as it was given, or its address; empty for bytes and pixels.
        height: of the image in pixels.
        width: likewise.
        frame: number of the frame in its video, from 0; None for an image.
        track_ids: int32 [n], the same number for the same object in all frames of a video; None without tracking.
        categories: the classes that the detector knows, label 1 first.
        read_pixels: returns the image, uint8 [height, width, 3], RGB; a file is read again.
    """

    boxes_yxyx: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    names: tuple[str, ...]
    file_name: str = ""
    height: int = 0
    width: int = 0
    frame: int | None = None
    track_ids: npt.NDArray[np.int32] | None = None
    categories: tuple[Category, ...] = ()
    read_pixels: Callable[[], Image] | None = field(default=None)

    @property
    def boxes_xyxy(self) -> npt.NDArray[np.float32]:
        """Return float32 [n, 4], left, top, right and bottom in pixels."""
        scale = np.array([self.width, self.height] * 2, np.float32)
        return self.boxes_yxyx[:, [1, 0, 3, 2]] * scale

    def __len__(self) -> int:
        return len(self.scores)

    def __bool__(self) -> bool:
        return True  # an image without detections is a result, too

    def __iter__(self) -> Iterator[Detection]:
        tracks: Sequence[int | None] = [None] * len(self) if self.track_ids is None else self.track_ids.tolist()
        rows = zip(
            self.names, self.labels.tolist(), self.scores.tolist(), self.boxes_xyxy.tolist(), tracks, strict=True
        )
        for name, label, score, box, track in rows:
            yield Detection(name, label, score, (box[0], box[1], box[2], box[3]), track)

    def __repr__(self) -> str:
        image = self._title()
        counts = ", ".join(f"{count} {name}" for name, count in Counter(self.names).most_common())
        return f"<ObjectDetections{' in ' if image else ''}{image}: {counts or 'none'}>"

    def draw(self) -> PIL.Image.Image:
        """Draw the boxes with class names and scores; a small image is enlarged first.

        Raises:
            DataError: the image is not known, or cannot be read any more.
        """
        names = [one.name for one in self.categories] or self._name_labels()
        return PIL.Image.fromarray(draw_detections(self._read(), self.boxes_yxyx, self.labels, self.scores, names))

    def crops(self) -> list[PIL.Image.Image]:
        """Cut the objects out of the image, each of at least one pixel, in the order of the detections.

        Raises:
            DataError: as by `draw`.
        """
        return [PIL.Image.fromarray(one) for one in crop_boxes(self._read(), self.boxes_yxyx)]

    def to_coco(self, image_id: int = 1) -> list[dict[str, Any]]:
        """Return COCO results: image_id, category_id, bbox (left, top, width, height in pixels) and score.

        Args:
            image_id: of the image in its data set.
        """
        ids = np.array([one.id for one in self.categories] or range(1, 1 + max(self.labels, default=0)), np.int64)
        size = np.array([self.height, self.width], np.int32)
        records = to_records(image_id, size, self.boxes_yxyx, ids[self.labels - 1], self.scores)
        if self.track_ids is not None:
            return [{**one, "track_id": track} for one, track in zip(records, self.track_ids.tolist(), strict=True)]
        return records

    def to_supervision(self) -> Any:
        """Return a `supervision.Detections`: boxes in pixels, scores, class_id from 0, and class_name.

        Raises:
            MissingExtraError: supervision is not installed.
        """
        return make_supervision(self.boxes_xyxy, self.labels, self.scores, self.names, self.track_ids)

    def _repr_html_(self) -> str:
        """Return the drawn image, small, and a table for a notebook."""
        rows = "".join(
            f"<tr><td>{html.escape(one.name)}</td><td>{one.score:.3f}</td>"
            f"<td>{', '.join(f'{side:.0f}' for side in one.box_xyxy)}</td></tr>"
            for one in list(self)[:NOTEBOOK_ROWS]
        )
        more = len(self) - NOTEBOOK_ROWS
        rows += f"<tr><td colspan=3>and {more} more</td></tr>" if more > 0 else ""
        table = f"<table><tr><th>class</th><th>score</th><th>left, top, right, bottom</th></tr>{rows}</table>"
        image = "" if self.read_pixels is None else f"<img src='data:image/jpeg;base64,{self._encode_small()}'>"
        return f"<div><p>{html.escape(repr(self)[1:-1])}</p>{image}{table if rows else ''}</div>"

    def _encode_small(self) -> str:
        buffer = io.BytesIO()
        fit_image(self.draw(), NOTEBOOK_SIDE, NOTEBOOK_SIDE).save(buffer, "JPEG", quality=85)
        return base64.b64encode(buffer.getvalue()).decode()

    def _title(self) -> str:
        name = self.file_name + (f"#{self.frame}" if self.frame is not None else "")
        size = f"{self.width}x{self.height}" if self.width else ""
        return " ".join(part for part in (name, size) if part)

    def _name_labels(self) -> list[str]:
        names = [""] * max(self.labels, default=0)
        for label, name in zip(self.labels, self.names, strict=True):
            names[label - 1] = name
        return names

    def _read(self) -> Image:
        if self.read_pixels is None:
            raise DataError("detections without their image cannot be drawn", remedy="take them from Detector.predict")
        return self.read_pixels()


def read_categories(model_config: ModelConfig) -> tuple[Category, ...]:
    """Return the classes of a model.

    Raises:
        DataError: its configuration does not name them.
    """
    try:
        return tuple(Category(**category) for category in model_config["categories"])
    except (KeyError, TypeError) as error:
        raise DataError(f"checkpoint: does not name its classes ({error!r}); use another") from None


def make_category_config(categories: Sequence[Category]) -> ModelConfig:
    """Return the configuration of a model with these classes, which `read_categories` reads."""
    return {"categories": [asdict(category) for category in categories]}


def crop_boxes(pixels: Image, boxes_yxyx: npt.NDArray[np.float32]) -> list[Image]:
    """Cut boxes [n, 4], in 0..1, out of an image, uint8 [height, width, 3]; each is of at least one pixel."""
    height, width = pixels.shape[:2]
    corners = np.rint(boxes_yxyx * [height, width, height, width]).astype(int)
    low = np.clip(corners[:, :2], 0, [height - 1, width - 1])
    high = np.clip(corners[:, 2:], low + 1, [height, width])
    return [pixels[top:bottom, left:right] for (top, left), (bottom, right) in zip(low, high, strict=True)]


def to_records(
    image_id: int,
    size: npt.NDArray[np.int32],
    boxes_yxyx: npt.NDArray[np.float32],
    category_ids: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float32],
) -> list[dict[str, Any]]:
    """Convert the detections of an image to COCO results, whose bbox is left, top, width, height in pixels.

    Args:
        image_id: of the image.
        size: [2], its height and width in pixels.
        boxes_yxyx: [n, 4], in 0..1.
        category_ids: [n].
        scores: [n].
    """
    y0, x0, y1, x1 = (boxes_yxyx.astype(np.float64) * np.tile(size, 2)).T
    bboxes = np.stack([x0, y0, x1 - x0, y1 - y0], axis=1)
    return [
        {"image_id": image_id, "category_id": category, "bbox": bbox, "score": score}
        for bbox, category, score in zip(bboxes.tolist(), category_ids.tolist(), scores.tolist(), strict=True)
    ]


def load_supervision() -> Any:
    """Import supervision.

    Raises:
        MissingExtraError: it is not installed.
    """
    return import_extra("supervision", "gaudi-apps[supervision]")


def make_supervision(
    boxes_xyxy: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int32],
    scores: npt.NDArray[np.float32],
    names: Sequence[str],
    track_ids: npt.NDArray[np.int32] | None = None,
) -> Any:
    """Make a `supervision.Detections` of boxes [n, 4] in pixels, labels from 1, scores and class names.

    Raises:
        MissingExtraError: supervision is not installed.
    """
    return load_supervision().Detections(
        xyxy=boxes_xyxy,
        confidence=scores,
        class_id=labels.astype(int) - 1,
        tracker_id=track_ids,
        data={"class_name": np.array(names, dtype=str)},
    )


def find_labels(classes: str | int | Sequence[str | int], categories: Sequence[Category]) -> frozenset[int] | None:
    """Find the labels of classes; None where none is given. An integer is an id, a text first a name, maybe of several.

    Raises:
        FlagError: a class is none of the detector's.
    """
    labels = set[int]()
    for given in [classes] if isinstance(classes, str | bytes) or not isinstance(classes, Iterable) else classes:
        text, names = str(given), [] if isinstance(given, int | np.integer) else [one.name for one in categories]
        named = {label for label, name in enumerate(names, 1) if name == text}  # bools are ints and no ids
        found = named or {label for label, one in enumerate(categories, 1) if str(one.id) == text}
        if not found:
            nearest = difflib.get_close_matches(text.lower(), {name.lower() for name in names}, n=3, cutoff=0.5)
            known = [name for name in dict.fromkeys(names) if name.lower() in nearest]
            listed = known or [f"{one.name} ({one.id})" for one in categories[:20]]
            remedy = f"did you mean {' or '.join(known)}?" if known else f"give one of {', '.join(listed)}"
            raise FlagError(f"--classes {text}: is no class of the detector", flag="--classes", remedy=remedy)
        labels |= found
    return frozenset(labels) or None


# ByteTrack joins two boxes by their overlap times the score, and begins a track where that of two frames is above .3:
# faint objects that move would get no number. With this score at least, boxes that overlap by half are of one object.
_LEAST_TRACKED_SCORE = 0.6


class Tracker:
    """Follow objects through the frames of videos, each from new, by the ByteTrack of supervision.

    Zhang et al., https://arxiv.org/abs/2110.06864. An image is no frame, and its objects get no number.

    Raises:
        MissingExtraError: supervision is not installed.
    """

    def __init__(self) -> None:
        load_supervision()
        self._video: Any = None
        self._tracks: Any = None
        self._shift = 0  # numbers of the videos before, so that each is of one object
        self._last = 0

    def follow(self, video: object, frame: int | None, rate: float, boxes_xyxy: Any, rows: Rows) -> Any:
        """Return the numbers of the objects of a frame, int32 [n], from 1; 0 for what is not followed (yet).

        Args:
            video: tells videos apart.
            frame: number of the frame; None for an image.
            rate: frames a second.
            boxes_xyxy: float32 [n, 4], in pixels.
            rows: the detections, whose labels and scores are read.
        """
        numbers = np.zeros(len(boxes_xyxy), np.int32)
        if frame is None:
            return numbers
        if video != self._video or frame == 0:
            self._video, self._tracks, self._shift = video, _make_byte_track(rate), self._last
        labels, scores = rows[1], rows[2]
        found = make_supervision(boxes_xyxy, labels, np.maximum(scores, _LEAST_TRACKED_SCORE), [""] * len(labels))
        found.data["row"] = np.arange(len(labels))
        followed = self._tracks.update_with_detections(found)
        if len(followed):
            numbers[followed.data["row"]] = followed.tracker_id.astype(np.int32) + self._shift
            self._last = max(self._last, int(numbers.max()))
        return numbers


def _make_byte_track(rate: float) -> Any:
    import warnings

    with warnings.catch_warnings():  # a later major version moves it into a package of its own
        warnings.simplefilter("ignore")
        return load_supervision().ByteTrack(frame_rate=max(1, round(rate)))


class Refinement:
    """Refine what a detector finds in images and frames: windows of photos, a choice of classes, and tracks.

    Args:
        categories: the classes, label 1 first.
        detect: returns boxes, labels and scores of a batch.
        prepare: makes inputs of the network.
        batch_size: inputs at once, at most.
        score_threshold: of detections that are followed, as others would begin tracks of nothing, and of those that
            windows find.
        classes: names or category ids of the classes to keep, or one of them; none: all.
        agnostic: keep the best of boxes that overlap by half or more, whatever their classes.
        tiles: see `Tiles`; None: images are looked at as a whole only.
        track: follow objects through videos.

    Raises:
        FlagError: a class is none of the detector's.
        MissingExtraError: `track` needs supervision, which is not installed.
    """

    def __init__(
        self,
        categories: Sequence[Category],
        detect: Detect,
        prepare: Preprocessor,
        batch_size: int,
        *,
        score_threshold: float,
        classes: str | int | Sequence[str | int] = (),
        agnostic: bool = False,
        tiles: int | str | None = None,
        track: bool = False,
    ) -> None:
        self._labels, self._agnostic = find_labels(classes, categories), agnostic
        self._tracker = Tracker() if track else None
        self._tiles, self._threshold = tiles, score_threshold
        self._detect, self._prepare, self._batch_size = detect, prepare, batch_size

    def apply(self, image: InputImage, rows: Rows) -> tuple[Rows, npt.NDArray[np.int32] | None]:
        """Return the detections in an image, and the numbers of their tracks, int32 [n], 0 without; None: none wanted.

        Args:
            image: where they are.
            rows: boxes in 0..1, labels and scores, best first; label 0 is none.
        """
        if self._tiles is not None:
            tiles = Tiles(self._tiles, max(image.network_input.shape))  # channels are first or last
            prepare = self._prepare.from_pixels
            rows = tiles.detect(image.pixels, rows, self._detect, prepare, self._batch_size, self._threshold)
        rows = self.choose(rows)
        if self._tracker is None:
            return rows, None
        numbers = np.zeros(len(rows[1]), np.int32)
        shown = rows[2] >= self._threshold
        followed = rows[0][shown], rows[1][shown], rows[2][shown]
        boxes = followed[0][:, [1, 0, 3, 2]] * np.array([image.width, image.height] * 2, np.float32)
        numbers[shown] = self._tracker.follow(image.path, image.frame, image.rate, boxes, followed)
        return rows, numbers

    def choose(self, rows: Rows) -> Rows:
        """Return the rows of the classes that are kept, without those of label 0, best first."""
        boxes, labels, scores = rows
        is_kept = labels > 0
        if self._labels is not None:
            is_kept &= np.isin(labels, list(self._labels))
        kept = np.flatnonzero(is_kept)
        if self._agnostic:
            kept = kept[suppress_across_classes(boxes[kept], scores[kept])]
        return boxes[kept], labels[kept], scores[kept]


class OpenedDetector(NamedTuple):
    """A function that detects on a batch of prepared images, the classes, and the preparation.

    So many threads may call the function at once as `side_by_side` says.
    """

    detect: Detect
    categories: tuple[Category, ...]
    prepare: Preprocessor
    side_by_side: int = 1


def make_export_preprocessor(side: int) -> Preprocessor:
    """Return the preparation of images for an export of a detector: resized to [side, side, 3], RGB in 0..255."""
    strictly = partial(decode_like_tensorflow, strict=True)
    return Preprocessor(partial(resize_pixels, side=side), decode_like_tensorflow, strictly)


def open_detector(export: CheckedExport, threads: int = 0, batch_size: int = 0) -> OpenedDetector:
    """Open an export, and what prepares images for it; see `open_model`.

    Args:
        export: to open.
        threads: to compute by; 0: as many as there are processors.
        batch_size: of batches that are computed side by side; 0: they are not.
    """
    prepare = make_export_preprocessor(int(export.manifest["image_size"]))
    model = open_model(export, prepare.from_encoded, threads, batch_size)

    def detect(images: Any) -> Any:
        found = model.compute(np.asarray(images))
        return found["boxes_yxyx"], found["labels"], found["scores"]

    categories = tuple(Category(one["id"], one["name"]) for one in export.manifest["classes"])
    return OpenedDetector(detect, categories, prepare, model.side_by_side)
