"""Pictures of what the network sees while it trains: after augmentation, with their labels."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gaudi_apps.pictures import add_title, enlarge, write_picture
from gaudi_datasets.classification.pipeline import MEAN_RGB

NUM_PICTURES = 16


def draw_training_input(
    batches: Iterable[Mapping[str, Any]],
    class_names: Sequence[str],
    output_dir: Path,
    *,
    num_pictures: int = NUM_PICTURES,
) -> list[Path]:
    """Draw the first images of training batches under the names of their classes.

    Args:
        batches: of `gaudi_datasets.classification.pipeline.train_dataset`; no more of them are taken than needed.
        class_names: in the order of the labels.
        output_dir: made when it is not there; pictures of an earlier call in it are removed.
        num_pictures: how many images.

    Returns:
        the PNG files, by their place in the order of training and the id of the image.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    for earlier in output_dir.iterdir():
        if re.fullmatch(r"\d{4}-image-\d+\.png", earlier.name):
            earlier.unlink()
    paths: list[Path] = []
    for batch in batches:
        for image, label, image_id in zip(
            *(np.asarray(batch[n]) for n in ("images", "labels", "image_ids")), strict=True
        ):
            pixels = np.rint(np.clip(np.asarray(image, np.float32) + MEAN_RGB, 0, 255)).astype(np.uint8)
            paths.append(output_dir / f"{len(paths) + 1:04d}-image-{image_id}.png")
            write_picture(paths[-1], add_title(enlarge(pixels), class_names[label]))
            if len(paths) == num_pictures:
                return paths
    return paths
