"""Pictures as the detector takes them, decoded by TensorFlow, as in its training."""

from __future__ import annotations

import tensorflow as tf

from gaudi_apps.inputs import Preparation
from gaudi_datasets.detection.pipeline import prepare_image, prepare_pixels

PREPARATION = Preparation(prepare_image, prepare_pixels, (tf.errors.InvalidArgumentError,))
