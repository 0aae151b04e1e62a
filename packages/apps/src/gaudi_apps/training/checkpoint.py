"""Checkpoints: folders of one tensor file and a manifest, complete or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_models.padding import Padding, PoolPadding
from gaudi_ops.files import (
    hash_file,
    open_regular_file,
    publish_file,
    read_file,
    remove_leftovers,
    staging_folder,
    sync_file,
    sync_folder,
    write_file,
)

FORMAT = "gaudi-apps checkpoint"
VERSION = 2
CHECKPOINTS, BEST = "checkpoints", "best"  # folders of a run
LOCAL_CHECKPOINTS = 2  # that are kept on this machine of a run in a store, which has the others
MANIFEST, TENSORS, RUN_FILE = "manifest.json", "state.safetensors", "run.json"
_FILES = (MANIFEST, TENSORS)
_REMEDY = "remove this checkpoint and use the one before"
_NAME = re.compile(r"step-(\d{8,})")
_SHOWN_STEPS = 5  # in a message
_DRAFT = re.compile(r"step-\d{8,}\.tmp")


class ModelConfig(TypedDict, total=False):
    """The configuration of a model, to build it again: JSON values, as a checkpoint has them.

    Attributes:
        categories: COCO categories of a detector.
        pool_padding: padding of a detector's pooling, see `gaudi_models.ssd.build_ssd`.
        classes: of a classifier, each with its name, in the order of the labels.
        model: name of a classifier's network, or of a detector's, see `gaudi_models.architectures.SSDArchitecture`.
        padding: of a classifier's convolutions.
        image_size: side of the network's images, in pixels.
        class_weights: of a detector's loss, see `gaudi_ops.tf.ssd_loss`, background first.
        box_voting: whether boxes of a detector vote, see `gaudi_ops.non_max_suppression`; they do not by default.
    """

    categories: list[dict[str, Any]]
    pool_padding: PoolPadding
    classes: list[dict[str, Any]]
    model: str
    padding: Padding
    image_size: int
    class_weights: list[float]
    box_voting: bool


@dataclass(frozen=True)
class RunState:
    """The progress of a run, and what decides its weights; a checkpoint holds it beside the tensors.

    Attributes:
        step: steps that are done.
        settings: flags and data that decide the weights, JSON values by name.
        batch_norm_images: images that batch norm goes over.
        epoch: of the next image.
        image: place of the next image in its epoch.
        image_sequence: see `gaudi_apps.training.trainer.ImageSequence`.
        early_stop: state of `gaudi_apps.training.callbacks.EarlyStopping`, JSON values by name; None: its first one.
        history: hashes of the rows of scalars and of scores so far, each empty where it is not known; or nothing.
        refits: with --minutes, the arguments of `gaudi_apps.training.plan.Plan.refit`, in their order.
        log_bytes: length of MLPerf's log; None: there is none, or it is not known.
    """

    step: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_norm_images: int = 0
    epoch: int = 0
    image: int = 0
    image_sequence: str = ""
    early_stop: Mapping[str, Any] | None = None
    history: tuple[str, ...] = ()
    refits: tuple[tuple[int, int], ...] = ()
    log_bytes: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values by name, as `from_json` reads them; the step is the checkpoint's own."""
        return {
            "settings": self.settings,
            "batch_norm_images": self.batch_norm_images,
            "position": {"epoch": self.epoch, "image": self.image},
            "image_sequence": self.image_sequence,
            "early_stop": self.early_stop,
            "history": list(self.history),
            "refits": [list(refit) for refit in self.refits],
            "log_bytes": self.log_bytes,
        }

    @classmethod
    def from_json(cls, step: int, values: Mapping[str, Any]) -> RunState:
        """Read what `to_json` returned, or what an earlier version wrote; values of the model are ignored.

        Raises:
            ValueError, TypeError, KeyError: a value is of another type than `to_json` writes.
        """
        position = _take(values, "position", dict, {"epoch": 0, "image": 0})
        stopping, history = values.get("early_stop"), _take(values, "history", list, [])
        if len(history) not in (0, 2):
            raise ValueError(f"history is {history}")
        refits = _take(values, "refits", list, [])
        if any(type(number) is not int for refit in refits for number in refit):
            raise ValueError(f"refits is {refits}")
        return cls(
            step=step,
            settings=_take(values, "settings", dict, {}),
            batch_norm_images=_take(values, "batch_norm_images", int, 0),
            epoch=_take(position, "epoch", int),
            image=_take(position, "image", int),
            image_sequence=_take(values, "image_sequence", str, ""),
            early_stop=None if stopping is None else _take(values, "early_stop", dict),
            history=tuple(map(str, history)),
            refits=tuple((done, total) for done, total in refits),
            log_bytes=None if values.get("log_bytes") is None else _take(values, "log_bytes", int),
        )


def _take(values: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Take a JSON value of one type, which true and false are no numbers of; ValueError if it is of another."""
    value = values.get(name, default)
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        raise ValueError(f"{name} is {value!r}")
    return value


# Names of the values of `RunState.to_json`; all others in a checkpoint are of its model.
RUN_STATE_NAMES = frozenset(RunState().to_json())


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as loaded.

    Attributes:
        step: steps that were done when it was written.
        tensors: arrays by name.
        metadata: JSON values about model and run by name; in the file they stand under "facts".
        sha256: of the tensor file; equal for equal tensors.
    """

    step: int
    tensors: Mapping[str, npt.NDArray[Any]]
    metadata: Mapping[str, Any]
    sha256: str

    @property
    def run_state(self) -> RunState:
        """Return the progress of the run."""
        return RunState.from_json(self.step, self.metadata)

    @property
    def model_config(self) -> ModelConfig:
        """JSON values by name that say how to build the model again."""
        values = {name: value for name, value in self.metadata.items() if name not in RUN_STATE_NAMES}
        return cast(ModelConfig, values)


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
        """List the steps of the checkpoints, rising, with those of damaged ones."""
        paths = (path for path in self._list_folders(_NAME) if any((path / file).is_file() for file in _FILES))
        return sorted(int(path.name.removeprefix("step-")) for path in paths)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.folder / f"step-{step:08d}"

    def save(self, step: int, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, Any]) -> Path:
        """Write a checkpoint, remove those that are too many, and return the new one's folder.

        Raises:
            OSError, DataError: the disk is full or fails, or run.json cannot be read; the earlier checkpoints stay.
        """
        target, run = self.path(step), read_run_id(self.folder.parent)
        try:
            with staging_folder(self.folder) as staging:
                draft = staging / target.name
                draft.mkdir()
                _write(draft, step, tensors, metadata, run=run)
                _publish(draft, target)
            sync_folder(self.folder)
        except OSError as error:  # whose file has a name that nobody knows
            if error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, str(target)) from None
        # One of a later step could not be read, else the run would have gone on from there: it takes no place.
        for old in [old for old in self.steps() if old <= step][: -self._keep]:
            _remove_files(self.path(old))
        # What a process left that was killed while it saved or removed one.
        empty = [path for path in self._list_folders(_NAME) if not any(path.iterdir())]
        for stale in [*self._list_folders(_DRAFT), *empty]:
            _remove_files(stale)
        return target

    def remove_later(self, step: int) -> None:
        """Remove checkpoints of later steps, which a run left that goes on from an earlier one."""
        for later in self.steps():
            if later > step:
                _remove_files(self.path(later))

    def load_newest(self, *, report: Callable[[str], None] = lambda text: None) -> Checkpoint:
        """Load the checkpoint of the highest step that can be read.

        Args:
            report: called with a line about each newer one that cannot be read.

        Raises:
            MissingInputError: there is no checkpoint.
            DataError: there are checkpoints, and all are damaged or of another format.
            OSError: one cannot be read now, see `load_checkpoint`.
        """
        steps = self.steps()
        if not steps:
            raise MissingInputError(
                "has no checkpoint", path=self.folder, remedy="train first, or give another --model_dir"
            )
        for step in reversed(steps):
            try:
                return load_checkpoint(self.path(step))
            except DataError as error:
                report(f"{error}")
        raise DataError(
            f"none of its {len(steps)} checkpoints can be read", path=self.folder, remedy="restore one from a copy"
        )

    def clear(self) -> None:
        """Remove all checkpoints, half-written ones too; files that this class did not write stay."""
        remove_leftovers(self.folder)
        for path in [*self._list_folders(_NAME), *self._list_folders(_DRAFT)]:
            _remove_files(path)
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _list_folders(self, name: re.Pattern[str]) -> list[Path]:
        """List folders of such names; a link to one is left out."""
        if not self.folder.is_dir():
            return []
        return [p for p in self.folder.iterdir() if name.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def load_checkpoint(path: Path) -> Checkpoint:
    """Load one checkpoint folder.

    Raises:
        DataError: a file is missing, damaged, or of another format; or the checkpoint is of another step than its
            folder's name, or of another run than the folder above.
        OSError: a file cannot be read now, as of a disk that fails or without permission; it may be whole.
    """
    try:
        content = read_file(path / MANIFEST)
        manifest = json.loads(content)["manifest"]
        # Compared as bytes: a changed space or digit anywhere is damage.
        if content != _render(manifest):
            raise DataError(f"{path / MANIFEST}: is damaged; {_REMEDY}")
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise DataError(f"{path / MANIFEST}: is no checkpoint of version {VERSION} of this program; {_REMEDY}")
        sha256 = manifest["sha256"][TENSORS]
        if sha256 != hash_file(path / TENSORS):
            raise DataError(f"{path / TENSORS}: is not what its manifest says; {_REMEDY}")
        metadata = _take(manifest, "facts", dict)
        state = RunState.from_json(manifest["step"], metadata)
        _require_place(path, manifest, state.settings)
        return Checkpoint(manifest["step"], load_file(path / TENSORS), metadata, sha256)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        if type(error) is OSError and error.errno is None:  # the library's own has neither number nor file
            raise OSError(errno.EIO, str(error), str(path / TENSORS)) from None
        is_lost = isinstance(error, (FileNotFoundError, IsADirectoryError))  # the file, or it never was one
        if isinstance(error, DataError) or (isinstance(error, OSError) and not is_lost):
            raise
        raise DataError(f"{path}: is damaged ({error!r}); {_REMEDY}") from error


def _require_place(path: Path, manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise DataError unless a checkpoint is of the step that names its folder, and of the run that it lies in."""
    step, named = manifest["step"], _NAME.fullmatch(path.name)
    if type(step) is not int or step < 0 or (named and step != int(named[1])):
        raise DataError(f"{path}: is of step {step!r}; {_REMEDY}", path=path, field="step")
    run = read_run_record(path.absolute().parents[1])
    if "id" in run and manifest.get("run") != run["id"]:
        raise DataError(f"{path}: is of another run; {_REMEDY}", path=path, field="run")
    # The fingerprint of data may be computed otherwise in a later release.
    for name, value in run.get("settings", {}).items():
        if name != "data" and name in settings and settings[name] != value:
            told = f"has {name} {settings[name]!r}, and its run {value!r}"
            raise DataError(f"{path}: {told}; {_REMEDY}", path=path, field=name)


def read_run_record(folder: Path) -> dict[str, Any]:
    """Read ``run.json`` as far as it is one, for what its checkpoints share with it; empty where there is none."""
    try:
        return _read_record(folder)
    except (OSError, ValueError, RecursionError):
        return {}


def read_run_id(folder: Path) -> Any:
    """Read the id of the run in a folder; None where there is no record, or it has none.

    Raises:
        OSError, DataError: it cannot be read now, or is damaged; a checkpoint without its id would be of another run.
    """
    try:
        return _read_record(folder).get("id")
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise DataError("is no record of a run", path=folder / RUN_FILE, remedy="restore it from a copy") from None


def _read_record(folder: Path) -> dict[str, Any]:
    found = json.loads(read_file(folder / RUN_FILE))
    return found if isinstance(found, dict) and isinstance(found.get("settings"), dict) else {}


def load_chosen(model_dir: Path, which: str, report: Callable[[str], None]) -> Checkpoint:
    """Load what --checkpoint names, see `find_checkpoints`; of newest ones the first that can be read.

    Raises:
        MissingInputError: there is none.
        DataError: it is damaged or of another format.
    """
    if which == "newest":
        return CheckpointFolder(model_dir / CHECKPOINTS).load_newest(report=report)
    return load_checkpoint(find_checkpoints(model_dir, which)[0])


def find_checkpoints(model_dir: Path, which: str) -> list[Path]:
    """Find the folders of the checkpoints of a run that --checkpoint names, in the order of steps.

    Raises:
        MissingInputError: there are none.
    """
    others = CheckpointFolder(model_dir / CHECKPOINTS)
    folder = CheckpointFolder(model_dir / BEST) if which == "best" else others
    steps = folder.steps()
    if which.isdecimal():
        steps = [step for step in steps if step == int(which)]
    if not steps:
        fault, remedy = f"has no checkpoint {which}", "train first, or give another --model_dir"
        if which == "best" and others.steps():
            remedy = "train with --eval_epochs above 0, which keeps the best one, or give --checkpoint newest"
        elif known := others.steps():
            remedy = f"give --checkpoint newest, or one of {', '.join(map(str, known[-_SHOWN_STEPS:]))}"
        raise MissingInputError(fault, path=folder.folder, remedy=remedy)
    return [folder.path(step) for step in (steps if which == "all" else steps[-1:])]


def find_run_checkpoint(path: Path) -> Path | None:
    """Find the checkpoint of a run whose weights are used: its best one, else its newest; None where no run is.

    Args:
        path: folder of the run, or its folder of checkpoints.

    Raises:
        MissingInputError: the run has no checkpoint.
    """
    if (path / MANIFEST).is_file() or not path.is_dir():
        return None
    folders = [CheckpointFolder(folder) for folder in (path / BEST, path / CHECKPOINTS, path)]
    found = next((folder.path(folder.steps()[-1]) for folder in folders if folder.steps()), None)
    if found is None and (path / RUN_FILE).is_file():
        raise MissingInputError("has no checkpoint", path=path, remedy="train first, or give another run")
    return found


def _write(
    draft: Path, step: int, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, Any], *, run: str | None
) -> None:
    # In memory, for the library's own writing goes through a file of its own, which stays where a run is killed in it.
    content = save(dict(tensors))
    sha256 = {TENSORS: hashlib.sha256(content).hexdigest()}
    manifest = {"format": FORMAT, "version": VERSION, "step": step, "sha256": sha256, "facts": dict(metadata)}
    if run is not None:  # of a run that began before runs had one, no checkpoint has it
        manifest["run"] = run
    with open_regular_file(draft / TENSORS, "xb") as file:
        file.write(content)
        file.flush()
        sync_file(file)
    write_file(draft / MANIFEST, _render(manifest))  # and syncs the names of both


def _publish(draft: Path, target: Path) -> None:
    """Give a draft its name; where that is taken, by a damaged checkpoint or notes of somebody, move its files in."""
    if not target.exists():
        draft.rename(target)
        return
    (target / MANIFEST).unlink(missing_ok=True)
    for name in (TENSORS, MANIFEST):
        publish_file(draft / name, target / name)
    sync_folder(target)


def _render(manifest: Mapping[str, Any]) -> bytes:
    """Return the content of a manifest file: the manifest under its own checksum."""
    body = json.dumps(manifest, sort_keys=True)
    whole = {"manifest_sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": manifest}
    return (json.dumps(whole, indent=2, sort_keys=True) + "\n").encode()


def _remove_files(folder: Path) -> None:
    # Only the two files of a checkpoint, and the folder if that empties it: what else lies there is not ours.
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def require_names(found: Iterable[str], expected: Iterable[str]) -> None:
    """Raise DataError unless the same names are in both."""
    if unlike := sorted({*found} ^ {*expected}):
        raise DataError(
            f"checkpoint: {len(unlike)} tensors are missing or unknown, the first is {unlike[0]}",
            field=unlike[0],
            remedy="use another",
        )


def require_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raise DataError unless a tensor has the shape that the model's has."""
    if list(found) != list(expected):
        raise DataError(
            f"checkpoint: tensor {name} has shape {list(found)} and the model {list(expected)}",
            field=name,
            remedy="it is of a model with other classes, so use another --model_dir",
        )


def require_classes(found: Mapping[str, Any], expected: Mapping[str, Any], name: str) -> None:
    """Raise DataError unless a checkpoint is of the classes of the data.

    Args:
        found: JSON values by name in the checkpoint.
        expected: those of the data, see `gaudi_apps.training.trainer.TrainingData`.
        name: of the checkpoint, for messages.
    """
    for entry, value in expected.items():
        if entry not in found:
            raise DataError("does not name its classes", record=name, field=entry, remedy="use another")
        if found[entry] != value:
            change = describe_class_change(list_class_names({entry: found[entry]}), list_class_names({entry: value}))
            raise DataError(
                "is of other classes than the data" + f": {change}" * bool(change),
                record=name,
                field=entry,
                remedy="give another --model_dir",
            )


_SHOWN = 3


def list_class_names(model_config: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes that a model's configuration has, in the order of their labels."""
    rows = model_config.get("categories", model_config.get("classes", ()))
    return [str(row.get("name", row) if isinstance(row, Mapping) else row) for row in rows]


def describe_class_change(before: Sequence[str], now: Sequence[str]) -> str:
    """Name the classes that are in one of two lists only, or say that their order differs; empty if they are equal."""
    missing, added = ([one for one in a if one not in b] for a, b in ((before, now), (now, before)))
    if not missing and not added and list(before) != list(now):
        return f"classes in another order: {', '.join(before[:_SHOWN])}, now {', '.join(now[:_SHOWN])}"
    return "; ".join(filter(None, (name_some("classes that are gone", missing), name_some("new classes", added))))


def name_some(what: str, names: Sequence[str]) -> str:
    """Return the first of some names behind what they are, and the number of the others; empty for none."""
    shown = [f"{json.dumps(name, ensure_ascii=False)}" for name in names[:_SHOWN]]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(shown)}{more}" if names else ""
