"""The names of a data set's files in its folder."""

from __future__ import annotations

from pathlib import Path


def find_coco_files(root: str | Path, dataset: str, split: str) -> tuple[Path, Path]:
    """The annotation file and the folder of images of a split.

    Args:
        root: the folder.
        dataset: "coco2017", whose names have the year, or "plain".
        split: "train" or "val".
    """
    name = f"{split}{dataset.removeprefix('coco') if dataset != 'plain' else ''}"
    return Path(root) / "annotations" / f"instances_{name}.json", Path(root) / name
