"""Pascal VOC folders (Annotations/, ImageSets/Main/, JPEGImages/) as COCO annotations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, ParseError

import defusedxml
import defusedxml.ElementTree

from gaudi_datasets.errors import DataError, MissingInputError

IMAGE_FOLDER = "JPEGImages"
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


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
        DataError: an annotation is no XML (or uses entities), an element is missing or no number, or a class is not
            among `class_names`.
    """
    root = Path(root)
    folder = root / "Annotations"
    files = {path.stem: path for path in sorted(folder.glob("*.xml"))}
    if not files:
        raise MissingInputError(
            "has no annotations *.xml", path=folder, remedy="give the folder that holds Annotations/"
        )
    image_ids = {stem: number for number, stem in enumerate(files, 1)}
    chosen = _read_image_sets(root, image_sets)
    missing = next((stem for stem in chosen if stem not in files), None)
    if missing is not None:
        raise MissingInputError(
            f"has no {missing}.xml, which an image set names", path=folder, remedy="add it or fix the set"
        )
    trees = {stem: parse_xml(files[stem]) for stem in (chosen if class_names else files)}
    class_names = class_names or sorted({name for stem in trees for name in list_classes(files[stem], trees[stem])})
    images = [VocImage(image_ids[stem], files[stem], trees[stem], _name_image(trees[stem], stem)) for stem in chosen]
    return make_document(images, class_names)


class VocImage(NamedTuple):
    """An image's annotation: its id, file and parsed content, the name of the image, and its size.

    The size is height and width in pixels; None for that of the annotation.
    """

    id: int
    path: Path
    tree: Element
    file_name: str
    size: tuple[int, int] | None = None


def make_document(images: Sequence[VocImage], class_names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Make a COCO annotation document of images and the classes in the order of their ids; raises as `read_voc`."""
    category_ids = {name: number for number, name in enumerate(class_names, 1)}
    records: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image in images:
        height, width = image.size or read_stated_size(image.tree, image.path)
        if height < 1 or width < 1:
            fault = f"size is {height:g} high and {width:g} wide; it must be at least 1"
            raise DataError(fault, path=image.path, remedy="fix the annotation")
        records.append({"id": image.id, "file_name": image.file_name, "height": height, "width": width})
        for one in image.tree.findall("object"):
            fields = _read_object(one, image.path, category_ids)
            annotations.append({"id": len(annotations) + 1, "image_id": image.id, **fields})
    categories = [{"id": number, "name": name, "supercategory": ""} for name, number in category_ids.items()]
    return {"images": records, "annotations": annotations, "categories": categories}


def list_classes(path: Path, tree: Element) -> set[str]:
    """List the classes of an annotation's objects."""
    return {_text(one, "name", path) for one in tree.findall("object")}


def read_stated_size(tree: Element, path: Path) -> tuple[int, int]:
    """Read the height and width in pixels that an annotation states."""
    height, width = (_number(tree, f"size/{side}", path) for side in ("height", "width"))
    return int(height), int(width)


def _name_image(tree: Element, stem: str) -> str:
    return stem + (Path(tree.findtext("filename") or "").suffix or ".jpg")


def _read_image_sets(root: Path, image_sets: Sequence[str]) -> list[str]:
    stems: list[str] = []
    for name in image_sets:
        path = root / "ImageSets" / "Main" / f"{name}.txt"
        if not path.is_file():
            there = ", ".join(sorted(other.stem for other in path.parent.glob("*.txt"))) or "none"
            raise MissingInputError(f"there is no such image set; there are: {there}", path=path)
        stems += [line.split()[0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return list(dict.fromkeys(stems))


def parse_xml(path: Path) -> Element:
    """Parse an XML file from outside.

    Raises:
        DataError: it is no XML, or uses entities.
    """
    try:
        tree: Element = defusedxml.ElementTree.fromstring(path.read_bytes())
    except (ParseError, defusedxml.DefusedXmlException, ValueError, LookupError) as error:  # the last two: encodings
        raise DataError(f"is no XML that can be read safely ({error})", path=path, remedy="fix or remove it") from None
    return tree


def _read_object(one: Element, path: Path, category_ids: dict[str, int]) -> dict[str, Any]:
    name = _text(one, "name", path)
    if name not in category_ids:
        raise DataError(
            f"class {name!r} is none of {', '.join(category_ids)}", path=path, remedy="fix it or add it to the classes"
        )
    xmin, ymin, xmax, ymax = (_number(one, f"bndbox/{corner}", path) for corner in _CORNERS)
    box = [xmin, ymin, xmax - xmin, ymax - ymin]
    is_difficult = (one.findtext("difficult") or "0").strip() == "1"
    return {"category_id": category_ids[name], "bbox": box, "area": box[2] * box[3], "iscrowd": int(is_difficult)}


def _text(element: Element, tag: str, path: Path) -> str:
    text = (element.findtext(tag) or "").strip()
    if not text:
        raise DataError(f"<{element.tag}> has no {tag}", path=path, field=tag, remedy="add it")
    return text


def _number(element: Element, tag: str, path: Path) -> float:
    text = _text(element, tag, path)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"<{element.tag}> has {tag} {text!r}; it must be a number", path=path, field=tag)
    return number
