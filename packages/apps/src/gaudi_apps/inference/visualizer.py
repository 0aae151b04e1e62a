"""Draw detections on images that are arrays, beside the ground truth, by `gaudi_datasets.drawing`."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL.Image
import PIL.ImageOps
import simplejpeg
from numpy.typing import NDArray

from gaudi_datasets.drawing import Outcomes, add_caption, draw_boxes, draw_outcomes, fit_image, join_images
from gaudi_datasets.errors import BadImageError, DataError
from gaudi_datasets.image_files import to_eight_bits
from gaudi_ops.files import write_file

Image = NDArray[np.uint8]
Boxes = NDArray[np.floating[Any]]
Labels = NDArray[np.integer[Any]]
Scores = NDArray[np.floating[Any]]

SMALLEST_SIDE = 600
THUMBNAIL_SIDE = 640
NAME_BYTES = 120


def draw_detections(
    image: Image,
    boxes_yxyx: Boxes,
    labels: Labels,
    scores: Scores | None,
    class_names: Sequence[str],
    *,
    max_boxes: int | None = None,
) -> Image:
    """Draw boxes with class name and score, the best score on top; a small image is enlarged first, to be readable.

    Args:
        image: uint8 [height, width, 3], RGB.
        boxes_yxyx: float [n, 4], 0..1.
        labels: int [n], 1 for the first of `class_names`.
        scores: float [n] in 0..1; None for ground truth.
        class_names: names in the order of the labels.
        max_boxes: draw the best ones only, and write the number of the others; None: draw all.

    Returns:
        A new image, uint8 [h, w, 3], RGB, in the proportions of the given one.
    """
    given = PIL.Image.fromarray(image)
    drawn = draw_boxes(
        given, boxes_yxyx, labels, class_names, scores=scores, low=SMALLEST_SIDE, high=None, max_boxes=max_boxes
    )
    return np.array(drawn)


def draw_errors(image: Image, outcomes: Outcomes, class_names: Sequence[str], *, max_boxes: int | None = None) -> Image:
    """Draw hits green, false alarms red and misses dashed, see `gaudi_datasets.drawing.draw_outcomes`."""
    given = PIL.Image.fromarray(image)
    return np.array(draw_outcomes(given, outcomes, class_names, low=SMALLEST_SIDE, high=None, max_boxes=max_boxes))


def compare_images(left: Image, right: Image, *, left_title: str, right_title: str) -> Image:
    """Put two images of one size side by side, each under its title."""
    if left.shape != right.shape:
        raise ValueError(f"images are {left.shape} and {right.shape}; give two of the same size")
    titled = ((left, left_title), (right, right_title))
    return np.array(join_images([add_caption(PIL.Image.fromarray(image), title) for image, title in titled]))


def write_image(path: Path, image: Image) -> None:
    """Write uint8 [height, width, 3] RGB as PNG or JPEG, by the ending of the path."""
    done, encoded = cv2.imencode(path.suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR))
    if not done:
        raise ValueError(f"{path}: OpenCV cannot write {path.suffix} files; use .png or .jpg")
    write_file(path, encoded.tobytes(), durable=False)


def write_worst(folder: Path, images: Iterable[tuple[dict[str, Any], Image]]) -> list[dict[str, Any]]:
    """Write images with errors as small JPEGs, in place of those of an earlier evaluation.

    Args:
        folder: made when it is not there.
        images: a row with `image_id` and `file_name`, and the pixels, of each image, the worst first.

    Returns:
        the rows, each with the JPEG from the folder above, as `image`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, (row, image) in enumerate(images, 1):
        path = name_image(folder, row["file_name"], row["image_id"], ".jpg", prefix=f"worst-{number:02}-")
        fit_image(PIL.Image.fromarray(image), 1, THUMBNAIL_SIDE).save(buffer := io.BytesIO(), "JPEG", quality=82)
        write_file(path, buffer.getvalue(), durable=False)
        rows.append({**row, "image": f"{folder.name}/{path.name}"})
    written = {row["image"].rpartition("/")[2] for row in rows}
    for path in folder.glob("worst-??-*.jpg"):
        if path.name not in written:
            path.unlink()
    return rows


def name_image(
    folder: Path, file_name: str, image_id: int, ending: str, taken: Sequence[Path] = (), *, prefix: str = ""
) -> Path:
    """Name the drawing of an image by the image's file, with letters that every disk takes.

    Args:
        folder: of the drawing.
        file_name: of the image, which may have folders; the image id stands for one without a letter.
        image_id: is added where the name is taken, or the next number that is free.
        ending: of the new name, with its dot.
        taken: names of other drawings.
        prefix: of the new name.
    """
    stem = re.sub(r"[^\w.-]+", "_", file_name.rpartition("/")[2].rpartition(".")[0] or file_name).strip("._-")
    stem = stem.encode()[:NAME_BYTES].decode(errors="ignore") or f"{image_id}"
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(image_id)))
    paths = (folder / f"{prefix}{stem}{number}{ending}" for number in numbers)
    return next(path for path in paths if path not in taken)


def write_first_images(folder: Path, images: Iterable[tuple[int, Image]], num_images: int) -> list[Path]:
    """Write the first of some images by place and image id, in place of those of an earlier call.

    Args:
        folder: made when it is not there.
        images: image id and pixels; no more of them are taken than are written.
        num_images: how many to write.

    Returns:
        the PNG files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.iterdir():
        if re.fullmatch(r"\d{4}-image-\d+\.png", earlier.name):
            earlier.unlink()
    paths = []
    for number, (image_id, image) in enumerate(itertools.islice(images, num_images), 1):
        paths.append(folder / f"{number:04d}-image-{image_id}.png")
        write_image(paths[-1], image)
    return paths


def decode_image(encoded: bytes) -> Image:
    """Decode an image to uint8 [height, width, 3], RGB, its pixels as they are stored; `check_image` has turned it."""
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), flags)
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2RGB), np.uint8)


def decode_like_tensorflow(encoded: bytes, *, strict: bool = False) -> Image:
    """Decode a JPEG or PNG to the pixels that TensorFlow makes of it, without TensorFlow.

    Decoders of JPEG differ by up to 20 of 255: TensorFlow takes the fast transform and smooth colours of libjpeg-turbo,
    and OpenCV has no switch for them.

    Args:
        encoded: content of the file.
        strict: take a JPEG that libjpeg warns of for damaged, too; without, this was judged when the image was read.

    Raises:
        DataError: the image is damaged.
    """
    if not encoded.startswith(b"\xff\xd8\xff"):  # of a JPEG
        return decode_image(encoded)
    try:
        return np.asarray(simplejpeg.decode_jpeg(encoded, "RGB", fastdct=True, strict=strict), np.uint8)
    except (ValueError, KeyError) as error:
        raise DataError(f"cannot be decoded ({error})", remedy="fetch it again or leave it out") from None


def to_pixels(image: Any) -> Image:
    """Return an array or a PIL image as uint8 [height, width, 3], RGB; a PIL image is turned upright by EXIF.

    Of 16 bits the upper 8 are kept, as of files; a PIL image of mode I without a value above 255 is taken as it is.

    Raises:
        BadImageError: a PIL image cannot be decoded.
        DataError: it is of another type or shape.
    """
    if isinstance(image, PIL.Image.Image):
        try:
            upright = PIL.ImageOps.exif_transpose(image)  # reads its file
        except Exception as error:  # of many types, as in gaudi_datasets.image_files.check_image
            if isinstance(error, MemoryError) or getattr(error, "errno", None):  # the latter of the system
                raise
            raise BadImageError(f"cannot be decoded ({error})", record="the image", remedy="fetch it again") from None
        if upright.mode != "I" or np.any(np.asarray(upright) > 0xFF):
            upright = to_eight_bits(upright)
        if upright.mode == "F":
            raise DataError("an image is of floating-point numbers; scale them to 0..255 and give uint8")
        upright = upright.convert(upright.mode.upper()) if upright.mode in ("La", "RGBa") else upright
        image = np.asarray(upright.convert("RGB"), np.uint8)
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
        kind = f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
        raise DataError(f"an image is {kind}; give uint8 [height, width, 3] in RGB, a PIL image, bytes or a path")
    if 0 in image.shape:
        raise DataError(f"an image is {list(image.shape)}; it has no pixels")
    return image


def enlarge(image: Image) -> Image:
    """Copy an image, enlarged until its longer side has at least SMALLEST_SIDE pixels."""
    return np.array(fit_image(PIL.Image.fromarray(image), SMALLEST_SIDE, None))


def add_title(image: Image, title: str, detail: str = "") -> Image:
    """Put a line of text above an image, with a fainter detail behind it; text without room is cut.

    Letters that the font lacks are question marks; names of classes come from `to_drawable`.
    """
    return np.array(add_caption(PIL.Image.fromarray(image), title, detail))
