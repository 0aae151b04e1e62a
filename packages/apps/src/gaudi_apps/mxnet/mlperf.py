"""Log a training in the format of MLPerf training v0.7 by MLPerf's own package, in a file and on standard output.

A resumed run appends to its log as it was at the checkpoint, so that the log and each epoch begin and end once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from gaudi_apps.mxnet.config import SSDMXNetConfig
from gaudi_apps.training.checkpoint import RunState
from gaudi_apps.training.history import History
from gaudi_apps.training.plan import Plan
from gaudi_apps.training.trainer import Callback, Score
from gaudi_datasets.detection.augmentation import PROPOSALS_PER_PASS
from gaudi_datasets.errors import import_extra
from gaudi_distributed.launch.planning import CACHES_CLEARED
from gaudi_ops.files import read_file, write_file
from gaudi_ops.program import say


class StandardOutput(logging.Handler):
    """Write lines to the standard output of the moment: above the progress bar, if one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        say(record.getMessage())


class MLPerfLog(Callback):
    """Write the lines of a run, ``:::MLLOG {...}``.

    Args:
        path: the file, which a new run overwrites.
        config: of the run.
        plan: of the run.
        history: has the scores of earlier starts.
        eval_samples: images that are scored.
        started: start of the program, in seconds since 1970.

    Raises:
        MissingExtraError: MLPerf's package is not installed.
    """

    def __init__(
        self, path: Path, config: SSDMXNetConfig, plan: Plan, history: History, *, eval_samples: int, started: float
    ) -> None:
        self._mllog, self._keys = load_mllog()
        self._path, self._config, self._plan, self._history = path, config, plan, history
        self._eval_samples, self._started = eval_samples, started
        self._logger: Any = None
        self._handler: _LogFile | None = None
        self._reached = False
        self._epoch = 0
        self._begun = set[tuple[str, float]]()  # in the log of earlier starts, and not ended: what, and the epoch

    def on_train_begin(self) -> None:
        """Log the settings and the start of the run; a resumed run at most the start of its epoch."""
        done = self.trainer.step
        if done:
            self._cut()
        logger = logging.Logger(f"{__name__}.{id(self)}", logging.INFO)
        self._handler = _LogFile(self._path, mode="a" if done else "w", encoding="utf-8")
        logger.addHandler(self._handler)
        logger.addHandler(StandardOutput())
        self._logger = self._mllog.MLLogger(logger)
        keys = self._keys
        if done == 0:
            milliseconds = int(1000 * self._started)
            # gaudi-run alone clears the caches of the machines, and sets the variable if it could.
            self._logger.event(keys.CACHE_CLEAR, os.environ.get(CACHES_CLEARED) == "1", time_ms=milliseconds)
            self._logger.start(keys.INIT_START, time_ms=milliseconds)
            for key, value in self._list_settings().items():
                self._logger.event(key, value)
            self._logger.end(keys.INIT_STOP)
            self._logger.start(keys.RUN_START)
        self._epoch = self._find_epoch(done)
        if (self._keys.EPOCH_START, self._epoch) not in self._begun:
            self._start_epoch()

    def add_state(self, state: RunState) -> RunState:
        """Keep the length of the log in checkpoints."""
        stream = self._handler and self._handler.stream
        return replace(state, log_bytes=os.fstat(stream.fileno()).st_size) if stream else state

    def on_step_begin(self, step: int) -> None:
        """Before the first step, log the scores that came after the checkpoint, and that the run has kept."""
        for row in self._history.scores if step == self.trainer.state.step + 1 else ():
            done = int(row["step"])
            if (self._keys.EVAL_START, self._name_epochs(done)[self._keys.EPOCH_NUM]) in self._begun:
                self._end_evaluation(done, row.get("AP", 0.0))

    def on_step_end(self, step: int, logs: Mapping[str, float]) -> None:
        """Log where epochs end and begin."""
        epoch = self._find_epoch(step)
        if epoch != self._epoch:
            keys = self._keys
            self._logger.end(keys.EPOCH_STOP, metadata={keys.EPOCH_NUM: self._epoch})
            self._logger.end(keys.BLOCK_STOP, metadata={keys.FIRST_EPOCH_NUM: self._epoch})
            self._epoch = epoch
            if step < self._plan.total_steps:
                self._start_epoch()

    def on_evaluate_begin(self, step: int) -> None:
        """Log the start of an evaluation, unless an earlier start did."""
        metadata = self._name_epochs(step)
        if (self._keys.EVAL_START, metadata[self._keys.EPOCH_NUM]) not in self._begun:
            self._logger.start(self._keys.EVAL_START, metadata=metadata)

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Log the end of an evaluation, and its accuracy."""
        self._end_evaluation(step, score.figures.get("AP", 0.0))  # its readers know no accuracy that is not defined

    def on_train_end(self) -> None:
        """Log the status of the run, unless it was stopped before its end."""
        if self.trainer.step < self._plan.total_steps and not self._reached:
            return
        status = self._keys.SUCCESS if self._reached else self._keys.ABORTED
        self._logger.end(self._keys.RUN_STOP, metadata={"status": status})

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()

    def _list_settings(self) -> dict[str, Any]:
        keys, plan, config = self._keys, self._plan, self._config
        schedule, names = config.schedule, config.mlperf
        return {
            keys.SUBMISSION_ORG: names.mlperf_org,
            keys.SUBMISSION_PLATFORM: names.mlperf_platform,
            keys.SUBMISSION_DIVISION: names.mlperf_division,
            keys.SUBMISSION_STATUS: names.mlperf_status,
            keys.SUBMISSION_BENCHMARK: keys.SSD,
            keys.SEED: config.run.seed,
            keys.GLOBAL_BATCH_SIZE: plan.global_batch,
            keys.TRAIN_SAMPLES: plan.images,
            keys.EVAL_SAMPLES: self._eval_samples,
            keys.MODEL_BN_SPAN: self.trainer.state.batch_norm_images,
            keys.MAX_SAMPLES: PROPOSALS_PER_PASS,
            keys.OPT_BASE_LR: plan.peak_learning_rate,
            keys.OPT_LR_WARMUP_FACTOR: schedule.lr_warmup_factor,
            keys.OPT_LR_WARMUP_STEPS: plan.warmup_steps,
            keys.OPT_LR_DECAY_BOUNDARY_EPOCHS: list(schedule.lr_drop_epochs),
            keys.OPT_WEIGHT_DECAY: schedule.weight_decay,
        }

    def _cut(self) -> None:
        """Remove from the log what follows the checkpoint, and find what has begun there and not ended."""
        length = self.trainer.state.log_bytes
        if length is None or not self._path.exists():
            return
        content = read_file(self._path)
        if len(content) > length:
            write_file(self._path, content[:length])
        keys = self._keys
        ends = {keys.EPOCH_STOP: keys.EPOCH_START, keys.EVAL_STOP: keys.EVAL_START}
        for line in content[:length].decode(errors="replace").splitlines():
            key, epoch = _parse(line)
            if key in ends.values():
                self._begun.add((key, epoch))
            elif key in ends:
                self._begun.discard((ends[key], epoch))

    def _end_evaluation(self, step: int, score: float) -> None:
        metadata = self._name_epochs(step)
        self._logger.event(self._keys.EVAL_ACCURACY, score, metadata=metadata)
        self._logger.end(self._keys.EVAL_STOP, metadata=metadata)
        self._reached |= 0 < self._config.report.target_map <= 100 * score

    def _find_epoch(self, done: int) -> int:
        """Return the epoch of the next step, counted from 1."""
        return int(done * self._plan.global_batch / self._plan.images) + 1

    def _start_epoch(self) -> None:
        keys = self._keys
        self._logger.start(keys.BLOCK_START, metadata={keys.FIRST_EPOCH_NUM: self._epoch, keys.EPOCH_COUNT: 1})
        self._logger.start(keys.EPOCH_START, metadata={keys.EPOCH_NUM: self._epoch})

    def _name_epochs(self, done: int) -> dict[str, float]:
        return {self._keys.EPOCH_NUM: round(done * self._plan.global_batch / self._plan.images, 4)}


class _LogFile(logging.FileHandler):
    """A file of a log whose faults are raised: logging only prints them, and the rest of the log would be lost."""

    def handleError(self, record: logging.LogRecord) -> NoReturn:  # noqa: N802
        """Raise the error that is handled, with the name of the file."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, self.baseFilename) from None
        raise

    def close(self) -> None:
        """Close the file; what a fault left unwritten is not tried again."""
        with contextlib.suppress(OSError):
            super().close()


def _parse(line: str) -> tuple[str, float]:
    """Return the key of a line, and the epoch that it is of; "" and 0 where there is none."""
    try:
        found = json.loads(line.partition(" ")[2])
        return str(found["key"]), float(found["metadata"]["epoch_num"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", 0


def load_mllog() -> tuple[Any, Any]:
    """Return MLPerf's module for logs, and that of its keys.

    Raises:
        MissingExtraError: the package is not installed.
    """
    names = ("mlperf_logging.mllog.mllog", "mlperf_logging.mllog.constants")
    mllog, constants = (import_extra(name, "gaudi-apps[mlperf]", "--mlperf") for name in names)
    return mllog, constants
