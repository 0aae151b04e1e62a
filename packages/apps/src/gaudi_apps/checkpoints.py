"""Checkpoints: folders of one tensor file and a manifest, complete or not there.

Tensors are stored as safetensors, which holds numbers only: loading a checkpoint of somebody else runs no code of
theirs. A checkpoint is written under a temporary name, synced and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gaudi_datasets.errors import DataError, MissingInputError

FORMAT = "gaudi-apps checkpoint"
VERSION = 1
TENSORS = "state.safetensors"
MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as loaded.

    Attributes:
        step: steps that were done when it was written.
        tensors: arrays by name.
        facts: what the program that wrote it noted about the model, JSON values by name.
    """

    step: int
    tensors: Mapping[str, npt.NDArray[Any]]
    facts: Mapping[str, Any]


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: where they are; made on the first save.
        keep: how many of the newest are kept.
    """

    def __init__(self, folder: Path, *, keep: int = 20) -> None:
        self.folder = folder
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, rising."""
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir() if (path / MANIFEST).is_file())
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> Path:
        """Write a checkpoint, remove those that are too many, and return the new one's folder.

        Raises:
            OSError: the disk is full or may not be written to; the earlier checkpoints stay.
        """
        target = self.path(step)
        draft = target.with_name(f"{target.name}.tmp")
        draft.mkdir(parents=True, exist_ok=True)
        try:
            _write(draft, step, tensors, facts)
            if target.exists():
                _remove_files(target)
            os.replace(draft, target)
        except BaseException:
            _remove_files(draft)
            raise
        _sync(self.folder)
        for old in self.steps()[: -self._keep]:
            _remove_files(self.path(old))
        return target

    def load_newest(self) -> Checkpoint:
        """Load the checkpoint of the highest step.

        Raises:
            MissingInputError: there is none.
            DataError: its files are damaged or of another format.
        """
        steps = self.steps()
        if not steps:
            raise MissingInputError(f"{self.folder}: has no checkpoint; train first, or give another --model_dir")
        return load_checkpoint(self.path(steps[-1]))


def load_checkpoint(path: Path) -> Checkpoint:
    """Load one checkpoint folder.

    Raises:
        DataError: a file is missing, damaged, or of another format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise DataError(
                f"{path / MANIFEST}: is no checkpoint of version {VERSION} of this program; use another one"
            )
        if manifest["sha256"][TENSORS] != _sha256(path / TENSORS):
            raise DataError(f"{path / TENSORS}: is not what its manifest says; remove this checkpoint, use one before")
        return Checkpoint(int(manifest["step"]), load_file(path / TENSORS), dict(manifest["facts"]))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: is damaged ({error!r}); remove this checkpoint, use the one before") from error


def _write(draft: Path, step: int, tensors: Mapping[str, npt.NDArray[Any]], facts: Mapping[str, Any]) -> None:
    try:
        save_file(dict(tensors), draft / TENSORS)
    except SafetensorError as error:
        raise OSError(f"{draft / TENSORS}: {error}") from error
    sha256 = {TENSORS: _sha256(draft / TENSORS)}
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "sha256": sha256, "facts": dict(facts)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for name in (TENSORS, MANIFEST):
        _sync(draft / name)


def _remove_files(folder: Path) -> None:
    # Only the two files of a checkpoint, and the folder if that empties it: what else lies there is not ours.
    for name in (MANIFEST, TENSORS):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
