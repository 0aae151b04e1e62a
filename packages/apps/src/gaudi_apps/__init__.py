"""Training, evaluation and prediction programs: detectors and classifiers on Gaudi, GPU and CPU.

Names are loaded when they are first used. `Detector` and `Classifier` need TensorFlow.
"""

from typing import TYPE_CHECKING

from gaudi_ops.lazy import make_lazy

if TYPE_CHECKING:
    from gaudi_apps.classification.classifier import Classification, Classifier
    from gaudi_apps.cli.program import open_trainer
    from gaudi_apps.detection.detector import Detector, ObjectDetections
    from gaudi_apps.training.trainer import Callback, Trainer

    __version__: str

__all__ = ["Callback", "Classification", "Classifier", "Detector", "ObjectDetections", "Trainer", "open_trainer"]

_MODULES = {
    "classification.classifier": ("Classification", "Classifier"),
    "cli.program": ("open_trainer",),
    "detection.detector": ("Detector", "ObjectDetections"),
    "training.trainer": ("Callback", "Trainer"),
}
_OF_TENSORFLOW = (*_MODULES["classification.classifier"], *_MODULES["detection.detector"])

__getattr__, __dir__ = make_lazy("gaudi_apps", _MODULES, of_tensorflow=_OF_TENSORFLOW)
