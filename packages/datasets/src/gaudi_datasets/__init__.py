"""Data sets for detection and classification: fetch, check, convert, read, augment and score.

Names are loaded when they are first used, so that importing the package imports no library.
"""

from typing import TYPE_CHECKING

from gaudi_ops.lazy import make_lazy

if TYPE_CHECKING:
    from gaudi_datasets.detection.coco import Category, CocoAnnotations, read_coco
    from gaudi_datasets.detection.scoring import CocoScores, score_detections
    from gaudi_datasets.errors import DataError, FlagError, GaudiError, MissingInputError, UnsafeError
    from gaudi_datasets.sampling import InputOptions

    __version__: str

__all__ = [
    "Category",
    "CocoAnnotations",
    "CocoScores",
    "DataError",
    "FlagError",
    "GaudiError",
    "InputOptions",
    "MissingInputError",
    "UnsafeError",
    "read_coco",
    "score_detections",
]

_MODULES = {
    "detection.coco": ("Category", "CocoAnnotations", "read_coco"),
    "detection.scoring": ("CocoScores", "score_detections"),
    "errors": ("DataError", "FlagError", "GaudiError", "MissingInputError", "UnsafeError"),
    "sampling": ("InputOptions",),
}

__getattr__, __dir__ = make_lazy("gaudi_datasets", _MODULES)
