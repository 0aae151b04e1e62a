"""Train a detector, detect objects, from images to boxes, labels and scores, and export it.

Detections of the exports are compared with those of the network.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from gaudi_apps.detection.agreement import (
    CANDIDATES_WITH_VOTES,
    DETECTED,
    DETECTIONS_PER_IMAGE,
    IOU_THRESHOLD,
    SCORE_THRESHOLD,
    VOTING_IOU,
    compare_detections,
    compare_rounded,
    take_detections,
)
from gaudi_apps.detection.detections import ObjectDetections as ObjectDetections
from gaudi_apps.detection.detections import Refinement, open_detector
from gaudi_apps.inference.converters import Agreement, ExportedNetwork, to_float32
from gaudi_apps.inference.exported_models import Arrays, CheckedExport
from gaudi_apps.inference.exporter import Export, ExportRequest, list_kinds, require_possible, write_exports
from gaudi_apps.inference.media import ImageInput, Images, InputImage, Preprocessor, predict_images, read_given
from gaudi_apps.inference.predictor import Trained, assign_all, name_model, read_model
from gaudi_apps.runtime.errors import require_argument
from gaudi_apps.runtime.settings import SMALLEST_TILE
from gaudi_apps.training.keras_task import Batch, KerasTask
from gaudi_datasets.detection.coco import Category
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.pipeline import prepare_image, prepare_pixels
from gaudi_datasets.errors import DataError
from gaudi_distributed import Communicator
from gaudi_models.architectures import CLASSIFIERS, SSDArchitecture
from gaudi_models.padding import SSD_PADDINGS, PoolPadding
from gaudi_models.ssd import build_ssd, freeze_backbone
from gaudi_models.weights import WeightsMetadata
from gaudi_ops import SSD300, SSD_SPECS
from gaudi_ops.boxes import VOTERS
from gaudi_ops.tf import MomentumSGD, decode_boxes, non_max_suppression, ssd_loss
from gaudi_ops.tf.detection import suppress_by_overlaps, vote_on_boxes, weigh_voters
from gaudi_ops.tf.losses import Implementation

if TYPE_CHECKING:
    from gaudi_apps.cli.flags import ExportFormat, RuntimeFlag
    from gaudi_apps.training.application import ReduceStatistics

MOMENTUM = 0.9


def make_preprocessor(image_size: int) -> Preprocessor:
    """Return the preparation of images as evaluation does it."""
    return Preprocessor(
        partial(prepare_pixels, image_size=image_size),
        from_file=partial(prepare_image, image_size=image_size),
        errors=(tf.errors.InvalidArgumentError,),
    )


class SSDTask(KerasTask):
    """Train the SSD on batches of `gaudi_datasets.detection.pipeline.train_dataset`.

    Args:
        num_classes: with the background.
        keras_policy: precision of the layers, ``"float32"`` or ``"mixed_bfloat16"``.
        weight_decay: see `gaudi_ops.tf.MomentumSGD`.
        communicator: of the processes that train together.
        architecture: backbone and size of the images; None: ResNet-34 at 300 pixels.
        pool_padding: see `gaudi_models.ssd.build_ssd`.
        ema_decay: of the average of the weights, see `gaudi_ops.tf.ExponentialMovingAverage`; 0: there is none.
        reduce_statistics: of batch norm, see `gaudi_models.ssd.build_ssd`.
        cross_entropy: its implementation, see `gaudi_ops.tf.ssd_loss`.
        class_weights: see `gaudi_ops.tf.ssd_loss`.
        box_weight: likewise.
        frozen: keep the backbone as it is, see `gaudi_models.ssd.freeze_backbone`.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        keras_policy: str,
        weight_decay: float,
        communicator: Communicator,
        architecture: SSDArchitecture | None = None,
        pool_padding: PoolPadding = "same",
        ema_decay: float = 0.0,
        reduce_statistics: ReduceStatistics | None = None,
        cross_entropy: Implementation = "auto",
        class_weights: Sequence[float] | None = None,
        box_weight: float = 1.0,
        frozen: bool = False,
    ) -> None:
        self._loss_options: dict[str, Any] = {"implementation": cross_entropy, "box_weight": box_weight}
        self._loss_options["class_weights"] = class_weights
        architecture = architecture or SSDArchitecture()
        model = build_ssd(
            num_classes,
            depth=architecture.depth,
            width=architecture.width,
            spec=architecture.spec,
            dtype=keras_policy,
            pool_padding=pool_padding,
            reduce_statistics=reduce_statistics,
        )
        if frozen:
            freeze_backbone(model)
        optimizer = MomentumSGD(model.trainable_variables, MOMENTUM, weight_decay)
        super().__init__(model, optimizer, communicator=communicator, ema_decay=ema_decay)

    def compute_loss(self, batch: Batch) -> dict[str, Any]:
        """Compute the loss and its two parts."""
        logits, offsets = self.model(batch["images"], training=True)
        targets = (batch["classes"], batch["offsets"], batch["num_matched"])
        loss, class_loss, box_loss = ssd_loss(logits, offsets, *targets, **self._loss_options)
        return {"loss": loss, "class_loss": class_loss, "box_loss": box_loss}


class Detector:
    """Detect objects by a trained network, with decoding and suppression.

    Args:
        model: from `gaudi_models.build_ssd`.
        class_names: of the labels from 1 on; needed by `predict`.
        category_ids: of these classes in COCO results; by default the labels.
        image_size: of the network's input, in pixels; needed by `predict`.
        box_voting: move each box to the mean of overlapping ones, see `gaudi_ops.non_max_suppression`.
    """

    def __init__(
        self,
        model: Any,
        class_names: Sequence[str] = (),
        category_ids: Sequence[int] = (),
        *,
        image_size: int = SSD300.image_size,
        box_voting: bool = False,
    ) -> None:
        self.class_names, self.image_size = tuple(class_names), image_size
        ids = category_ids if len(category_ids) else range(1, len(self.class_names) + 1)
        self.categories = tuple(Category(int(each), name) for each, name in zip(ids, class_names, strict=True))
        self._prepare = make_preprocessor(image_size)
        self._compute = tf.function(lambda x: find_boxes(model, x, box_voting), autograph=False, reduce_retracing=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, runtime: RuntimeFlag = "tensorflow") -> Detector:
        """Load a detector in float32 from a run, a checkpoint, or an export as safetensors.

        Args:
            path: of these.
            runtime: ``"openvino"``, ``"onnxruntime"``, ``"litert"`` or ``"auto"`` take the fastest export of a run that
                was evaluated for its checkpoint, in the precision that it has.

        Raises:
            GaudiError: see `gaudi_apps.inference.predictor.read_trained`, or it is not a detector.
            ValueError: there is no such runtime.
            WeightsError: the file is damaged, or of another model.
        """
        return cls.open(read_model(path, runtime), path)

    @classmethod
    def open(cls, found: CheckedExport | Trained, path: str | os.PathLike[str]) -> Detector:
        """Open what `gaudi_apps.inference.predictor.read_model` found at a path; raises as `load` does."""
        if isinstance(found, CheckedExport):
            if name_model(found) in CLASSIFIERS:
                raise DataError("is of no detector", path=path, field="model", remedy="use gaudi_apps.Classifier")
            return _ExportedDetector(found)
        weights, metadata = found
        try:
            architecture = SSDArchitecture.from_name(metadata.model, metadata.image_size)
        except ValueError as error:
            raise DataError(f"is of no detector: {error}", path=path, field="model", remedy="use another") from None
        model = build_ssd(
            len(metadata.classes) + 1,
            depth=architecture.depth,
            width=architecture.width,
            spec=architecture.spec,
            pool_padding=weights.pool_padding,
        )
        assign_all(model, weights)
        ids = [one.get("id", label) for label, one in enumerate(metadata.classes, 1)]
        names = [one["name"] for one in metadata.classes]
        return cls(model, names, ids, image_size=architecture.image_size, box_voting=metadata.box_voting)

    def predict(
        self,
        images: Images,
        *,
        score_threshold: float = 0.3,
        batch_size: int = 16,
        classes: str | int | Sequence[str | int] | None = None,
        agnostic_nms: bool = False,
        tiles: int | Literal["auto"] | None = None,
        track: bool = False,
    ) -> Any:
        """Detect the objects in images, prepared as training prepares them, in the order of the images.

        Args:
            images: a path, encoded bytes, pixels uint8 [height, width, 3] in RGB, or a PIL image; a folder, a pattern
                (``"photos/*.jpg"``), or a list of such; a video, a camera (``"webcam:0"``) or an address; an iterator
                of images.
            score_threshold: lowest score of a detection, 0 to 1; the network has none below .05.
            batch_size: largest number of images at once.
            classes: names or category ids (integers are ids) of the classes to detect, or one of them; by default all.
            agnostic_nms: keep the best of boxes that overlap by half or more, whatever their classes.
            tiles: side in pixels, 64 or more, of the windows in which larger photos are looked at, too; ``"auto"``:
                twice the network's side; None: photos are looked at as a whole only.
            track: number the objects of a video, the same object by the same number; needs gaudi-apps[supervision].

        Returns:
            an `ObjectDetections` for one image; a list of them for a folder, a pattern, a list, a tuple or an array
            [n, height, width, 3]; an iterator for a video, a camera, a stream and any other iterable, which reads ahead
            by a batch at most.

        Raises:
            MissingInputError: a file is not there.
            DataError: an image cannot be decoded.
            TransferError: a camera or an address does not answer.
            ValueError: a number is out of its bounds, or a `FlagError`: a class is none of the detector's.
            MissingExtraError: supervision is not installed, and `track` is set.
        """
        require_argument("score_threshold", score_threshold, bounds=(0, 1), kind=Real)
        require_argument("tiles", tiles, None, "auto", bounds=(SMALLEST_TILE, math.inf))
        prepare = self._prepare
        refinement = Refinement(
            self.categories,
            self.detect,
            prepare,
            batch_size,
            score_threshold=score_threshold,
            classes=() if classes is None else classes,
            agnostic=agnostic_nms,
            tiles=tiles,
            track=track,
        )
        run = partial(self._predict_batch, refinement=refinement, score_threshold=score_threshold)
        return predict_images(images, prepare, batch_size, run)

    def prepare(self, image: ImageInput) -> InputImage:
        """Decode and resize one image, in any thread; `predict` takes the result, and raises no error for it."""
        return next(read_given(image, self._prepare))

    def _predict_batch(
        self, batch: Sequence[InputImage], *, refinement: Refinement, score_threshold: float
    ) -> list[ObjectDetections]:
        outputs = self.detect(np.stack([image.network_input for image in batch]))
        results = []
        for image, *rows in zip(batch, *outputs, strict=True):
            (boxes, labels, scores), tracks = refinement.apply(image, (rows[0], rows[1], rows[2]))
            kept = scores >= score_threshold
            found = ObjectDetections(
                boxes[kept],
                labels[kept],
                scores[kept],
                tuple(self.class_names[label - 1] for label in labels[kept]),
                *(image.file_name, image.height, image.width, image.frame),
                track_ids=None if tracks is None else tracks[kept],
                categories=self.categories,
                read_pixels=image.read_pixels,
            )
            results.append(found)
        return results

    def detect(self, images: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Detect the objects in a batch, at most 200 in an image, best first.

        Args:
            images: [batch, side, side, 3], prepared by `gaudi_datasets.detection.pipeline` for the network.

        Returns:
            boxes float32 [batch, 200, 4], y0, x0, y1, x1 in 0..1; labels int32 [batch, 200], 0 where there is no
            detection; scores float32 [batch, 200].
        """
        boxes, labels, scores = self._compute(images)
        return boxes.numpy(), labels.numpy(), scores.numpy()


class _ExportedDetector(Detector):
    """A detector that is an export."""

    def __init__(self, export: CheckedExport) -> None:
        self._detect, self.categories, self._prepare, _ = open_detector(export)
        self.class_names = tuple(one.name for one in self.categories)
        self.image_size = int(export.manifest["image_size"])

    def detect(self, images: Any) -> Any:
        """Detect by the export; images are resized, RGB in 0..255."""
        return self._detect(images)


def find_boxes(model: Any, images: Any, box_voting: bool = False) -> tuple[Any, Any, Any]:
    """Compute `Detector.detect` on tensors, inside a graph."""
    logits, offsets = model(images, training=False)
    boxes, labels, scores = non_max_suppression(_decode(offsets), tf.nn.softmax(logits), **_make_rules(box_voting))
    return tf.clip_by_value(boxes, 0.0, 1.0), labels, scores


def detect_combined_nms(model: Any, images: Any, box_voting: bool = False) -> tuple[Any, Any, Any]:
    """Detect as `find_boxes` does, by the combined suppression that ONNX has.

    Scores that tie with the last considered one of their class are kept, too.
    """
    logits, offsets = model(images, training=False)
    scores, decoded = tf.nn.softmax(logits)[..., 1:], _decode(offsets)
    considered = _make_rules(box_voting)["max_per_class"]
    count = min(VOTERS + 1, scores.shape[1]) if box_voting else considered
    best = tf.math.top_k(tf.transpose(scores, [0, 2, 1]), count)
    scores = tf.where(scores >= best.values[:, tf.newaxis, :, considered - 1], scores, 0.0)
    found = tf.image.combined_non_max_suppression(
        decoded[:, :, tf.newaxis],
        scores,
        max_output_size_per_class=DETECTIONS_PER_IMAGE,
        max_total_size=DETECTIONS_PER_IMAGE,
        # TensorFlow drops above its threshold; this is the largest float32 below ours.
        iou_threshold=float(np.nextafter(np.float32(IOU_THRESHOLD), np.float32(0))),
        score_threshold=SCORE_THRESHOLD,
        clip_boxes=False,
    )
    labels = tf.where(found.nmsed_scores > 0, tf.cast(found.nmsed_classes, tf.int32) + 1, 0)
    boxes = found.nmsed_boxes
    if box_voting:
        voters, weights = tf.gather(decoded, best.indices, batch_dims=1), weigh_voters(best.values, SCORE_THRESHOLD)
        boxes = vote_on_boxes(boxes, labels, voters, weights, VOTING_IOU)
    return tf.clip_by_value(boxes, 0.0, 1.0), labels, found.nmsed_scores


def detect_by_builtins(model: Any, images: Any, box_voting: bool = False) -> tuple[Any, Any, Any]:
    """Detect as `find_boxes` does, by operations that TensorFlow Lite has."""
    logits, offsets = model(images, training=False)
    boxes, labels, scores = suppress_by_overlaps(_decode(offsets), tf.nn.softmax(logits), **_make_rules(box_voting))
    return tf.clip_by_value(boxes, 0.0, 1.0), labels, scores


def _make_rules(box_voting: bool) -> dict[str, Any]:
    rules: dict[str, Any] = {"score_threshold": SCORE_THRESHOLD, "iou_threshold": IOU_THRESHOLD}
    rules |= {"max_per_class": DETECTIONS_PER_IMAGE, "max_detections": DETECTIONS_PER_IMAGE}
    return rules | {"max_per_class": CANDIDATES_WITH_VOTES, "voting_iou": VOTING_IOU} if box_voting else rules


def _decode(offsets: Any) -> Any:
    """Decode offsets [batch, n, 4] with the default boxes of which there are n."""
    return decode_boxes(offsets, next(spec for spec in SSD_SPECS.values() if spec.num_boxes == offsets.shape[1]))


def run_export(
    model: Any,
    categories: Sequence[Category],
    encoded_images: Sequence[bytes],
    output_dir: Path,
    formats: Sequence[ExportFormat],
    *,
    step: int,
    architecture: SSDArchitecture,
    pool_padding: PoolPadding,
    box_voting: bool = False,
    request: ExportRequest | None = None,
) -> dict[Path, Export]:
    """Export a detector in some formats, each into a folder of its name, and compare each with the network.

    See `gaudi_apps.inference.exporter`, whose errors it raises. ``export.json`` has the step, the network, the size of
    its images, the pool padding and the classes.

    Args:
        model: from `gaudi_models.ssd.build_ssd`; it is exported in float32 whatever its precision.
        categories: the classes, label 1 first.
        encoded_images: from `gaudi_apps.inference.exporter.choose_images`.
        output_dir: made when it is not there.
        formats: see `DetectorExport`.
        step: of the checkpoint that the model is from.
        architecture: of the model.
        pool_padding: of the model, see `gaudi_models.ssd.build_ssd`.
        box_voting: see `Detector`.
        request: precisions, and what tells whether exports are good enough; None: fp32, compared alone.
    """
    request = request or ExportRequest()
    kinds = list_kinds(formats, request.precisions)
    require_possible(output_dir, kinds)
    network = DetectorExport(to_float32(model), categories, pool_padding, architecture, box_voting)
    metadata = {
        "step": step,
        "model": architecture.name,
        "image_size": architecture.image_size,
        "pool_padding": pool_padding,
        "box_voting": box_voting,
        "classes": network.list_classes(),
    }
    return write_exports({"": network}, encoded_images, output_dir, kinds, metadata, request)


class DetectorExport(ExportedNetwork):
    """Define the exports of a detector.

    A SavedModel and an ONNX model have decoding and suppression inside. They return ``boxes_yxyx`` float32
    [batch, 200, 4] in 0..1, ``labels`` int32 [batch, 200] from 1, ``scores`` float32 [batch, 200], best first and 0
    throughout where there is no detection, and a SavedModel ``num_detections`` int32 [batch], too. The signature
    ``class_names`` returns ``class_names`` string [classes] and ``category_ids`` int64 [classes]; label l is entry
    l - 1.

    So has a model of TensorFlow Lite, of built-in operations alone. It takes images resized bilinearly, and returns
    what a SavedModel does. OpenVINO takes images resized like these, and returns what ONNX does.

    Args:
        model: from `gaudi_models.ssd.build_ssd`, in float32.
        categories: the classes, label 1 first.
        pool_padding: of the model.
        architecture: of the model; None: ResNet-34 at 300 pixels.
        box_voting: see `Detector`.
    """

    scale, shift = 1 / (255 * STDDEV_RGB), -MEAN_RGB / STDDEV_RGB

    def __init__(
        self,
        model: Any,
        categories: Sequence[Category],
        pool_padding: PoolPadding = "same",
        architecture: SSDArchitecture | None = None,
        box_voting: bool = False,
    ) -> None:
        architecture = architecture or SSDArchitecture()
        classes, size = [asdict(category) for category in categories], architecture.image_size
        padding = SSD_PADDINGS[pool_padding]
        super().__init__(model, size, WeightsMetadata(padding, classes, size, architecture.name, box_voting))
        self._categories, self._box_voting = categories, box_voting

    def prepare_encoded(self, encoded: Any) -> Any:
        """Prepare an image as training does."""
        return prepare_image(encoded, self.image_size)

    def prepare_pixels(self, pixels: Any) -> Any:
        """Prepare pixels as training does."""
        return prepare_pixels(pixels, self.image_size)

    def resize(self, pixels: Any) -> Any:
        """Resize pixels bilinearly."""
        return tf.image.resize(pixels, [self.image_size, self.image_size]).numpy()

    def compute(self, images: Any) -> dict[str, Any]:
        """Detect, and count the detections."""
        boxes, labels, scores = find_boxes(self.model, images, self._box_voting)
        count = tf.math.count_nonzero(labels, axis=1, dtype=tf.int32)
        return {"boxes_yxyx": boxes, "labels": labels, "scores": scores, "num_detections": count}

    def compute_onnx(self, images: Any) -> dict[str, Any]:
        """Detect by the suppression that ONNX has."""
        return dict(zip(DETECTED, detect_combined_nms(self.model, images, self._box_voting), strict=True))

    def compute_tflite(self, images: Any) -> dict[str, Any]:
        """Detect by the operations of TensorFlow Lite, and count the detections."""
        boxes, labels, scores = detect_by_builtins(self.model, images, self._box_voting)
        count = tf.reduce_sum(tf.cast(labels > 0, tf.int32), axis=1)
        return {"boxes_yxyx": boxes, "labels": labels, "scores": scores, "num_detections": count}

    def list_classes(self) -> list[dict[str, Any]]:
        """List label, category id and name of each class."""
        return [{"label": label, "id": one.id, "name": one.name} for label, one in enumerate(self._categories, 1)]

    def class_tensors(self) -> dict[str, Any]:
        """Return the names and the category ids of the classes."""
        ids = tf.constant([category.id for category in self._categories], tf.int64)
        return {"class_names": tf.constant([category.name for category in self._categories]), "category_ids": ids}

    def compare(self, reference: Arrays, found: Arrays) -> Agreement:
        """Compare detections."""
        return compare_detections(take_detections(reference), take_detections(found))

    def compare_rounded(self, images: Any, reference: Arrays, found: Arrays) -> Agreement:
        """Compare detections with what the network finds before suppression."""
        logits, offsets = self.model(images, training=False)
        boxes, scores = _decode(offsets).numpy(), tf.nn.softmax(logits).numpy()
        both = take_detections(reference), take_detections(found)
        return compare_rounded(boxes, scores, *both, self._box_voting)
