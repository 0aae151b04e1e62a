"""Read weights of several programs as arrays by our names, put them into a model, and write them.

No code in a file is run: pickles are read by an interpreter of our own that knows numbers only.
"""

from gaudi_models.weights.assignment import LoadReport, assign_weights
from gaudi_models.weights.contents import WeightsFile, WeightsMetadata, write_weights
from gaudi_models.weights.reading import convert_weights, read_weights

__all__ = [
    "LoadReport",
    "WeightsFile",
    "WeightsMetadata",
    "assign_weights",
    "convert_weights",
    "read_weights",
    "write_weights",
]
