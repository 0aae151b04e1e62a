from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from gaudi_apps.classification.media_loading import (
    PCI_DEVICE,
    MediaLoading,
    choose_media_loading,
    describe_media_loading,
)


@pytest.mark.parametrize(
    ("device", "installed", "jpeg_data_dir", "environ", "reason"),
    [
        ("0x1020", True, "jpegs", {}, "a Gaudi2, habana-media-loader and jpegs are there"),
        ("0x1000", True, "jpegs", {}, "the device is no Gaudi2"),
        (None, True, "jpegs", {}, "the device is no Gaudi2"),
        ("0x1020", False, "jpegs", {}, "habana-media-loader is not installed"),
        ("0x1020", True, None, {}, "--jpeg_data_dir is not given"),
        ("0x1020", True, "jpegs", {"FORCE_HABANA_IMAGENET_LOADER_FALLBACK": "1"}, "LOADER_FALLBACK is set"),
        ("0x1020", True, "jpegs", {"FORCE_HABANA_IMAGENET_LOADER_FALLBACK": "0"}, "are there"),
    ],
)
def test_each_rule_decides_and_says_so(
    tmp_path: Path,
    device: str | None,
    installed: bool,
    jpeg_data_dir: str | None,
    environ: Mapping[str, str],
    reason: str,
) -> None:
    if device is not None:
        (tmp_path / PCI_DEVICE).parent.mkdir(parents=True)
        (tmp_path / PCI_DEVICE).write_text(f"{device}\n")
    choice = choose_media_loading(jpeg_data_dir, environ, root=tmp_path, is_installed=lambda name: installed)
    assert reason in choice.reason
    assert choice.on_hardware == reason.endswith("are there")


def test_what_is_read_is_said_in_one_line() -> None:
    refused = describe_media_loading(MediaLoading(True, "it could"), "jpegs")
    unused = describe_media_loading(MediaLoading(False, "no Gaudi2"), "jpegs")
    assert "refused" in refused
    assert "not used: no Gaudi2" in unused
    assert "from jpegs" in refused
    assert "from jpegs" in unused
    assert "\n" not in refused + unused
    assert describe_media_loading(MediaLoading(False, "no Gaudi2"), None).endswith("no Gaudi2")


def test_nothing_of_the_vendors_is_installed_here(tmp_path: Path) -> None:
    (tmp_path / PCI_DEVICE).parent.mkdir(parents=True)
    (tmp_path / PCI_DEVICE).write_text("0x1020\n")
    assert choose_media_loading("jpegs", {}, root=tmp_path).reason == "habana-media-loader is not installed"
