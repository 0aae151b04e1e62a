"""Log a training in the format of MLPerf training v0.7 by MLPerf's own package, in a file and on standard output.

A resumed run appends to its log, so that the log begins and ends once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from gaudi_apps.mxnet.config import SSDMXNetConfig
from gaudi_apps.training.plan import Plan
from gaudi_apps.training.trainer import Callback, Score
from gaudi_datasets.detection.augmentation import PROPOSALS_PER_PASS
from gaudi_datasets.errors import import_extra
from gaudi_distributed.launch.planning import CACHES_CLEARED
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
        eval_samples: images that are scored.
        started: start of the program, in seconds since 1970.

    Raises:
        MissingExtraError: MLPerf's package is not installed.
    """

    def __init__(self, path: Path, config: SSDMXNetConfig, plan: Plan, *, eval_samples: int, started: float) -> None:
        self._mllog, self._keys = load_mllog()
        self._path, self._config, self._plan = path, config, plan
        self._eval_samples, self._started = eval_samples, started
        self._logger: Any = None
        self._handler: logging.Handler | None = None
        self._reached = False
        self._epoch = 0

    def on_train_begin(self) -> None:
        """Log the settings and the start of the run; a resumed run logs the start of its epoch only."""
        done = self.trainer.step
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
        self._start_epoch()

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
        """Log the start of an evaluation."""
        self._logger.start(self._keys.EVAL_START, metadata=self._name_epochs(step))

    def on_evaluate_end(self, step: int, score: Score) -> None:
        """Log the end of an evaluation, and its accuracy."""
        metadata = self._name_epochs(step)
        self._logger.event(self._keys.EVAL_ACCURACY, score.value, metadata=metadata)
        self._logger.end(self._keys.EVAL_STOP, metadata=metadata)
        self._reached |= 0 < self._config.report.target_map <= 100 * score.value

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
            keys.MODEL_BN_SPAN: config.data.batch_size * config.distribution.bn_group,
            keys.MAX_SAMPLES: PROPOSALS_PER_PASS,
            keys.OPT_BASE_LR: plan.peak_learning_rate,
            keys.OPT_LR_WARMUP_FACTOR: schedule.lr_warmup_factor,
            keys.OPT_LR_WARMUP_STEPS: plan.warmup_steps,
            keys.OPT_LR_DECAY_BOUNDARY_EPOCHS: list(schedule.lr_drop_epochs),
            keys.OPT_WEIGHT_DECAY: schedule.weight_decay,
        }

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


def load_mllog() -> tuple[Any, Any]:
    """Return MLPerf's module for logs, and that of its keys.

    Raises:
        MissingExtraError: the package is not installed.
    """
    names = ("mlperf_logging.mllog.mllog", "mlperf_logging.mllog.constants")
    mllog, constants = (import_extra(name, "gaudi-apps[mlperf]", "--mlperf") for name in names)
    return mllog, constants
