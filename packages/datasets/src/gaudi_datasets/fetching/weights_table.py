"""List the weights that `gaudi-datasets fetch weights` knows: addresses, checksums, and where each was published.

Files of torchvision carry the first eight digits of their SHA-256 in their names. The whole SHA-256 are those of
github.com/plai-group/ubc_primitives (primitives/cnn/cnn.py) for resnet34-333f7ec4, of the model card of OmniShotCut for
resnet18-f37072fd, and of
github.com/isarandi/tensorflow-resnetv1.5-like-pytorch (convert_weights.py) for the others; further repositories agree.

No SHA-256 of the original SSD's checkpoint was published. Its MD5 are in the README of release 0.14 of
github.com/HabanaAI/Model-References (TensorFlow/computer_vision/SSD_ResNet34), for files of the same names on another
server. So they are compared and shown, and the checksums within the files decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

TORCHVISION_URL = "https://download.pytorch.org/models"
BACKBONE_URL = "https://storage.googleapis.com/intel-optimized-tensorflow/models/ssd-backbone"
BACKBONE = "model.ckpt-28152"


@dataclass(frozen=True)
class WeightsFile:
    """A file on a server, and what was published about it: SHA-256, MD5 and bytes, empty or 0 where they were not."""

    url: str
    sha256: str = ""
    size: int = 0
    md5: str = ""

    @property
    def name(self) -> str:
        """Return the last part of the address."""
        return urlsplit(self.url).path.rpartition("/")[2]


@dataclass(frozen=True)
class Weights:
    """Files that belong together.

    Attributes:
        purpose: what they are for.
        files: in the order of fetching.
        licence: what their publisher states.
        usage: the flag that takes them, after the program's name.
        folder: where they go, below the folder that is fetched into; empty for that folder.
    """

    purpose: str
    files: tuple[WeightsFile, ...]
    licence: str
    usage: str
    folder: str = ""


def _torchvision(purpose: str, usage: str, name: str, sha256: str, size: int = 0) -> Weights:
    file = WeightsFile(f"{TORCHVISION_URL}/{name}-{sha256[:8]}.pth", sha256, size)
    return Weights(purpose, (file,), "BSD-3-Clause (torchvision)", usage)


def _classifier(name: str, sha256: str, size: int = 0) -> Weights:
    purpose = "a classifier of ImageNet: torchvision's file"
    return _torchvision(purpose, "resnet_train --fine_tune --pretrained_filepath", name, sha256, size)


WEIGHTS: Mapping[str, Weights] = {
    "resnet18": _torchvision(
        "a smaller backbone of the SSD: torchvision's file",
        "ssd_train --backbone resnet18 --resnet_checkpoint",
        "resnet18",
        "f37072fd47e89c5e827621c5baffa7500819f7896bbacec160b1a16c560e07ec",
        46830571,
    ),
    "resnet34": _torchvision(
        "the SSD's backbone: torchvision's file, which the original in MXNet began with",
        "ssd_mxnet_train --pretrained_backbone",
        "resnet34",
        "333f7ec4c6338da2cbed37f1fc0445f9624f1355633fa1d7eab79a91084c6cef",
        87306240,
    ),
    "resnet34-tensorflow": Weights(
        "the SSD's backbone: the checkpoint that the original in TensorFlow began with",
        (
            WeightsFile(f"{BACKBONE_URL}/{BACKBONE}.index", md5="96080eb2d106f7bd4a682bde003b1436"),
            WeightsFile(f"{BACKBONE_URL}/{BACKBONE}.data-00000-of-00001", md5="1b7fabd0872b765da2fc60af46fe6390"),
            WeightsFile(f"{BACKBONE_URL}/{BACKBONE}.meta", md5="6b31dd1a042cdbbb2fd7fcd6f2c5e843"),
            WeightsFile(f"{BACKBONE_URL}/checkpoint", md5="7e9f4ba94c150b5c0c073cb738e7ad39"),
        ),
        "licence not stated",
        "ssd_train --resnet_checkpoint",
        folder="resnet34-tensorflow",
    ),
    "resnet50": _classifier("resnet50", "0676ba61b6795bbe1773cffd859882e5e297624d384b6993f7c9e683e722fb8a", 102530333),
    "resnet101": _classifier("resnet101", "63fe2227b86e8f1f2063f43a75c84d195911b6a0eace650907dd3dc62dd49a0a"),
    "resnet152": _classifier("resnet152", "394f9c45966e3651a89bbb78a48410a6755854ce4a5ab64927cf1c7247f85e58"),
}
