"""Flags that all programs share: several processes, and `--mode parity`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, arg

from gaudi_apps.cli.flag_rules import fixed, per_rank, resume_safe
from gaudi_datasets.errors import FlagError

Switch = FlagCreatePairsOff[bool]


@dataclass(frozen=True)
class HorovodFlags:
    """Ranks that train together by Horovod, one for each device; `DistributionFlags` adds tf.distribute."""

    use_horovod: Annotated[Switch, arg(aliases=["-hvd"]), resume_safe()] = False
    """Train together by Horovod, as under gaudi-run without a flag; --batch_size is that of one process."""
    hvd_workers: Annotated[int, resume_safe(minimum=0)] = 0
    """Processes in all, which are started through gaudi-run where none were launched; 0: those that were launched."""
    num_workers_per_hls: Annotated[int, resume_safe(minimum=0)] = 0
    """Processes on each machine of MULTI_HLS_IPS, or on this one, started through gaudi-run where none were
    launched; 0: 8 with MULTI_HLS_IPS, else as --hvd_workers says."""
    horovod_hierarchical_allreduce: Annotated[Switch, resume_safe()] = False
    """With --use_horovod: within each machine first, then between machines."""

    @property
    def has_engine(self) -> bool:
        """Return whether several processes train together."""
        return self.use_horovod

    def to_distribution(self) -> DistributionFlags:
        """Return the same flags beside those of tf.distribute, which is off."""
        return DistributionFlags(**{flag.name: getattr(self, flag.name) for flag in fields(HorovodFlags)})


@dataclass(frozen=True)
class DistributionFlags(HorovodFlags):
    """Several processes that train together, one for each device."""

    distribution_strategy: Annotated[
        Literal["off", "multi_worker", "mirrored", "hpu"], arg(aliases=["-ds"]), resume_safe()
    ] = "off"
    """Train together by tf.distribute; --batch_size is that of all processes. mirrored: starts a process for each
    device of this machine; hpu: on Gaudi."""
    kubernetes_run: Annotated[Switch, resume_safe()] = False
    """Kubernetes starts the processes, as the mpirun of an MPIJob does; none are started here."""
    num_gpus: Annotated[int, arg(aliases=["-ng"]), resume_safe(minimum=0)] = 0
    """Devices of this machine for --distribution_strategy mirrored; 0: all."""
    worker_hosts: Annotated[str | None, resume_safe()] = None
    """host:port of every process, with commas between, for --distribution_strategy multi_worker without TF_CONFIG."""
    task_index: Annotated[int, per_rank(per_command=True)] = -1
    """The place of this process in --worker_hosts, from 0."""
    global_batch_size: Annotated[int, fixed(sets_batch=True, minimum=0)] = 0
    """Images a step of all processes, in place of --batch_size: a run can go on with more or fewer; 0: by that."""
    distributed_bn: Annotated[Switch, resume_safe()] = False
    """Batch norm over the images of all processes, in place of each by itself."""
    bn_group: Annotated[Literal[0, 2, 4, 8, 16], resume_safe()] = 0
    """With --distributed_bn: over groups of so many processes; 0: over all."""
    commit_steps: Annotated[int, resume_safe(minimum=1)] = 10
    """Under gaudi-run with hosts that come and go: steps between two copies of the state in memory."""
    gradient_compression: Annotated[Literal["none", "fp16", "bf16"], resume_safe()] = "none"
    """Type in which gradients travel between processes."""
    fusion_threshold_mb: Annotated[int | None, resume_safe(minimum=0)] = None
    """MiB of gradients that travel together at most; 0: each by itself."""

    @property
    def has_engine(self) -> bool:
        """Return whether several processes train together."""
        return self.use_horovod or self.distribution_strategy != "off"

    def to_distribution(self) -> DistributionFlags:
        """Return these flags."""
        return self


def check_distribution(flags: DistributionFlags) -> None:
    """Raise FlagError for the first flag that breaks a rule of its own or of another one."""
    strategy = flags.distribution_strategy
    if flags.use_horovod and strategy != "off":
        raise FlagError(f"--use_horovod: contradicts --distribution_strategy {strategy}; leave one of them out")
    _check_needs(flags)
    _check_hosts(flags)
    if flags.num_gpus and flags.hvd_workers not in (0, flags.num_gpus):
        raise FlagError(f"--num_gpus {flags.num_gpus}: contradicts --hvd_workers {flags.hvd_workers}; leave one out")


def _check_needs(flags: DistributionFlags) -> None:
    """Flags that have an effect only beside others."""
    strategy, is_several = flags.distribution_strategy, flags.has_engine
    several = "--use_horovod or --distribution_strategy"
    rules = (
        ("hvd_workers", flags.hvd_workers > 1, is_several, several),
        ("num_workers_per_hls", flags.num_workers_per_hls > 1, is_several, several),
        ("kubernetes_run", flags.kubernetes_run, is_several, several),
        ("distributed_bn", flags.distributed_bn, is_several, several),
        ("gradient_compression", flags.gradient_compression != "none", is_several, several),
        ("fusion_threshold_mb", flags.fusion_threshold_mb is not None, is_several, several),
        ("horovod_hierarchical_allreduce", flags.horovod_hierarchical_allreduce, flags.use_horovod, "--use_horovod"),
        ("bn_group", flags.bn_group, flags.distributed_bn, "--distributed_bn"),
        ("num_gpus", flags.num_gpus > 1, strategy == "mirrored", "--distribution_strategy mirrored"),
        ("worker_hosts", flags.worker_hosts, strategy == "multi_worker", "--distribution_strategy multi_worker"),
    )
    for name, is_given, is_met, needed in rules:
        if is_given and not is_met:
            raise FlagError(f"--{name}: is for processes that train together; give {needed} too, or leave it out")


def _check_hosts(flags: DistributionFlags) -> None:
    if (flags.worker_hosts is None) != (flags.task_index == -1):
        raise FlagError("--worker_hosts and --task_index: give both or none")
    count = len((flags.worker_hosts or "").split(","))
    if flags.worker_hosts is not None and not 0 <= flags.task_index < count:
        raise FlagError(f"--task_index {flags.task_index}: must be a place in --worker_hosts, 0 to {count - 1}")
    if flags.worker_hosts is not None and flags.hvd_workers not in (0, count):
        raise FlagError(f"--hvd_workers {flags.hvd_workers}: contradicts --worker_hosts, which names {count}")


RECORDED = "recorded"
MAX_STEPS = 100


@dataclass(frozen=True)
class ParityFlags:
    """For --mode parity: compute the first training batches in two ways, and name the first tensor that differs."""

    parity_against: Annotated[tuple[str, ...], resume_safe()] = ()
    """The other side: flags with other values, as device=cpu checkpoint=best, or recorded=FOLDER."""
    parity_output: Annotated[str | None, resume_safe()] = None
    """New folder for a recording of this side, to compare with later or on another machine."""
    parity_steps: Annotated[int, resume_safe(minimum=1, maximum=MAX_STEPS)] = 2
    """Steps to compute: the first ones of a training, with its batches and rates."""
    parity_rtol: Annotated[float | None, resume_safe(minimum=0)] = None
    """Difference that is tolerated, as a share of the largest value of a tensor. By default 1e-6 of the weights to
    begin with; of what layers give 1e-4, or .05 where a side is bf16; of gradients and updates 1e-3, or .3."""
    parity_atol: Annotated[float | None, resume_safe(minimum=0)] = None
    """Added to that; by default 1e-6, of weights at the start 1e-8."""


@dataclass(frozen=True)
class OtherSide:
    """What this side is compared with.

    Attributes:
        recorded: a folder that --parity_output made; None: it is computed.
        arguments: added to the command line they give the other side, if it is computed.
        text: as the user described it.
    """

    recorded: str | None
    arguments: tuple[str, ...]
    text: str


def find_other_side(flags: ParityFlags) -> OtherSide | None:
    """The other side of checked flags; None: there is only a recording to make."""
    given = dict(_split(entry) for entry in flags.parity_against)
    if not given:
        return None
    arguments = [_to_argument(name, value) for name, value in given.items() if name != RECORDED]
    return OtherSide(given.get(RECORDED), tuple(arguments), " ".join(flags.parity_against))


def check_parity(flags: ParityFlags, mode: str, per_side: Sequence[str]) -> None:
    """Raise FlagError for the first flag whose value breaks a rule.

    Args:
        flags: to be checked.
        mode: what is done.
        per_side: names of the flags that two sides may differ in.
    """
    if mode != "parity":
        _require_defaults(flags, mode)
        return
    if not flags.parity_against and flags.parity_output is None:
        raise FlagError("--mode parity: needs --parity_against, as device=cpu, or --parity_output FOLDER")
    if flags.parity_against and flags.parity_output is not None:
        raise FlagError("--parity_output: records a side by itself, so leave out --parity_against")
    _check_against(flags.parity_against, per_side)


def _require_defaults(flags: ParityFlags, mode: str) -> None:
    defaults = ParityFlags()
    for entry in fields(flags):
        if getattr(flags, entry.name) != getattr(defaults, entry.name):
            raise FlagError(f"--{entry.name}: is for --mode parity; mode is {mode}")


def _check_against(entries: Sequence[str], names: Collection[str]) -> None:
    seen: set[str] = set()
    for entry in entries:
        name, value = _split(entry)
        if name not in (*names, RECORDED) or not value:
            known = ", ".join(f"{one}=.." for one in names)
            raise FlagError(f"--parity_against {entry}: must be one of {known}, or {RECORDED}=FOLDER")
        if name in seen:
            raise FlagError(f"--parity_against {entry}: {name} is given twice; leave one of them out")
        seen.add(name)
    if RECORDED in seen and len(seen) > 1:
        raise FlagError(f"--parity_against {RECORDED}=..: what is recorded does not change; leave the others out")


def _split(entry: str) -> tuple[str, str]:
    name, _, value = entry.partition("=")
    return name.removeprefix("--").replace("-", "_"), value


def _to_argument(name: str, value: str) -> str:
    switches: dict[str, Any] = {"true": f"--{name}", "false": f"--no_{name}"}
    return str(switches.get(value, f"--{name}={value}"))
