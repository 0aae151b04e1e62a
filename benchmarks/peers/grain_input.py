"""The detector's training batches through Grain: draws, colours and targets of gaudi-datasets, and OpenCV's decoder.

Grain has the order, the threads and the batches. It gives no transformations of images, so what an image costs besides
is the same work as ours. Runs where there is Grain, without TensorFlow.
Usage: python grain_input.py RECORDS BATCH STEPS THREADS
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grain  # type: ignore[import-not-found]
import numpy as np

from gaudi_datasets.detection.batches import cut_window, decode_example_pixels
from gaudi_datasets.detection.samples import Tile, draw_sample
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.sampling import InputOptions
from gaudi_ops import SSD300


def main(records: Path, batch: int, steps: int, threads: int) -> None:
    """Read some batches."""
    source, options = RecordSource(records, "train"), InputOptions(batch)

    def decode(tile: Tile) -> Any:
        return cut_window(decode_example_pixels(tile.example, "image"), tile.decoded)

    def load(place: int) -> dict[str, Any]:
        epoch, index = divmod(place, len(source))
        sample = draw_sample(source.read, index, epoch, options, len(source))
        classes, offsets, num_matched = sample.encode(SSD300)
        return {
            "images": sample.render(decode, options.image_size),
            "classes": classes,
            "offsets": offsets,
            "num_matched": np.int32(num_matched),
            "image_ids": np.int64(sample.image_id),
        }

    reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * batch)
    dataset = grain.MapDataset.range(batch * steps).shuffle(seed=0).map(load).to_iter_dataset(reading)
    for _ in dataset.batch(batch, drop_remainder=True):
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
