"""Settings of a run, made from the flags of a program, whose names differ from program to program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gaudi_datasets.fetching.stores import find_copy
from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.comm.opening import CommunicationOptions
from gaudi_distributed.devices.machine import count_processors

# Threads: a number, 0 for as many as there are processors to use, or the measured best.
ThreadFlag: TypeAlias = Literal["auto"] | int
MAX_PARITY_STEPS = 100  # that --mode parity compares
SMALLEST_TILE = 64  # side in pixels of the windows of a photo, in Python and by --tiles


@dataclass(frozen=True)
class Distribution:
    """A process and the others that it trains with; by default it is alone.

    Attributes:
        rank_info: rank and world size of the process.
        communication: how they talk.
        batch_norm_group: over the images of how many of them batch norm goes.
        environment: variables that follow from flags and are still to be set.
    """

    rank_info: RankInfo = field(default_factory=RankInfo)
    communication: CommunicationOptions = field(default_factory=CommunicationOptions)
    batch_norm_group: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceSettings:
    """Settings of the device.

    Attributes:
        device: ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"hpu"``.
        dtype: precision by name, see `gaudi_distributed.choose_precision`.
        seed: of weights, order and augmentation.
        use_hpu: whether ``"auto"`` may take a Gaudi.
        recipe_cache: folder of compiled graphs on Gaudi.
        intra_threads: within an operation; 0: as many as usable processors; ``"auto"``: the fastest.
        inter_threads: between operations; the same.
        max_cpus: processors the program may use at most; 0: all.
        deterministic: whether every operation has to give the same bits at every run.
        local_rank: of this process on its machine, which says which device is its own.
        is_rank: whether it is one of several processes.
        checks_shapes: whether a training step without static shapes is an error on every device.
        compiles_steps: whether XLA compiles training steps as a whole.
        recomputes: whether training steps compute the inside of blocks again, see `gaudi_models.layers.Network`.
    """

    device: str
    dtype: str
    seed: int
    use_hpu: bool = False
    recipe_cache: str | None = None
    intra_threads: ThreadFlag = 0
    inter_threads: ThreadFlag = 0
    max_cpus: int = 0
    deterministic: bool = False
    local_rank: int = 0
    is_rank: bool = False
    checks_shapes: bool = False
    compiles_steps: bool = False
    recomputes: bool = False

    @property
    def usable_cpus(self) -> int:
        """Processors that the program may use."""
        available = count_processors()
        return min(available, self.max_cpus or available)

    @property
    def runtime_threads(self) -> int:
        """Threads of an export's runtime: as the flag says, else one for each processor; nothing is measured."""
        given = self.intra_threads
        return self.usable_cpus if given == "auto" else given or self.usable_cpus


@dataclass(frozen=True)
class RunSettings:
    """A run, its reports and its end.

    Attributes:
        device: see `DeviceSettings`.
        model_dir: folder of the run.
        clean: whether to remove the run there first.
        checkpoint: which one is used: ``"newest"``, ``"best"``, ``"all"`` or a step; None: as the mode does by default.
        keep_checkpoints: how many of the newest are kept.
        checkpoint_minutes: between two checkpoints, besides those by steps; 0: none.
        log_every: steps between two reports to the user.
        summary_every: steps between two points in TensorBoard.
        profiled_steps: steps to trace for TensorBoard's profiler.
        draws_input: whether images of the training input are wanted.
        weights: file to begin with.
        target: the score that ends training; 0: none.
        evaluates: whether training is scored, while it lasts or at its end.
        reports_scores: whether a report of scores is wanted at the end of training.
        steps: of the run, where they are given; 0: they follow from epochs.
        patience: evaluations in a row without a better score that end training; 0: never.
        kills: how often verify-resume kills its run.
        steps_per_call: steps that are computed in one call.
        callbacks: import paths of the user's callbacks, see `gaudi_apps.training.callbacks.load_callbacks`.
        log_to: trackers to log to, see `gaudi_apps.training.history`.
        minutes: that the length of training is fitted to; 0: it follows from steps or epochs.
        reports_best: whether the report at the end is of the best checkpoint, and of the test images if there are any.
        distribution: this process among those that train together.
    """

    device: DeviceSettings
    model_dir: Path
    clean: bool
    checkpoint: str | None
    keep_checkpoints: int
    checkpoint_minutes: float
    log_every: int
    summary_every: int
    profiled_steps: range
    draws_input: bool
    weights: str | None
    target: float
    evaluates: bool
    reports_scores: bool
    steps: int
    patience: int = 0
    kills: int = 0
    steps_per_call: int = 1
    callbacks: tuple[str, ...] = ()
    log_to: tuple[str, ...] = ()
    minutes: float = 0.0
    reports_best: bool = False
    distribution: Distribution = field(default_factory=Distribution)


def make_device_settings(
    config: Any, distribution: Distribution, *, intra_threads: ThreadFlag, inter_threads: ThreadFlag
) -> DeviceSettings:
    """Make the settings of the device for one rank, from the flag groups `run` and `device` of a TensorFlow program."""
    run, device = config.run, config.device
    return DeviceSettings(
        device=device.device,
        use_hpu=not device.no_hpu,
        dtype=device.dtype,
        recipe_cache=device.recipe_cache,
        intra_threads=intra_threads,
        inter_threads=inter_threads,
        max_cpus=device.max_cpus,
        seed=run.seed,
        deterministic=run.deterministic,
        local_rank=distribution.rank_info.local_rank,
        is_rank=distribution.rank_info.size > 1,
        checks_shapes=device.check_static_shapes,
        compiles_steps=device.enable_xla,
        recomputes=device.recompute,
    )


def make_run_settings(config: Any, device: DeviceSettings, distribution: Distribution, **others: Any) -> RunSettings:
    """Make the settings of a run for one rank, from flags that all programs have, and others by their names."""
    run, report = config.run, config.report
    return RunSettings(
        device=device,
        model_dir=find_copy(run.model_dir),
        clean=run.clean,
        keep_checkpoints=report.keep_ckpt_max,
        checkpoint_minutes=report.save_checkpoints_minutes,
        log_every=report.log_steps,
        draws_input=report.vis_dataloader,
        steps=run.steps,
        callbacks=run.callbacks,
        log_to=run.log_to,
        distribution=distribution,
        **others,
    )


def find_version(distribution: str) -> str:
    """Return the version of a distribution, ``"none"`` if it is not installed."""
    from importlib import metadata  # 30 ms, which --help does not need

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"
