"""Which variables of the launcher's environment reach the ranks: those named here or by the user, and no secret."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gaudi_distributed.errors import ConfigurationError, FlagError, UnsafeError
from gaudi_distributed.launch.caches import CACHES_CLEARED

NAMES = frozenset(
    {CACHES_CLEARED, "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS"}
    | {"PATH", "PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS"}
)
PREFIXES = (
    *("ENABLE_", "GC_", "HABANA_", "HBN_", "HCCL_", "HCL_", "HOROVOD_", "LOG_LEVEL_"),
    *("MXNET_", "NCCL_", "SYN_", "SYNAPSE_", "TF_", "TPC_"),
)
# What programs expect on the machine where they were started; another host has its own.
LOCAL_NAMES = frozenset(
    {"DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_HOST", "HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM"}
    | {"TMPDIR", "TZ", "USER", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"}
)
# Of a job of SLURM: what mpirun needs to start its daemons in it; nothing that looks like a rank.
SLURM_NAMES = frozenset(
    {"SLURM_CLUSTER_NAME", "SLURM_CONF", "SLURM_CPUS_ON_NODE", "SLURM_JOBID", "SLURM_JOB_CPUS_PER_NODE"}
    | {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NODELIST"}
    | {"SLURM_TASKS_PER_NODE"}
)
SSH_NAMES = frozenset({"SSH_AUTH_SOCK"})

_SECRET = re.compile(
    r"TOKEN|KEY|SECRET|PASSW|PASSPHRASE|PWD|CREDENTIAL|PRIVATE|AUTH|COOKIE|JWT|SIGNATURE"
    r"|^(AWS|AZURE|GCP|GOOGLE|GITHUB|GITLAB|HF|WANDB)_",
    re.IGNORECASE,
)
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# What tells a process its rank: set by the launcher for each, or by one that this launcher runs in.
_RANKS = re.compile(
    r"(HOROVOD|OMPI_COMM_WORLD|PMI)_(LOCAL_|CROSS_)?(RANK|SIZE)|TF_CONFIG|MPI_LOCALN?RANK(ID|S)|SLURM_STEP_NUM_TASKS"
)


def choose_forwarded(environ: Mapping[str, str], asked: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names, sorted, of the variables in `environ` that go to every rank; `asked` are the user's own.

    Raises:
        FlagError: what was asked for is no name of a variable, or is not set.
        UnsafeError: what was asked for looks like a secret.
    """
    for name in asked:
        if _NAME.fullmatch(name) is None:
            raise FlagError(f"--forward {name!r}: is no name of a variable; give names only, values come from here")
        if is_secret(name):
            raise UnsafeError(f"--forward {name}: looks like a secret; let the ranks read it from a file of their own")
        if name not in environ:
            raise FlagError(f"--forward {name}: is not set here; set it, or leave the flag out")
    found = {name for name in environ if name in NAMES or name.startswith(PREFIXES)}
    good = {name for name in found if _NAME.fullmatch(name) and not is_secret(name) and not _RANKS.fullmatch(name)}
    return tuple(sorted(good.union(asked)))


def choose_local(environ: Mapping[str, str], *, ssh: bool) -> tuple[str, ...]:
    """Return the names of the further variables that a process on this machine keeps; `ssh` where it logs in."""
    names = LOCAL_NAMES | SLURM_NAMES | (SSH_NAMES if ssh else frozenset())
    return tuple(sorted(names.intersection(environ)))


def is_secret(name: str) -> bool:
    """Tell whether a variable of this name may hold something that must not travel."""
    return _SECRET.search(name) is not None


def refuse_ranks(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError where the environment makes this process a rank of some run already."""
    found = sorted(name for name in environ if _RANKS.fullmatch(name))
    if found:
        raise ConfigurationError(
            f"{', '.join(found)} set: gaudi-run is itself a rank of some run; start it once, or unset them"
        )
