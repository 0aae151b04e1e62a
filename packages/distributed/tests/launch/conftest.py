"""Provide environments and wheels for the build of Horovod: real ones, whose distributions hold next to nothing."""

from __future__ import annotations

import sys
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gaudi_distributed.launch.presets import load_presets

MakeEnvironment = Callable[..., Path]
MakeWheel = Callable[..., Path]


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that must never appear, in the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "canary"


@pytest.fixture
def make_environment(tmp_path: Path) -> MakeEnvironment:
    """Return the function that makes an environment with distributions of these versions; it returns its Python."""

    def make(**versions: str) -> Path:
        folder = tmp_path / f"environment{len(list(tmp_path.glob('environment*')))}"
        venv.create(folder, with_pip=False, symlinks=True)
        packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        for module, version in versions.items():
            name = module.replace("_", "-")
            about = packages / f"{module}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (about / "RECORD").touch()
        return folder / "bin" / "python"

    return make


@pytest.fixture
def make_wheel() -> MakeWheel:
    """Return the function that writes Horovod's wheel with this module for TensorFlow into a folder."""

    def make(folder: Path, module: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "horovod-0.28.1-py3-none-any.whl"
        about = "horovod-0.28.1.dist-info"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("horovod/__init__.py", "")
            wheel.writestr("horovod/tensorflow/__init__.py", module)
            wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
        return path

    return make


@pytest.fixture
def register(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return the function that installs a distribution with one preset, registered under this object."""
    load_presets.cache_clear()

    def install(target: str) -> None:
        about = tmp_path / "own-1.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1\n")
        (about / "entry_points.txt").write_text(f"[gaudi_distributed.presets]\nown = {target}\n")
        (tmp_path / "own_presets.py").write_text(
            "from gaudi_distributed.launch.presets import Preset\n"
            "PRESETS = {'own-2': Preset('two ranks', 1, 2, 'none', command=('own_train', '--fast'), lane='own')}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    load_presets.cache_clear()
