"""Mathematics of single-shot detectors and classifiers: NumPy at the top level, TensorFlow in `gaudi_ops.tf`.

Names are loaded when they are first used, so that schedules cost no NumPy and NumPy users need no TensorFlow.
"""

from typing import TYPE_CHECKING

from gaudi_ops.lazy import make_lazy

if TYPE_CHECKING:
    from gaudi_ops import reference, schedules
    from gaudi_ops import tf as tf
    from gaudi_ops.anchors import SSD300, SSD512, SSD_SPECS, DefaultBoxSpec, default_boxes, default_boxes_cyxhw
    from gaudi_ops.boxes import areas, cyxhw_to_yxyx, iou, non_max_suppression, yxyx_to_cyxhw
    from gaudi_ops.targets import decode_boxes, encode_boxes, encode_targets, match_boxes

    __version__: str

# Without tf: a star import is the NumPy half, and works without TensorFlow.
__all__ = [
    "SSD300",
    "SSD512",
    "SSD_SPECS",
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
    "": ("reference", "schedules", "tf"),
    "anchors": ("SSD300", "SSD512", "SSD_SPECS", "DefaultBoxSpec", "default_boxes", "default_boxes_cyxhw"),
    "boxes": ("areas", "cyxhw_to_yxyx", "iou", "non_max_suppression", "yxyx_to_cyxhw"),
    "targets": ("decode_boxes", "encode_boxes", "encode_targets", "match_boxes"),
}

__getattr__, __dir__ = make_lazy("gaudi_ops", _MODULES, of_tensorflow=["tf"])
