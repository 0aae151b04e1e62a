"""Log a training: scalars and scores as lines of JSON in the run's own files, and to trackers by `--log_to`.

The rows of the own files up to a checkpoint are known by a hash in it, so that a file that was changed, cut or replaced
is told. A tracker (a CSV file, MLflow, Weights & Biases) has a logger that belongs to a run: one that goes on continues
its row of the tracker, whose id is kept in the folder of the run. Rank 0 alone logs to trackers. Their packages are
extras, and are looked for before anything is computed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import os
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, ClassVar, Literal, TypeAlias
from urllib.parse import urlsplit, urlunsplit

from gaudi_apps.runtime.errors import RanksChangedError, StoppedError, warn
from gaudi_apps.training.checkpoint import RunState
from gaudi_apps.training.trainer import Callback, Score
from gaudi_datasets.errors import import_extra
from gaudi_datasets.output_files import write_json
from gaudi_datasets.program import count_things
from gaudi_ops.files import open_regular_file, publish_file, read_text, sync_file, write_file

Ending: TypeAlias = Literal["FINISHED", "KILLED", "FAILED"]  # as MLflow names them; a run that was stopped is killed
METRICS = "metrics.csv"
LOG_FILES = (METRICS, "mlflow.json", "wandb.json")
EXTRAS: Mapping[str, str] = {"mlflow": "mlflow", "wandb": "wandb"}  # module by name of the logger and of its extra
PROJECT = "gaudi-apps"  # where the environment names none
_NOT_IN_NAMES = re.compile(r"[^\w./ -]+")  # of MLflow's metrics
_BATCH = 100  # parameters that MLflow takes at once
Row = dict[str, float]


class History(Callback):
    """Append scalars and scores to files of JSON lines.

    Args:
        history: file of scalars.
        evaluations: file of scores.
        every: steps between two rows of scalars.

    Attributes:
        scores: rows of scores that earlier starts wrote, up to the step from which the run goes on.
    """

    def __init__(self, history: Path, evaluations: Path, every: int = 1) -> None:
        self._paths, self._every = (history, evaluations), every
        self._files: list[IO[str]] = []
        self._digests: list[_Digest] = []
        self.scores: list[Row] = []
        self._scored = set[int]()  # steps whose scores are to come, some from a process of their own

    def is_due(self, step: int) -> bool:
        """Return whether a row is due."""
        return self.trainer.is_due(step, self._every)

    def on_train_begin(self) -> None:
        """Open the files, without rows of steps that this run repeats; warn of others than the run has written."""
        for path, known in zip(self._paths, self.trainer.state.history or ("", ""), strict=True):
            kept, digest = keep_rows(path, self.trainer.step, known if self.trainer.is_root else "")
            write_file(path, "".join(_to_line(row) for row in kept))
            self._files.append(open_regular_file(path, "a", encoding="utf-8"))
            self._digests.append(digest)
            self.scores = kept  # of the second file, in the end

    def add_state(self, state: RunState) -> RunState:
        """Keep in checkpoints by which the rows are known: those of rank 0, and scores where none is to come."""
        if not self.trainer.is_root:
            return replace(state, history=())
        rows, scores = (digest.text for digest in self._digests)
        return replace(state, history=(rows, "" if self._scored else scores))

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Append a row of scalars; it is in the file when this returns."""
        if self.is_due(step):
            self._append(0, {"step": step, **logs})

    def on_evaluate_begin(self, step: int) -> None:
        """Expect a row of scores."""
        self._scored.add(step)

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Append a row of scores."""
        self._append(1, {"step": step, **score.figures})
        self._scored.discard(step)

    def on_checkpoint(self, step: int) -> None:
        """Wait until the rows that the checkpoint tells of are on the disk."""
        for file in self._files:
            sync_file(file)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    def _append(self, number: int, row: Mapping[str, float]) -> None:
        self._digests[number].add(row)
        file = self._files[number]
        try:
            file.write(_to_line(row))
            file.flush()
        except OSError as error:  # which may not name the file
            raise OSError(error.errno, error.strerror, file.name) from None


def keep_rows(path: Path, step: int, known: str) -> tuple[list[Row], _Digest]:
    """Read the rows up to a step, and their hash; warn where that is not what a checkpoint knows (empty: nothing)."""
    kept = [row for row in read_history(path, report=warn) if row["step"] <= step]
    digest = _Digest(kept)
    if known not in ("", digest.text):
        warn(f"{path}: its rows up to step {step} are not those that the run wrote; it goes on")
        digest.forget()
    return kept, digest


class _Digest:
    """SHA-256 of rows in their order."""

    def __init__(self, rows: Sequence[Mapping[str, float]]) -> None:
        self._hash, self._is_known = hashlib.sha256(), True
        for row in rows:
            self.add(row)

    @property
    def text(self) -> str:
        """Return it in hexadecimal; empty if it is not known."""
        return self._hash.hexdigest() if self._is_known else ""

    def add(self, row: Mapping[str, float]) -> None:
        """Add a row."""
        self._hash.update(_to_line(row).encode())

    def forget(self) -> None:
        """Tell nothing from now on."""
        self._is_known = False


def read_history(path: Path, *, report: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Read rows by step, the last of each; `report` is told of damaged lines, but for one that a crash cut short."""
    rows: dict[float, Row] = {}
    *lines, last = read_text(path, errors="replace").split("\n") if path.exists() else [""]
    damaged = []
    for number, line in enumerate([*lines, last], 1):
        if (row := _parse_row(line)) is not None:
            rows[row["step"]] = row
        elif number <= len(lines):
            damaged.append(number)
    if damaged:
        report(f"{path}: line {damaged[0]} is damaged; left out: {count_things(len(damaged), 'line')}")
    return [rows[step] for step in sorted(rows)]


def _parse_row(line: str) -> Row | None:
    """Return the numbers of a line by name, if it has them and a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0
    return row if is_row and all(type(value) in (int, float) for value in row.values()) else None


def _to_line(row: Mapping[str, float]) -> str:
    numbers = {name: value if isinstance(value, int) else float(value) for name, value in row.items()}
    return json.dumps(numbers) + "\n"


def require_loggers(names: Sequence[str]) -> None:
    """Check that the packages of trackers can be imported.

    Raises:
        MissingExtraError: one cannot; it names the extra.
    """
    for name in names:
        if name in EXTRAS:
            _load(name)


def _load(name: str) -> Any:
    return import_extra(EXTRAS[name], f"gaudi-apps[{name}]", f"--log_to {name}")


class RunLogger(Callback):
    """Base class of loggers: it passes on scalars and scores, and is finished after the last evaluation.

    Args:
        folder: of the run; its name is that of the run in the tracker.
        every: steps between two points of scalars.
        register: called with files that the logger makes in the folder.
    """

    name: ClassVar[str]

    def __init__(self, folder: Path, every: int, register: Callable[..., None]) -> None:
        self.folder, self._every, self._register = folder, every, register
        self.is_open = False  # also of one that has failed

    def is_due(self, step: int) -> bool:
        """Return whether a point is due."""
        return self.trainer.is_due(step, self._every)

    def on_train_begin(self) -> None:
        """Begin or continue the run in the tracker, with its settings as hyperparameters."""
        self.begin()
        self.is_open = True

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Log the scalars of the step."""
        if self.is_due(step):
            self.log(step, logs)

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Log the figures of an evaluation, with val_ before their names, as Keras does."""
        self.log_score("val", step, score)

    def log_score(self, split: str, step: int, score: Score) -> None:
        """Log the figures of an evaluation with the name of their images before them."""
        self.log(step, {f"{split}_{name}": value for name, value in score.figures.items()})

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log figures, unless the logger is closed."""
        with self.surviving():
            if self.is_open:
                self.write(step, figures)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """Switch the logger off, with a warning, if it fails within a context: the training goes on without it."""
        try:
            yield
        except Exception as error:  # of a tracker's package, which may raise anything
            self.is_open = False
            warn(f"--log_to {self.name}: fails, and logs no more of this run ({type(error).__name__}: {error})")

    @abstractmethod
    def begin(self) -> None:
        """Begin or continue the run in the tracker."""

    @abstractmethod
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log figures by name after a step."""

    @abstractmethod
    def finish(self, ending: Ending) -> None:
        """End the row of this run; it may be continued later."""

    def read_id(self) -> str | None:
        """Read the id that the run has in the tracker; None for a new one."""
        try:
            found = json.loads(read_text(self._id_file))["id"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return found if isinstance(found, str) else None

    def keep_id(self, run_id: str) -> None:
        """Keep the id that the run has in the tracker."""
        write_json(self._id_file, {"id": run_id})
        self._register(self._id_file)

    @property
    def _id_file(self) -> Path:
        return self.folder / f"{self.name}.json"


class CsvLogger(RunLogger):
    """Write `metrics.csv`: a row for each step, with a column for each scalar and each figure of an evaluation."""

    name = "csv"

    def begin(self) -> None:
        """Read the rows up to the step from which the run goes on."""
        self._path = self.folder / METRICS
        self._rows: dict[int, dict[str, float | str]] = {}
        try:
            self._read()
        except (csv.Error, KeyError, TypeError, ValueError):  # as other programs save it
            names = (self.folder / f"metrics.{number}.csv" for number in itertools.count(1))
            kept = next(path for path in names if not os.path.lexists(path))
            publish_file(self._path, kept)
            warn(f"{self._path}: is no table of this program any more; it is kept as {kept.name}, and a new one begins")
            self._rows = {}
        self._save()
        self._register(self._path)

    def _read(self) -> None:
        if not self._path.is_file():
            return
        with open_regular_file(self._path, "r", encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            if "step" not in (table.fieldnames or ["step"]):
                raise KeyError("step")
            for row in table:
                step = int(row["step"])
                if step <= self.trainer.step:
                    self._rows[step] = {name: text for name, text in row.items() if name and text}

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Add figures to the row of a step; the file is written where an evaluation or the end comes."""
        self._rows.setdefault(step, {"step": step}).update(figures)

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Write the file with the figures of an evaluation."""
        super().on_evaluate_end(step, score)
        self._save()

    def on_checkpoint(self, step: int) -> None:
        """Write the file beside each checkpoint."""
        self._save()

    def finish(self, ending: Ending) -> None:
        """Write the file."""
        self._save()

    def _save(self) -> None:
        columns = dict.fromkeys(["step", *(name for row in self._rows.values() for name in row)])
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, list(columns), lineterminator="\n")
        table.writeheader()
        table.writerows(row for _, row in sorted(self._rows.items()))
        write_file(self._path, text.getvalue())


class MlflowLogger(RunLogger):
    """Log to the server or folder that MLFLOW_TRACKING_URI names, by default `mlruns` in the current folder.

    The experiment is MLFLOW_EXPERIMENT_NAME, by default gaudi-apps.
    """

    name = "mlflow"

    def begin(self) -> None:
        """Begin or continue the run."""
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"file:{Path('mlruns').absolute()}"
        if uri.startswith("file:") or "://" not in uri:
            # A folder is all that a run on one machine needs; recent versions ask to be told so.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        mlflow = _load("mlflow")
        self._entities = mlflow.entities
        self._client: Any = mlflow.MlflowClient(uri)
        self._run_id = self._find_run(mlflow.exceptions.MlflowException)
        self.trainer.message(f"MLflow: run {self._run_id} in {hide_user(uri)}")

    def _find_run(self, error_class: type[Exception]) -> str:
        if known := self.read_id():
            try:
                if self._client.get_run(known).info.lifecycle_stage == "active":
                    self._client.update_run(known, status="RUNNING")
                    return known
            except error_class as error:
                if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                    raise
            # Another store, or somebody removed it.
            warn(f"--log_to mlflow: run {known} of {self._id_file} is not there; a new one has what follows")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run_id = str(self._client.create_run(experiment_id, run_name=self.folder.name).info.run_id)
        settings = [self._entities.Param(name, str(value)[:500]) for name, value in self.trainer.state.settings.items()]
        for first in range(0, len(settings), _BATCH):
            self._client.log_batch(run_id, params=settings[first : first + _BATCH])
        self.keep_id(run_id)
        return run_id

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log a metric for each figure."""
        now = round(1000 * time.time())
        metrics = [
            self._entities.Metric(_NOT_IN_NAMES.sub("_", name), float(value), now, step)
            for name, value in figures.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, ending: Ending) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self._run_id, status=ending)


class WandbLogger(RunLogger):
    """Log to Weights & Biases; its own variables (WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY, ...) say where and how."""

    name = "wandb"

    def begin(self) -> None:
        """Begin or continue the run."""
        wandb = _load("wandb")
        known = self.read_id()
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=self.folder.name,
            dir=str(self.folder),
            id=known,
            resume=None if known is None else "allow",
            config=dict(self.trainer.state.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Its own count of steps drops what is logged of an earlier one, such as the report of the best.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if known is None:
            self.keep_id(str(self._run.id))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log({"step": step, **{name: float(value) for name, value in figures.items()}})

    def finish(self, ending: Ending) -> None:
        """End the run; the end of the process waits until its service has written it."""
        self._run.finish(exit_code=int(ending == "FAILED"))


def hide_user(uri: str) -> str:
    """Return an address without the user and the password or token in it."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


_LOGGERS: Mapping[str, type[RunLogger]] = {"csv": CsvLogger, "mlflow": MlflowLogger, "wandb": WandbLogger}


@contextmanager
def open_loggers(
    names: Sequence[str], folder: Path, every: int, register: Callable[..., None]
) -> Iterator[list[RunLogger]]:
    """Make the loggers of some names, each once, and finish at the end of the context those that have begun."""
    loggers = [_LOGGERS[name](folder, every, register) for name in dict.fromkeys(names)]
    ending: Ending = "FAILED"
    try:
        yield loggers
        ending = "FINISHED"
    except (StoppedError, RanksChangedError, KeyboardInterrupt):  # the run goes on later
        ending = "KILLED"
        raise
    finally:
        for logger in loggers:
            if logger.is_open:
                with logger.surviving():
                    logger.finish(ending)


def log_score(loggers: Sequence[RunLogger], split: str, step: int, score: Score) -> None:
    """Log the score of an evaluation after the last step, by the name of its images."""
    for logger in loggers:
        logger.log_score(split, step, score)
