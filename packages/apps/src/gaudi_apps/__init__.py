"""Training, evaluation and prediction programs: detectors and classifiers on Gaudi, GPU and CPU."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module 'gaudi_apps' has no attribute {name!r}", name=name)
    from importlib.metadata import version

    globals()[name] = value = version("gaudi-apps")
    return value
