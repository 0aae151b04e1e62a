"""Detections on pictures and videos of the user's: listed, drawn, and as one COCO results file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gaudi_apps.coco_table import write_json
from gaudi_apps.file_progress import FileProgress
from gaudi_apps.pictures import Picture, draw_detections, write_picture
from gaudi_apps.ssd.detector import Detector
from gaudi_apps.ssd.evaluation import Detection, to_records
from gaudi_apps.ssd.inputs import BadFile, InputPicture, read_pictures
from gaudi_apps.ssd.report import DRAWN_PER_IMAGE, DRAWN_SCORE
from gaudi_apps.videos import VideoWriter
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.errors import DataError
from gaudi_datasets.staging import staging_folder

# A batch of large frames ends before it takes more memory than this for its pixels.
PIXEL_BYTES_PER_BATCH = 256 * 2**20


@dataclass(frozen=True)
class PredictOptions:
    """How to predict.

    Attributes:
        batch_size: pictures at once, at most.
        score_threshold: least score of a detection that is drawn and listed; the results file has all above .05.
        strict: end with the first file that cannot be used, instead of naming and skipping it.
    """

    batch_size: int = 16
    score_threshold: float = DRAWN_SCORE
    strict: bool = False


@dataclass(frozen=True)
class PredictReport:
    """What a prediction did: files that were given and that could not be used, pictures and frames, detections."""

    output_dir: Path
    files: int
    bad_files: int
    pictures: int
    detections: int

    def describe(self) -> str:
        """Where the results are and what could not be used, a line each."""
        counts = f"{self.pictures} pictures and frames, {self.detections} detections"
        lines = [f"{self.output_dir}: {counts}; detections.json, files.json and what was drawn"]
        if self.bad_files:
            lines.append(f"{self.bad_files} of {self.files} files could not be used; files.json says why")
        return "\n".join(lines)


def predict(
    detector: Detector,
    files: Sequence[Path],
    categories: Sequence[Category],
    output_dir: Path,
    options: PredictOptions,
    *,
    write_line: Callable[[str], None] = print,
) -> PredictReport:
    """Detect on every picture and every frame of the files.

    `output_dir` gets, all at the end or nothing: a PNG of each picture and a video of each video with at most 10 boxes
    drawn; ``detections.json``, a COCO results list; and ``files.json``, a COCO document without annotations whose
    ``images`` say which file (and frame) each image id is, and which picture was drawn of it, and whose ``bad_files``
    say what was skipped. Files of the same names from an earlier run are replaced.

    Args:
        detector: the trained network.
        files: from `gaudi_apps.ssd.inputs.find_files`.
        categories: the classes, label 1 first.
        output_dir: made when it is not there.
        options: see `PredictOptions`.
        write_line: gets a line for each detection that is drawn: file, score, class, and left, top, right, bottom in
            pixels.

    Raises:
        DataError: no file can be used, or one cannot and the options are strict.
        OSError: the results cannot be written.
    """
    places = {path: place for place, path in enumerate(files, 1)}
    with staging_folder(output_dir) as draft, FileProgress(len(files)) as progress:
        with _Results(draft, categories, options.score_threshold) as results:
            pictures = _skip_bad(read_pictures(files), results, progress, options.strict)
            for batch in _make_batches(pictures, options.batch_size):
                found = detector.detect(np.stack([picture.image for picture in batch]))
                for picture, *rows in zip(batch, *found, strict=True):
                    for line in results.add(picture, *rows):
                        write_line(line)
                progress.update(
                    places[batch[-1].path], f"{len(results.images)} pictures, {len(results.detections)} detections"
                )
        if not results.images:
            raise DataError(f"none of {len(files)} files can be used; the first: {results.bad_files[0].message}")
        results.write_tables()
        for path in sorted(draft.iterdir()):
            os.replace(path, output_dir / path.name)
    counts = (len(files), len(results.bad_files), len(results.images), len(results.detections))
    return PredictReport(output_dir, *counts)


def _skip_bad(
    pictures: Iterator[InputPicture | BadFile], results: _Results, progress: FileProgress, strict: bool
) -> Iterator[InputPicture]:
    for picture in pictures:
        if isinstance(picture, InputPicture):
            yield picture
        elif strict:
            raise picture.error
        else:
            results.bad_files.append(picture)
            progress.note(f"skipped: {picture.message}")


def _name_file(image_id: int, path: Path) -> dict[str, Any]:
    # COCO's file names are within a folder of images, so the path as it was given stands beside.
    return {"id": image_id, "file_name": path.name, "path": str(path)}


def _make_batches(pictures: Iterator[InputPicture], batch_size: int) -> Iterator[list[InputPicture]]:
    batch: list[InputPicture] = []
    for picture in pictures:
        batch.append(picture)
        if len(batch) == batch_size or sum(one.pixels.nbytes for one in batch) > PIXEL_BYTES_PER_BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


class _Results:
    """What is found, collected and drawn into a folder; use it as a context manager, which finishes the videos."""

    def __init__(self, folder: Path, categories: Sequence[Category], score_threshold: float) -> None:
        self.detections: list[Detection] = []
        self.images: list[dict[str, Any]] = []
        self.bad_files: list[BadFile] = []
        self._folder = folder
        self._categories = categories
        self._names = [category.name for category in categories]
        self._category_ids = np.array([0] + [category.id for category in categories])
        self._score_threshold = score_threshold
        self._taken: set[str] = set()
        self._video: tuple[Path, VideoWriter] | None = None  # the one whose frames are being read

    def __enter__(self) -> _Results:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_video()

    def add(
        self,
        picture: InputPicture,
        boxes_yxyx: npt.NDArray[np.float32],
        labels: npt.NDArray[np.int32],
        scores: npt.NDArray[np.float32],
    ) -> list[str]:
        """Keep and draw the detections of a picture (rows of label 0 are none); the lines about those drawn."""
        size = np.array(picture.pixels.shape[:2], np.int32)
        found = labels > 0
        self.detections += to_records(
            picture.image_id, size, boxes_yxyx[found], self._category_ids[labels[found]], scores[found]
        )
        shown = np.flatnonzero(found & (scores >= self._score_threshold))[:DRAWN_PER_IMAGE]
        drawn = draw_detections(picture.pixels, boxes_yxyx[shown], labels[shown], scores[shown], self._names)
        row = _name_file(picture.image_id, picture.path)
        row |= {"height": int(size[0]), "width": int(size[1]), "drawn": self._write_drawn(picture, drawn)}
        self.images.append(row if picture.frame is None else row | {"frame": picture.frame})
        corners = boxes_yxyx[shown] * np.tile(size, 2)
        return [
            f"{picture.name}: {scores[row]:.3f} {self._names[labels[row] - 1]} {x0:.0f} {y0:.0f} {x1:.0f} {y1:.0f}"
            for row, (y0, x0, y1, x1) in zip(shown, corners, strict=True)
        ]

    def write_tables(self) -> None:
        """Write the two JSON files."""
        write_json(self._folder / "detections.json", self.detections)
        bad_files = [{**_name_file(bad.image_id, bad.path), "error": bad.message} for bad in self.bad_files]
        categories = [asdict(category) for category in self._categories]
        document = {"images": self.images, "annotations": [], "categories": categories, "bad_files": bad_files}
        write_json(self._folder / "files.json", document)

    def _write_drawn(self, picture: InputPicture, drawn: Picture) -> str:
        """Write a PNG, or add a frame to the video of the file; the name of what is written."""
        if picture.frame is None:
            path = self._folder / f"{self._free_name(picture)}.png"  # the whole name before it: a.jpg and a.png are two
            write_picture(path, drawn)
            return path.name
        if self._video is None or self._video[0] != picture.path:
            self._close_video()
            self._video = picture.path, VideoWriter(self._folder / self._free_name(picture), picture.rate)
        return self._video[1].write(drawn).name

    def _close_video(self) -> None:
        if self._video is not None:
            self._video[1].close()
            self._video = None

    def _free_name(self, picture: InputPicture) -> str:
        """The file's name, with the image id after it when a file of another folder has taken it."""
        name = picture.path.name if picture.path.name not in self._taken else f"{picture.path.name}-{picture.image_id}"
        self._taken.add(name)
        return name
