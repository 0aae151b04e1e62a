"""Start the processes that flags ask for, through the launcher of `gaudi-run`, or say what would be started.

A process becomes the launcher, as the originals' demo scripts did. The launcher runs the same command as each rank, and
that finds its rank in the environment and starts nothing further.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

from gaudi_apps.cli.flags import DistributionFlags, HorovodFlags
from gaudi_apps.runtime.errors import flag_error
from gaudi_apps.runtime.settings import Distribution
from gaudi_datasets.errors import FlagError
from gaudi_distributed import ConfigurationError, DeviceError
from gaudi_distributed.cluster.hosts import find_cluster
from gaudi_distributed.cluster.rank_info import detect_rank, is_launched, write_tf_config
from gaudi_distributed.cluster.rendezvous import SIZES
from gaudi_distributed.comm.communicator import BYTES_PER_MB, DEFAULT_MB, plan_buckets
from gaudi_distributed.comm.horovod_engine import require_horovod
from gaudi_distributed.comm.opening import CommunicationOptions, Engine, find_engine
from gaudi_distributed.devices.selection import DeviceKind, count_devices
from gaudi_ops.program import flush_output, say
from gaudi_ops.scaling import Step

if TYPE_CHECKING:
    from gaudi_distributed.launch.planning import CommandLine
    from gaudi_models.architectures import Tensors

LAUNCHER = "gaudi_distributed.launch"
_HOSTS = "MULTI_HLS_IPS"
_ENGINES = "--use_horovod or --distribution_strategy"

FindDevice: TypeAlias = Callable[[], DeviceKind]
SomeFlags = TypeVar("SomeFlags", bound=HorovodFlags)


@dataclass(frozen=True)
class LaunchReport:
    """The processes that a command would start.

    Attributes:
        command: gaudi-run with its flags and the program; empty where it cannot be started.
        processes: how many there would be.
        backend: what starts them.
        lines: the command lines, host by host.
        notes: how they are started, then what would keep them from running on this machine.
    """

    command: tuple[str, ...]
    processes: int = 0
    backend: str = ""
    lines: tuple[CommandLine, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """JSON values by name."""
        return asdict(self)

    def describe(self) -> str:
        """Return lines of text."""
        text = "".join(f"launch: {note}\n" for note in self.notes)
        for line in self.lines:
            first, last = line.first_rank, line.last_rank
            ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
            way = f", by way of {shlex.join(line.reach)}" if line.reach else ""
            text += f"{ranks} on {', '.join(line.hosts)}{way}:\n  {shlex.join(line.argv)}\n"
        return text


def start_processes(
    flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice, command: Sequence[str]
) -> None:
    """Become the launcher of several processes of a command, where flags ask for them and none were launched.

    Signals, output and the exit status are then those of `gaudi-run`.

    Raises:
        FlagError: several are to train together, none were launched, and the flags do not say how many to start.
        ConfigurationError: what they talk by is not installed, or the device is not there.
    """
    if environ.get(_HOSTS) and not flags.has_engine and not is_launched(environ):
        say(f"{_HOSTS} has no effect without {_ENGINES}: 1 process", error=True)
    workers = flags.num_workers_per_hls
    if workers > 1 and not flags.has_engine and not is_launched(environ):
        say(f"--num_workers_per_hls {workers} has no effect without {_ENGINES}: 1 process", error=True)
    arguments = list_launcher_words(flags, environ, find_device, command)
    if arguments is not None:
        check_engine(flags, find_device)
        become_launcher(arguments)


def become_launcher(words: Sequence[str]) -> NoReturn:
    """Go on as `gaudi-run` with these arguments, in this process."""
    flush_output()
    os.execv(sys.executable, [sys.executable, "-m", LAUNCHER, *words])


def list_launcher_words(
    flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice, command: Sequence[str]
) -> list[str] | None:
    """Return what gaudi-run is given; None: there is nothing to start. See `start_processes`."""
    if not flags.has_engine or flags.worker_hosts is not None or is_launched(environ):
        return None
    engine = "--use_horovod" if flags.use_horovod else f"--distribution_strategy {flags.distribution_strategy}"
    if flags.kubernetes_run:
        raise flag_error(
            "--kubernetes_run: Kubernetes starts the processes, and it started none here; run this command by the "
            "mpirun of an MPIJob (`gaudi-run --mpijob`), or leave the flag out to start them here"
        )
    request = find_request(flags, environ, find_device)
    if request is None:
        raise flag_error(
            f"{engine}: no processes were launched",
            "give --num_workers_per_hls N, or --hvd_workers N, or start by `gaudi-run --np N`",
        )
    ranks, slots = request
    if (ranks or slots) == 1 and not environ.get(_HOSTS):
        return None
    given = {"--np": ranks, "--num_workers_per_hls": slots}
    return [
        *(word for flag, value in given.items() if value is not None for word in (flag, str(value))),
        *(() if flags.use_horovod else ("--backend", "multi_worker")),
        *_list_scale_out(flags, environ, find_device),
        *("--", *command),
    ]


def check_engine(flags: DistributionFlags, find_device: FindDevice) -> None:
    """Raise ConfigurationError where ranks that are started on this machine could not train together."""
    if flags.use_horovod:
        require_horovod()
    if flags.distribution_strategy == "hpu" and (device := find_device()) != "hpu":
        raise DeviceError(
            f"--distribution_strategy hpu: is for Gaudis, and this machine computes on its {device}; choose "
            "--distribution_strategy multi_worker, or see `gaudi-run doctor --device hpu`"
        )


def report_launch(
    flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice, command: Sequence[str]
) -> LaunchReport | None:
    """Say what `start_processes` would start, which this machine may lack things for; None: nothing."""
    # Neither help nor a run of one process needs the launcher.
    from gaudi_distributed.launch.flags import PROGRAM, parse_flags
    from gaudi_distributed.launch.planning import plan_launch

    try:
        words = list_launcher_words(flags, environ, find_device, command)
        if words is None:
            return None
        launch = plan_launch(parse_flags(["--dry_run", *words]), environ)
    except (FlagError, ConfigurationError) as error:
        return LaunchReport((), notes=(f"it would not start here: {error}",))
    notes = list(launch.notes)
    try:
        check_engine(flags, find_device)
    except ConfigurationError as error:
        notes.append(f"it would not run here: {error}")
    plan = launch.plan
    return LaunchReport((PROGRAM, *words), plan.cluster.size, plan.backend, launch.command_lines, tuple(notes))


def _list_scale_out(flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice) -> tuple[str, ...]:
    """Return the launcher's flags for Gaudis of several hosts, whose traffic needs variables of its own."""
    if "," not in environ.get(_HOSTS, "") or find_device() != "hpu":
        return ()
    within_hosts = ("--scale_out", "hierarchical") if flags.horovod_hierarchical_allreduce else ()
    return ("--accelerator", "hpu", *within_hosts)


def fill_distribution_flags(flags: SomeFlags, environ: Mapping[str, str], find_device: FindDevice) -> SomeFlags:
    """Return the flags, with the engine that gaudi-run started this process for where they name none.

    So `gaudi-run --np 8 ssd_train` trains on 8 devices as if --use_horovod were given, too.

    Raises:
        ConfigurationError: they name Horovod, or know nothing else, and gaudi-run started the processes for
            tf.distribute.
    """
    engine = find_engine(environ)
    if engine == "multi_worker" and flags.use_horovod:
        raise ConfigurationError(
            "--use_horovod: gaudi-run --backend multi_worker started the processes for tf.distribute",
            flag="--use_horovod",
            remedy="leave out one of the two",
        )
    if engine == "multi_worker" and not isinstance(flags, DistributionFlags):
        raise ConfigurationError(
            "gaudi-run --backend multi_worker started the processes for tf.distribute, and this program trains by "
            "Horovod",
            flag="--backend",
            remedy="leave out --backend",
        )
    if flags.has_engine or engine in (None, "single"):
        return flags
    if engine == "horovod":
        return replace(flags, use_horovod=True)
    strategy: dict[str, Any] = {"distribution_strategy": "hpu" if find_device() == "hpu" else "multi_worker"}
    return replace(flags, **strategy)


def find_distribution(flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice) -> Distribution:
    """Return the rank of this process, and how it communicates with the others.

    Args:
        flags: checked.
        environ: the variables of the process.
        find_device: says which device the process computes on; asked only where that matters.

    Raises:
        FlagError: the flags contradict what was launched.
        ConfigurationError: what was launched contradicts itself.
    """
    environment = _list_workers(flags, environ)
    variables = {**environ, **environment}
    rank_info = detect_rank(variables)
    if not is_launched(variables):
        return Distribution(rank_info)
    for name, asked, found in (
        ("hvd_workers", flags.hvd_workers, rank_info.size),
        ("num_gpus", flags.num_gpus * (flags.distribution_strategy == "mirrored"), rank_info.local_size),
    ):
        if asked not in (0, found):
            raise flag_error(f"--{name} {asked}: {found} processes were launched", "give this number, or leave it out")
    if 0 < flags.num_workers_per_hls < rank_info.local_size:
        raise flag_error(
            f"--num_workers_per_hls {flags.num_workers_per_hls}: {rank_info.local_size} processes were launched on "
            "this host",
            "give this number, or leave it out",
        )
    group = (flags.bn_group or rank_info.size) if flags.distributed_bn else 1
    if rank_info.size % group:
        raise flag_error(
            f"--bn_group {group}: must divide the {rank_info.size} processes", "give another, or leave it out"
        )
    communication = CommunicationOptions(
        engine=_choose_engine(flags, find_device),
        compression=flags.gradient_compression,
        fusion_threshold_mb=flags.fusion_threshold_mb,
        hierarchical_allreduce=flags.horovod_hierarchical_allreduce,
        group_size=group,
    )
    return Distribution(rank_info, communication, group, environment)


def count_workers(flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice) -> int:
    """Count the processes that train together, those launched already or those to be launched.

    Raises:
        ConfigurationError: what names the hosts names none.
    """
    variables = {**environ, **_list_workers(flags, environ)}
    if is_launched(variables):
        return detect_rank(variables).size
    request = find_request(flags, environ, find_device)
    if request is None:
        return 1
    ranks, slots = request
    return ranks or find_cluster(environ, slots=slots)[0].size


def find_request(
    flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice
) -> tuple[int | None, int | None] | None:
    """Return the ranks that the launcher has to start, in all and on each host; None if no flag gives a number.

    Hosts are those of MULTI_HLS_IPS, of a scheduler, or this machine; with MULTI_HLS_IPS alone, each has 8.
    """
    if not flags.has_engine:
        return None
    slots = flags.num_workers_per_hls or None
    if flags.distribution_strategy == "mirrored":
        return flags.hvd_workers or flags.num_gpus or slots or count_devices(find_device()), None
    if flags.hvd_workers or slots or environ.get("MULTI_HLS_IPS"):
        return flags.hvd_workers or None, slots
    return None


def share_batch(flags: DistributionFlags, batch_size: int, workers: int) -> int:
    """Return the images per step of all processes.

    --batch_size is that of one process with Horovod, and that of all with tf.distribute, as in the originals.

    Raises:
        FlagError: the processes cannot have equal parts of it.
    """
    if not flags.global_batch_size and flags.distribution_strategy == "off":
        return batch_size * workers
    name = "global_batch_size" if flags.global_batch_size else "batch_size"
    whole = flags.global_batch_size or batch_size
    if whole % workers:
        raise flag_error(f"--{name} {whole}: is that of all {workers} processes, so it must be a multiple of {workers}")
    return whole


def choose_batch(config: Any, given: Collection[str], wanted: int, workers: int) -> tuple[int, int]:
    """Return --batch_size and the images per step of all processes, which see the wanted ones together, or fewer.

    A --batch_size among the names of the flags that are given is kept.
    """
    flags, own = config.distribution, config.data.batch_size
    if "batch_size" not in given:
        of_one = max(1, wanted // workers)
        own = of_one if flags.distribution_strategy == "off" else of_one * workers
    return own, share_batch(flags, own, workers)


def describe_step(tensors: Tensors, flags: DistributionFlags) -> Step:
    """Describe what a rank sends in a step of TensorFlow; its seconds are left out.

    The backward pass goes from the last tensor to the first, so a bucket is ready with its first one. A batch norm sums
    in the forward and in the backward pass, see `gaudi_ops.tf.synchronized_batch_norm`.
    """
    megabytes = DEFAULT_MB if flags.fusion_threshold_mb is None else flags.fusion_threshold_mb
    sizes = [(4 if flags.gradient_compression == "none" else 2) * values for values, _ in tensors.trainable]
    work = [each for _, each in tensors.trainable]
    buckets = [
        (1 - sum(work[: bucket[0]]) / sum(work), sum(sizes[index] for index in bucket))
        for bucket in plan_buckets([("", size) for size in sizes], megabytes * BYTES_PER_MB)
    ]
    sums = [4 * count for channels in tensors.channels for count in (2 * channels + 1, 2 * channels)]
    group = flags.bn_group if flags.distributed_bn else 1
    return Step(buckets, 8 * sum(tensors.channels), sums, group, flags.horovod_hierarchical_allreduce)


def _choose_engine(flags: DistributionFlags, find_device: FindDevice) -> Engine:
    if flags.use_horovod:
        return "horovod"
    if flags.distribution_strategy == "mirrored":
        return "hpu" if find_device() == "hpu" else "multi_worker"
    return "single" if flags.distribution_strategy == "off" else flags.distribution_strategy


def _list_workers(flags: DistributionFlags, environ: Mapping[str, str]) -> dict[str, str]:
    """Return TF_CONFIG by --worker_hosts."""
    if flags.worker_hosts is None:
        return {}
    if "TF_CONFIG" in environ:
        raise flag_error(
            "--worker_hosts: TF_CONFIG is set too, and says the same or otherwise", "leave one of them out"
        )
    return {"TF_CONFIG": write_tf_config(flags.worker_hosts.split(","), flags.task_index)}


def check_elastic(mode: str, flags: DistributionFlags, environ: Mapping[str, str]) -> None:
    """Raise FlagError unless this can be done by processes that come and go, however many there are at a time."""
    if mode != "train":
        raise flag_error(f"--mode {mode}: hosts may change during train only", "start it by gaudi-run --np")
    if not flags.global_batch_size or not flags.use_horovod:
        raise flag_error("--use_horovod and --global_batch_size: give both, for the number of processes changes")
    for name, value in (("hvd_workers", flags.hvd_workers), ("num_workers_per_hls", flags.num_workers_per_hls)):
        if value:
            raise flag_error(f"--{name} {value}: the number of processes changes", "leave it out")
    for size in map(int, filter(str.isdecimal, environ.get(SIZES, "").split(","))):
        share_batch(flags, 0, size)
        if flags.distributed_bn and size % (flags.bn_group or size):
            raise flag_error(
                f"--bn_group {flags.bn_group}: must divide the number of processes, which may become {size}",
                "give another, or leave it out",
            )
