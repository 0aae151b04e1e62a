"""The program ssd_train with a network that costs next to nothing, for tests of all that is around the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gaudi_apps.runtime.settings import DeviceSettings
    from gaudi_distributed import Precision


def build_small_ssd(
    num_classes: int,
    *,
    depth: int = 34,
    width: float = 1.0,
    spec: Any = None,
    pool_padding: str = "same",
    dtype: str = "float32",
    reduce_statistics: Any = None,
    names: tuple[str, str, str] = ("hidden", "class", "box"),
) -> Any:
    """Make a model with the inputs and outputs of the detector, which answers the same at each default box.

    Files of weights are read by the names of layers; other names than the detector's are left out there.
    """
    from gaudi_models.layers import Network, make_batch_norm
    from gaudi_ops import SSD300
    from gaudi_ops.tf.keras_api import keras

    layers, spec = keras.layers, spec or SSD300
    images = keras.Input([spec.image_size, spec.image_size, 3], name="images")
    # In float32, for without AVX-512 TensorFlow adds values of bfloat16 in it: those of 2500 pixels are lost.
    x = layers.AveragePooling2D(50, name="pool", dtype="float32")(images)
    x = make_batch_norm(reduce_statistics, momentum=0.9, name="conv1_bn", dtype=dtype)(x)
    x = layers.Flatten(name="flatten", dtype=dtype)(x)
    x = layers.Dense(128, activation="relu", name=names[0], dtype=dtype)(x)
    outputs = [
        layers.RepeatVector(spec.num_boxes, name=f"{name}s", dtype="float32")(
            layers.Dense(size, name=name, dtype="float32")(x)
        )
        for name, size in ((names[1], num_classes), (names[2], 4))
    ]
    return Network(images, outputs, name=f"small_{pool_padding}_{depth}")


if __name__ == "__main__":
    from gaudi_apps import ssd_train
    from gaudi_apps.runtime import tensorflow as tensorflow_framework

    start_tensorflow = tensorflow_framework.start_tensorflow

    def start(settings: DeviceSettings) -> Precision:
        """Exchange the network as soon as TensorFlow may be imported."""
        precision = start_tensorflow(settings)
        import gaudi_models.ssd

        gaudi_models.ssd.build_ssd = build_small_ssd
        return precision

    tensorflow_framework.start_tensorflow = start
    ssd_train.main()
