"""Open data for detection as it is found: its layout recognised, and validation found or split from training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gaudi_datasets.detection.coco import BOX_RULES, Category, CocoAnnotations, select_images
from gaudi_datasets.detection.sources import CocoSource, DetectionSource, RecordSource
from gaudi_datasets.errors import DataError
from gaudi_datasets.layouts.boxes import ALL, BoxSets
from gaudi_datasets.layouts.checking import check_all
from gaudi_datasets.layouts.inventory import SPLITS, OnBadImage, count_names, fold, note_converted
from gaudi_datasets.layouts.recognition import read_boxes
from gaudi_datasets.layouts.splitting import (
    SplitData,
    choose_validation,
    hash_files,
    note_split,
    require_share,
    require_training,
    split_records,
)
from gaudi_datasets.program import count_things
from gaudi_datasets.records.record_sets import find_splits

__all__ = ["DetectionData", "check_all", "open_data"]

_REMEDY = "add them, or give one annotation file"


@dataclass(frozen=True, eq=False)
class DetectionData(SplitData[DetectionSource]):
    """Images with boxes for training, validation and test.

    Attributes:
        annotations: what the sources were made of, by split, with the folder of the images; empty for records.
        missing: images that are annotated and not there.
    """

    annotations: Mapping[str, tuple[CocoAnnotations, Path]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def categories(self) -> tuple[Category, ...]:
        """Return the classes, the same for all splits, in id order."""
        return self.train.categories


def open_data(
    path: str | Path, *, val_share: float = 0.2, seed: int = 0, on_bad_image: OnBadImage = "fail"
) -> DetectionData:
    """Open a data set as it is: a folder, a YAML file of YOLO or a JSON file of COCO.

    Layouts are recognised by content. Where there is no validation, a share of the training images is split off: by
    class, with equal images on one side, the same for the same seed. Batches of the sources are those of the records
    that `write_records` makes of the same annotations and of `others`, the sources of the other splits.

    Args:
        path: the folder or file.
        val_share: share of the training images for validation, if there is none; 0: do without.
        seed: of the split.
        on_bad_image: skip: leave out and note training images whose size must be read from the file, and cannot be;
            others that are damaged are in the data, for `check_when_read` to skip.

    Raises:
        BrokenImagesError: such images are there and may not be left out.
        MissingInputError: there is no such path, or no image is where it should be.
        DataError: nothing known is there, or several things are; it breaks its format, or the classes of splits differ.
        FlagError: the share is not in 0..1.
    """
    path = Path(path)
    require_share(val_share)
    if path.is_dir() and (splits := find_splits(path, "detection")):
        return _open_records(path, splits, val_share, seed)
    return _open_boxes(path, read_boxes(path, on_bad_image), val_share, seed)


def _open_records(path: Path, splits: Mapping[str, str], val_share: float, seed: int) -> DetectionData:
    sources = {split: RecordSource(path, name) for split, name in splits.items()}
    require_training(sources, path, _REMEDY)
    require_equal_classes({split: [each.name for each in source.categories] for split, source in sources.items()}, path)
    split_names = split_records(
        sources,
        lambda: RecordSource(path, splits["train"]),
        lambda example: example.labels[~example.is_crowd].tolist(),
        share=val_share,
        seed=seed,
        name=str(path),
    )
    layout = f"records ({', '.join(splits.values())})"
    notes = note_split(split_names)
    return DetectionData(layout, sources["train"], sources.get("val"), sources.get("test"), notes, split_names)


def _open_boxes(path: Path, boxes: BoxSets, val_share: float, seed: int) -> DetectionData:
    sets, notes, split_names = dict(boxes.sets), list(boxes.notes), dict[str, list[str]]()
    if ALL in sets:
        if "train" in sets:  # a reader leaves them out, or these would replace the training images
            raise RuntimeError(f"{boxes.layout}: images of no split beside those of training")
        sets["train"] = sets.pop(ALL)
    require_training(sets, path, _REMEDY)
    require_equal_classes(
        {split: [f"{one.name} ({one.id})" for one in sets[split][0].categories] for split in sets}, path
    )
    if "val" not in sets and val_share:
        annotations, image_dir = sets["train"]
        in_val = choose_validation(
            list_classes(annotations),
            annotations.file_names,
            hash_files([image_dir / name for name in annotations.file_names]),
            share=val_share,
            seed=seed,
            name=str(path),
        )
        for split, kept in (("train", ~in_val), ("val", in_val)):
            part = select_images(annotations, np.flatnonzero(kept))
            sets[split] = part, image_dir
            split_names[split] = list(part.file_names)
    names = [one.name for one in sets["train"][0].categories]
    counts = Counter(fold(name).strip() for name in names)
    alike = [repr(name) for name in names if counts[fold(name).strip()] > 1]
    notes += [count_names(alike, "class", "of equal names but for capitals and blanks")] if alike else []
    notes += note_split(split_names)
    sources = {split: CocoSource(*sets[split], keep_empty=split != "train") for split in SPLITS if split in sets}
    CocoSource.read_alike(sources.values())
    for split, source in sources.items():
        notes += note_losses(split, sets[split][0], source)
    notes += note_converted(name for coco, _ in sets.values() for name in coco.file_names)
    found = sources["train"], sources.get("val"), sources.get("test")
    return DetectionData(boxes.layout, *found, tuple(notes), split_names, sets, boxes.missing)


def list_classes(annotations: CocoAnnotations) -> list[list[int]]:
    """List the classes of each image's boxes that are no crowds."""
    classes: list[list[int]] = []
    for start, stop in zip(annotations.box_splits[:-1], annotations.box_splits[1:], strict=True):
        classes.append(annotations.category_ids[start:stop][~annotations.is_crowd[start:stop]].tolist())
    return classes


def note_losses(split: str, annotations: CocoAnnotations, source: CocoSource) -> list[str]:
    """Note the boxes and images of a split that are left out."""
    notes = []
    broken = Counter(fault.rule for fault in annotations.faults)
    name_of = dict(zip(annotations.image_ids.tolist(), annotations.file_names, strict=True))
    for rule in BOX_RULES:
        if broken[rule]:
            names = dict.fromkeys(name_of[fault.image_id] for fault in annotations.faults if fault.rule == rule)
            boxes = count_things(broken[rule], "box")
            notes.append(f"{split}: left out {boxes} {rule}, in {count_names(names, 'image')}")
    if annotations.wrong_areas:
        wrong = count_things(len(annotations.wrong_areas), "wrong area")
        notes.append(f"{split}: replaced {wrong} by width x height, as of annotation {min(annotations.wrong_areas)}")
    kept = set(source.file_names)
    empty = [name for name in annotations.file_names if name not in kept]
    if empty:
        notes.append(f"{split}: left out {count_names(empty, 'image', 'without a box to learn from')}")
    return notes


def require_equal_classes(names_of: Mapping[str, Sequence[str]], path: Path) -> None:
    """Require that splits have the same classes in the same order.

    Raises:
        DataError: they differ; it names the classes that do.
    """
    train = names_of["train"]
    for split, names in names_of.items():
        if list(names) != list(train):
            only = [
                f"only in {where}: {', '.join(sorted(set(some) - set(others)))}"
                for where, some, others in (("train", train, names), (split, names, train))
                if set(some) - set(others)
            ]
            raise DataError(
                f"the classes of train and {split} differ ({'; '.join(only) or 'in their order'})",
                path=path,
                remedy="give both the same classes",
            )
