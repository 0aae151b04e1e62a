"""A detector trains by Keras' own `compile` and `fit`, with the loss of gaudi_ops."""

from __future__ import annotations

import numpy as np
import pytest

from gaudi_models import architectures
from gaudi_models.ssd import build_ssd
from gaudi_ops import SSD300, decode_boxes, encode_targets
from gaudi_ops.tf import SSDLoss
from gaudi_ops.tf.keras_api import keras

BOX = [0.25, 0.25, 0.75, 0.75]


@pytest.mark.slow
def test_the_loss_falls_and_the_box_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a quarter of the channels in all levels, which are enough for one box."""
    monkeypatch.setattr("gaudi_models.resnet.STEM_FILTERS", 16)
    monkeypatch.setattr("gaudi_models.resnet.STAGE_FILTERS", (16, 32, 64, 128))
    levels = [(inner // 4, outer // 4, *rest) for inner, outer, *rest in architectures.SSD_EXTRA_LEVELS]
    monkeypatch.setattr(architectures, "SSD_EXTRA_LEVELS", tuple(levels))
    keras.utils.set_random_seed(0)
    detector = build_ssd(3, depth=18)
    trainable = keras.Model(detector.input, keras.layers.Concatenate(dtype="float32")(detector.output))
    trainable.compile(keras.optimizers.Adam(1e-3), SSDLoss())
    images = np.random.default_rng(0).normal(scale=0.2, size=[4, 300, 300, 3]).astype(np.float32)
    images[:, 75:225, 75:225] += 2.0
    classes, offsets, _ = encode_targets([BOX], [2])
    targets = np.concatenate([classes[:, np.newaxis], offsets], axis=1).astype(np.float32)
    history = trainable.fit(images, np.stack([targets] * 4), batch_size=2, epochs=14, verbose=0).history["loss"]
    assert np.isfinite(history).all()
    assert history[-1] < 0.2 * history[0]
    # In the mode of training, whose batch norm goes over the images: the moving averages of 28 steps are not there yet.
    logits, predicted = detector(images, training=True)
    assert logits.shape == (4, SSD300.num_boxes, 3)
    for scores, boxes in zip(np.asarray(logits), decode_boxes(np.asarray(predicted)), strict=True):
        best = scores[:, 2] - scores.max(axis=1, initial=-np.inf, where=[True, True, False])
        assert np.abs(boxes[np.argmax(best)] - BOX).max() < 0.1
