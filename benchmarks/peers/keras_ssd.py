"""The SSD with ResNet-34 as one would write it with Keras and tf.data alone, from random weights.

Network, loss and input are those of `plain_keras_ssd.py` and `plain_detection_input.py`. SGD with momentum .9 and a
weight decay of 5e-4; the rate is that of ``ssd_train --data``, .024 for 8 images a step, by the root of the batch, and
falls by a cosine after a warm-up of a tenth of the steps. Runs in the environment of `nox -s bench`, with the
project's root in PYTHONPATH. Usage: python keras_ssd.py train|detect --data DATA --output FOLDER --dtype fp32|bf16
[--epochs N] [--seed N]
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from benchmarks.plain_detection_input import plain_dataset
from benchmarks.plain_keras_ssd import build_plain_ssd, find_boxes, plain_loss
from program import BEGINS, parse, read_category_ids, read_images, to_records, write_detections  # type: ignore[import-not-found]

from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.colors import MEAN_RGB, STDDEV_RGB
from gaudi_datasets.detection.records import write_records
from gaudi_ops.tf.keras_api import keras

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16"}
BATCH = 16
PEAK_RATE = 0.024 * math.sqrt(BATCH / 8)
MOMENTUM, WEIGHT_DECAY, WARM_UP = 0.9, 5e-4, 0.1


def train(data: Path, output: Path, epochs: int, seed: int, dtype: str) -> None:
    """Train for some epochs, and write the weights."""
    keras.utils.set_random_seed(seed)
    records = output / "records"
    images = read_images(data, "train")
    if not records.exists():
        truth = read_coco(data / "train.json")
        write_records(truth, data / "images" / "train", records, split="train", keep_empty=False, shards=1)
    paths = [str(path) for path in sorted(records.glob("*.tfrecord"))]
    per_epoch = max(1, len(images) // BATCH)
    model = build_plain_ssd(len(read_category_ids(data)) + 1, POLICIES[dtype])
    optimizer = keras.optimizers.SGD(0.0, momentum=MOMENTUM)

    @tf.function
    def learn(images: Any, targets: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = plain_loss(*model(images, training=True), *targets)
            decay = tf.add_n([tf.nn.l2_loss(each) for each in model.trainable_variables])
            total = loss + WEIGHT_DECAY * decay
        gradients = tape.gradient(total, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    steps = epochs * per_epoch
    warm_up = max(1, round(WARM_UP * steps))
    print(BEGINS, flush=True)
    for step, (pixels, *targets) in enumerate(plain_dataset(paths, BATCH).take(steps)):
        share = min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.learning_rate.assign(PEAK_RATE * share)
        loss = learn(pixels, targets)
        if (step + 1) % per_epoch == 0:
            print(f"epoch {(step + 1) // per_epoch}/{epochs} loss {float(loss):.3f}", flush=True)
    model.save_weights(output / "weights.h5")


def detect(data: Path, output: Path) -> None:
    """Detect on the test images, in float32."""
    category_ids, records = read_category_ids(data), []
    model = build_plain_ssd(len(category_ids) + 1, POLICIES["fp32"])
    model.load_weights(output / "weights.h5")
    for image, path in read_images(data, "test"):
        pixels = tf.io.decode_image(path.read_bytes(), channels=3, expand_animations=False)
        resized = tf.image.resize(tf.image.convert_image_dtype(pixels, tf.float32), [300, 300])
        boxes, classes, scores = find_boxes(*model((resized - MEAN_RGB)[None] / STDDEV_RGB, training=False))
        found = np.flatnonzero(scores[0].numpy() > 0)
        scales = np.array([image["height"], image["width"]] * 2)
        top_left_first = (boxes[0].numpy()[found] * scales)[:, [1, 0, 3, 2]]
        ids = [category_ids[int(one)] for one in classes[0].numpy()[found]]
        records += to_records(image["id"], top_left_first.tolist(), ids, scores[0].numpy()[found].tolist())
    write_detections(output / "detections.json", records)


def main() -> None:
    """Train or detect, as the command line says."""
    options = parse(__doc__, dtypes=tuple(POLICIES))
    if options.mode == "train":
        train(options.data, options.output, options.epochs, options.seed, options.dtype)
    else:
        detect(options.data, options.output)


if __name__ == "__main__":
    main()
