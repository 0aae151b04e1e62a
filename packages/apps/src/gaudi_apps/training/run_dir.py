"""The folder of a run: its settings, and the files that belong to it.

``run.json`` says both. It keeps two runs from mixing in one folder, and lets a run be removed without touching
anything else that lies there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gaudi_apps.runtime.errors import RunChangedError, RunInUseError, warn
from gaudi_apps.training.checkpoint import (
    BEST,
    CHECKPOINTS,
    MANIFEST,
    CheckpointFolder,
    describe_class_change,
    find_run_checkpoint,
    list_class_names,
    name_some,
)
from gaudi_apps.training.checkpoint import RUN_FILE as RUN_FILE
from gaudi_datasets.documents import CHECKSUM, require_seal, seal
from gaudi_datasets.errors import DataError, MissingInputError, UnsafeError
from gaudi_datasets.fetching.copies import fetch_copy
from gaudi_datasets.fetching.stores import is_url
from gaudi_datasets.fetching.uploads import WritableStore
from gaudi_datasets.output_files import write_json
from gaudi_ops.files import hold_lock, made_folder, read_owner, read_text, remove_leftovers, write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_models.weights import WeightsFile

ANALYSIS = "analysis.json"  # what the report tells besides the metrics of evaluation.json
RUN_LOG = "run_log.json"  # plan and data of the run; command, speed and environment of each start
REPORT = "report.html"
RECIPE, OF_RECIPE = "recipe.json", "gaudi-apps recipe"  # name and format, of gaudi_apps.training.recipe
LOCK = "run.lock"  # names the process that trains
FORMAT = "gaudi-apps run"
VERSION = 2  # of the first one, records have no checksum


class RunFolder:
    """A run's folder.

    Args:
        folder: made when the run begins.
        checkpoint_folders: names of the folders of checkpoints within, which remove their own files.
    """

    def __init__(self, folder: Path, checkpoint_folders: Sequence[str] = ("checkpoints",)) -> None:
        self.folder = folder
        self._checkpoint_folders = checkpoint_folders
        self._record_path = folder / RUN_FILE

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other trainings out of the folder within a context; make it, unless it stays empty.

        Raises:
            RunInUseError: another process trains here; nothing was written.
        """
        path = self.folder / LOCK

        def refuse() -> None:
            owner = read_owner(path)
            named = f"process {owner.get('process', '?')} on {owner.get('host', '?')} since {owner.get('began', '?')}"
            raise RunInUseError(
                f"another training runs there: {named}",
                path=self.folder,
                remedy=f"wait for its end or give another --model_dir, or remove {LOCK} if it has ended",
            )

        with made_folder(self.folder), hold_lock(path, waiting=refuse):
            for folder in (self.folder, self.folder / CHECKPOINTS, self.folder / BEST):
                remove_leftovers(folder)
            yield

    def validate(
        self,
        settings: Mapping[str, Any],
        *,
        files: Sequence[str],
        folders: Sequence[str],
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> bool:
        """See whether a run can begin here, or go on; nothing is changed.

        Args:
            settings: what decides the result of the run, JSON values by name.
            files: names of files that the run will write, which are its own once it has begun.
            folders: names of folders that it will write into; of what is in them, only what `register_files` is told
                is its own. None of the files and folders may be there before a run begins.
            defaults: values of settings that the run here may lack, because a release since then added them.
            aliases: names that settings had in earlier releases, each with the name of today.

        Returns:
            whether there is a run already.

        Raises:
            RunChangedError: there is a run of other settings.
            UnsafeError: there is no run, and one of the names is taken.
            DataError: ``run.json`` cannot be read.
        """
        if self._record_path.exists():
            # A release since the run began may have added settings, which the run had at their defaults.
            renamed = aliases or {}
            before = {renamed.get(name, name): value for name, value in self._read()["settings"].items()}
            added = {name: value for name, value in (defaults or {}).items() if name in settings and name not in before}
            _require_same(self._record_path, before, settings, added)
            return True
        names = (*self._checkpoint_folders, *files, *folders)
        taken = [name for name in names if os.path.lexists(self.folder / name) and not self._is_about_to_begin(name)]
        if taken:
            raise UnsafeError(
                f"is there, but by {RUN_FILE} no run wrote it",
                path=self.folder / taken[0],
                remedy="give another --model_dir",
            )
        return False

    def begin(
        self,
        settings: Mapping[str, Any],
        *,
        files: Sequence[str],
        folders: Sequence[str],
        recipe: Mapping[str, Any] | None = None,
        **earlier: Mapping[str, Any] | None,
    ) -> bool:
        """Begin a run here, or go on with the one that is here; all else is as of `validate`.

        The recipe is written before ``run.json``: of a run whose length was fitted, nothing else tells the length.
        """
        if self.validate(settings, files=files, folders=folders, **earlier):
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        if recipe is not None:
            write_json(self.folder / RECIPE, recipe)
        # Its checkpoints have the id, too, so that those of another run are told apart.
        run = {"format": FORMAT, "version": VERSION, "id": secrets.token_hex(16)}
        record = {**run, "settings": dict(settings), "files": sorted(files)}
        write_json(self._record_path, seal(record))
        return False

    def read_settings(self) -> dict[str, Any] | None:
        """Read the settings of the run that is here; None where there is none.

        Raises:
            DataError: ``run.json`` cannot be read.
        """
        if not self._record_path.exists():
            return None
        settings: dict[str, Any] = self._read()["settings"]
        return settings

    def write_data(self, data: Mapping[str, Any]) -> None:
        """Keep a description of the data, see `describe_data`, unless it is there."""
        path = self.folder / DATA_FILE
        if not path.exists():
            write_json(path, data)
            self.register_files(path)

    def read_data(self) -> Any:
        """Read the description of the data; None where the run has none that can be read."""
        try:
            return json.loads(read_text(self.folder / DATA_FILE))
        except (OSError, ValueError):
            return None

    def require_validation(self, split: str, data: Mapping[str, Any]) -> None:
        """Compare the validation images of a name, see `describe_data`, with those of the run so far.

        Raises:
            RunChangedError: they are others.
        """
        if change := self.describe_validation_change(split, data):
            raise RunChangedError(
                f"the run there is validated on other data: {change}",
                path=self.folder / VALIDATION_FILE,
                field="validation data",
                remedy="give the same, another --model_dir, or --clean to start over",
            )

    def describe_validation_change(self, split: str, data: Mapping[str, Any]) -> str:
        """Tell how images of a name differ from those that the run is validated on; empty: not, or nobody knows."""
        before = self._read_validation().get(split)
        if before is None or before["fingerprint"] == data["fingerprint"]:
            return ""
        return describe_data_change(before, data) or f"it has other images or classes of split {split!r}"

    def write_validation(self, split: str, data: Mapping[str, Any]) -> None:
        """Keep a description of the validation images of a name."""
        path, before = self.folder / VALIDATION_FILE, self._read_validation()
        if split not in before:
            write_json(path, seal({**before, split: data}))
            self.register_files(path)

    def _read_validation(self) -> dict[str, Any]:
        """Read what the run is validated on, by the name of the images; nothing where that is not known.

        Raises:
            OSError: the file is there and cannot be read.
        """
        path = self.folder / VALIDATION_FILE
        if not path.exists():
            return {}
        try:
            found = json.loads(read_text(path))
            require_seal(found, path)
        except (ValueError, RecursionError) as error:
            if isinstance(error, OSError):  # no regular file
                raise
            warn(f"{path}: is damaged, so the images that are given now count as those of the run")
            return {}
        return {name: data for name, data in found.items() if name != CHECKSUM}

    def register_files(self, *paths: Path) -> None:
        """Note files as the run's own, as soon as their names are known; without a run here nothing is noted."""
        if not self._record_path.exists():
            return
        record = self._read()
        names = {os.fspath(path.relative_to(self.folder)) for path in paths}
        if new := names - set(record["files"]):
            record = {**record, "version": VERSION, "files": sorted({*record["files"], *new})}
            write_json(self._record_path, seal(record))

    def clean(self) -> int:
        """Remove the run: its checkpoints and the files noted as its own, and folders that this empties.

        Returns:
            how many files were removed, checkpoints not counted.

        Raises:
            UnsafeError: there is something here, but no run.
        """
        if not self._record_path.exists():
            if self.folder.is_dir() and not all(self._is_about_to_begin(path.name) for path in self.folder.iterdir()):
                raise UnsafeError(f"holds files but no {RUN_FILE}, so --clean removes nothing", path=self.folder)
            return 0
        paths = [self.folder / name for name in self._read()["files"]]
        checkpoint_folders = [self.folder / name for name in self._checkpoint_folders]
        # All are looked at before the first file is removed.
        for folder in [*checkpoint_folders, *(path.parent for path in paths)]:
            self._require_inside(folder)
        for folder in checkpoint_folders:
            CheckpointFolder(folder).clear()
        removed = sum(self._remove(path) for path in paths)
        self._record_path.unlink()
        return removed

    def _is_about_to_begin(self, name: str) -> bool:
        """Return whether a file is the lock, or the recipe of a run that ended before its ``run.json`` was written."""
        if name == LOCK:
            return True
        try:
            text = read_text(self.folder / name) if name == RECIPE else "{}"
            return bool(json.loads(text)["format"] == OF_RECIPE)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _require_inside(self, folder: Path) -> None:
        """Raise UnsafeError for a folder outside the run: the record was tampered with, or a folder became a link."""
        if not folder.resolve().is_relative_to(self.folder.resolve()):
            raise UnsafeError(
                f"is outside the folder of the run in {self._record_path}", path=folder, remedy="remove it by hand"
            )

    def _remove(self, path: Path) -> bool:
        if not path.is_file() and not path.is_symlink():
            return False
        path.unlink()
        root, parent = self.folder.resolve(), path.parent.resolve()
        while parent != root and not any(parent.iterdir()):
            parent.rmdir()
            parent = parent.parent
        return True

    def _read(self) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(read_text(self._record_path))
            if record["format"] != FORMAT or record["version"] not in range(1, VERSION + 1):
                raise ValueError(f"format {record['format']!r}, version {record['version']!r}")
            if (record["version"] > 1 or CHECKSUM in record) and seal(record) != record:
                raise ValueError("it was changed, or is damaged")
            files, settings = record["files"], record["settings"]
            if not isinstance(settings, dict) or not isinstance(files, list):
                raise ValueError("files or settings are of the wrong type")
            if not all(isinstance(name, str) and "\0" not in name for name in files):
                raise ValueError("a name among files is none")
            return record
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"is no record of a run ({error})", path=self._record_path, remedy="give another --model_dir"
            ) from None


def fetch_weights(place: str | os.PathLike[str], *folders: str) -> Path:
    """Return a path of this machine as it is; fetch what weights are read of at a URL, and return its copy.

    Args:
        place: of a file, a checkpoint, an export or a run; of a run, its best or newest checkpoint is fetched.
        folders: of a run that are fetched, too.

    Raises:
        MissingInputError: there is nothing, or the run has no checkpoint.
        GaudiError: as by `gaudi_datasets.fetching.copies.fetch_copy`.
    """
    if not is_url(place) or WritableStore(place).find_file(RUN_FILE) is None:
        return fetch_copy(place)

    def select(names: Collection[str]) -> set[str]:
        manifest = rf"(({CHECKPOINTS}|{BEST})/step-(\d{{8,}}))/{re.escape(MANIFEST)}"
        found = [match for name in names if (match := re.fullmatch(manifest, name))]
        if not found:
            raise MissingInputError("has no checkpoint", path=place, remedy="train first, or give another run")
        chosen = max((match[2] == BEST, int(match[3]), match[1]) for match in found)[2]
        starts = tuple(f"{folder}/" for folder in (chosen, *folders))
        return {name for name in names if name == RUN_FILE or name.startswith(starts)}

    return fetch_copy(place, select)


def read_initial_weights(path: str, model_config: Mapping[str, Any]) -> WeightsFile:
    """Read the weights that --weights names, without heads of other classes than the data; of a run say which ones.

    Raises:
        MissingInputError: the run has no checkpoint.
        GaudiError: see `gaudi_models.weights.read_weights`.
    """
    from gaudi_models.weights import read_weights

    place, classes = fetch_weights(path), list_class_names(model_config)
    chosen = find_run_checkpoint(place)
    if chosen is None:
        return read_weights(place).for_classes(classes)
    which = "best" if chosen.parent.name == BEST else "newest"
    say(f"{path}: weights of its {which} checkpoint, {chosen}")
    return read_weights(chosen).for_classes(classes)


def write_analysis(folder: Path, analysis: Mapping[str, Any]) -> None:
    """Write what a report tells of an evaluation, as one line of JSON; its counts would fill thousands of lines."""
    write_file(folder / ANALYSIS, json.dumps(analysis, separators=(",", ":")) + "\n")


DATA_FILE, VALIDATION_FILE = "training_data.json", "validation_data.json"
MOST_FILES = 50_000  # of a larger data set the files are not listed


def describe_data(model_config: Mapping[str, Any], fingerprint: str, files: Mapping[str, str]) -> dict[str, Any]:
    """Return what `training_data.json` keeps of the data, to name what differs when a run goes on with other data."""
    listed = dict(files) if len(files) <= MOST_FILES else {}
    return {"fingerprint": fingerprint, "classes": list_class_names(model_config), "files": listed}


def describe_data_change(before: Any, now: Mapping[str, Any]) -> str:
    """Name the classes and files that differ between two of `describe_data`; empty if that cannot be told.

    Args:
        before: as read from a file, so of any form.
        now: of the data here.
    """
    try:
        if before["fingerprint"] == now["fingerprint"]:
            return ""
        classes = describe_class_change(list(map(str, before["classes"])), now["classes"])
        there, here = dict(before["files"]), dict(now["files"])
    except (KeyError, TypeError, ValueError):
        return ""
    parts = [classes]
    if there and here:
        gone, new = sorted(there.keys() - here), sorted(here.keys() - there)
        changed = [name for name in sorted(there.keys() & here) if not _is_same(there[name], here[name])]
        parts += [name_some("only in the run's data", gone), name_some("only in this data", new)]
        parts.append(name_some("changed", changed))
    return "; ".join(filter(None, parts))


def _is_same(before: str, now: str) -> bool:
    """Compare what was known of a file with what is; earlier releases lacked the CRC-32C in the end."""
    return before in (now, now.rpartition(" ")[0])


def _require_same(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    # Through JSON, where a tuple is a list.
    now, known = json.loads(json.dumps(now)), {**json.loads(json.dumps(added)), **before}
    changed = [name for name in {*before, *now} if known.get(name) != now.get(name)]
    if changed:
        # What only one of the two has follows from another change.
        changed.sort(key=lambda name: (name not in before or name not in now, name))
        name = changed[0]
        others = f" (and {len(changed) - 1} more: {', '.join(changed[1:4])})" if len(changed) > 1 else ""
        raise RunChangedError(
            f"the run there has {name} {before.get(name)!r}, this one {now.get(name)!r}{others}",
            path=path,
            field=name,
            remedy="give the same, another --model_dir, or --clean to start over",
        )


def read_step_seconds(model_dir: Path, images: int) -> float | None:
    """Read the seconds of a step of some images that the last start of a run of one process took; None: none is known.

    They are those of ``run_log.json``, with the wait for data and without evaluations.
    """
    try:
        log = json.loads(read_text(model_dir / RUN_LOG))
        speed, run = log["starts"][-1]["images_per_second"], log["plan"]
        is_alike = (run["workers"], run["global_batch"]) == (1, images)
        return images / speed if is_alike and speed else None
    except (OSError, ValueError, LookupError, TypeError):  # there is none, or it is damaged
        return None
