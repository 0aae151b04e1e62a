"""Networks in Keras: ResNets, ResNeXts and the single-shot detector. They know no loss, no suppression and no device.

Names are loaded when they are first used, so that sizes and weights can be read without TensorFlow.
"""

from typing import TYPE_CHECKING

from gaudi_ops.lazy import make_lazy

if TYPE_CHECKING:
    from gaudi_models.architectures import CLASSIFIERS, count_parameters
    from gaudi_models.classifiers import build_classifier, feature_extractor, freeze_backbone
    from gaudi_models.errors import MissingWeightsError, ModelsError, UnsafeWeightsError, WeightsError
    from gaudi_models.resnet import ResNetBackbone
    from gaudi_models.ssd import build_ssd
    from gaudi_models.weights import (
        LoadReport,
        WeightsFile,
        WeightsMetadata,
        assign_weights,
        convert_weights,
        read_weights,
        write_weights,
    )

    __version__: str

__all__ = [
    "CLASSIFIERS",
    "LoadReport",
    "MissingWeightsError",
    "ModelsError",
    "ResNetBackbone",
    "UnsafeWeightsError",
    "WeightsError",
    "WeightsFile",
    "WeightsMetadata",
    "assign_weights",
    "build_classifier",
    "build_ssd",
    "convert_weights",
    "count_parameters",
    "feature_extractor",
    "freeze_backbone",
    "read_weights",
    "write_weights",
]

_MODULES = {
    "architectures": ("CLASSIFIERS", "count_parameters"),
    "classifiers": ("build_classifier", "feature_extractor", "freeze_backbone"),
    "errors": ("MissingWeightsError", "ModelsError", "UnsafeWeightsError", "WeightsError"),
    "resnet": ("ResNetBackbone",),
    "ssd": ("build_ssd",),
    "weights": (
        "LoadReport",
        "WeightsFile",
        "WeightsMetadata",
        "assign_weights",
        "convert_weights",
        "read_weights",
        "write_weights",
    ),
}
_OF_TENSORFLOW = [name for module in ("classifiers", "resnet", "ssd") for name in _MODULES[module]]

__getattr__, __dir__ = make_lazy("gaudi_models", _MODULES, of_tensorflow=_OF_TENSORFLOW)
