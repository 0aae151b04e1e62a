"""Detect the rank of this process from the environment that its launcher set."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gaudi_distributed.cluster.hosts import expand_task_counts
from gaudi_distributed.errors import ConfigurationError

# Rank, size, rank on the host and size on the host, as each launcher names them.
_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Only a step that srun started has the second and the last; a job's script has the others too, and is one process.
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
_WORKER = re.compile(r"(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class RankInfo:
    """One process of a run: `rank` of `size`, `local_rank` of the `local_size` processes on its `host`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = "localhost"


def detect_rank(environ: Mapping[str, str]) -> RankInfo:
    """Return the rank and world size that the launcher of this process set; without a launcher it is alone.

    Reads the variables of Horovod, Open MPI, MPICH and SLURM, and TF_CONFIG.

    SLURM's count only where no other launcher's are: in a job, mpirun starts its daemons as a step of SLURM.

    Raises:
        ConfigurationError: variables are half set, are no numbers, are out of range, or contradict each other.
    """
    host = environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    found = _find_launchers(environ, host)
    return found[0][1] if found else RankInfo(host=host)


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher made this process a rank, even the only one; ConfigurationError as of `detect_rank`."""
    return bool(_find_launchers(environ, ""))


def write_tf_config(workers: Sequence[str], index: int) -> str:
    """Return TF_CONFIG's value for worker `index` of `workers` (host:port each).

    Raises:
        ConfigurationError: there is no such worker, a worker is not host:port, or one is named twice.
    """
    _check_workers(workers, index, "the list of workers")
    return json.dumps({"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": index}})


def _find_launchers(environ: Mapping[str, str], host: str) -> list[tuple[str, RankInfo]]:
    """Return what each launcher's variables say, with the name of the first variable; all agree."""
    found: list[tuple[str, RankInfo]] = []
    for names in (_HOROVOD, _OPEN_MPI):
        if _any_set(names, environ):
            found.append((names[0], _read_four(names, environ, host)))
    # srun, too, sets the first two of these, but not the last two.
    if _any_set(_MPICH[2:], environ) or (_any_set(_MPICH, environ) and not _any_set(_SLURM[1:2], environ)):
        found.append((_MPICH[0], _read_four(_MPICH, environ, host)))
    if not found and _any_set(_SLURM[1:2], environ):
        found.append((_SLURM[0], _read_slurm(environ, host)))
    if environ.get("TF_CONFIG"):
        found.append(("TF_CONFIG", _read_tf_config(environ["TF_CONFIG"], host)))
    for name, other in found[1:]:
        first, expected = found[0]
        if (other.rank, other.size) != (expected.rank, expected.size):
            raise ConfigurationError(
                f"{first} says rank {expected.rank} of {expected.size}, {name} says rank {other.rank} of {other.size}",
                field=name,
                remedy="unset the one that does not belong to this run",
            )
    return found


def _any_set(names: Sequence[str], environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in names)


def _read_numbers(names: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    missing = [name for name in names if name not in environ]
    if missing:
        there = [name for name in names if name in environ]
        raise ConfigurationError(
            f"{', '.join(there)} set and {', '.join(missing)} not: all of them are needed",
            field=missing[0],
            remedy="start the run through its launcher, or unset them",
        )
    for name in names:
        if not re.fullmatch("[0-9]{1,6}", environ[name]):
            raise ConfigurationError(
                f"{name} is {environ[name]!r}, which is not a number from 0 to 999999",
                field=name,
                remedy="start the run through its launcher, or unset it",
            )
    return [int(environ[name]) for name in names]


def _read_four(names: Sequence[str], environ: Mapping[str, str], host: str) -> RankInfo:
    rank, size, local_rank, local_size = _read_numbers(names, environ)
    return _checked(RankInfo(rank, size, local_rank, local_size, host), names)


def _read_slurm(environ: Mapping[str, str], host: str) -> RankInfo:
    rank, size, local_rank, node = _read_numbers(_SLURM[:4], environ)
    counts = expand_task_counts(environ.get(_SLURM[4], ""), _SLURM[4])
    if node >= len(counts):
        raise ConfigurationError(
            f"{_SLURM[3]} is {node} and {_SLURM[4]} is {environ.get(_SLURM[4])!r}, which names {len(counts)} hosts",
            field=_SLURM[3],
            remedy="start the run through srun, or unset them",
        )
    return _checked(RankInfo(rank, size, local_rank, counts[node], host), _SLURM)


def _read_tf_config(text: str, host: str) -> RankInfo:
    """Return the rank of a worker; chiefs, parameter servers and evaluators are errors."""
    try:
        content = json.loads(text)
        workers, kind, index = content["cluster"]["worker"], content["task"]["type"], content["task"]["index"]
        others = sorted(set(content["cluster"]) - {"worker"})
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigurationError(
            f"TF_CONFIG is {text[:120]!r}, which does not name cluster.worker, task.type and task.index "
            f"({type(error).__name__}: {error})",
            field="TF_CONFIG",
            remedy="write it as JSON",
        ) from error
    if kind != "worker" or others or type(index) is not int or not isinstance(workers, list):
        raise ConfigurationError(
            f"TF_CONFIG is {text[:120]!r}",
            field="TF_CONFIG",
            remedy="it may name a list of workers and, as task, the index of one of them only",
        )
    _check_workers(workers, index, "TF_CONFIG")
    hosts = [worker.rpartition(":")[0] for worker in workers]
    local_rank, local_size = hosts[:index].count(hosts[index]), hosts.count(hosts[index])
    return RankInfo(index, len(workers), local_rank, local_size, host)


def _check_workers(workers: Sequence[object], index: int, source: str) -> None:
    for worker in workers:
        matched = _WORKER.fullmatch(worker) if isinstance(worker, str) else None
        if matched is None or not 0 < int(matched["port"]) < 65536:
            raise ConfigurationError(
                f"{source}: worker {worker!r} is not host:port", field=source, remedy="write it like node1:2410"
            )
        if workers.count(worker) > 1:
            raise ConfigurationError(
                f"{source}: worker {worker!r} is named twice", field=source, remedy="give each its own port"
            )
    if not 0 <= index < len(workers):
        raise ConfigurationError(
            f"{source}: worker {index} is not one of 0 to {len(workers) - 1}", field=source, remedy="correct the index"
        )


def _checked(found: RankInfo, names: Sequence[str]) -> RankInfo:
    if not (found.local_rank <= found.rank < found.size and found.local_rank < found.local_size <= found.size):
        raise ConfigurationError(
            f"{names[0]} is {found.rank} of {found.size}, and on its host {found.local_rank} of {found.local_size}: "
            "a rank is below its size, and a host has no more than all",
            field=names[0],
            remedy="start the run through its launcher",
        )
    return found
