"""Detect on a user's images by flags: print, draw and write what was found, by a detector of any framework."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.detection.detections import DRAWN_PER_IMAGE, Detect, Refinement, crop_boxes, to_records
from gaudi_apps.inference.addresses import Address, is_video
from gaudi_apps.inference.media import InputImage, Preprocessor
from gaudi_apps.inference.predictor import BATCH_BESIDE_OTHERS, LARGEST_BATCH, Results, find_inputs, predict_files
from gaudi_apps.inference.tiles import Rows
from gaudi_apps.inference.visualizer import add_title, draw_detections, write_image
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.fetching.stores import find_copy
from gaudi_datasets.output_files import LONGEST_NAME, cut_name, take_name, write_csv, write_json
from gaudi_datasets.program import count_things
from gaudi_ops.files import write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.detection.config import ImageFlags, SaveFlag
    from gaudi_apps.detection.detections import OpenedDetector


LABELS, CLASSES, CSV, CROPS = "labels", "classes.txt", "detections.csv", "crops"
COLUMNS = (
    *("image_id", "path", "frame", "image_width", "image_height", "category_id", "class", "score"),
    *("left", "top", "right", "bottom", "track_id"),
)


def name_tracks(
    labels: npt.NDArray[np.int32], track_ids: npt.NDArray[np.int32], class_names: Sequence[str]
) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Return labels and names to draw: of an object that is followed its number, so that it keeps its colour."""
    others = track_ids.max(initial=0) + 1 + np.arange(len(labels), dtype=np.int32)
    drawn = np.where(track_ids > 0, track_ids, others).astype(np.int32)
    names = [""] * int(drawn.max(initial=0))
    for place, label, track in zip(drawn.tolist(), labels.tolist(), track_ids.tolist(), strict=True):
        names[place - 1] = class_names[label - 1] + (f" #{track}" if track else "")
    return drawn, names


class DetectionFiles:
    """Write detections as YOLO labels, as CSV, and as images of single objects.

    ``txt`` gives ``labels/NAME.txt`` for each image, with a line for each object: class from 0, and centre, width and
    height as fractions of the image; ``classes.txt`` has the classes. ``csv`` gives one table, ``detections.csv``, and
    ``crops`` a JPEG of each object in ``crops/CLASS/``.

    Args:
        folder: to write into.
        kinds: what to write; others than these three are left out.
        categories: the classes, label 1 first.
    """

    def __init__(self, folder: Path, kinds: Sequence[SaveFlag], categories: Sequence[Category]) -> None:
        self._folder, self._kinds, self._categories = folder, frozenset(kinds), categories
        self._rows: list[tuple[Any, ...]] = []
        self._taken: set[str] = set()
        self._class_folders = _name_folders([one.name for one in categories])

    @property
    def names(self) -> list[str]:
        """Names of the files and folders that are written."""
        names = (("txt", f"{LABELS}/"), ("txt", CLASSES), ("csv", CSV), ("crops", f"{CROPS}/"))
        return [name for kind, name in names if kind in self._kinds]

    def add(self, image: InputImage, rows: Rows, track_ids: npt.NDArray[np.int32] | None = None) -> None:
        """Write the detections of an image, boxes in 0..1, labels from 1 and scores, best first."""
        stem = self._name(image)
        if "txt" in self._kinds:
            self._write_labels(stem, rows)
        if "csv" in self._kinds:
            self._add_rows(image, rows, track_ids)
        if "crops" in self._kinds:
            self._write_crops(stem, image, rows)

    def close(self) -> None:
        """Write what is of all images."""
        if "txt" in self._kinds:
            (self._folder / LABELS).mkdir(exist_ok=True)
            names = [re.sub(r"[\r\n]", " ", one.name) for one in self._categories]
            text = "".join(f"{name}\n" for name in names)
            write_file(self._folder / CLASSES, text.encode(errors="backslashreplace"))
        if "csv" in self._kinds:
            write_csv(self._folder / CSV, COLUMNS, self._rows)

    def _name(self, image: InputImage) -> str:
        """Return a name for the files of an image, as YOLO pairs them: that of its file, without the ending."""
        stem = cut_name(Path(image.path.name).stem, LONGEST_NAME - 20)  # the number of a frame has room
        if image.frame is not None:
            stem = f"{stem}_{image.frame:06d}"
        return take_name(stem, image.image_id, self._taken, image.path.name)

    def _write_labels(self, stem: str, rows: Rows) -> None:
        boxes, labels, _ = rows
        centers, sides = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
        lines = [
            f"{label - 1} {center[1]:.6f} {center[0]:.6f} {side[1]:.6f} {side[0]:.6f}\n"
            for label, center, side in zip(labels.tolist(), centers.tolist(), sides.tolist(), strict=True)
        ]
        folder = self._folder / LABELS
        folder.mkdir(exist_ok=True)
        write_file(folder / f"{stem}.txt", "".join(lines), durable=False)

    def _add_rows(self, image: InputImage, rows: Rows, track_ids: npt.NDArray[np.int32] | None) -> None:
        frame = "" if image.frame is None else image.frame
        tracks = [0] * len(rows[1]) if track_ids is None else track_ids.tolist()
        for (y0, x0, y1, x1), label, score, track in zip(*(part.tolist() for part in rows), tracks, strict=True):
            one = self._categories[label - 1]
            sides = (x0 * image.width, y0 * image.height, x1 * image.width, y1 * image.height)
            texts = [f"{score:.6f}", *(f"{side:.2f}" for side in sides), track or ""]
            place = image.image_id, str(image.path), frame, image.width, image.height
            self._rows.append((*place, one.id, one.name, *texts))

    def _write_crops(self, stem: str, image: InputImage, rows: Rows) -> None:
        for number, (pixels, label) in enumerate(
            zip(crop_boxes(image.pixels, rows[0]), rows[1].tolist(), strict=True), 1
        ):
            folder = self._folder / CROPS / self._class_folders[label - 1]
            folder.mkdir(parents=True, exist_ok=True)
            write_image(folder / f"{stem}-{number}.jpg", pixels)


def _name_folders(names: Sequence[str]) -> list[str]:
    """Return a folder's name for each class: its own where it can be one, with its label where it is taken."""
    taken: set[str] = set()
    cleaned = [cut_name(re.sub(r"[^\w .-]", "_", name).strip(" ."), 100) for name in names]
    return [take_name(name or f"class-{label}", label, taken, key=str.lower) for label, name in enumerate(cleaned, 1)]


SAVED: Sequence[SaveFlag] = ("images", "json")


def predict_by_flags(
    flags: ImageFlags, open_detector: Callable[[int], OpenedDetector], model_dir: Path, *, batch_size: int
) -> None:
    """Detect on each image and frame that flags name, and print the results, see `DetectionResults`.

    The detector is opened once the images are found. It is asked to compute batches side by side, and told their size,
    where there are several, but not (0) where the frames of a camera or the tiles of a photo wait for each of them.
    """
    output_dir = find_copy(flags.output_dir or model_dir / "predictions", "outputs")
    files = find_inputs(flags.inference, output_dir)
    is_stored = not any(isinstance(path, Address) for path in files)
    many = flags.tiles == "off" and is_stored and (len(files) > LARGEST_BATCH or is_video(files[0]))
    beside = min(batch_size, BATCH_BESIDE_OTHERS) if many else 0
    detect, categories, preprocessor, side_by_side = open_detector(beside)
    refinement = make_refinement(flags, categories, detect, preprocessor, batch_size)
    results = predict_files(
        detect,
        files,
        preprocessor,
        lambda folder: DetectionResults(
            folder, categories, flags.score_threshold, flags.max_boxes, refinement=refinement, save=flags.save
        ),
        output_dir,
        batch_size=beside if side_by_side > 1 else batch_size,
        strict=flags.strict,
        max_frames=flags.max_frames,
        side_by_side=side_by_side,
    )
    say(*results.describe(output_dir, f", {results.count()}").split("\n"))
    if results.boxes_left_out:
        where = f"{count_things(results.boxes_left_out, 'box')} in {count_things(results.images_cut, 'image')}"
        say(f"{where} listed and not drawn: --max_boxes {flags.max_boxes}")


def make_refinement(
    flags: ImageFlags, categories: Sequence[Category], detect: Detect, prepare: Preprocessor, batch_size: int
) -> Refinement:
    """Make the refinement of detections that flags ask for; see `Refinement`."""
    return Refinement(
        categories,
        detect,
        prepare,
        batch_size,
        score_threshold=flags.score_threshold,
        classes=flags.classes,
        agnostic=flags.agnostic_nms,
        tiles=None if flags.tiles == "off" else flags.tiles,
        track=flags.track,
    )


class DetectionResults(Results):
    """Collect the detections of each image as COCO results, and draw the best of them.

    The folder gets a PNG of each image and a video of each video with the boxes drawn; ``detections.json``, a
    COCO results list; and ``files.json``, a COCO document without annotations whose ``images`` have file, frame and
    drawn image of each image id, and whose ``bad_files`` are those that were skipped.

    Args:
        folder: to write into.
        categories: the classes, label 1 first.
        score_threshold: of detections that are drawn and printed, each in a line with file, score, class, and left,
            top, right, bottom in pixels; the results file has all above .05.
        max_boxes: that are drawn in an image; the number of the others is written into it.
        refinement: changes what the network found; None: nothing is changed.
        save: what to write, see `gaudi_apps.detection.config.ImageFlags`.

    Attributes:
        num_detections: number of rows of the results file.
        num_listed: number of those that are drawn and printed.
        boxes_left_out: number of boxes that were not drawn.
        images_cut: number of images and frames that they are of.
    """

    tables = ("detections.json", "files.json")

    def __init__(
        self,
        folder: Path,
        categories: Sequence[Category],
        score_threshold: float,
        max_boxes: int = DRAWN_PER_IMAGE,
        *,
        refinement: Refinement | None = None,
        save: Sequence[SaveFlag] = SAVED,
    ) -> None:
        super().__init__(folder, draws="images" in save)
        self._max_boxes, self.boxes_left_out, self.images_cut = max_boxes, 0, 0
        self._refinement, self._has_tables = refinement, "json" in save
        self._others = DetectionFiles(folder, save, categories)
        self.files = [*(self.tables if self._has_tables else ()), *self._others.names]
        self.num_detections = self.num_listed = 0
        self._encoded: list[str] = []  # each with the rows of an image, encoded while the next ones are computed
        self._categories = categories
        self._names = [category.name for category in categories]
        self._category_ids = np.array([0] + [category.id for category in categories])
        self._score_threshold = score_threshold

    def add(self, image: InputImage, *outputs: npt.NDArray[Any]) -> list[str]:
        """Keep and draw the detections of an image, without rows of label 0; return a line for each that is drawn."""
        boxes_yxyx, labels, scores = outputs
        found = labels > 0
        rows, tracks = (boxes_yxyx[found], labels[found], scores[found]), None
        if self._refinement is not None:
            rows, tracks = self._refinement.apply(image, rows)
        boxes_yxyx, labels, scores = rows
        size = np.array([image.height, image.width], np.int32)
        records = to_records(image.image_id, size, boxes_yxyx, self._category_ids[labels], scores)
        shown = np.flatnonzero(scores >= self._score_threshold)
        self._others.add(
            image, (boxes_yxyx[shown], labels[shown], scores[shown]), None if tracks is None else tracks[shown]
        )
        names, drawn_labels, ends = self._names, labels[shown], [""] * len(shown)
        if tracks is not None:
            for record, track in zip(records, tracks.tolist(), strict=True):
                record.update({"track_id": track} if track else {})
            drawn_labels, names = name_tracks(labels[shown], tracks[shown], names)
            ends = [f" #{track}" if track else "" for track in tracks[shown].tolist()]
        self.num_detections += len(records)
        self.num_listed += len(shown)
        self._encoded += [json.dumps(records)[1:-1]] if records and self._has_tables else []
        self._draw(image, boxes_yxyx[shown], drawn_labels, scores[shown], names)
        corners = (boxes_yxyx[shown] * np.tile(size, 2)).tolist()
        drawn = zip(labels[shown].tolist(), scores[shown].tolist(), corners, ends, strict=True)
        return [
            f"{image.name}: {score:.3f} {self._names[label - 1]} {x0:.0f} {y0:.0f} {x1:.0f} {y1:.0f}{end}"
            for label, score, (y0, x0, y1, x1), end in drawn
        ]

    def _draw(self, image: InputImage, boxes_yxyx: Any, labels: Any, scores: Any, names: Sequence[str]) -> None:
        """Draw the detections that are shown, where images are to be drawn, and keep the row of the image."""
        if not self.draws:
            self.add_image(image, None)
            return
        if len(scores) > self._max_boxes:
            self.boxes_left_out += len(scores) - self._max_boxes
            self.images_cut += 1
        drawn = draw_detections(image.pixels, boxes_yxyx, labels, scores, names, max_boxes=self._max_boxes)
        if image.frame is None:  # all frames of a video have one size
            drawn = add_title(drawn, image.path.name, f"score {self._score_threshold:.2f} and above: {len(scores)}")
        self.add_image(image, drawn)

    def count(self) -> str:
        """Return the number of detections that are listed, and of those in the results file."""
        stored = f" ({self.num_detections} in {self.tables[0]})" if self._has_tables else ""
        return f"{count_things(self.num_listed, 'detection')} from {self._score_threshold:g} on{stored}"

    def write_tables(self) -> None:
        """Write the two JSON files, and what else is of all images."""
        self._others.close()
        if not self._has_tables:
            return
        categories = [asdict(category) for category in self._categories]
        document = {"images": self.images, "annotations": [], "categories": categories, "bad_files": self.bad_files}
        detections, files = self.tables
        write_file(self.folder / detections, f"[{', '.join(self._encoded)}]\n")
        write_json(self.folder / files, document)
