"""Where a process stands among those that train together, by its flags and by what launched it.

Plain Python, so that a plan, or an error in the flags, needs no TensorFlow.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from gaudi_apps.distribution_flags import DistributionFlags
from gaudi_datasets.errors import FlagError
from gaudi_distributed import ConfigurationError
from gaudi_distributed.devices import DeviceKind, count_devices
from gaudi_distributed.opening import CommunicationOptions, Engine, find_engine
from gaudi_distributed.place import Place, find_place, is_launched, write_tf_config

FindDevice: TypeAlias = Callable[[], DeviceKind]

LAUNCHER = "gaudi_distributed.launch"


@dataclass(frozen=True)
class Distribution:
    """A process and the others that it trains with; as it is by default, it is alone.

    Attributes:
        place: which of them it is.
        communication: how they talk.
        batch_norm_group: over the images of how many of them batch norm goes.
        environment: variables that follow from flags and are still to be set.
    """

    place: Place = field(default_factory=Place)
    communication: CommunicationOptions = field(default_factory=CommunicationOptions)
    batch_norm_group: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


def complete_flags(flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice) -> DistributionFlags:
    """The flags, with the engine that gaudi-run started this process for where they name none.

    So `gaudi-run --np 8 ssd_train` trains on 8 devices as if --use_horovod were given, too.

    Raises:
        ConfigurationError: they name Horovod, or know nothing else, and gaudi-run started the processes for
            tf.distribute.
    """
    engine = find_engine(environ)
    if engine == "multi_worker" and flags.use_horovod:
        raise ConfigurationError(
            "--use_horovod: gaudi-run --backend multi_worker started the processes for tf.distribute; leave out one of "
            "the two"
        )
    if engine == "multi_worker" and not isinstance(flags, DistributionFlags):
        raise ConfigurationError(
            "gaudi-run --backend multi_worker started the processes for tf.distribute, and this program trains by "
            "Horovod; leave out --backend"
        )
    if flags.has_engine or engine in (None, "single"):
        return flags
    if engine == "horovod":
        return replace(flags, use_horovod=True)
    return replace(flags, distribution_strategy="hpu" if find_device() == "hpu" else "multi_worker")


def find_distribution(flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice) -> Distribution:
    """The place of this process, and how it is to talk to the others.

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
    place = find_place(variables)
    if not is_launched(variables):
        return Distribution(place)
    for name, asked, found in (
        ("hvd_workers", flags.hvd_workers, place.size),
        ("num_gpus", flags.num_gpus * (flags.distribution_strategy == "mirrored"), place.local_size),
    ):
        if asked not in (0, found):
            raise FlagError(f"--{name} {asked}: {found} processes were launched; give this number, or leave it out")
    group = (flags.bn_group or place.size) if flags.distributed_bn else 1
    if place.size % group:
        raise FlagError(f"--bn_group {group}: must divide the {place.size} processes; give another, or leave it out")
    communication = CommunicationOptions(
        engine=_choose_engine(flags, find_device),
        compression=flags.gradient_compression,
        fusion_threshold_mb=flags.fusion_threshold_mb,
        hierarchical_allreduce=flags.horovod_hierarchical_allreduce,
    )
    return Distribution(place, communication, group, environment)


def count_workers(flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice) -> int:
    """How many processes train together, where they are launched already, and else where they will be."""
    variables = {**environ, **_list_workers(flags, environ)}
    return find_place(variables).size if is_launched(variables) else _count_asked(flags, find_device) or 1


def start_processes(
    flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice, command: Sequence[str]
) -> None:
    """Become the launcher of several processes of a command, where flags ask for them and none were launched.

    Raises:
        FlagError: several are to train together, none were launched, and the flags do not say how many to start.
    """
    arguments = plan_launch(flags, environ, find_device, command)
    if arguments is not None:
        sys.stdout.flush()
        os.execv(arguments[0], arguments)


def plan_launch(
    flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice, command: Sequence[str]
) -> list[str] | None:
    """The arguments of `gaudi-run` that start the processes; None: there is nothing to start. See `start_processes`."""
    if not flags.has_engine or flags.worker_hosts is not None or is_launched(environ):
        return None
    engine = "--use_horovod" if flags.use_horovod else f"--distribution_strategy {flags.distribution_strategy}"
    if flags.kubernetes_run:
        raise FlagError("--kubernetes_run: Kubernetes launched no processes here; start the program by an MPIJob")
    workers = _count_asked(flags, find_device)
    if not workers:
        raise FlagError(f"{engine}: no processes were launched; start by `gaudi-run --np N`, or give --hvd_workers N")
    if workers == 1:
        return None
    per_server = flags.num_workers_per_hls
    return [
        *(sys.executable, "-m", LAUNCHER, "--np", str(workers)),
        *(() if per_server == DistributionFlags.num_workers_per_hls else ("--num_workers_per_hls", str(per_server))),
        *(() if flags.use_horovod else ("--backend", "multi_worker")),
        *("--", *command),
    ]


def share_batch(flags: DistributionFlags, batch_size: int, workers: int) -> int:
    """Images a step of all processes together.

    --batch_size is that of one process with Horovod, and that of all with tf.distribute, as in the originals.

    Raises:
        FlagError: the processes cannot have equal parts of it.
    """
    if not flags.global_batch_size and flags.distribution_strategy == "off":
        return batch_size * workers
    name = "global_batch_size" if flags.global_batch_size else "batch_size"
    whole = flags.global_batch_size or batch_size
    if whole % workers:
        raise FlagError(f"--{name} {whole}: is that of all {workers} processes, so it must be a multiple of {workers}")
    return whole


def _count_asked(flags: DistributionFlags, find_device: FindDevice) -> int:
    """Processes that the flags ask for; 0: they don't say."""
    if flags.worker_hosts is not None:
        return len(flags.worker_hosts.split(","))
    if flags.distribution_strategy == "mirrored":
        return flags.hvd_workers or flags.num_gpus or count_devices(find_device())
    return flags.hvd_workers


def _choose_engine(flags: DistributionFlags, find_device: FindDevice) -> Engine:
    if flags.use_horovod:
        return "horovod"
    if flags.distribution_strategy == "mirrored":
        return "hpu" if find_device() == "hpu" else "multi_worker"
    return "single" if flags.distribution_strategy == "off" else flags.distribution_strategy


def _list_workers(flags: DistributionFlags, environ: Mapping[str, str]) -> dict[str, str]:
    """TF_CONFIG by --worker_hosts."""
    if flags.worker_hosts is None:
        return {}
    if "TF_CONFIG" in environ:
        raise FlagError("--worker_hosts: TF_CONFIG is set too, and says the same or otherwise; leave one of them out")
    return {"TF_CONFIG": write_tf_config(flags.worker_hosts.split(","), flags.task_index)}
