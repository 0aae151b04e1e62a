"""Networks in Keras: ResNets, ResNeXts and the single-shot detector. They know no loss, no suppression and no device.

Names are loaded when they are first used, so that sizes and weights can be read without TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_OF_TENSORFLOW = frozenset(name for module in ("classifiers", "resnet", "ssd") for name in _MODULES[module])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("gaudi-models")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"gaudi_models.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'gaudi_models' has no attribute {name!r}", name=name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    hidden = frozenset() if _has_tensorflow() else _OF_TENSORFLOW
    return sorted({*globals(), *__all__, "__version__"} - hidden)


def _has_tensorflow() -> bool:
    """Find out if TensorFlow is installed, without importing it: `help` reads every name that `dir` lists."""
    from importlib.util import find_spec

    try:
        return find_spec("tensorflow") is not None
    except ImportError:
        return False
