"""Open the communicator of a run, and verify that all ranks have the same configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, get_args

from gaudi_distributed.cluster.hosts import FIRST_PORT
from gaudi_distributed.cluster.rank_info import RankInfo, detect_rank, write_tf_config
from gaudi_distributed.cluster.rendezvous import ADDRESS as GLOO_ADDRESS
from gaudi_distributed.cluster.rendezvous import CYCLE_VARIABLE, FUSION_VARIABLE
from gaudi_distributed.comm.communicator import BYTES_PER_MB, DEFAULT_MB, Communicator, SingleProcess
from gaudi_distributed.errors import ConfigurationError

Engine = Literal["single", "horovod", "horovod_mxnet", "multi_worker", "hpu"]
Compression = Literal["none", "fp16", "bf16"]
ENGINES: tuple[Engine, ...] = get_args(Engine)
COMPRESSIONS: tuple[Compression, ...] = get_args(Compression)
# What gaudi-run tells the processes that it starts: the engine that they are started for.
ENGINE_VARIABLE = "GAUDI_RUN_ENGINE"
PROCESSOR_CYCLE_MS = 25
_COMPRESSED_DTYPES: Mapping[str, str | None] = {"none": None, "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class CommunicationOptions:
    """Configure how the ranks of a run communicate.

    `engine`: "horovod", "horovod_mxnet" for programs of MXNet, or tf.distribute as "multi_worker"
    (MultiWorkerMirroredStrategy) or "hpu" (HPUStrategy).
    `compression`: the type in which float32 gradients travel.
    `fusion_threshold_mb`: tensors are reduced in buckets of at most so many MiB (None: 64; 0: each by itself).
    `hierarchical_allreduce`: Horovod reduces within each host first, where its back end can.
    `group_size`: of the groups of neighbouring ranks that sum among themselves, see `allreduce_within`; 1: none do.
    `first_port`: without TF_CONFIG, rank r of tf.distribute on one machine listens at `first_port` + r.
    """

    engine: Engine = "single"
    compression: Compression = "none"
    fusion_threshold_mb: int | None = None
    hierarchical_allreduce: bool = False
    group_size: int = 1
    first_port: int = FIRST_PORT


def find_engine(environ: Mapping[str, str]) -> Engine | None:
    """Return the engine that gaudi-run started this process for; None if it did not.

    Raises:
        ConfigurationError: the variable names none.
    """
    found = environ.get(ENGINE_VARIABLE)
    engine = next((name for name in ENGINES if name == found), None)
    if engine is None and found is not None:
        raise ConfigurationError(
            f"{ENGINE_VARIABLE} is {found!r}, and the engines are {', '.join(ENGINES)}",
            field=ENGINE_VARIABLE,
            remedy="start the run with gaudi-run, or unset it",
        )
    return engine


def communication_environment(
    options: CommunicationOptions, rank_info: RankInfo, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that the engine reads, to be set before TensorFlow is imported.

    Raises:
        ConfigurationError: options that contradict each other or the rank, a run of several processes for which no
            engine was chosen, or several hosts without TF_CONFIG.
    """
    _check_options(options, rank_info)
    if options.engine in ("horovod", "horovod_mxnet"):
        # Tensors come to Horovod in buckets: its own fusion would add them in an order that changes from run to run.
        variables = {} if FUSION_VARIABLE in environ else {FUSION_VARIABLE: "0"}
        if options.hierarchical_allreduce:
            variables["HOROVOD_HIERARCHICAL_ALLREDUCE"] = "1"
        return variables
    if options.engine == "single" or environ.get("TF_CONFIG"):
        return {}
    if rank_info.local_size != rank_info.size:
        raise ConfigurationError(
            f"{rank_info.local_size} of {rank_info.size} processes are on this host and TF_CONFIG is not set, so "
            "tf.distribute cannot know the others' addresses",
            remedy="set TF_CONFIG, or start the run with gaudi-run --backend multi_worker",
        )
    workers = [f"localhost:{options.first_port + rank}" for rank in range(rank_info.size)]
    return {"TF_CONFIG": write_tf_config(workers, rank_info.rank)}


def polling_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ranks that compute on processors, to be set before the communicator is opened.

    Horovod asks all ranks each millisecond what is ready, and MPI spins until the last has answered, on the very cores
    that compute: two ranks of one core each lost a quarter of their speed. Gloo sleeps meanwhile.
    """
    leave = CYCLE_VARIABLE in environ or GLOO_ADDRESS in environ
    return {} if leave else {CYCLE_VARIABLE: str(PROCESSOR_CYCLE_MS)}


def open_communicator(options: CommunicationOptions) -> Communicator:
    """Return this rank's communicator; blocks until all ranks are there.

    Call it after `apply_environment` of `communication_environment` and after `open_device`, and before TensorFlow
    computes anything.

    Raises:
        ConfigurationError: the engine is not installed, or it counts other ranks than the environment names.
    """
    rank_info = detect_rank(os.environ)
    _check_options(options, rank_info)
    megabytes = DEFAULT_MB if options.fusion_threshold_mb is None else options.fusion_threshold_mb
    max_bytes, compressed_dtype = megabytes * BYTES_PER_MB, _COMPRESSED_DTYPES[options.compression]
    if options.engine == "horovod":
        from gaudi_distributed.comm.horovod_engine import HorovodCommunicator

        # Horovod's rings within hosts are those of all ranks.
        group_size = 1 if options.hierarchical_allreduce else options.group_size
        return HorovodCommunicator(rank_info, max_bytes, compressed_dtype, group_size)
    if options.engine == "horovod_mxnet":
        from gaudi_distributed.comm.horovod_mxnet_engine import HorovodMXNetCommunicator

        return HorovodMXNetCommunicator(rank_info, options.group_size)
    if options.engine == "single":
        return SingleProcess()
    from gaudi_distributed.comm.collective_engine import CollectiveCommunicator, make_multi_worker_strategy
    from gaudi_distributed.devices.habana import make_strategy

    # Either waits for all workers of TF_CONFIG. On a Gaudi it is not tested, and rows of groups go to all ranks there.
    if options.engine == "hpu":
        return CollectiveCommunicator(make_strategy(), rank_info, max_bytes, compressed_dtype)
    strategy = make_multi_worker_strategy(rank_info.rank)
    return CollectiveCommunicator(strategy, rank_info, max_bytes, compressed_dtype, options.group_size)


def _check_options(options: CommunicationOptions, rank_info: RankInfo) -> None:
    if options.engine == "single" and rank_info.size > 1:
        raise ConfigurationError(
            f"this is process {rank_info.rank} of {rank_info.size}, and each would train alone into the same folder",
            remedy="choose --use_horovod or --distribution_strategy, or start one process",
        )
    if options.engine not in ENGINES or options.compression not in COMPRESSIONS:
        raise ConfigurationError(
            f"engine is {options.engine!r} and compression {options.compression!r}",
            field="engine",
            remedy=f"choose among {', '.join(ENGINES)} and among {', '.join(COMPRESSIONS)}",
        )
    if options.engine == "horovod" and options.compression == "bf16":
        raise ConfigurationError(
            "compression is bf16, a type that Horovod does not reduce",
            field="compression",
            remedy="choose fp16 or none",
        )
    if options.hierarchical_allreduce and options.engine != "horovod":
        raise ConfigurationError(
            f"hierarchical allreduce is Horovod's, and the engine is {options.engine}",
            field="hierarchical_allreduce",
            remedy="leave it out, or choose Horovod",
        )
    if options.fusion_threshold_mb is not None and options.fusion_threshold_mb < 0:
        raise ConfigurationError(
            f"fusion threshold is {options.fusion_threshold_mb} MiB",
            field="fusion_threshold_mb",
            remedy="use 0 or more",
        )
    if not 0 < options.first_port <= 65536 - rank_info.size:
        raise ConfigurationError(
            f"first port is {options.first_port}: ports are 1 to 65535, and each of {rank_info.size} ranks has one",
            field="first_port",
            remedy="choose another",
        )


_SHOWN = 80


def verify_consistent(communicator: Communicator, configuration: Mapping[str, Any]) -> None:
    """Compare the configuration (JSON values by name) of all ranks; all ranks return, or all raise the same error.

    Raises:
        ConfigurationError: ranks differ; it names the first field that does, and which ranks have which value.
    """
    contents = communicator.gather(json.dumps(configuration, sort_keys=True).encode())
    error = find_difference([json.loads(content) for content in contents])
    if error is not None:
        raise error


def find_difference(configurations: list[dict[str, Any]]) -> ConfigurationError | None:
    """Return the error for the first name, in alphabetical order, whose values differ between ranks; None if none does.

    `configurations` are by rank. The error's field is the path of the value, like "configuration.batch_size".
    """
    fields = [_flatten(each) for each in configurations]
    for name in sorted({name for each in fields for name in each}):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(fields):
            ranks.setdefault(each.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            same = next(i for i, characters in enumerate(zip_longest(*ranks)) if len(set(characters)) > 1)
            values = "; ".join(f"{_name_ranks(members)}: {_shorten(value, same)}" for value, members in ranks.items())
            return ConfigurationError(
                f"the ranks differ in {name}: {values}", field=name, remedy=f"start all of them with the same {name}"
            )
    return None


def _flatten(value: Any, path: str = "") -> dict[str, str]:
    if not isinstance(value, dict) or (path and not value):
        return {path: json.dumps(value, sort_keys=True)}
    fields: dict[str, str] = {}
    for name, inner in value.items():
        fields |= _flatten(inner, f"{path}.{name}" if path else name)
    return fields


def _name_ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{' and more' if len(ranks) > 8 else ''}"


def _shorten(value: str, same: int) -> str:
    """Cut a long value around the first character that differs from the others."""
    start = max(0, same - _SHOWN // 2) if len(value) > _SHOWN else 0
    end = start + _SHOWN
    return f"{'...' if start else ''}{value[start:end]}{'...' if end < len(value) else ''}"
