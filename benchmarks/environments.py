"""Environments of other programs, made by venv and pip, because pip's settings say where PyTorch for CPUs is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".nox"
TORCHVISION = ("torch==2.14.1", "torchvision==0.29.1")


def make_environment(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of an environment below .nox, which is made where it is missing or has other requirements.

    Raises:
        CalledProcessError: it cannot be made.
        OSError: the folder cannot be written.
    """
    folder = FOLDER / name
    python, ready, wanted = folder / "bin" / "python", folder / "ready", " ".join(requirements)
    if not ready.exists() or ready.read_text(encoding="utf-8") not in ("", wanted):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *requirements], check=True)
        ready.write_text(wanted, encoding="utf-8")
    return python
