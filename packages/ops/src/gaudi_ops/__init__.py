"""Mathematics of single-shot detectors and classifiers: NumPy at the top level, TensorFlow in `gaudi_ops.tf`.

Names are loaded when they are first used, so that schedules cost no NumPy and NumPy users need no TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaudi_ops import reference, schedules
    from gaudi_ops import tf as tf
    from gaudi_ops.anchors import SSD300, DefaultBoxSpec, default_boxes, default_boxes_cyxhw
    from gaudi_ops.boxes import areas, cyxhw_to_yxyx, iou, yxyx_to_cyxhw
    from gaudi_ops.coding import decode_boxes, encode_boxes
    from gaudi_ops.matching import match_boxes
    from gaudi_ops.nms import non_max_suppression
    from gaudi_ops.targets import encode_targets

__version__ = "0.1.0"

# Without tf: a star import is NumPy's half, and works without TensorFlow.
__all__ = [
    "SSD300",
    "DefaultBoxSpec",
    "areas",
    "cyxhw_to_yxyx",
    "decode_boxes",
    "default_boxes",
    "default_boxes_cyxhw",
    "encode_boxes",
    "encode_targets",
    "iou",
    "match_boxes",
    "non_max_suppression",
    "reference",
    "schedules",
    "yxyx_to_cyxhw",
]

_MODULES = {
    "anchors": ("SSD300", "DefaultBoxSpec", "default_boxes", "default_boxes_cyxhw"),
    "boxes": ("areas", "cyxhw_to_yxyx", "iou", "yxyx_to_cyxhw"),
    "coding": ("decode_boxes", "encode_boxes"),
    "matching": ("match_boxes",),
    "nms": ("non_max_suppression",),
    "targets": ("encode_targets",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("reference", "schedules", "tf"):
        return importlib.import_module(f"gaudi_ops.{name}")
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"gaudi_ops.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'gaudi_ops' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "tf"})
