"""TensorFlow operations of single-shot detectors and classifiers: targets, losses, convolution, optimizers.

Needs a TensorFlow, of any distribution: without one, importing this raises an ImportError that names the extra.
"""

from gaudi_ops.lazy import use_onednn

try:
    use_onednn()
    import tensorflow  # noqa: F401, ICN001
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError(
        "gaudi_ops.tf needs TensorFlow, which is not installed; "
        "pip install 'gaudi-ops[tensorflow]' (or 'gaudi-ops[tensorflow-cpu]'), or keep to the NumPy half of gaudi_ops"
    ) from error

from gaudi_ops.tf.batch_norm import synchronized_batch_norm
from gaudi_ops.tf.classification import in_top_k, mixup, smoothed_softmax_cross_entropy
from gaudi_ops.tf.convolution import GroupedConv2D, grouped_conv2d, pointwise_conv2d
from gaudi_ops.tf.detection import decode_boxes, default_boxes, encode_targets, non_max_suppression
from gaudi_ops.tf.losses import SoftmaxCrossEntropyMME, SSDLoss, softmax_cross_entropy_mme, ssd_loss
from gaudi_ops.tf.masks import topk_mask
from gaudi_ops.tf.optimizers import (
    LARS,
    LARS_SKIP,
    ExponentialMovingAverage,
    LarsSGD,
    MomentumSGD,
    TensorSchedule,
    l2_loss,
)
from gaudi_ops.tf.pruning import MagnitudePruning, magnitude_mask

__all__ = [
    "LARS",
    "LARS_SKIP",
    "ExponentialMovingAverage",
    "GroupedConv2D",
    "LarsSGD",
    "MagnitudePruning",
    "MomentumSGD",
    "SSDLoss",
    "SoftmaxCrossEntropyMME",
    "TensorSchedule",
    "decode_boxes",
    "default_boxes",
    "encode_targets",
    "grouped_conv2d",
    "in_top_k",
    "l2_loss",
    "magnitude_mask",
    "mixup",
    "non_max_suppression",
    "pointwise_conv2d",
    "smoothed_softmax_cross_entropy",
    "softmax_cross_entropy_mme",
    "ssd_loss",
    "synchronized_batch_norm",
    "topk_mask",
]
