"""Mathematics of single-shot detectors and classifiers: NumPy at the top level, TensorFlow in `gaudi_ops.tf`.

Names are loaded when they are first used, so that schedules cost no NumPy and NumPy users need no TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaudi_ops import reference, schedules
    from gaudi_ops import tf as tf
    from gaudi_ops.anchors import SSD300, DefaultBoxSpec, default_boxes, default_boxes_cyxhw
    from gaudi_ops.boxes import areas, cyxhw_to_yxyx, iou, non_max_suppression, yxyx_to_cyxhw
    from gaudi_ops.targets import decode_boxes, encode_boxes, encode_targets, match_boxes

    __version__: str

# Without tf: a star import is the NumPy half, and works without TensorFlow.
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

_SUBMODULES = ("reference", "schedules", "tf")
_MODULES = {
    "anchors": ("SSD300", "DefaultBoxSpec", "default_boxes", "default_boxes_cyxhw"),
    "boxes": ("areas", "cyxhw_to_yxyx", "iou", "non_max_suppression", "yxyx_to_cyxhw"),
    "targets": ("decode_boxes", "encode_boxes", "encode_targets", "match_boxes"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"gaudi_ops.{name}")
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("gaudi-ops")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"gaudi_ops.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'gaudi_ops' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", *(["tf"] if _has_tensorflow() else [])})


def _has_tensorflow() -> bool:
    """Find out if TensorFlow is installed, without importing it: `help` reads every name that `dir` lists."""
    from importlib.util import find_spec

    try:
        return find_spec("tensorflow") is not None
    except ImportError:
        return False
