"""Pascal VOC folders (Annotations/, ImageSets/Main/, JPEGImages/) as COCO annotations."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, ParseError

import defusedxml
import defusedxml.ElementTree

from gaudi_datasets.documents import read_lines, require_unique
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_ops.files import read_file

IMAGE_FOLDER = "JPEGImages"
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_OF_OBJECT = ("name", "difficult", *(f"bndbox/{corner}" for corner in _CORNERS))
_ENDING = re.compile(r"\.(jpe?g|png|xml|bmp|webp|tiff?)$", re.IGNORECASE)


def read_voc(
    root: str | Path, image_sets: Sequence[str], class_names: Sequence[str] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Read the images of some image sets as a COCO annotation document, for `parse_coco`.

    Category ids are 1..n. Image ids are 1..n by name. Both count over the whole folder, so that image sets read
    one by one agree. A box is xmin, ymin, xmax - xmin, ymax - ymin: VOC's definition has corners that count pixels
    from 1 with the last one inside, but the tools that write the format since (and the data here) write the edges, so
    that xmin == xmax is a box of no size and an image's right edge is its width. `difficult` objects become crowds,
    which neither training nor scoring counts, as VOC's own scoring does.

    Args:
        root: the folder.
        image_sets: names of files in ImageSets/Main, without ".txt"; an image in several of them comes once.
        class_names: the classes in the order of their ids; all names of the folder, sorted, when None.

    Raises:
        MissingInputError: a part of the folder, an image set, or an image's annotation is not there.
        FlagError: a class is given twice.
        DataError: an image set is not in UTF-8, an annotation is no XML (or uses entities), an element is missing or no
            number, or a class is not among `class_names`.
    """
    require_unique(class_names or ())
    root = Path(root)
    folder = root / "Annotations"
    files = {path.stem: path for path in sorted(folder.glob("*.xml"))}
    if not files:
        raise MissingInputError(
            "has no annotations *.xml", path=folder, remedy="give the folder that holds Annotations/"
        )
    image_ids = {stem: number for number, stem in enumerate(files, 1)}
    chosen = _read_image_sets(root, image_sets, files)
    missing = next((stem for stem in chosen if stem not in files), None)
    if missing is not None:
        raise MissingInputError(
            f"has no {missing}.xml, which an image set names", path=folder, remedy="add it or fix the set"
        )
    found = {stem: read_annotation(files[stem]) for stem in (chosen if class_names else files)}
    class_names = class_names or sorted({name for stem in found for name in list_classes(files[stem], found[stem])})
    images = [VocImage(image_ids[stem], files[stem], found[stem], _name_image(found[stem], stem)) for stem in chosen]
    return make_document(images, class_names)


class VocAnnotation(NamedTuple):
    """Hold what is read of an annotation, as it stands there, in a twentieth of the memory of its tree.

    Attributes:
        file_name: of the image; empty where there is none.
        size: texts of height and width.
        objects: of each object the texts of name, difficult, and left, top, right and bottom.
    """

    file_name: str
    size: tuple[str, ...]
    objects: tuple[tuple[str, ...], ...]


class VocImage(NamedTuple):
    """An image's annotation: its id, file and content, the name of the image, and its size.

    The size is height and width in pixels; None for that of the annotation.
    """

    id: int
    path: Path
    content: VocAnnotation
    file_name: str
    size: tuple[int, int] | None = None


def make_document(images: Sequence[VocImage], class_names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Make a COCO annotation document of images and the classes in the order of their ids; raises as `read_voc`."""
    category_ids = {name: number for number, name in enumerate(class_names, 1)}
    records: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image in images:
        height, width = image.size or read_stated_size(image.content, image.path)
        if height < 1 or width < 1:
            fault = f"size is {height:g} high and {width:g} wide; it must be at least 1"
            raise DataError(fault, path=image.path, remedy="fix the annotation")
        records.append({"id": image.id, "file_name": image.file_name, "height": height, "width": width})
        for one in image.content.objects:
            fields = _read_object(one, image.path, category_ids)
            annotations.append({"id": len(annotations) + 1, "image_id": image.id, **fields})
    categories = [{"id": number, "name": name, "supercategory": ""} for name, number in category_ids.items()]
    return {"images": records, "annotations": annotations, "categories": categories}


def list_classes(path: Path, content: VocAnnotation) -> set[str]:
    """List the classes of an annotation's objects."""
    return {_require(one[0], "object", "name", path) for one in content.objects}


def read_stated_size(content: VocAnnotation, path: Path) -> tuple[int, int]:
    """Read the height and width in pixels that an annotation states."""
    sides = zip(content.size, ("size/height", "size/width"), strict=True)
    height, width = (_parse_number(text, "annotation", tag, path) for text, tag in sides)
    return int(height), int(width)


def find_stem(line: str, stems: Container[str]) -> str:
    """Return the image that a line of an image set names, without its folder and its ending.

    Names may hold spaces, and a number may stand behind them. `stems` are the known ones; of a line that names none
    of them it is the first word.
    """
    whole, stem = line.strip(), ""
    for text in (whole, whole.rsplit(maxsplit=1)[0], whole.split()[0]):
        name = text.replace("\\", "/").rpartition("/")[2]
        for stem in (name, _ENDING.sub("", name)):
            if stem in stems:
                return stem
    return stem


def _name_image(content: VocAnnotation, stem: str) -> str:
    return stem + (Path(content.file_name).suffix or ".jpg")


def _read_image_sets(root: Path, image_sets: Sequence[str], known: Container[str]) -> list[str]:
    stems: list[str] = []
    for name in image_sets:
        path = root / "ImageSets" / "Main" / f"{name}.txt"
        if not path.is_file():
            there = ", ".join(sorted(other.stem for other in path.parent.glob("*.txt"))) or "none"
            raise MissingInputError(f"there is no such image set; there are: {there}", path=path)
        stems += [find_stem(line, known) for line in read_lines(path) if line.strip()]
    return list(dict.fromkeys(stems))


def parse_xml(path: Path) -> Element:
    """Parse an XML file from outside.

    Raises:
        DataError: it is no XML, or uses entities.
    """
    try:
        tree: Element = defusedxml.ElementTree.fromstring(read_file(path))
    except (ParseError, defusedxml.DefusedXmlException, ValueError, LookupError) as error:  # the last two: encodings
        raise DataError(f"is no XML that can be read safely ({error})", path=path, remedy="fix or remove it") from None
    return tree


def read_annotation(path: Path) -> VocAnnotation:
    """Read an annotation; what its texts mean is looked at later, and raises then. Raises as `parse_xml`."""
    tree = parse_xml(path)
    sizes = tuple(_text(tree, f"size/{side}") for side in ("height", "width"))
    objects = (tuple(_text(one, tag) for tag in _OF_OBJECT) for one in tree.findall("object"))
    return VocAnnotation(_text(tree, "filename"), sizes, tuple(objects))


def _read_object(one: Sequence[str], path: Path, category_ids: dict[str, int]) -> dict[str, Any]:
    name, difficult, *corners = one
    _require(name, "object", "name", path)
    if name not in category_ids:
        raise DataError(
            f"class {name!r} is none of {', '.join(category_ids)}", path=path, remedy="fix it or add it to the classes"
        )
    tags = zip(corners, _OF_OBJECT[2:], strict=True)
    xmin, ymin, xmax, ymax = (_parse_number(text, "object", tag, path) for text, tag in tags)
    box = [xmin, ymin, xmax - xmin, ymax - ymin]
    is_crowd = int(difficult == "1")
    return {"category_id": category_ids[name], "bbox": box, "area": box[2] * box[3], "iscrowd": is_crowd}


def _text(element: Element, tag: str) -> str:
    return sys.intern((element.findtext(tag) or "").strip())


def _require(text: str, element: str, tag: str, path: Path) -> str:
    if not text:
        raise DataError(f"<{element}> has no {tag}", path=path, field=tag, remedy="add it")
    return text


def _parse_number(text: str, element: str, tag: str, path: Path) -> float:
    _require(text, element, tag, path)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"<{element}> has {tag} {text!r}; it must be a number", path=path, field=tag)
    return number
