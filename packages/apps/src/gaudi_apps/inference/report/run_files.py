"""Read what a run left in its folder, for its report; what is missing or damaged is named, and the rest is used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from gaudi_apps.training.reports import Row, read_history
from gaudi_apps.training.run_dir import ANALYSIS, RUN_FILE, RUN_LOG, RunFolder
from gaudi_datasets.errors import MissingInputError

MAX_FILE_BYTES = 64 * 2**20  # of a JSON file; that of 5000 images and 80 classes has 200 kB


class RunFiles(NamedTuple):
    """The files of a run.

    Attributes:
        folder: of the run.
        settings: of ``run.json``.
        flags: of ``config.yaml``.
        log: of ``run_log.json``: plan, data, and the command, speed and environment of each start.
        history: rows of ``history.jsonl``.
        evaluations: rows of ``evaluations.jsonl``.
        evaluation: of ``evaluation.json``.
        analysis: of ``analysis.json``.
        missing: what could not be had, by what a reader looks for.
    """

    folder: Path
    settings: Mapping[str, Any]
    flags: Mapping[str, Any]
    log: Mapping[str, Any]
    history: list[Row]
    evaluations: list[Row]
    evaluation: Mapping[str, Any]
    analysis: Mapping[str, Any]
    missing: dict[str, str]


def read_run(folder: Path) -> RunFiles:
    """Read the files of a run.

    Raises:
        MissingInputError: there is no folder, or no run in it.
        DataError: its ``run.json`` is damaged.
    """
    if not folder.is_dir():
        raise MissingInputError("there is no such folder", path=folder, remedy="give the --model_dir of a run")
    settings = RunFolder(folder).read_settings()
    if settings is None and not (folder / "evaluation.json").is_file():
        raise MissingInputError(
            f"holds no run: there is no {RUN_FILE}", path=folder, remedy="give the --model_dir of a run"
        )
    missing: dict[str, str] = {}
    if settings is None:
        missing["Settings"] = f"there is no {RUN_FILE}"
    return RunFiles(
        folder,
        settings or {},
        _read_object(folder / "config.yaml", "Flags", missing),
        _read_object(folder / RUN_LOG, "Command, plan, speed and environment", missing),
        _read_rows(folder / "history.jsonl", "Curves", missing),
        _read_rows(folder / "evaluations.jsonl", "Metrics during training", missing),
        _read_object(folder / "evaluation.json", "Metrics", missing),
        _read_object(folder / ANALYSIS, "Errors, thresholds, calibration and images", missing),
        missing,
    )


def _read_object(path: Path, purpose: str, missing: dict[str, str]) -> dict[str, Any]:
    """Read a JSON or YAML file that holds an object; where it does not, say so and return an empty one."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except FileNotFoundError:
        missing[purpose] = f"there is no {path.name}"
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        missing[purpose] = f"{path.name} cannot be read: {next(iter(str(error).splitlines()), '')}"
    return {}


def _read_rows(path: Path, purpose: str, missing: dict[str, str]) -> list[Row]:
    """Read the rows of a history that hold a step and numbers."""
    try:
        rows = [
            {name: value for name, value in row.items() if isinstance(value, int | float)}
            for row in read_history(path)
            if isinstance(row, dict) and isinstance(row.get("step"), int)
        ]
    except (OSError, ValueError) as error:
        missing[purpose] = f"{path.name} cannot be read: {error}"
        return []
    if not rows:
        missing[purpose] = f"{path.name} has no rows" if path.is_file() else f"there is no {path.name}"
    return rows
