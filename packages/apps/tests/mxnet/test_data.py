"""The images that the flags of the program in MXNet name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from gaudi_apps.mxnet.application import open_source
from gaudi_apps.mxnet.config import SSDMXNetConfig


def test_turned_images_are_read_as_the_other_split_tells(
    tmp_path: Path, write_turned_split: Callable[[Path, str], None]
) -> None:
    config = SSDMXNetConfig()
    config = replace(config, data=replace(config.data, coco_root=str(tmp_path), dataset="plain"))
    write_turned_split(tmp_path, "val")
    alone, boxes = open_source(config, "val").read(0).boxes_yxyx, [[0.1, 0.1, 0.3, 0.35]]
    np.testing.assert_allclose(alone, boxes, atol=1e-6)
    write_turned_split(tmp_path, "train")
    np.testing.assert_allclose(open_source(config, "val").read(0).boxes_yxyx, [[0.7, 0.65, 0.9, 0.9]], atol=1e-6)
