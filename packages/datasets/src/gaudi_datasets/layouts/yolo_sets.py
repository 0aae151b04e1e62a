"""YOLO data sets as they are found: by their YAML file, or by text files with a box a line."""

from __future__ import annotations

import codecs
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path, PurePosixPath

from gaudi_datasets.detection.coco import CocoAnnotations, parse_coco
from gaudi_datasets.detection.yolo import (
    count_keypoint_values,
    labels_of,
    list_label_places,
    make_document,
    read_class,
    read_yaml,
)
from gaudi_datasets.documents import load_yaml, read_lines
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.image_files import IMAGE_ENDINGS
from gaudi_datasets.layouts.boxes import ALL, BoxSets, Candidate, describe_splits, note_unused
from gaudi_datasets.layouts.checking import read_sizes
from gaudi_datasets.layouts.inventory import (
    LISTS,
    SPLITS,
    Inventory,
    OnBadImage,
    choose_notes,
    count_names,
    split_of_path,
)
from gaudi_datasets.program import count_things
from gaudi_ops.files import read_file, read_text

_NAME_FILES = ("classes.txt", "obj.names", "data.names", "class_names.txt", "labels.txt")
_YAML_STEMS = ("data", "dataset")
_SNIFFED = 4096


def find(inventory: Inventory) -> list[Candidate]:
    """List the YAML files that name YOLO's classes and images; without any, the labels."""
    paths = [inventory.root / name for name in inventory.list_files(".yaml", ".yml")]
    candidates = [from_yaml(path, inventory.on_bad_image, inventory.root) for path in paths if _is_yolo(path)]
    if candidates:
        return candidates
    labels = list_labels(inventory)
    labelled = _pair(inventory, labels)
    if not labelled:
        return []
    if broken := [path for path in paths if path.stem in _YAML_STEMS]:
        return [from_yaml(path, inventory.on_bad_image) for path in broken]  # which says what is wrong with it
    folder = inventory.root / PurePosixPath(labels[0]).parent
    return [Candidate("YOLO labels", folder, lambda: _read_folder(inventory, labels))]


def list_labels(inventory: Inventory) -> list[str]:
    """List the text files that begin with a box, or are empty."""
    return [name for name in inventory.list_files(".txt") if _has_boxes(inventory.root / name)]


def from_yaml(path: Path, on_bad_image: OnBadImage = "fail", root: Path | None = None) -> Candidate:
    """Return the way to read a YAML file, which notes folders outside of the root, else of the file's folder."""
    return Candidate("YOLO", path, lambda: _read_yaml(path, on_bad_image, root or path.parent))


def _is_yolo(path: Path) -> bool:
    try:
        document = load_yaml(path)
    except DataError:
        return False
    return isinstance(document, dict) and "names" in document and any(key in document for key in (*SPLITS, "valid"))


def _read_yaml(path: Path, on_bad_image: OnBadImage, root: Path) -> BoxSets:
    document, notes = load_yaml(path), list[str]()
    if not isinstance(document, dict):
        raise DataError("is no YAML of a YOLO data set", path=path, remedy="give one with names, train and val")
    keys = {"train": "train", "val": "val" if document.get("val") else "valid", "test": "test"}
    sets, outlines, keypoints = {}, Counter[str](), count_keypoint_values(path)
    if keypoints:
        notes.append(f"left out {keypoints} values of keypoints of each box")
    every: list[Path] = []
    for split, key in keys.items():
        if not document.get(key) and split != "train":
            continue
        try:
            names, paths = read_yaml(path, key, notes)
        except MissingInputError as missing:
            if split != "test":
                raise
            notes.append(f"test: left out, because {missing.path} {missing.args[0]}")
            continue
        sizes = read_sizes(paths, str(path), choose_notes(on_bad_image, split, notes))
        every += sizes
        sets[split] = _parse(path, sizes, _join(paths), names, outlines, labels_of, keypoints)
    top = os.path.normpath(root.absolute())
    if outside := sorted({str(each.parent) for each in every if not each.is_relative_to(top)}):
        notes.append(f"read {count_names(outside, 'folder', f'outside of {root}')}")
    bare = [each for each in every if not labels_of(each).exists()]
    _note_labels(bare, outlines, _list_orphans(every), notes)
    _note_sharing({each: labels_of(each) for each in every}, set(bare), notes)
    return BoxSets(f"YOLO by {path.name} ({describe_splits(sets)})", sets, tuple(dict.fromkeys(notes)))


def _read_folder(inventory: Inventory, labels: Sequence[str]) -> BoxSets:
    notes, outlines = list[str](), Counter[str]()
    labelled = _pair(inventory, inventory.list_files(".txt"))  # a broken one, too, which is a fault
    # Without a file of labels an image of the same folder shows nothing, as YOLO has it.
    folders = {PurePosixPath(name).parent for name in labelled}
    images = [name for name in inventory.images if PurePosixPath(name).parent in folders]
    splits = _split(inventory, images, notes)
    names = _read_names(inventory, [inventory.root / name for name in set(labelled.values())], notes)
    label_of = {inventory.root / name: inventory.root / label for name, label in labelled.items()}

    def find_labels(image: Path) -> Path:
        return label_of.get(image, image.with_suffix(".txt"))

    sets = {}
    for split, paths in splits.items():
        sizes = read_sizes(paths, str(inventory.root), choose_notes(inventory.on_bad_image, split, notes))
        sets[split] = _parse(inventory.root, sizes, _join(paths), names, outlines, find_labels, None)
    every = [each for paths in splits.values() for each in paths]
    bare = [each for each in every if each not in label_of]
    _note_labels(bare, outlines, sorted(set(labels) - set(labelled.values())), notes)
    _note_sharing({each: find_labels(each) for each in every}, set(bare), notes)
    note_unused(inventory, set(images), notes)
    return BoxSets(f"YOLO labels without a YAML file ({describe_splits(sets)})", sets, tuple(notes))


def _split(inventory: Inventory, images: Sequence[str], notes: list[str]) -> dict[str, list[Path]]:
    """Return the images of each split, by Darknet's lists of them, or else by their folders."""
    named, place = _read_lists(inventory, notes), "in no list"
    if named:
        listed = {name for names in named.values() for name in names}
        left = [name for name in images if name not in listed]
    else:
        place = "in no folder of a split"
        for name in images:
            named.setdefault(split_of_path(name), []).append(name)
        left = named.pop(ALL) if ALL in named and len(named) > 1 else []
    if left:
        notes.append(f"left out {count_names([PurePosixPath(name).name for name in left], 'image', place)}")
    return {split: [inventory.root / name for name in names] for split, names in named.items()}


def _read_lists(inventory: Inventory, notes: list[str]) -> dict[str, list[str]]:
    """Read train.txt, valid.txt and test.txt where they list images: the images of each split, sorted."""
    found: dict[str, set[str]] = {}
    missing: list[str] = []
    for path in inventory.list_files(".txt", everywhere=True):
        split = LISTS.get(PurePosixPath(path).stem.lower())
        text = read_text(inventory.root / path, encoding="utf-8-sig", errors="replace") if split else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if split is None or not any(PurePosixPath(line).suffix.lower() in IMAGE_ENDINGS for line in lines):
            continue
        near = PurePosixPath(path).parent.as_posix()
        names = [inventory.find_image(line, near, split) for line in lines]
        missing += [line for line, name in zip(lines, names, strict=True) if name is None]
        found.setdefault(split, set()).update(name for name in names if name is not None)
    if missing:
        notes.append(f"left out {count_names(missing, 'listed image', 'that is not there')}")
    return {split: sorted(names, key=lambda name: name.split("/")) for split, names in found.items() if names}


def _join(paths: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([each.parent for each in paths]))


def _parse(
    name: Path,
    sizes: Mapping[Path, tuple[int, int]],
    folder: Path,
    names: Mapping[int, str],
    outlines: Counter[str],
    find_labels: Callable[[Path], Path],
    keypoints: int | None,
) -> tuple[CocoAnnotations, Path]:
    document = make_document([*sizes], folder, names, outlines, find_labels, [*sizes.values()], keypoints)
    return parse_coco(document, name), folder


def _list_orphans(images: Sequence[Path]) -> list[str]:
    """List the files of boxes beside the labels of images, of which no image is there."""
    found = []
    for place, folder in sorted({(labels_of(image).parent, image.parent) for image in images}):
        stems = {path.stem for path in folder.iterdir() if path.suffix.lower() in IMAGE_ENDINGS}
        texts = sorted(path for path in place.glob("[!.]*.[tT][xX][tT]") if path.stem not in stems)
        found += [f"{place.name}/{path.name}" for path in texts if _has_boxes(path)]
    return found


def _note_labels(bare: Sequence[Path], outlines: Counter[str], orphans: Sequence[str], notes: list[str]) -> None:
    """Note images without a file of labels, outlines, and labels without an image."""
    if bare:
        notes.append(
            f"took as showing nothing {count_names([path.name for path in bare], 'image', 'without a file of labels')}"
        )
    if outlines:
        notes.append(f"made boxes of {sum(outlines.values())} outlines, in {count_names(outlines, 'file')}")
    if orphans:
        notes.append(f"left out {count_names(orphans, 'file', 'of labels without an image')}")


def _note_sharing(label_of: Mapping[Path, Path], bare: Set[Path], notes: list[str]) -> None:
    """Note images that have one file of labels between them, as a.jpg and a.png have a.txt."""
    images = Counter(label for image, label in label_of.items() if image not in bare)
    shared = [image.name for image, label in label_of.items() if images[label] > 1]
    if shared:
        notes.append(f"took {count_names(shared, 'image', 'with a file of labels that another one has, too')}")


def _pair(inventory: Inventory, labels: Sequence[str]) -> dict[str, str]:
    """Return the file of labels of each image that has one."""
    # Of a.TXT and a.txt the last one is taken.
    known, pairs = {PurePosixPath(name).with_suffix(".txt").as_posix(): name for name in sorted(labels)}, {}
    for name in inventory.images:
        places = [place.as_posix() for place in list_label_places(PurePosixPath(name))]
        label = next((known[place] for place in places if place in known), None)
        if label is not None:
            pairs[name] = label
    return pairs


def _has_boxes(path: Path) -> bool:
    """Tell whether a text file begins with a line of a box or an outline, or is empty."""
    lines = read_file(path, count=_SNIFFED).removeprefix(codecs.BOM_UTF8).splitlines()[:1]
    if not lines:
        return path.name not in _NAME_FILES
    fields = lines[0].decode("ascii", errors="replace").split()
    if len(fields) < 5 or len(fields) % 2 == 0 or read_class(fields[0]) < 0:
        return False
    try:
        return all(-1 <= float(field) <= 2 for field in fields[1:])
    except ValueError:
        return False


def _list_names(path: Path) -> tuple[str, ...]:
    """Read the names of a file, whose lines count from 0 as the numbers of the classes."""
    lines = [line.strip() for line in read_lines(path)]
    while lines and not lines[-1]:
        lines.pop()
    if "" in lines:
        raise DataError(
            "names no class in a line", path=path, record=f"line {lines.index('') + 1}", remedy="name it or remove it"
        )
    return tuple(lines)


def _read_names(inventory: Inventory, labels: Sequence[Path], notes: list[str]) -> dict[int, str]:
    """Read the names of the classes from a file of them; without one, name them by their numbers."""
    listed_files = inventory.list_files(".txt", ".names", everywhere=True)
    found = [name for name in listed_files if PurePosixPath(name).name in _NAME_FILES]
    listed = {name: _list_names(inventory.root / name) for name in found}
    if len(set(listed.values())) > 1:
        raise DataError(
            f"{found[0]} and {found[1]} name different classes", path=inventory.root, remedy="leave one of them there"
        )
    if listed and (names := listed[found[0]]):
        notes.append(f"classes named by {found[0]}")
        return dict(enumerate(names))
    texts = (read_text(path, encoding="utf-8-sig", errors="replace") for path in labels)
    numbers = {read_class(line.split()[0]) for text in texts for line in text.splitlines() if line.strip()} - {-1}
    if not numbers:
        raise DataError("has no box in its labels", path=inventory.root, remedy="annotate some images")
    notes.append(
        f"no file names the {count_things(len(numbers), 'class')} (classes.txt, or a YAML file); named by their numbers"
    )
    return {number: str(number) for number in sorted(numbers)}
