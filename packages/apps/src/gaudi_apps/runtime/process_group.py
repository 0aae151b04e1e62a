"""Find the rank of this process and how ranks communicate, from flags and environment.

Plain Python, so that a plan, or an error in the flags, needs no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from gaudi_apps.cli.flags import DistributionFlags, HorovodFlags
from gaudi_datasets.errors import FlagError
from gaudi_distributed import ConfigurationError
from gaudi_distributed.cluster.hosts import find_cluster
from gaudi_distributed.cluster.rank_info import RankInfo, detect_rank, is_launched, write_tf_config
from gaudi_distributed.comm.opening import CommunicationOptions, Engine, find_engine
from gaudi_distributed.devices.selection import DeviceKind, count_devices

FindDevice: TypeAlias = Callable[[], DeviceKind]
SomeFlags = TypeVar("SomeFlags", bound=HorovodFlags)


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


def complete_flags(flags: SomeFlags, environ: Mapping[str, str], find_device: FindDevice) -> SomeFlags:
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
            raise FlagError(
                f"--{name} {asked}: {found} processes were launched",
                flag=f"--{name}",
                remedy="give this number, or leave it out",
            )
    if 0 < flags.num_workers_per_hls < rank_info.local_size:
        raise FlagError(
            f"--num_workers_per_hls {flags.num_workers_per_hls}: {rank_info.local_size} processes were launched on "
            "this host",
            flag="--num_workers_per_hls",
            remedy="give this number, or leave it out",
        )
    group = (flags.bn_group or rank_info.size) if flags.distributed_bn else 1
    if rank_info.size % group:
        raise FlagError(
            f"--bn_group {group}: must divide the {rank_info.size} processes",
            flag="--bn_group",
            remedy="give another, or leave it out",
        )
    communication = CommunicationOptions(
        engine=_choose_engine(flags, find_device),
        compression=flags.gradient_compression,
        fusion_threshold_mb=flags.fusion_threshold_mb,
        hierarchical_allreduce=flags.horovod_hierarchical_allreduce,
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
        raise FlagError(
            f"--{name} {whole}: is that of all {workers} processes, so it must be a multiple of {workers}",
            flag=f"--{name}",
        )
    return whole


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
        raise FlagError(
            "--worker_hosts: TF_CONFIG is set too, and says the same or otherwise",
            flag="--worker_hosts",
            remedy="leave one of them out",
        )
    return {"TF_CONFIG": write_tf_config(flags.worker_hosts.split(","), flags.task_index)}
