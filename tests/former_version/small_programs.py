"""Run a program with a network that costs next to nothing: `python small_programs.py PROGRAM ARGUMENTS...`.

`THEN` among the arguments begins those of another run by the same process, which comes after a run that has succeeded.
It works with the packages of this version and of the former one, for it exchanges the networks as their modules are
imported, and knows nothing else of either.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import itertools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SIDE = 50  # of what is averaged first, in pixels


def build_small_ssd(num_classes: int, *, pool_padding: str = "same", dtype: str = "float32", **_: Any) -> Any:
    """Return a detector for Keras, which answers the same at each default box."""
    keras = importlib.import_module("gaudi_ops.tf.keras_api").keras
    layers = keras.layers
    images = keras.Input([300, 300, 3], name="images")
    x = layers.AveragePooling2D(SIDE, name="pool", dtype=dtype)(images)
    x = layers.BatchNormalization(momentum=0.9, name="conv1_bn", dtype=dtype)(x)
    x = layers.Flatten(name="flatten", dtype=dtype)(x)
    x = layers.Dense(16, activation="relu", name="hidden", dtype=dtype)(x)
    outputs = [
        layers.RepeatVector(8732, name=f"{name}s", dtype="float32")(layers.Dense(size, name=name, dtype="float32")(x))
        for name, size in (("class", num_classes), ("box", 4))
    ]
    return keras.Model(images, outputs, name=f"small_{pool_padding}")


def build_small_classifier(name: str, num_classes: int, *, image_size: int, **options: Any) -> Any:
    """Return a classifier for Keras."""
    keras = importlib.import_module("gaudi_ops.tf.keras_api").keras
    layers, dtype = keras.layers, options.get("dtype", "float32")
    images = keras.Input([image_size, image_size, 3], name="images")
    x = layers.Rescaling(1 / 128, name="scale", dtype=dtype)(images)
    x = layers.Conv2D(8, 3, 4, use_bias=False, name="conv1", dtype=dtype)(x)
    x = layers.BatchNormalization(momentum=0.9, name="conv1_bn", dtype=dtype)(x)
    x = layers.ReLU(name="relu", dtype=dtype)(x)
    x = layers.GlobalAveragePooling2D(name="features", dtype="float32")(x)
    return keras.Model(images, layers.Dense(num_classes, name="logits", dtype="float32")(x), name=name)


def build_small_mxnet_ssd(
    num_classes: int, *, pool_padding: str = "symmetric", layout: str = "NCHW", reduce_statistics: Any = None, **_: Any
) -> Any:
    """Return a detector for MXNet, which answers the same at each default box."""
    from mxnet.gluon import HybridBlock

    layers = importlib.import_module("gaudi_models.mxnet.layers")
    options: dict[str, Any] = {"layout": layout, "dtype": "float32"}

    class SmallSSD(HybridBlock):
        def __init__(self) -> None:
            super().__init__(prefix="")
            self.padding = importlib.import_module("gaudi_models.padding").SSD_PADDINGS[pool_padding]
            self.layout = layout
            self.norm = layers.BatchNorm(3, layout=layout, prefix="conv1_bn_", reduce_statistics=reduce_statistics)
            self.hidden = layers.Convolution(16, 300 // SIDE, channels=3, pad=0, prefix="conv1_", **options)
            heads: dict[str, Any] = {"channels": 16, "use_bias": True, **options}
            self.class_head = layers.Convolution(num_classes, 1, prefix="class_", **heads)
            self.box_head = layers.Convolution(4, 1, prefix="box_", **heads)

        def hybrid_forward(self, F: Any, images: Any) -> Any:  # noqa: N803 - Gluon's name
            pooled = F.Pooling(images, kernel=(SIDE, SIDE), stride=(SIDE, SIDE), pool_type="avg")
            x = F.relu(self.hidden(self.norm(pooled)))
            rows = [F.reshape(head(x), (0, 1, -1)) for head in (self.class_head, self.box_head)]
            return tuple(F.repeat(row, 8732, axis=1) for row in rows)

    return SmallSSD()


# By module: the function that builds a network, and what takes its place.
BUILDERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "gaudi_models.ssd": ("build_ssd", build_small_ssd),
    "gaudi_models.classifiers": ("build_classifier", build_small_classifier),
    "gaudi_models.mxnet.ssd": ("build_ssd", build_small_mxnet_ssd),
}


class ExchangeNetworks:
    """Exchange the functions that build networks in each module of theirs, once Python has executed it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module as Python does; Python calls this for each import."""
        if name not in BUILDERS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_exchange(module: ModuleType) -> None:
            execute(module)
            setattr(module, *BUILDERS[name])

        spec.loader.exec_module = execute_and_exchange  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    sys.meta_path.insert(0, ExchangeNetworks)
    program, *arguments = sys.argv[1:]
    main = importlib.import_module(f"gaudi_apps.{program}").main
    for is_then, run in itertools.groupby(arguments, "THEN".__eq__):
        if not is_then:
            try:
                main([*run])
            except SystemExit as end:
                if end.code:
                    raise
