"""Take the detector's training input apart: what each of its stages costs, by the functions that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from gaudi_datasets.benchmarking.measurement import Clocks, StageClock
from gaudi_datasets.detection.colors import color_image, resize_image
from gaudi_datasets.detection.samples import draw_example_crop, encode_crop_targets
from gaudi_datasets.detection.sources import DetectionSource
from gaudi_datasets.sampling import InputOptions
from gaudi_ops import SSD300

Loader = Literal["tensorflow", "opencv"]
Sample = Callable[[int, int, StageClock], tuple[Any, ...]]
"""Makes image, classes, offsets and number of matches from index and epoch, each stage timed."""


def measure_detection(
    source: DetectionSource,
    indices: Sequence[int],
    options: InputOptions,
    loader: Loader,
    *,
    seconds: float,
    clocks: Clocks,
) -> dict[str, float]:
    """Measure milliseconds of processors for an image by stage, of one image after another on one thread.

    Args:
        source: the images.
        indices: of those to take, which were read before, so that memory holds them; after the last they come again, in
            the next epoch.
        options: of the input.
        loader: that decodes.
        seconds: after which no further image is begun; one is made in any case, after one that is not timed.
        clocks: what time is measured by.
    """
    sample = make_sample(source, options, loader)
    sample(indices[0], 0, StageClock(clocks.processor))  # what is set up at the first call
    clock, begin = StageClock(clocks.processor), clocks.wall()
    while not clock.images or clocks.wall() - begin < seconds:
        epoch, position = divmod(clock.images, len(indices))
        sample(indices[position], epoch, clock)
        clock.images += 1
    return clock.milliseconds()


def make_sample(source: DetectionSource, options: InputOptions, loader: Loader) -> Sample:
    """Make the function that makes a sample as `train_dataset` and `train_batches` do.

    TensorFlow decodes no more than the crop, OpenCV the whole image, which is cut afterwards.
    """
    if loader == "tensorflow":
        from gaudi_datasets.tf_input import decode_window
    else:
        from gaudi_datasets.detection.batches import cut_window, decode_example_pixels

    def sample(index: int, epoch: int, clock: StageClock) -> tuple[Any, ...]:
        with clock.stage("read"):
            example = source.read(index)
        with clock.stage("crop"):
            window, draws = draw_example_crop(example, epoch, options)
        with clock.stage("targets"):
            targets = encode_crop_targets(example, draws, SSD300)
        place = f"{source.name}: record {index} (image {example.image_id}, {example.file_name})"
        if loader == "tensorflow":
            with clock.stage("decode"):
                pixels = decode_window(example.encoded, window, place)
        else:
            with clock.stage("decode"):
                whole = decode_example_pixels(example, place)
            with clock.stage("crop"):
                pixels = cut_window(whole, window)
        with clock.stage("resize"):
            resized = resize_image(pixels, options.image_size)
        with clock.stage("colours"):
            image = color_image(resized, draws)
        return image, *targets

    return sample


def open_batches(source: DetectionSource, options: InputOptions, loader: Loader) -> Iterator[Any]:
    """Open the whole input."""
    if loader == "tensorflow":
        from gaudi_datasets.detection.pipeline import train_dataset
        from gaudi_datasets.tf_input import read_batches

        return read_batches(train_dataset(source, options), source)
    from gaudi_datasets.detection.batches import train_batches

    return train_batches(source, options)
