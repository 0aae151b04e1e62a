"""A session of a program: framework, communicator, folder of the run, and its state while ranks come and go."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from gaudi_apps.cli.flag_rules import list_flags, select_flags
from gaudi_apps.runtime.errors import FailureReporter, RanksChangedError, broadcast_from_rank0, warn
from gaudi_apps.runtime.settings import find_version
from gaudi_apps.training.application import Application, Framework, Restored
from gaudi_apps.training.checkpoint import (
    BEST,
    CHECKPOINTS,
    LOCAL_CHECKPOINTS,
    Checkpoint,
    CheckpointFolder,
    ModelConfig,
    RunState,
    find_checkpoints,
    load_chosen,
    require_classes,
)
from gaudi_apps.training.plan import find_recipe_version
from gaudi_apps.training.recipe import parse_recipe
from gaudi_apps.training.run_dir import RunFolder, read_initial_weights
from gaudi_datasets.fetching.stores import is_url
from gaudi_distributed import Communicator, SingleProcess, apply_environment
from gaudi_distributed.cluster.rendezvous import RendezvousClient
from gaudi_distributed.comm.communicator import allreduce_within
from gaudi_distributed.comm.opening import communication_environment, open_communicator, verify_consistent
from gaudi_ops.files import open_regular_file, read_file, read_text
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.training.trainer import Callback, TrainableTask, TrainingData
    from gaudi_models.weights import WeightsFile

WORKER, LOG = "worker_{}", "log.txt"
HISTORY, EVALUATIONS = "history.jsonl", "evaluations.jsonl"
SUMMARIES = "summaries"
_WORKER_FILES = (LOG, HISTORY, EVALUATIONS)
_SUMMARY_FILES = ("events.out.tfevents.*", "plugins/profile/*/*", "trace.json")  # TensorBoard's, and traces
OURS = ("gaudi_apps", "gaudi_datasets", "gaudi_distributed", "gaudi_models", "gaudi_ops")
OTHERS = ("horovod", "numpy")  # besides those of the framework


class Session:
    """One start of a program, in this process and maybe others; use it as a context manager.

    Args:
        app: the program, with validated flags.
        reporter: reports where this process is.
        elastic: copies of the state, where ranks come and go.

    Attributes:
        communicator: of the processes that train together.
        is_root: whether this one is rank 0, whose files count, and which alone shows and writes results.
        uploads: brings what a training writes to the store of its URL, on rank 0.
        logs: where this process writes what only it knows: the folder of the run, or `worker_R` in it.
    """

    def __init__(self, app: Application, reporter: FailureReporter, elastic: ElasticState | None = None) -> None:
        self.app = app
        self.reporter = reporter
        self.elastic = elastic = elastic or ElasticState()
        self.settings = app.settings
        self.model_dir = app.settings.model_dir
        keep = app.settings.keep_checkpoints
        if is_url(app.config.run.model_dir):  # which has the others
            keep = min(keep, LOCAL_CHECKPOINTS)
        self.uploads: Callback | None = None
        self.folder = RunFolder(self.model_dir, (CHECKPOINTS, BEST))
        self.checkpoints = CheckpointFolder(self.model_dir / CHECKPOINTS, keep=keep)
        self.best = CheckpointFolder(self.model_dir / BEST, keep=1)
        distribution = app.settings.distribution
        apply_environment(distribution.environment)
        apply_environment(communication_environment(distribution.communication, distribution.rank_info, os.environ))
        # In a later round of an elastic run the framework is started already, and stays.
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
        with (
            open_regular_file(self.logs / LOG, "a", encoding="utf-8", buffering=1) as log,
            contextlib.redirect_stdout(log),
        ):
            yield

    def register_logs(self) -> None:
        """Register as the run's own what TensorBoard's writers made, and what other ranks wrote here."""
        if self.is_root:
            # By their names, for --clean removes them: files of others may lie beside them, as in a project.
            workers = [self.model_dir / WORKER.format(rank) for rank in range(1, self.communicator.size)]
            found = [worker / name for worker in workers for name in _WORKER_FILES]
            for folder in (self.model_dir, *workers):
                found += [path for name in _SUMMARY_FILES for path in (folder / SUMMARIES).glob(name)]
            self.folder.register_files(*(path for path in found if path.is_file()))

    def require_equal_start(self, data: str = "") -> None:
        """Compare over the ranks what they are about to do, with the fingerprint of the training data.

        Raises:
            ConfigurationError: ranks differ; it names the first difference.
        """
        if self.communicator.size > 1:
            verify_consistent(self.communicator, list_start_metadata(self.app, data))

    def share_recipe(self) -> None:
        """Follow the recipe of rank 0, which alone may have the folder of the run; the type of numbers stays."""
        document = broadcast_from_rank0(self.communicator, self.app.recipe.to_document)
        if not self.is_root and document["choices"]:
            own = {choice.flag: choice for choice in self.app.recipe.choices}
            recipe = parse_recipe(document, self.app.recipe.given)
            choices = (own.get(one.flag, one) if one.flag == "dtype" else one for one in recipe.choices)
            self.app.use_recipe(replace(recipe, choices=tuple(choices)))
            self.settings = self.app.settings

    def share_split(self) -> None:
        """Split the data as rank 0 does, for the same reason."""
        if getattr(getattr(self.app.config, "recipe", None), "data", None) is None:
            return
        flags = dict(list_flags(self.app.config))
        values = broadcast_from_rank0(self.communicator, lambda: {name: flags[name] for name in ("val_share", "seed")})
        if not self.is_root:
            self.app.change_flags(values)
            self.settings = self.app.settings

    def choose_version(self) -> None:
        """Follow the rules of the run in the folder, or the current ones, alike on all ranks."""
        clean = self.settings.clean
        self.app.use_version(
            broadcast_from_rank0(self.communicator, lambda: find_recipe_version(self.folder, clean=clean))
        )

    def choose_fingerprint(self, data: TrainingData) -> TrainingData:
        """Name the data as the run in the folder does, which may have begun with an earlier release."""

        def is_former() -> bool:
            settings = None if self.settings.clean else self.folder.read_settings()
            before = None if settings is None else settings.get("data")
            return before != data.fingerprint and before == data.former_fingerprint

        if not broadcast_from_rank0(self.communicator, is_former):
            return data
        say("the run was begun by an earlier release, which noted sizes only: replaced images cannot be noticed")
        return replace(data, fingerprint=data.former_fingerprint)

    def build_task(self, model_config: ModelConfig, *, averages: bool) -> TrainableTask:
        """Build a network by its configuration, with new weights, that trains with the other ranks."""
        group = self.settings.distribution.batch_norm_group
        reduction = allreduce_within(self.communicator, group) if group > 1 else None
        task = self.app.build_task(
            model_config, averages=averages, communicator=self.communicator, reduce_statistics=reduction
        )
        if self.settings.device.checks_shapes or self.app.framework.needs_static_shapes():
            task.guard_shapes()
        return task

    def load_or_initialize(
        self, data: TrainingData, batch_norm_images: int
    ) -> tuple[TrainableTask, ModelConfig, RunState]:
        """Build the network with one state on every rank: that of a checkpoint, of a file of weights, or a new one.

        Raises:
            DataError: no checkpoint can be read, or it is of other classes than the data.
        """
        checkpoint: Checkpoint | None = None
        weights: WeightsFile | None = None

        def find() -> dict[str, Any]:
            """Look for a checkpoint, or a file of weights; return JSON values of it for all ranks."""
            nonlocal checkpoint, weights
            checkpoint = self.elastic.newest
            if checkpoint is None and not self.settings.clean and self.checkpoints.steps():
                checkpoint = self.checkpoints.load_newest(report=warn)
            if checkpoint is None:
                if self.settings.weights is not None:
                    weights = read_initial_weights(self.settings.weights, data.model_config)
                return {"model_config": self.app.describe_model(data, weights), "step": 0, "run_state": {}}
            require_classes(checkpoint.metadata, data.model_config, f"checkpoint of step {checkpoint.step}")
            state = checkpoint.run_state
            if state.batch_norm_images not in (0, batch_norm_images):
                warn(
                    f"batch norm went over {state.batch_norm_images} images up to step {checkpoint.step}, "
                    f"now {batch_norm_images}"
                )
            return {"model_config": checkpoint.model_config, "step": checkpoint.step, "run_state": state.to_json()}

        def fill() -> None:
            """Set the state of rank 0's network."""
            if checkpoint is not None:
                task.write_state(checkpoint.tensors)
                say(f"{self.checkpoints.path(checkpoint.step)}: continuing after step {checkpoint.step}")
            elif weights is not None:
                say(*task.load_weights(weights).describe().splitlines())

        found = broadcast_from_rank0(self.communicator, find)
        task = self.build_task(found["model_config"], averages=True)
        broadcast_from_rank0(self.communicator, fill)
        self.reporter.at(found["step"], "broadcast")
        share_state(self.communicator, task)
        return task, found["model_config"], RunState.from_json(found["step"], found["run_state"])

    def select_checkpoints(self) -> list[Path]:
        """List the folders of the checkpoints that --checkpoint names, in the order of steps.

        Raises:
            MissingInputError: there are none.
        """
        return find_checkpoints(self.model_dir, self.settings.checkpoint or "newest")

    def load_selected(self) -> Checkpoint:
        """Load the checkpoint that --checkpoint names; the newest is the newest one that can be read."""
        return load_chosen(self.model_dir, self.settings.checkpoint or "newest", warn)

    def restore_reported(self) -> Restored:
        """Build the network that a training reports, in this process: with --data the best one, else the newest."""
        best = self.settings.reports_best and self.settings.reports_scores and self.best.steps()
        return self._restore((self.best if best else self.checkpoints).load_newest(report=warn))

    def restore_used(self) -> Restored:
        """Build the network that predict and export use, and say which one.

        It is the one that --checkpoint names. Without the flag it is that of the report of the run: the best one where
        it was trained by --data, else the newest.
        """
        which = self.app.find_used_checkpoint()
        restored = self._restore(load_chosen(self.model_dir, which, warn))
        named = f", the {which} one" * (not which.isdecimal())
        say(f"{self.model_dir}: checkpoint of step {restored.step}{named}", error=True)
        return restored

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
        return Restored(task, model_config, checkpoint.step, checkpoint.sha256)

    def _build_for_use(self, model_config: ModelConfig) -> TrainableTask:
        """Build a network that does not train, and so needs no other rank."""
        return self.app.build_task(model_config, averages=False, communicator=SingleProcess(), reduce_statistics=None)


class ElasticState:
    """Keep the state of a process while ranks come and go.

    Args:
        every: steps between two copies of the state; 0: none are made, for ranks do not come and go.
        client: of the launcher's rendezvous.

    Attributes:
        newest: the newest copy. All ranks have the same, so whoever is rank 0 next can give it to the others.
        framework: the one that computes, once it was started.
    """

    def __init__(self, every: int = 0, client: RendezvousClient | None = None) -> None:
        self.every = every
        self.newest: Checkpoint | None = None
        self.framework: Framework | None = None
        self._client = client
        self._is_later_round = False

    def is_due(self, step: int) -> bool:
        """Return whether the newest copy is old enough for another one."""
        return self.every > 0 and step - (0 if self.newest is None else self.newest.step) >= self.every

    def hosts_updated(self) -> bool:
        """Return whether the launcher is about to begin a new round, with other ranks."""
        return self._client is not None and self._client.hosts_updated()

    def leaves_alone(self) -> bool:
        """Tell the launcher that this process is asked to end; return whether the others may go on without it."""
        return self._client is not None and self._client.leave()

    def begin_round(self, is_asked_to_end: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the next round, and set the variables of this process's rank; return False if it is not needed."""
        from gaudi_distributed.comm.horovod_engine import end_horovod

        if self._is_later_round:
            end_horovod()
        self._is_later_round = True
        variables = None if self._client is None else self._client.next_assignment(is_asked_to_end)
        if variables is None:
            return False
        os.environ.update(variables)
        return True

    @contextlib.contextmanager
    def recovering(self) -> Iterator[None]:
        """Suppress the loss of a rank and a change of ranks within a context; the next round goes back to the copy."""
        from gaudi_distributed.comm.horovod_engine import is_rank_lost

        try:
            yield
        except Exception as error:
            if not isinstance(error, RanksChangedError) and not is_rank_lost(error):
                raise
            step = 0 if self.newest is None else self.newest.step
            say(f"the processes change: going back to step {step}")


def list_start_metadata(app: Application, data: str) -> dict[str, Any]:
    """Return JSON values by name that are equal where ranks may train together; data is their fingerprint."""
    per_rank = select_flags(type(app.config), "per_rank")
    flags = {name: value for name, value in list_flags(app.config) if name not in per_rank}
    return {
        "configuration": flags,
        "data": data,
        "device": app.framework.list_devices(),
        "precision": app.framework.precision_name,
        "python": platform.python_version(),
        "versions": {name: find_version(name) for name in (*app.framework.distributions, *OTHERS)},
        "code": hash_code(),
    }


def describe_environment(app: Application) -> dict[str, str]:
    """Describe device, processors, system and versions for people, once the framework has started."""
    names = ("tensorflow", "tensorflow-cpu", "tf-keras", "mxnet", "habana-tensorflow", "numpy", "gaudi-apps")
    versions = {name: find_version(name) for name in names}
    try:
        lines = read_text(Path("/proc/cpuinfo")).splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    usable = len(os.sched_getaffinity(0))
    return {
        "Device": f"{', '.join(app.framework.list_devices())}, {app.framework.precision_name}",
        "Processors": f"{usable} of {os.cpu_count()} {model or platform.machine()}",
        "System": f"{platform.platform()}, Python {platform.python_version()}",
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version != "none"),
    }


def hash_code() -> str:
    """Hash our packages as they are installed: a version does not tell of a file that somebody changed."""
    digest = hashlib.sha256()
    for package in OURS:
        spec = util.find_spec(package)
        folder = Path(spec.origin if spec and spec.origin else package).parent
        for path in sorted(folder.rglob("*.py")):
            content = read_file(path)
            digest.update(f"{package}/{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def share_state(communicator: Communicator, task: TrainableTask) -> None:
    """Give the networks of all ranks, which are built alike, the state that rank 0's has."""
    if communicator.size > 1:
        state = task.read_state()
        tensors = communicator.broadcast(list(state.values()))
        task.write_state(dict(zip(state, map(np.asarray, tensors), strict=True)))
