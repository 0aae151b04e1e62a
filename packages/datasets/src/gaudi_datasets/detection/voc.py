"""Pascal VOC folders (Annotations/, ImageSets/Main/, JPEGImages/) as COCO annotations."""

from __future__ import annotations

import codecs
import contextlib
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, ParseError

import defusedxml
import defusedxml.ElementTree

from gaudi_datasets.documents import read_lines, require_unique
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.layouts.inventory import count_equal, keep_best, walk_files
from gaudi_ops.files import read_file

IMAGE_FOLDER = "JPEGImages"
_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_OF_OBJECT = ("name", "difficult", *(f"bndbox/{corner}" for corner in _CORNERS))
_ENCODING = re.compile(rb"""<\?xml[^>]*?\sencoding\s*=\s*["']([A-Za-z][A-Za-z0-9._-]*)["']""")
# In which China, Taiwan, Japan and Korea write, by Python's names, which expat does not know. Windows writes letters of
# its own under the names of some, too, which a superset reads (WHATWG, Encoding).
_SUPERSETS = {"gb2312": "gb18030", "gbk": "gb18030", "big5": "cp950", "shift_jis": "cp932", "euc_kr": "cp949"}
_OF_SEVERAL_BYTES = (*_SUPERSETS, "gb18030", "big5hkscs", "cp950", "cp932", "euc_jp", "iso2022_jp", "cp949")
_ALIASES = {"windows-31j": "cp932", **{f"windows-{page}": f"cp{page}" for page in (932, 936, 949, 950)}}
_ENDING = re.compile(r"\.(jpe?g|png|xml|bmp|webp|tiff?)$", re.IGNORECASE)


def read_voc(
    root: str | Path, image_sets: Sequence[str], class_names: Sequence[str] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Read the images of some image sets as a COCO annotation document, for `parse_coco`.

    Category ids are 1..n. Image ids are 1..n by name. Both count over the whole folder, so that image sets read
    one by one agree. A box is xmin, ymin, xmax - xmin, ymax - ymin: VOC's definition has corners that count pixels
    from 1 with the last one inside, but the tools that write the format since (and the data here) write the edges, so
    that xmin == xmax is a box of no size and an image's right edge is its width. `difficult` objects become crowds,
    which neither training nor scoring counts, as VOC's own scoring does. Annotations/ may have folders; the image of
    Annotations/a/b.xml is a/b.jpg, and an image set names it by a/b, or by b where that is the only one.

    Args:
        root: the folder.
        image_sets: names of files in ImageSets/Main, without ".txt"; an image in several of them comes once.
        class_names: the classes in the order of their ids; all names of the folder, sorted, when None.

    Raises:
        MissingInputError: a part of the folder, an image set, or an image's annotation is not there.
        FlagError: a class is given twice.
        DataError: an image set is not in UTF-8, a line of it fits several annotations, an annotation is no XML (or uses
            entities), an element is missing or no number, or a class is not among `class_names`.
    """
    require_unique(class_names or ())
    root = Path(root)
    folder = root / "Annotations"
    paths = sorted(path for path in walk_files(folder) if path.suffix == ".xml") if folder.is_dir() else []
    files = {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}
    if not files:
        raise MissingInputError(
            "has no annotations *.xml", path=folder, remedy="give the folder that holds Annotations/"
        )
    image_ids = {name: number for number, name in enumerate(files, 1)}
    chosen = _read_image_sets(root, image_sets, list(files))
    found = {name: read_annotation(files[name]) for name in (chosen if class_names else files)}
    class_names = class_names or sorted({each for name in found for each in list_classes(files[name], found[name])})
    images = [VocImage(image_ids[name], files[name], found[name], _name_image(found[name], name)) for name in chosen]
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


class ListedAnnotations:
    """Find the annotations that the lines of image sets name, by the longest ends of their paths.

    Args:
        images: the image of each annotation, if it is known, both by their names from one folder.
        folders: names of further folders with images: what a line names there is nowhere else.
    """

    def __init__(self, images: Mapping[str, str | None], folders: Iterable[str] = ()) -> None:
        # Of each annotation its folders and those of its image, the nearest first.
        self._folders_of: dict[str, list[tuple[str, ...]]] = {}
        self._by_stem: dict[str, list[str]] = defaultdict(list)
        self._by_tail: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, image in images.items():
            stem, places = PurePosixPath(name).stem, [_list_folders(each) for each in (name, image) if each is not None]
            self._folders_of[name] = places
            self._by_stem[stem].append(name)
            for folder in {place[0].casefold() for place in places if place}:
                self._by_tail[stem, folder].append(name)
        self._known = {folder for _, folder in self._by_tail}.union(map(str.casefold, folders))
        tops = [places[0][::-1] for places in self._folders_of.values()]
        self._depth = count_equal(min(tops, default=()), max(tops, default=()), str)

    def read_list(self, path: Path) -> tuple[list[str], list[str]]:
        """Read a list: the annotations that it names, each once, and what its other lines name.

        Raises:
            DataError: it is not in UTF-8, or a line fits several annotations equally well.
        """
        found: dict[str, None] = {}
        unknown: dict[str, None] = {}
        for number, line in enumerate(read_lines(path), 1):
            readings = list_readings(line)
            names = next(filter(None, map(self._find, readings)), [])
            if len(names) > 1:
                shown = PurePosixPath(*self._inner_folders(names[0])[::-1], PurePosixPath(names[0]).stem)
                raise DataError(
                    f"{names[0]} and {names[1]} may both be {line.strip()!r}",
                    path=path,
                    record=f"line {number}",
                    remedy=f"write the folder before the name, such as {shown}",
                )
            if names:
                found[names[0]] = None
            elif readings:
                unknown[readings[-1].as_posix()] = None
        return list(found), list(unknown)

    def _find(self, wanted: PurePosixPath) -> list[str]:
        """List the annotations that fit best."""
        folders = _list_folders(wanted)
        nearest = folders[0].casefold() if folders else ""
        names = self._by_tail.get((wanted.name, nearest), [])
        if not names and nearest not in self._known:
            names = self._by_stem.get(wanted.name, [])
        return keep_best(
            names,
            [
                lambda name: max(count_equal(place, folders) for place in self._folders_of[name]),
                lambda name: max(count_equal(place, folders, str) for place in self._folders_of[name]),
                lambda name: self._inner_folders(name) == folders,
            ],
        )

    def _inner_folders(self, name: str) -> tuple[str, ...]:
        """List the folders of an annotation, the nearest first, below the one that all annotations share."""
        folders = self._folders_of[name][0]
        return folders[: len(folders) - self._depth]


def list_readings(line: str) -> list[PurePosixPath]:
    """List what a line of an image set may name, with and without its ending, the likeliest first.

    Names may hold spaces, and a number may stand behind them. A blank line names nothing.
    """
    whole = line.strip().replace("\\", "/")
    texts = (whole, whole.rsplit(maxsplit=1)[0], whole.split()[0]) if whole else ()
    return [PurePosixPath(each) for text in texts for each in (text, _ENDING.sub("", text))]


def _list_folders(name: str | PurePosixPath) -> tuple[str, ...]:
    return PurePosixPath(name).parts[-2::-1]


def _name_image(content: VocAnnotation, name: str) -> str:
    return name + (Path(content.file_name).suffix or ".jpg")


def _read_image_sets(root: Path, image_sets: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return which of the annotations the image sets name, each once; names are without their ending."""
    images = root / IMAGE_FOLDER
    folders = {path.parent.name for path in walk_files(images)} if images.is_dir() else ()
    listed = ListedAnnotations({f"Annotations/{name}.xml": f"{IMAGE_FOLDER}/{name}.jpg" for name in names}, folders)
    chosen: list[str] = []
    for name in image_sets:
        path = root / "ImageSets" / "Main" / f"{name}.txt"
        if not path.is_file():
            there = ", ".join(sorted(other.stem for other in path.parent.glob("*.txt"))) or "none"
            raise MissingInputError(f"there is no such image set; there are: {there}", path=path)
        found, unknown = listed.read_list(path)
        if unknown:
            raise MissingInputError(
                f"has no {unknown[0]}.xml, which an image set names",
                path=root / "Annotations",
                remedy=f"add it or fix {path.name}",
            )
        chosen += found
    return [name.removeprefix("Annotations/").removesuffix(".xml") for name in dict.fromkeys(chosen)]


def parse_xml(path: Path) -> Element:
    """Parse an XML file from outside.

    Raises:
        DataError: it is no XML, uses entities, or is not in the encoding that it declares.
    """
    try:
        tree: Element = defusedxml.ElementTree.fromstring(_decode(read_file(path)))
    except (ParseError, defusedxml.DefusedXmlException, ValueError, LookupError) as error:  # the last two: encodings
        is_xml = isinstance(error, (ParseError, defusedxml.DefusedXmlException))
        remedy = "fix or remove it" if is_xml else "save it as UTF-8, and declare that"
        raise DataError(f"is no XML that can be read safely ({error})", path=path, remedy=remedy) from None
    return tree


def _decode(content: bytes) -> str | bytes:
    """Decode an XML file in characters of several bytes, which expat does not know; return any other as it is.

    A byte order mark of UTF-8 says more than a declaration that was left as it was when an editor wrote the file anew.
    Raises ValueError for what is not in the declared encoding, and LookupError where there is no such encoding.
    """
    if content.startswith(codecs.BOM_UTF8):
        return content.decode("utf-8-sig")
    declared = _ENCODING.match(content)
    name = declared[1].decode().lower().removeprefix("x-") if declared else "utf-8"
    if (name := codecs.lookup(_ALIASES.get(name, name)).name) not in _OF_SEVERAL_BYTES:
        return content
    with contextlib.suppress(UnicodeDecodeError):
        return content.decode(name)
    with contextlib.suppress(UnicodeDecodeError):
        content.decode("utf-8")
        raise ValueError(f"it declares {name}, and is in UTF-8")
    return content.decode(_SUPERSETS.get(name, name))


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
