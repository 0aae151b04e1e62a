"""Data sets for detectors and classifiers: fetched, checked, converted, read, augmented and scored.

Names are loaded when they are first used, so that importing the package costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaudi_datasets.classification.class_folders import FolderSource
    from gaudi_datasets.detection.coco import Category, CocoAnnotations, read_coco
    from gaudi_datasets.detection.scoring import CocoScores, score_detections
    from gaudi_datasets.detection.sources import CocoSource, ground_truth
    from gaudi_datasets.detection.voc import read_voc
    from gaudi_datasets.detection.yolo import read_yolo
    from gaudi_datasets.errors import DataError, FlagError, GaudiError, MissingInputError, UnsafeError

    __version__: str

# Records are sources of detectors and of classifiers, so `RecordSource` is in the `sources` module of each.
__all__ = [
    "Category",
    "CocoAnnotations",
    "CocoScores",
    "CocoSource",
    "DataError",
    "FlagError",
    "FolderSource",
    "GaudiError",
    "MissingInputError",
    "UnsafeError",
    "ground_truth",
    "read_coco",
    "read_voc",
    "read_yolo",
    "score_detections",
]

_MODULES = {
    "classification.class_folders": ("FolderSource",),
    "detection.coco": ("Category", "CocoAnnotations", "read_coco"),
    "detection.scoring": ("CocoScores", "score_detections"),
    "detection.sources": ("CocoSource", "ground_truth"),
    "detection.voc": ("read_voc",),
    "detection.yolo": ("read_yolo",),
    "errors": ("DataError", "FlagError", "GaudiError", "MissingInputError", "UnsafeError"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("gaudi-datasets")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"gaudi_datasets.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'gaudi_datasets' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
