"""YOLO data sets (a YAML file, images/ and labels/ with a text file an image) as COCO annotations."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, TypeVar

from gaudi_datasets.documents import is_there, load_yaml, read_lines, shorten
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import IMAGE_ENDINGS, read_size
from gaudi_datasets.layouts.inventory import walk_files

# What the tools that read this format take for images; the last three are refused, by name, when they are read.
_IMAGE_SUFFIXES = {*IMAGE_ENDINGS, ".dng", ".heic", ".pfm"}
_MAX_CLASSES = 10**6
_FIELDS = "class cx cy w h"
# Values are rounded to some four to six digits, so a corner this little past the edge, as a share of the image, is on
# it: less than a tenth of a pixel of 640.
_ROUNDING = 1e-4

AnyPath = TypeVar("AnyPath", bound=PurePath)


def read_yolo(data: str | Path, image_set: str) -> tuple[dict[str, list[dict[str, Any]]], Path]:
    """Read one set of images as a COCO annotation document, for `parse_coco`, and the folder of its file names.

    Category ids are the class numbers plus 1, image ids 1..n by path. The YAML file gives `names` (a list, or an object
    by number, which may have gaps) and for each set a folder, a text file that lists images, or several of these,
    relative to `path`, which is relative to the YAML file. The labels of images/a/b.jpg are labels/a/b.txt, or else
    images/a/b.txt, a box a line: class, and centre and size as shares of the image as people see it, turned as EXIF
    says. Without that file, or when it is empty, there are no boxes.

    Args:
        data: the YAML file.
        image_set: its key: "train", "val" or "test".

    Raises:
        MissingInputError: the YAML file, a folder, an image or the labels of all images are not there.
        DataError: the YAML file or a line of labels breaks the format, or an image's size can't be read.
    """
    data = Path(data)
    names, paths = read_yaml(data, image_set)
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    return make_document(paths, folder, names, keypoints=count_keypoint_values(data)), folder


def count_keypoint_values(data: Path) -> int:
    """Return how many values of keypoints follow each box, by the YAML file's `kpt_shape`; 0 without it.

    Raises:
        DataError: it is no pair of numbers.
    """
    document = load_yaml(data)
    shape = document.get("kpt_shape") if isinstance(document, dict) else None
    if shape is None:
        return 0
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise DataError(f"kpt_shape is {shorten(shape)}; it must be two numbers", path=data, field="kpt_shape")
    return math.prod(shape)


def read_yaml(data: Path, image_set: str, notes: list[str] | None = None) -> tuple[dict[int, str], list[Path]]:
    """Read the classes by their numbers, and the images of a set, sorted; see `read_yolo`.

    A place "../a" is the folder a beside the file, if that is there; with `notes`, this is noted where both are.
    With `notes`, a `path` that is not there, as that of another machine, is the folder of the file, and noted.
    """
    document = load_yaml(data)
    if not isinstance(document, dict):
        raise DataError(f"is {shorten(document)}; it must be an object with names, train and val", path=data)
    return _class_names(document, data), _find_images(document, data, image_set, notes)


def make_document(
    paths: Sequence[Path],
    folder: Path,
    names: Mapping[int, str],
    outlines: Counter[str] | None = None,
    find_labels: Callable[[Path], Path] | None = None,
    sizes: Sequence[tuple[int, int]] | None = None,
    keypoints: int | None = 0,
) -> dict[str, list[dict[str, Any]]]:
    """Make a COCO annotation document of images and the labels that belong to them.

    Args:
        paths: of the images, in the order of their ids.
        folder: that file names are relative to.
        names: the classes by their numbers.
        outlines: counts the outlines of each image that are read as their boxes; None: an outline is a fault.
        find_labels: returns the file of labels of an image, which need not be there; None: `labels_of`.
        sizes: height and width of the images in pixels; None: they are read.
        keypoints: number of values after each box that are left out; None: unknown, so that a file with boxes and
            longer lines, which may be outlines or boxes with keypoints, is a fault. With outlines and without
            keypoints, a file whose lines all look like boxes with keypoints is one.

    Raises:
        MissingInputError, DataError: as by `read_yolo`.
    """
    find_labels = find_labels or labels_of
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image_id, path in enumerate(paths, 1):
        height, width = sizes[image_id - 1] if sizes else read_size(path)
        file_name = path.relative_to(folder).as_posix()
        images.append({"id": image_id, "file_name": file_name, "height": height, "width": width})
        for number, box in _read_boxes(find_labels(path), width, height, names, outlines, keypoints):
            fields = {"category_id": number + 1, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, **fields})
    categories = [{"id": number + 1, "name": name, "supercategory": ""} for number, name in sorted(names.items())]
    return {"images": images, "annotations": annotations, "categories": categories}


def _class_names(document: dict[str, Any], path: Path) -> dict[int, str]:
    """Return the classes by their numbers, in rising order."""
    names = document.get("names")
    listed = dict(enumerate(names)) if isinstance(names, list) else names
    texts = listed.values() if isinstance(listed, dict) else ()
    if not isinstance(listed, dict) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise DataError(
            f"names is {shorten(names)}; it must be a list of the classes, each a text", path=path, field="names"
        )
    for number in listed:
        if type(number) is not int or not 0 <= number < _MAX_CLASSES:
            raise DataError(
                f"names has the key {shorten(number)}; it must be a number from 0", path=path, field="names"
            )
    if document.get("nc", len(listed)) not in (len(listed), max(listed) + 1):
        raise DataError(
            f"nc is {shorten(document['nc'])}, but names has {len(listed)}", path=path, remedy="fix one of the two"
        )
    return {number: listed[number] for number in sorted(listed)}


def _find_images(document: dict[str, Any], data: Path, image_set: str, notes: list[str] | None) -> list[Path]:
    """List the images of a set, sorted, each once."""
    places = document.get(image_set)
    places = [places] if isinstance(places, str) else places
    if not isinstance(places, list) or not places or not all(isinstance(place, str) and place for place in places):
        raise DataError(
            f"{image_set} is {shorten(places)}; it must be a folder or a list of them", path=data, field=image_set
        )
    root = document.get("path") or "."
    if not isinstance(root, str):
        raise DataError(f"path is {shorten(root)}; it must be a folder", path=data, field="path")
    if notes is not None and not is_there(data.parent / root, Path.is_dir):
        notes.append(f"{data.name}: path {shorten(root)} is not there; the folder of the file was taken")
        root = "."
    found: set[Path] = set()
    for place in places:
        named, inner = data.parent / root / place, place.removeprefix("../")  # as exports for a folder below have it
        folder = data.parent / root / inner if is_there(data.parent / root / inner) else named
        if notes is not None and folder != named and named.exists():
            notes.append(f"{image_set}: took {inner}, not {place}, which is there, too")
        if not is_there(folder):
            raise MissingInputError(
                "is not there, though the YAML file names it", path=named, remedy="fix path or the name"
            )
        found.update(Path(os.path.normpath(path.absolute())) for path in _list_images(folder))
    paths = sorted(found)
    if not paths:
        raise DataError(f"{image_set} has no images", path=data, remedy="fix the folder")
    if not any(labels_of(path).exists() for path in paths):
        raise MissingInputError(
            "is not there, nor are the labels of any other image of it",
            path=_expect_labels(paths[0], data),
            remedy="put labels there, or beside the images",
        )
    return paths


def _list_images(place: Path) -> Iterator[Path]:
    """List the images below a folder, or those that a text file lists relative to itself."""
    if place.is_dir():
        yield from (path for path in walk_files(place) if path.suffix.lower() in _IMAGE_SUFFIXES)
        return
    for line in read_lines(place):
        if line.strip():
            yield place.parent / line.strip().replace("\\", "/")


def labels_of(image: Path) -> Path:
    """Return the file of labels of an image, the first of `list_label_places` that is there; else the first of all.

    It ends in .txt, or in .TXT where that alone is there.
    """
    places = list_label_places(image)
    endings = (path for place in places for path in (place, place.with_suffix(".TXT")))
    return next((path for path in endings if path.exists()), places[0])


def list_label_places(image: AnyPath) -> list[AnyPath]:
    """List where labels may be: the path with labels/ in place of the last images/, if it has that; the image's."""
    beside, parts = image.with_suffix(".txt"), list(image.parts)
    for position in range(len(parts) - 2, -1, -1):
        if parts[position] == "images":
            parts[position] = "labels"
            return [type(image)(*parts).with_suffix(".txt"), beside]
    return [beside]


def _expect_labels(image: Path, data: Path) -> Path:
    """Return where the labels of an image should be: beside it if images/ is no folder of the set, but above it."""
    places = list_label_places(image)
    shared = os.path.commonpath([os.path.normpath(data.parent.absolute()), image])
    return next((place for place in places if place.is_relative_to(shared)), places[-1])


def _read_boxes(
    path: Path, width: int, height: int, names: Container[int], outlines: Counter[str] | None, keypoints: int | None
) -> Iterator[tuple[int, tuple[float, float, float, float]]]:
    """Read class number, and left, top, width and height in pixels, of each line."""
    if not path.exists():
        return
    lines = read_lines(path)
    given = [line.split() for line in lines if line.strip()]
    is_pose = outlines is not None and not keypoints and given and all(map(_is_pose, given))
    if is_pose or (keypoints is None and len({len(fields) == 5 for fields in given}) > 1):
        raise DataError(
            "looks like boxes with keypoints" if is_pose else "has boxes of 5 fields and other lines",
            path=path,
            remedy="give a YAML file, with kpt_shape where lines have keypoints, or fix the others",
        )
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                fields = line.split()
                if keypoints and len(fields) == 5 + keypoints:
                    fields = fields[:5]
                elif outlines is not None and not keypoints and len(fields) >= 7 and len(fields) % 2:
                    fields = _enclose(fields)
                    outlines[path.name] += 1
                yield _parse_line(fields, width, height, names)
            except ValueError as fault:
                raise DataError(f"{fault}", path=path, record=f"line {number}") from None


def _parse_line(
    fields: Sequence[str], width: int, height: int, names: Container[int]
) -> tuple[int, tuple[float, float, float, float]]:
    if len(fields) != 5:
        polygon = ", as an outline has; turn outlines into boxes" if len(fields) > 6 else ""
        raise ValueError(f"has {len(fields)} fields{polygon}; a box has 5: {_FIELDS}")
    if read_class(fields[0]) not in names:
        raise ValueError(f"class is {fields[0]!r}; it must be the number of a class")
    values = []
    for name, text in zip(_FIELDS.split()[1:], fields[1:], strict=True):
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {text!r}; it must be a share of the image, in 0..1")
        values.append(value)
    left, box_width = _span(values[0], values[2], width)
    top, box_height = _span(values[1], values[3], height)
    return int(fields[0]), (left, top, box_width, box_height)


def read_class(text: str) -> int:
    """Return the class number that a line begins with; -1 when it is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else -1


def _enclose(fields: Sequence[str]) -> list[str]:
    """Return the fields of the box around an outline, which are the class and then x and y of each point."""
    try:
        x, y = ([float(text) for text in fields[start::2]] for start in (1, 2))
    except ValueError:
        raise ValueError("has a coordinate that is no number") from None
    spans = [(min(values), max(values)) for values in (x, y)]
    centres = [(low + high) / 2 for low, high in spans]
    return [fields[0], *map(repr, centres), *(repr(high - low) for low, high in spans)]


def _is_pose(fields: Sequence[str]) -> bool:
    """Tell if what may be an outline is a box with keypoints in it, from which the outline's second point is far."""
    try:
        x, y, width, height, *rest = map(float, fields[1:])
        size = 3 if len(rest) % 3 == 0 and {0, 1, 2}.issuperset(rest[2::3]) else 2  # the third tells of visibility
        points = [(px - x, py - y) for px, py in zip(rest[::size], rest[1::size], strict=True) if px or py]
        across, down = (max(map(abs, values)) for values in zip(*points, strict=True))
    except ValueError:  # there is no point, or no number
        return False
    is_far = len(rest) > 2 and max(abs(width - x), abs(height - y)) > 4 * max(across, down)  # a triangle may be so
    return across <= width / 2 and down <= height / 2 and (size == 3 or is_far)


def _span(centre: float, length: float, pixels: int) -> tuple[float, float]:
    """Start and length in pixels; an end that only rounding put past the edge is on it."""
    start, stop = centre - length / 2, centre + length / 2
    start = 0.0 if -_ROUNDING <= start < 0 else start * pixels
    stop = float(pixels) if 1 < stop <= 1 + _ROUNDING else stop * pixels
    extent = stop - start
    while stop <= pixels < start + extent:  # by the last bit
        extent = math.nextafter(extent, 0.0)
    return start, extent
