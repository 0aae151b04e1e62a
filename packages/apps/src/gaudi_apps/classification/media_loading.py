"""Whether images are loaded by the media engine of Gaudi2, by the four rules of the original, and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

FALLBACK = "FORCE_HABANA_IMAGENET_LOADER_FALLBACK"
# The names of SynapseAI 1.14; older ones had one module, hpu_media_loader.
MODULES = ("habana_frameworks.medialoaders", "habana_frameworks.mediapipe")
DISTRIBUTION = "habana-media-loader"
PCI_DEVICE = Path("sys/class/accel/accel0/device/device")
GAUDI2 = "0x1020"


@dataclass(frozen=True)
class MediaLoading:
    """A decision, and the reason in words."""

    on_hardware: bool
    reason: str


def choose_media_loading(
    jpeg_data_dir: str | None,
    environ: Mapping[str, str],
    *,
    root: Path = Path("/"),
    is_installed: Callable[[str], bool] | None = None,
) -> MediaLoading:
    """Decide by four rules: the device is a Gaudi2, the loader is installed, JPEG files are named, nobody forbids it.

    Args:
        jpeg_data_dir: folder of JPEG files, if one is named.
        environ: environment variables.
        root: of the file system.
        is_installed: whether there is a module of a name; None: as Python finds it.
    """
    if not _is_gaudi2(root / PCI_DEVICE):
        return MediaLoading(False, "the device is no Gaudi2")
    if not all(map(is_installed or _is_installed, MODULES)):
        return MediaLoading(False, f"{DISTRIBUTION} is not installed")
    if jpeg_data_dir is None:
        return MediaLoading(False, "--jpeg_data_dir is not given")
    if environ.get(FALLBACK, "").lower() in ("1", "true"):
        return MediaLoading(False, f"{FALLBACK} is set")
    return MediaLoading(True, f"a Gaudi2, {DISTRIBUTION} and {jpeg_data_dir} are there")


def describe_media_loading(loading: MediaLoading, data_dir: str | None) -> str:
    """Say in one line whether the engine loads images, why not, and what is read in its place.

    The engine's own pipeline is not part of this version, so it is refused where the original would have used it.

    Args:
        loading: the decision.
        data_dir: folder that images are read from; None with random images.
    """
    text = "refused, for it is not part of this version" if loading.on_hardware else "not used"
    read = "" if data_dir is None else f"; images are read from {data_dir} by the processor"
    return f"hardware media loading: {text}: {loading.reason}{read}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def _is_gaudi2(path: Path) -> bool:
    return path.is_file() and path.read_text(encoding="ascii", errors="replace").strip() == GAUDI2
