"""Training, evaluation and prediction programs: detectors and classifiers on Gaudi, GPU and CPU.

Names are loaded when they are first used. `Detector` and `Classifier` need TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaudi_apps.classification.classifier import Classification, Classifier
    from gaudi_apps.detection.detector import Detector, ObjectDetections
    from gaudi_apps.training.trainer import Callback, Trainer

    __version__: str

__all__ = ["Callback", "Classification", "Classifier", "Detector", "ObjectDetections", "Trainer"]

_MODULES = {
    "classification.classifier": ("Classification", "Classifier"),
    "detection.detector": ("Detector", "ObjectDetections"),
    "training.trainer": ("Callback", "Trainer"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
_OF_TENSORFLOW = frozenset(name for name, module in _MODULE_OF.items() if module != "training.trainer")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("gaudi-apps")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"gaudi_apps.{_MODULE_OF[name]}"), name)
    else:
        raise AttributeError(f"module 'gaudi_apps' has no attribute {name!r}", name=name)
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
