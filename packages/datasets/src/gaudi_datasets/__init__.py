"""Data sets for detection and classification: fetch, check, convert, read, augment and score.

Names are loaded when they are first used, so that importing the package imports nothing else.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
