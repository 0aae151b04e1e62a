"""Use an exported SavedModel in a process that imports TensorFlow and nothing of ours.

It is run as the text of a program: `python -c TEXT SAVED_MODEL RESULT.npz IMAGE...`. The result holds the outputs of
both signatures: `encoded_*` for all images in one batch, `images_*` for one image after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf


def main(saved_model: str, result: str, *encoded_images: str) -> None:
    """Write the outputs on the images."""
    signatures = tf.saved_model.load(saved_model).signatures
    encoded = [Path(encoded_image).read_bytes() for encoded_image in encoded_images]
    outputs = {f"encoded_{name}": value for name, value in signatures["serving_default"](tf.constant(encoded)).items()}
    images = [tf.io.decode_image(one, channels=3, expand_animations=False)[tf.newaxis] for one in encoded]
    singles = [signatures["images"](images=image) for image in images]
    outputs |= {f"images_{name}": tf.concat([single[name] for single in singles], axis=0) for name in singles[0]}
    np.savez(result, **{name: value.numpy() for name, value in outputs.items()})
    ours = sorted(name for name in sys.modules if name.startswith("gaudi_"))
    if ours:
        sys.exit(f"imported {', '.join(ours)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
