"""The program ssd_mxnet_train with a network that costs next to nothing, for tests of all around the network."""

from __future__ import annotations

from typing import Any

SIDE = 50  # of what is averaged first, in pixels


def build_small_ssd(
    num_classes: int,
    *,
    pool_padding: str = "symmetric",
    layout: str = "NCHW",
    precision: str = "fp32",
    reduce_statistics: Any = None,
) -> Any:
    """Make a block with the inputs, outputs and names of the detector, which answers the same at each default box."""
    from mxnet.gluon import HybridBlock

    from gaudi_models.mxnet.layers import BatchNorm, Convolution
    from gaudi_models.padding import SSD_PADDINGS

    options: dict[str, Any] = {"layout": layout, "dtype": "float32"}

    class SmallSSD(HybridBlock):
        def __init__(self) -> None:
            super().__init__(prefix="")
            self.padding, self.layout = SSD_PADDINGS[pool_padding], layout  # type: ignore[index]
            self.norm = BatchNorm(3, layout=layout, prefix="conv1_bn_", reduce_statistics=reduce_statistics)
            hidden: dict[str, Any] = {"channels": 3, "pad": 0, "prefix": "conv1_"}
            self.hidden = Convolution(64, 300 // SIDE, **hidden, **options)
            self.class_head = Convolution(num_classes, 1, channels=64, prefix="class_", use_bias=True, **options)
            self.box_head = Convolution(4, 1, channels=64, prefix="box_", use_bias=True, **options)

        def hybrid_forward(self, F: Any, images: Any) -> Any:  # noqa: N803 - Gluon's name
            pooled = F.Pooling(images, kernel=(SIDE, SIDE), stride=(SIDE, SIDE), pool_type="avg")
            x = F.relu(self.hidden(self.norm(pooled)))
            rows = [F.reshape(head(x), (0, 1, -1)) for head in (self.class_head, self.box_head)]
            return tuple(F.repeat(row, 8732, axis=1) for row in rows)

    return SmallSSD()


if __name__ in ("__main__", "__mp_main__"):  # the latter where it validates in the background
    import gaudi_models.mxnet.ssd

    gaudi_models.mxnet.ssd.build_ssd = build_small_ssd  # type: ignore[assignment]

if __name__ == "__main__":
    from gaudi_apps import ssd_mxnet_train

    ssd_mxnet_train.main()
