"""A session of a program: framework, communicator, folder of the run, and values shared from rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from gaudi_apps.errors import RootError
from gaudi_apps.runtime.elastic import ElasticState
from gaudi_apps.runtime.failure_reporting import FailureReporter
from gaudi_apps.training.application import Application, Restored
from gaudi_apps.training.checkpoint import Checkpoint, CheckpointFolder, ModelConfig, load_checkpoint
from gaudi_apps.training.plan import find_recipe_version
from gaudi_apps.training.run_dir import RunFolder
from gaudi_apps.training.trainer import TrainableTask
from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.program import describe_error, exit_status_of
from gaudi_distributed import Communicator, SingleProcess, apply_environment
from gaudi_distributed.comm.communicator import SumOfGroup, allreduce_within
from gaudi_distributed.comm.opening import communication_environment, open_communicator

CHECKPOINTS = "checkpoints"
BEST = "best"
WORKER, LOG = "worker_{}", "log.txt"
SUMMARIES = "summaries"


class Session:
    """One start of a program, in this process and maybe others; use it as a context manager.

    Args:
        app: the program, with validated flags.
        reporter: reports where this process is.
        elastic: copies of the state, where ranks come and go.

    Attributes:
        communicator: of the processes that train together.
        is_root: whether this one is rank 0, whose files count, and which alone shows and writes results.
        logs: where this process writes what only it knows: the folder of the run, or `worker_R` in it.
    """

    def __init__(self, app: Application, reporter: FailureReporter, elastic: ElasticState) -> None:
        self.app = app
        self.reporter, self.elastic = reporter, elastic
        self.settings = app.settings
        self.model_dir = app.settings.model_dir
        self.folder = RunFolder(self.model_dir, (CHECKPOINTS, BEST))
        self.checkpoints = CheckpointFolder(self.model_dir / CHECKPOINTS, keep=app.settings.keep_checkpoints)
        self.best = CheckpointFolder(self.model_dir / BEST, keep=1)
        distribution = app.settings.distribution
        apply_environment(distribution.environment)
        apply_environment(communication_environment(distribution.communication, distribution.rank_info, os.environ))
        # A process that has another rank than before keeps its device.
        if elastic.framework is None:
            app.framework.start(app.settings.device)
            elastic.framework = app.framework
        app.framework = elastic.framework
        self.communicator: Communicator = open_communicator(distribution.communication)
        if not elastic.every:
            reporter.host(self.communicator, distribution.rank_info)
        rank = self.communicator.rank
        self.is_root = rank == 0
        self.logs = self.model_dir / WORKER.format(rank) if rank else self.model_dir
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Session:
        if not self.is_root:
            silence = self._stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            self._stack.enter_context(contextlib.redirect_stdout(silence))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            # None leaves while another, which may still be at work, needs it.
            self.communicator.barrier()
            self.communicator.close()

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Redirect what other ranks than 0 print into their log within a context; the run has begun."""
        if self.is_root:
            yield
            return
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / LOG).open("a", encoding="utf-8", buffering=1) as log, contextlib.redirect_stdout(log):
            yield

    def register_logs(self) -> None:
        """Register as the run's own what TensorBoard's writers made, and what other ranks wrote here."""
        if self.is_root:
            folders = [self.model_dir / SUMMARIES, *self.model_dir.glob(WORKER.format("*"))]
            paths = (path for folder in folders for path in folder.rglob("*"))
            self.folder.register_files(*(path for path in paths if path.is_file()))

    def choose_version(self) -> None:
        """Follow the rules of the run in the folder, or the current ones, alike on all ranks."""
        clean = self.settings.clean
        self.app.use_version(
            broadcast_from_rank0(self.communicator, lambda: find_recipe_version(self.folder, clean=clean))
        )

    def build_task(self, model_config: ModelConfig, *, averages: bool) -> TrainableTask:
        """Build a network by its configuration, with new weights, that trains with the other ranks."""
        task = self.app.build_task(
            model_config,
            averages=averages,
            communicator=self.communicator,
            reduce_statistics=self._find_reduction(),
        )
        if self.settings.device.checks_shapes or self.app.framework.needs_static_shapes():
            task.guard_shapes()
        return task

    def _find_reduction(self) -> SumOfGroup | None:
        group = self.settings.distribution.batch_norm_group
        return allreduce_within(self.communicator, group) if group > 1 else None

    def select_checkpoints(self) -> list[Path]:
        """List the folders of the checkpoints that --checkpoint names, in the order of steps.

        Raises:
            MissingInputError: there are none.
        """
        which = self.settings.checkpoint
        folder = self.best if which == "best" else self.checkpoints
        steps = folder.steps()
        if which.isdecimal():
            steps = [step for step in steps if step == int(which)]
        if not steps:
            raise MissingInputError(
                f"has no checkpoint {which}",
                path=folder.folder,
                remedy="train first, or give another --model_dir",
            )
        return [folder.path(step) for step in (steps if which == "all" else steps[-1:])]

    def load_selected(self) -> Checkpoint:
        """Load the checkpoint that --checkpoint names; the newest is the newest one that can be read."""
        if self.settings.checkpoint == "newest":
            return self.checkpoints.load_newest(report=warn)
        return load_checkpoint(self.select_checkpoints()[0])

    def restore_newest(self) -> Restored:
        """Build the network of the newest checkpoint that can be read, in this process alone."""
        return self._restore(self.checkpoints.load_newest(report=warn))

    def restore_selected(self) -> Restored:
        """Build the network of the one checkpoint that --checkpoint names, in this process alone."""
        return self._restore(self.load_selected())

    def restore_together(self, load: Callable[[], Checkpoint]) -> Restored:
        """Build the network of a checkpoint that rank 0 loads, on every rank."""
        loaded: list[Checkpoint] = []

        def load_configuration() -> dict[str, Any]:
            loaded.append(load())
            return {"model_config": loaded[0].model_config, "step": loaded[0].step}

        found = broadcast_from_rank0(self.communicator, load_configuration)
        if self.is_root:
            restored = self._restore(loaded[0])
        else:
            restored = Restored(self._build_for_use(found["model_config"]), found["model_config"], found["step"])
        self.reporter.begin("broadcast")
        share_state(self.communicator, restored.task)
        return restored

    def _restore(self, checkpoint: Checkpoint) -> Restored:
        """Build a network with the averaged weights of a checkpoint, or its weights if there is no average."""
        model_config = checkpoint.model_config
        task = self._build_for_use(model_config)
        task.write_weights(checkpoint.tensors)
        return Restored(task, model_config, checkpoint.step)

    def _build_for_use(self, model_config: ModelConfig) -> TrainableTask:
        """Build a network that does not train, and so needs no other rank."""
        return self.app.build_task(model_config, averages=False, communicator=SingleProcess(), reduce_statistics=None)


def warn(text: str) -> None:
    """Show a line that is no result."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


Value = TypeVar("Value")


def broadcast_from_rank0(communicator: Communicator, compute: Callable[[], Value]) -> Value:
    """Call a function on rank 0 only, and return its result, a JSON value, on every rank.

    Raises:
        RootError: on the other ranks, if the function raised an error on rank 0, where that error is raised.
    """
    if communicator.size == 1:
        return compute()
    if communicator.rank:
        answer = json.loads(communicator.gather(b"")[0])
        if "error" in answer:
            raise RootError(answer["error"], answer["status"])
        value: Value = answer["value"]
        return value
    try:
        value = compute()
    except Exception as error:
        told = {"error": describe_error(error), "status": exit_status_of(error)}
        communicator.gather(json.dumps(told).encode())
        raise
    communicator.gather(json.dumps({"value": value}).encode())
    return value


def share_state(communicator: Communicator, task: TrainableTask) -> None:
    """Give the networks of all ranks, which are built alike, the state that rank 0's has."""
    if communicator.size > 1:
        state = task.read_state()
        tensors = communicator.broadcast(list(state.values()))
        task.write_state(dict(zip(state, map(np.asarray, tensors), strict=True)))
