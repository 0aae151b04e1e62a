"""SSD300 with ResNet-34 in plain Gluon, and its loss with two sorts: what the network and the loss are compared with.

Layers of `gluon.nn` one after the other; the hardest negatives by the rank of a rank, as GluonCV has it.
"""

from __future__ import annotations

from typing import Any

from mxnet.gluon import HybridBlock, nn

BLOCKS = ((64, 3, 1), (128, 4, 2), (256, 6, 1))
EXTRAS = ((256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 1, 0), (128, 256, 1, 0))
BOXES = (4, 6, 6, 6, 4, 4)


class PlainBlock(HybridBlock):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, filters: int, stride: int, projects: bool) -> None:
        super().__init__()
        self.main = nn.HybridSequential()
        self.main.add(
            nn.Conv2D(filters, 3, stride, 1, use_bias=False),
            nn.BatchNorm(),
            nn.Activation("relu"),
            nn.Conv2D(filters, 3, 1, 1, use_bias=False),
            nn.BatchNorm(gamma_initializer="zeros"),
        )
        self.shortcut = nn.HybridSequential()
        if projects:
            self.shortcut.add(nn.Conv2D(filters, 1, stride, use_bias=False), nn.BatchNorm())

    def hybrid_forward(self, F: Any, x: Any) -> Any:  # noqa: N803 - Gluon's name
        """Features."""
        return F.relu(self.main(x) + self.shortcut(x))


class PlainSSD(HybridBlock):
    """Logits and offsets of images [batch, 3, 300, 300]."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self._num_classes = num_classes
        self.levels, self.class_heads, self.box_heads = (nn.HybridSequential() for _ in range(3))
        backbone = nn.HybridSequential()
        backbone.add(
            nn.Conv2D(64, 7, 2, 3, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D(3, 2, 1)
        )
        for filters, count, stride in BLOCKS:
            for number in range(count):
                backbone.add(PlainBlock(filters, stride if number == 0 else 1, number == 0 and filters > 64))
        self.levels.add(backbone)
        for narrow, wide, stride, pad in EXTRAS:
            level = nn.HybridSequential()
            level.add(nn.Conv2D(narrow, 1, activation="relu"), nn.Conv2D(wide, 3, stride, pad, activation="relu"))
            self.levels.add(level)
        for boxes in BOXES:
            self.class_heads.add(nn.Conv2D(boxes * num_classes, 3, 1, 1))
            self.box_heads.add(nn.Conv2D(boxes * 4, 3, 1, 1))

    def hybrid_forward(self, F: Any, x: Any) -> tuple[Any, Any]:  # noqa: N803 - Gluon's name
        """Rows of all levels."""
        logits: list[Any] = []
        offsets: list[Any] = []
        for level, class_head, box_head in zip(self.levels, self.class_heads, self.box_heads, strict=True):
            x = level(x)
            for rows, head, channels in ((logits, class_head, self._num_classes), (offsets, box_head, 4)):
                rows.append(F.reshape(F.transpose(head(x), axes=(0, 2, 3, 1)), shape=(0, -1, channels)))
        return F.concat(*logits, dim=1), F.concat(*offsets, dim=1)


class PlainLoss(HybridBlock):
    """The detector's loss, hard negatives by two sorts."""

    def hybrid_forward(  # noqa: D102
        self,
        F: Any,  # noqa: N803 - Gluon's name
        logits: Any,
        offsets: Any,
        classes: Any,
        target_offsets: Any,
        num_matched: Any,
    ) -> Any:
        positive = classes > 0
        entropy = -F.pick(F.log_softmax(logits), classes)
        rank = F.argsort(F.argsort(entropy * (positive - 1), axis=1), axis=1)
        hard = F.broadcast_lesser(rank, F.expand_dims(3 * positive.sum(axis=1), axis=1))
        class_loss = F.where(positive + hard > 0, entropy, F.zeros_like(entropy)).sum(axis=1)
        box_loss = (F.smooth_l1(offsets - target_offsets, scalar=1.0).sum(axis=2) * positive).sum(axis=1)
        return F.mean((class_loss + box_loss) / num_matched)
