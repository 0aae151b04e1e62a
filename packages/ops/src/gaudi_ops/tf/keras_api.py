"""The one place that chooses a Keras: Keras 2 everywhere.

``tf.keras`` is Keras 2 up to TensorFlow 2.15; from 2.16 on it is Keras 3, and Keras 2 lives on as ``tf_keras``.
Keras 2 is kept because it trains these networks about twice as fast as Keras 3 on a CPU.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def _choose_keras() -> Any:
    if tuple(int(part) for part in tf.__version__.split(".")[:2]) < (2, 16):
        return tf.keras
    try:
        import tf_keras
    except ModuleNotFoundError as error:
        raise ImportError(
            f"TensorFlow {tf.__version__} needs the distribution tf-keras for Keras 2; "
            f"pip install 'gaudi-ops[tensorflow]' or pip install tf-keras"
        ) from error
    return tf_keras


keras: Any = _choose_keras()
