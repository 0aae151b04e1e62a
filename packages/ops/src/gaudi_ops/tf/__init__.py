"""TensorFlow operations of single-shot detectors: targets, losses, masks, decoding, suppression.

Needs a TensorFlow, of any distribution: without one, importing this raises an ImportError that names the extra.
"""

try:
    import tensorflow  # noqa: F401, ICN001
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError(
        "gaudi_ops.tf needs TensorFlow, which is not installed; "
        "pip install 'gaudi-ops[tensorflow]' (or 'gaudi-ops[tensorflow-cpu]'), or keep to the NumPy half of gaudi_ops"
    ) from error

from gaudi_ops.tf.averages import MovingAverages
from gaudi_ops.tf.cross_entropy import softmax_cross_entropy_mme
from gaudi_ops.tf.detection import decode_boxes, default_boxes, encode_targets, non_max_suppression
from gaudi_ops.tf.losses import ssd_loss
from gaudi_ops.tf.masks import topk_mask
from gaudi_ops.tf.optimizers import MomentumSGD

__all__ = [
    "MomentumSGD",
    "MovingAverages",
    "decode_boxes",
    "default_boxes",
    "encode_targets",
    "non_max_suppression",
    "softmax_cross_entropy_mme",
    "ssd_loss",
    "topk_mask",
]
