"""Input pipelines of the classifier: from a source of examples to batches.

Examples are read, and their crops drawn, some at a time in Python; pixels are decoded one image at a time in
TensorFlow, and only within the crop. They stay uint8 up to the resizing, which is where they become float.

Where at least twice the pixels that are needed would be decoded in both directions, a JPEG is decoded at a half, a
quarter or an eighth of its size, which takes a fraction of the time. Bilinear resizing of all pixels passes over most
of them then, so the two images differ; the one decoded at reduced scale is nearer to the image that averages all
pixels: photographs of about 640x480 differ from that at 128x128 by 2.9 of 255 in the mean, and by 6.4 without.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_datasets.classification.augmentation import RESNET_RANGE, AugmentationRange, draw_augmentation, draw_colors
from gaudi_datasets.classification.examples import ClassificationExample, ClassificationSource
from gaudi_datasets.sampling import (
    InputOptions,
    SampleOrder,
    find_expect,
    image_generator,
    reading_ahead,
    shard_indices,
    synthetic_image_ids,
)
from gaudi_datasets.tf_input import apply_options, call_python, evaluation_batches

# Of ImageNet, RGB, for values in 0..255; the originals subtract them and divide by nothing.
MEAN_RGB = np.array([123.68, 116.78, 103.94], np.float32)

CHUNK = 16  # examples read by one call of Python
_READERS = 4  # calls of Python at once: some wait for the disk while one computes

_DIVISORS = (1, 2, 4, 8)  # of the scale that libjpeg decodes at
_NO_JPEG = len(_DIVISORS)  # stands where else the number of a divisor does
_MARGIN = 8 / 7  # 256 for 224: the short side before the centre is cut out, over the network's size
_LONGEST = 4  # times the short side; the ends of longer ones are cut off first: resized, a line would fill memory


def train_dataset(
    source: ClassificationSource,
    options: InputOptions,
    *,
    first_step: int = 0,
    ranges: AugmentationRange = RESNET_RANGE,
) -> Any:
    """Make the endless training batches of this rank, from that of `first_step` on.

    Returns:
        tf.data.Dataset of dicts: ``images`` [batch, side, side, 3], RGB in 0..255 minus `MEAN_RGB`; ``labels`` int32
        [batch], 0 for the first class; ``image_ids`` int64 [batch].
    """
    order = SampleOrder(len(source), options, expect=find_expect(source))
    read_example = functools.cache(source.read) if options.cache_encoded else source.read

    @tf.autograph.experimental.do_not_convert
    def samples_of(step: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(
            call_python(order.at_step, [step], [tf.int64, tf.int64], [[None], [None]])
        )

    @tf.autograph.experimental.do_not_convert
    def read(indices: Any, epochs: Any) -> Any:
        def draw(indices: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> tuple[Any, ...]:
            examples = [read_example(index) for index in indices.tolist()]
            return draw_crops(examples, epochs, options, ranges)

        return call_python(draw, [indices, epochs], *_CROP_SIGNATURE)

    @tf.autograph.experimental.do_not_convert
    def load(
        encoded: Any, window: Any, decoding: Any, flip: Any, colors: Any, label: Any, image_id: Any
    ) -> dict[str, Any]:
        pixels = resize_crop(decode_crop(encoded, window, decoding), options.image_size)
        images = finish_crop(pixels, flip, colors if ranges.changes_colors else None, options)
        return {"images": images, "labels": label, "image_ids": image_id}

    steps = tf.data.Dataset.range(first_step, np.iinfo(np.int64).max)
    chunks = steps.flat_map(samples_of).batch(CHUNK, drop_remainder=True)
    dataset = chunks.map(read, num_parallel_calls=min(_READERS, options.parallel_calls)).unbatch()
    dataset = dataset.map(load, num_parallel_calls=options.parallel_calls)
    dataset = dataset.batch(options.batch_size, drop_remainder=True)
    return apply_options(dataset.prefetch(2), options)


def eval_dataset(source: ClassificationSource, options: InputOptions, *, num_images: int | None = None) -> Any:
    """Make batches of every image of a source, or of the first `num_images`, once, in its order, of equal shape.

    Every rank gets as many. The short side is resized to 8/7 of the network's image (256 for 224), and the centre is
    taken.

    Returns:
        tf.data.Dataset of dicts as `train_dataset` gives them. Batches are filled up with images of zeros whose id is
        -1 and whose label is 0.
    """
    count = len(source) if num_images is None else min(num_images, len(source))
    positions = shard_indices(count, options)
    read_example = reading_ahead(source.read, find_expect(source), positions[positions < count])

    def read(index: int) -> tuple[Any, ...]:
        example = read_example(int(index))
        size = np.array([[example.height, example.width]], np.int32)
        decodings = _choose_decodings([example], size, resized_side(options.image_size), aligned=True)
        return example.encoded, decodings[0], np.int32(example.label), np.int64(example.image_id)

    def load(index: Any) -> dict[str, Any]:
        types = [tf.string, tf.int32, tf.int32, tf.int64]
        encoded, decoding, label, image_id = call_python(read, [index], types, [[], [], [], []])
        pixels = _resize_center(_decode_whole(encoded, decoding), options.image_size)
        return {"images": _finish(pixels, options), "labels": label, "image_ids": image_id}

    return evaluation_batches(load, count, options)


def synthetic_dataset(options: InputOptions, *, num_classes: int) -> Any:
    """Repeat one random batch of the types and shapes of `train_dataset`, to measure speed.

    Each rank has its part of one global batch.
    """
    image_ids = synthetic_image_ids(options)
    generators = [image_generator(options.seed, 0, image_id) for image_id in image_ids.tolist()]
    shape = (options.image_size, options.image_size, 3)
    images = np.stack([generator.random(shape, dtype=np.float32) for generator in generators])
    batch = {
        "images": tf.cast(images * 255 - MEAN_RGB, options.dtype),
        "labels": np.array([generator.integers(0, num_classes) for generator in generators], np.int32),
        "image_ids": image_ids,
    }
    return apply_options(tf.data.Dataset.from_tensors(batch).repeat())


def prepare_image(encoded: Any, image_size: int = 224) -> Any:
    """Decode an image, the bytes of a JPEG or PNG, and make it what the network takes, exactly as in evaluation.

    Returns:
        float32 [image_size, image_size, 3], RGB, minus `MEAN_RGB`.
    """
    return prepare_pixels(decode_reduced(encoded, image_size), image_size)


def decode_reduced(encoded: Any, image_size: int = 224) -> Any:
    """Decode a JPEG or PNG as evaluation does, a large JPEG at a reduced scale: uint8 [height, width, 3], RGB."""

    def choose() -> Any:
        size = tf.io.extract_jpeg_shape(encoded)[:2]
        divisors = np.array(_DIVISORS[1:], np.int32)
        fit = (tf.reduce_min(size) >= resized_side(image_size) * divisors) & tf.reduce_all(
            size[:, None] % divisors == 0, 0
        )
        return tf.reduce_sum(tf.cast(fit, tf.int32))

    decoding = tf.cond(tf.io.is_jpeg(encoded), choose, lambda: tf.constant(_NO_JPEG))
    return _decode_whole(encoded, decoding)


def prepare_pixels(pixels: Any, image_size: int = 224) -> Any:
    """Make decoded images, uint8 [height, width, 3] or [batch, height, width, 3] in RGB, what the network takes.

    Returns:
        float32 [..., image_size, image_size, 3], RGB, minus `MEAN_RGB`.
    """
    return _resize_center(pixels, image_size) - MEAN_RGB


def resized_side(image_size: int) -> int:
    """Return the short side in pixels that an image is resized to before its centre of `image_size` is cut out."""
    return round(image_size * _MARGIN)


def cut_square(pixels: Any, image_size: int = 224) -> Any:
    """Resize pixels, uint8 [height, width, 3], and cut the square out whose centre `prepare_pixels` takes.

    Returns:
        float32 [side, side, 3] in 0..255, whose side is `resized_side`.
    """
    return _resize_center(pixels, image_size, resized_side(image_size)).numpy()


_CROP_SIGNATURE: tuple[list[Any], list[list[int | None]]] = (
    [tf.string, tf.int32, tf.int32, tf.bool, tf.float32, tf.int32, tf.int64],
    [[None], [None, 4], [None], [None], [None, 3, 4], [None], [None]],
)


def draw_crops(
    examples: list[ClassificationExample],
    epochs: npt.NDArray[np.int64],
    options: InputOptions,
    ranges: AugmentationRange = RESNET_RANGE,
) -> tuple[Any, ...]:
    """Draw what training makes of some images in their epochs.

    Returns:
        Arrays with a row for each image: encoded bytes; window int32 [4] on the reduced image; how to decode it; if it
        is mirrored; colours float32 [3, 4]; label; image id. They are what `decode_crop` and `finish_crop` take.
    """
    sizes = np.array([(example.height, example.width) for example in examples], np.int32)
    generators = [
        image_generator(options.seed, epoch, example.image_id)
        for epoch, example in zip(epochs.tolist(), examples, strict=True)
    ]
    windows, flips = draw_augmentation(sizes, generators, ranges, options.flip_probability)
    colors = draw_colors(generators, ranges, MEAN_RGB)
    decodings = _choose_decodings(examples, windows[:, 2:], options.image_size)
    # The window on the reduced image, which may leave out a last row and column of that.
    windows = windows // np.array([*_DIVISORS, 1], np.int32)[decodings, None]
    encoded = np.array([example.encoded for example in examples], object)
    labels = np.array([example.label for example in examples], np.int32)
    image_ids = np.array([example.image_id for example in examples], np.int64)
    return encoded, windows, decodings, flips, colors, labels, image_ids


def _choose_decodings(
    examples: Sequence[ClassificationExample], sizes: npt.NDArray[np.int32], least: int, *, aligned: bool = False
) -> npt.NDArray[np.int32]:
    """Choose how to decode each image: the number of the largest divisor possible, or `_NO_JPEG`: int32 [n].

    At least `least` pixels must remain of `sizes` [n, 2], height and width of what is decoded. With `aligned`, both
    must divide without rest, so that nothing is shifted by a part of a pixel.
    """
    divisors = np.array(_DIVISORS[1:])
    fit = sizes.min(axis=1, keepdims=True) >= least * divisors
    if aligned:
        fit &= (sizes[..., None] % divisors == 0).all(axis=1)
    are_jpeg = np.array([example.encoded.startswith(b"\xff\xd8") for example in examples])
    return np.where(are_jpeg, fit.sum(axis=1), _NO_JPEG).astype(np.int32)


def decode_crop(encoded: Any, window: Any, decoding: Any) -> Any:
    """Decode the pixels of a window (top, left, height, width on the reduced image), uint8 [height, width, 3]."""

    def crop_decoded() -> Any:
        whole = tf.io.decode_image(encoded, channels=3, expand_animations=False)
        return tf.slice(whole, tf.pad(window[:2], [[0, 1]]), tf.pad(window[2:], [[0, 1]], constant_values=3))

    decode = functools.partial(tf.io.decode_and_crop_jpeg, encoded, window, channels=3)
    pixels = tf.switch_case(decoding, [*(functools.partial(decode, ratio=each) for each in _DIVISORS), crop_decoded])
    return tf.ensure_shape(pixels, [None, None, 3])


def _decode_whole(encoded: Any, decoding: Any) -> Any:
    """Decode all pixels of the reduced image: uint8 [height, width, 3]."""
    decode = functools.partial(tf.io.decode_jpeg, encoded, channels=3)
    decode_other = functools.partial(tf.io.decode_image, encoded, channels=3, expand_animations=False)
    pixels = tf.switch_case(decoding, [*(functools.partial(decode, ratio=each) for each in _DIVISORS), decode_other])
    return tf.ensure_shape(pixels, [None, None, 3])


def _resize_center(pixels: Any, image_size: int, side: int | None = None) -> Any:
    """Resize the short side to `resized_side` and cut out a square, bilinear: float32 [..., side, side, 3].

    The centre of ``image_size`` is cut out, or a square of ``side`` whose own centre it is.
    """
    size = tf.shape(pixels)[-3:-1]
    kept = tf.minimum(size, _LONGEST * tf.reduce_min(size))
    top, left = tf.unstack((size - kept) // 2)
    pixels = pixels[..., top : top + kept[0], left : left + kept[1], :]
    scale = resized_side(image_size) / tf.reduce_min(size)
    resized_size = tf.cast(tf.math.rint(tf.cast(kept, tf.float64) * scale), tf.int32)
    side = side or image_size
    # The halves are rounded one by one: of the square alone, its centre would be beside that of the image by a pixel.
    top, left = tf.unstack((resized_size - image_size) // 2 - (side - image_size) // 2)
    center = tf.image.resize(pixels, resized_size)[..., top : top + side, left : left + side, :]
    return tf.ensure_shape(center, [*pixels.shape[:-3], side, side, 3])


def resize_crop(pixels: Any, image_size: int) -> Any:
    """Resize bilinearly to a square: float32 [side, side, 3] in 0..255."""
    return tf.image.resize(pixels, [image_size, image_size])


def finish_crop(pixels: Any, flip: Any, colors: Any, options: InputOptions) -> Any:
    """Change colours by a map of `draw_colors` (None: not), mirror, subtract the mean, and cast."""
    if colors is not None:
        rows = tf.matmul(tf.reshape(pixels, [-1, 3]), colors[:, :3], transpose_b=True)
        changed = tf.reshape(tf.nn.bias_add(rows, colors[:, 3]), tf.shape(pixels))
        pixels = tf.clip_by_value(changed, 0.0, 255.0)
    mirrored = tf.reverse(pixels, tf.fill([tf.cast(flip, tf.int32)], 1))  # along no axis when it is not to be
    return _finish(mirrored, options)


def _finish(pixels: Any, options: InputOptions) -> Any:
    """Subtract the mean, and cast."""
    shape = (options.image_size, options.image_size, 3)
    mean = tf.constant(np.broadcast_to(MEAN_RGB, shape))  # of full size: broadcasting the inner axis is slow
    return tf.cast(tf.ensure_shape(pixels, shape) - mean, options.dtype)
