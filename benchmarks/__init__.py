"""Measurements of speed and memory, by ratio within one run; `nox -s bench` runs them all."""

import os

# As the programs set it, for all that a benchmark compares: TensorFlow alone leaves oneDNN off on some processors.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
