"""Check that the session `current` has the versions that it is there for.

A TensorFlow that is older would be tested without anybody seeing it. Horovod, which no such TensorFlow takes, has to
say so.
"""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

from gaudi_distributed.comm.horovod_engine import load_horovod
from gaudi_distributed.errors import ConfigurationError
from gaudi_ops.tf.keras_api import keras


def main() -> None:
    """Fail unless TensorFlow and Keras are 2.21, and NumPy is 2."""
    found = [tf.__version__, keras.__version__, np.__version__]
    if not (found[0].startswith("2.21.") and found[1].startswith("2.21.") and int(found[2].split(".")[0]) >= 2):
        sys.exit(f"TensorFlow, Keras and NumPy are {', '.join(found)}")
    try:
        load_horovod()
    except ConfigurationError as error:
        if f"for TensorFlow {found[0]}" not in str(error):
            sys.exit(f"Horovod is refused for another reason: {error}")
    else:
        sys.exit("Horovod works with this TensorFlow?")


if __name__ == "__main__":
    main()
