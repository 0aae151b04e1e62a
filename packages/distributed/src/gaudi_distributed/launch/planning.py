"""Plan the processes of a launch and their variables from flags and environment, and describe them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from gaudi_distributed.cluster.hosts import join_port
from gaudi_distributed.cluster.rendezvous import SIZES, STORE_TOKEN, WORKER
from gaudi_distributed.comm.opening import ENGINE_VARIABLE, Engine
from gaudi_distributed.devices.machine import LOOPBACK, find_local_hosts, own_address
from gaudi_distributed.errors import ConfigurationError, FlagError, MissingProgramError, UnsafeError
from gaudi_distributed.failure.coordinator import COORDINATOR, TOKEN
from gaudi_distributed.launch import choices, guard
from gaudi_distributed.launch.containers import (
    check_container,
    choose_image,
    choose_inside,
    lane_of,
    plan_docker,
    wrap_singularity,
)
from gaudi_distributed.launch.flags import CONTAINER_KINDS, PROGRAM, Options, without_flags
from gaudi_distributed.launch.presets import Preset
from gaudi_distributed.launch.processes import (
    Backend,
    LaunchPlan,
    Process,
    find_working_folder,
    plan_gloo,
    plan_multi_worker,
    plan_openmpi,
)

_PLANNERS: dict[Backend, Callable[[LaunchPlan], list[Process]]] = {
    "openmpi": plan_openmpi,
    "gloo": plan_gloo,
    "multi_worker": plan_multi_worker,
}
# Flags for this side of a container.
_OUTSIDE = (
    *("--container", *(f"--{kind}" for kind in CONTAINER_KINDS), "--image", "--mount", "--workdir"),
    *("--dry_run", "--max_restarts"),
)


@dataclass(frozen=True)
class Launch:
    """A planned launch.

    Attributes:
        plan: for whom.
        processes: by what.
        address: where ranks reach this machine.
        notes: lines about how it runs.
        files: texts to write first, by path.
        watches_ranks: whether this launcher watches the ranks, and not one inside a container.
    """

    plan: LaunchPlan
    processes: tuple[Process, ...]
    address: str
    notes: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    watches_ranks: bool = True

    @property
    def command_lines(self) -> tuple[CommandLine, ...]:
        """Return the command lines: one of each host, or the one that starts the ranks of all hosts."""
        cluster = self.plan.cluster
        if any(process.rank is None for process in self.processes):
            hosts = tuple(host.name for host in cluster.hosts)
            return tuple(CommandLine(hosts, 0, cluster.size - 1, each.argv, each.reach) for each in self.processes)
        lines, first = [], 0
        for host in cluster.hosts:
            process = self.processes[first]
            lines.append(CommandLine((host.name,), first, first + host.slots - 1, process.argv, process.reach))
            first += host.slots
        return tuple(lines)

    def describe(self) -> str:
        """Return the text of `--dry_run`: what would be written and run.

        Values are shown of variables that the launch sets, and of no others. A word that is not plain to the eye is
        shown as a JSON string.
        """
        notes = "".join(f"{note}\n" for note in self.notes)
        files = "".join(f"file {path}\n{text}\n" for path, text in self.files.items())
        processes = "\n".join("\n".join(_describe(process)) + "\n" for process in self.processes)
        return f"{notes}\n{files}{processes}"


def plan_launch(options: Options, environ: Mapping[str, str]) -> Launch:
    """Return the planned launch; an error carries its exit status (64, 66, 77 or 78)."""
    refuse_ranks(environ)
    find_working_folder()
    preset, command = choices.choose_preset(options)
    image = _choose_image(options, preset, command)
    cluster, source = choices.choose_cluster(options, preset, environ)
    backend, about_backend = choices.choose_backend(options, preset, environ, cluster.size)
    variables, files = choices.choose_variables(options, preset, cluster, environ)
    note, preloaded = choices.choose_jemalloc(options, image, environ)
    local_hosts = find_local_hosts(cluster)
    engine: Engine = "multi_worker" if backend == "multi_worker" else "horovod"
    engine = "single" if cluster.size == 1 else engine
    # `start` is given its number, which mpirun has to find.
    known = {RESTART: "0", **environ} if options.max_restarts else environ
    plan = LaunchPlan(
        cluster=cluster,
        command=command,
        backend=backend,
        environment={ENGINE_VARIABLE: engine, **variables, **preloaded},
        forwarded=choose_inside(options.container, choose_forwarded(known, options.forward)),
        rank_cores=choices.choose_cores(options, cluster),
        local_hosts=local_hosts,
        ssh=choices.choose_ssh(options.ssh_port, options.ssh_config, source, environ),
        interface=choices.choose_interface(options.interface, environ),
        mpi_root=choices.choose_mpi_root(options.mpi_root, environ),
        tag_output=options.tag_output,
        log_dir=None if options.log_dir is None else options.log_dir.absolute(),
        control_port=options.control_port,
        grace=options.grace,
        max_restarts=options.max_restarts,
        is_root=os.geteuid() == 0,
        guard=(options.remote_python or sys.executable, "-I", guard.__file__),
    )
    plan = replace(plan, kept=choose_local(environ, ssh=not plan.is_local))
    withheld = (f"{name} has a user or a password in its URL: ranks do not get it" for name in list_logins(environ))
    notes = [_summarize(plan), *filter(None, (about_backend,)), note, *withheld]
    if image is not None and options.container == "docker":
        return _plan_docker(plan, image, options, preset, notes, files)
    if image is not None:
        accelerator = choices.choose_accelerator(options, preset)
        plan = replace(plan, command=wrap_singularity(image, options, accelerator, command))
    return _plan_ranks(plan, options, environ, notes, files)


def _plan_docker(
    plan: LaunchPlan,
    image: str,
    options: Options,
    preset: Preset | None,
    notes: Sequence[str],
    files: Mapping[Path, str],
) -> Launch:
    if not plan.is_local:
        raise ConfigurationError(
            "--container docker: starts containers on this machine only",
            flag="--container",
            remedy="start one with sshd on each host, and gaudi-run with --hosts in one of them",
        )
    inner = (PROGRAM, *without_flags(options.words, _OUTSIDE), *options.command)
    user = f"{os.geteuid()}:{os.getegid()}"
    processes = plan_docker(image, options, choices.choose_accelerator(options, preset), plan, inner, user)
    return Launch(plan, tuple(processes), LOOPBACK, tuple(notes), files, watches_ranks=False)


def _plan_ranks(
    plan: LaunchPlan, options: Options, environ: Mapping[str, str], notes: list[str], files: Mapping[Path, str]
) -> Launch:
    """Plan the ranks by what the machine has; what it lacks is an error, or a note with `--dry_run`."""
    address = ""
    with _note_errors(options, notes):
        address = own_address(plan.cluster, plan.local_hosts, plan.interface)
    if plan.local_hosts:
        with _note_errors(options, notes):
            program = choices.find_program(plan.command[0], environ)
            plan = replace(plan, command=(program, *plan.command[1:]))
    if plan.backend == "openmpi":
        with _note_errors(options, notes):
            choices.find_program(plan.mpirun, environ)
        if plan.interface is None and not plan.is_local and address and ":" not in address:
            plan = replace(plan, interface=f"{address}/24")
    return Launch(plan, tuple(_PLANNERS[plan.backend](plan)), address, tuple(notes), files)


@contextmanager
def _note_errors(options: Options, notes: list[str]) -> Iterator[None]:
    """Turn an error of this machine into a note with `--dry_run`, because nothing is going to run here."""
    try:
        yield
    except ConfigurationError as error:
        if not options.dry_run:
            raise
        notes.append(f"it would not run here: {error}")


def _choose_image(options: Options, preset: Preset | None, command: Sequence[str]) -> str | None:
    """Return the image of the container, if any; FlagError if flags of containers are given without one."""
    if options.container == "none":
        if options.image or options.mount or options.workdir:
            raise FlagError("--image, --mount and --workdir go with --container docker or singularity", flag="--image")
        return None
    image = options.image or choose_image(options.container, choices.choose_accelerator(options, preset), command)
    if options.image is None and options.container == "singularity" and not (options.dry_run or Path(image).is_file()):
        raise MissingProgramError(
            f"{image}: does not exist",
            path=image,
            remedy=(
                f"build it by apptainer build {image} containers/{lane_of(image)}.def in a clone, or name another by "
                "--image"
            ),
        )
    check_container(image, options)
    return image


def _summarize(plan: LaunchPlan) -> str:
    ranks = "1 rank" if plan.cluster.size == 1 else f"{plan.cluster.size} ranks"
    hosts = ", ".join(join_port(host.name, host.slots) for host in plan.cluster.hosts)
    cores = plan.cores_per_rank
    bound = "not bound to cores" if cores == 0 else f"bound to {cores} {'core' if cores == 1 else 'cores'} each"
    return f"{ranks} on {hosts} by {plan.backend}, {bound}"


# Says to ranks whether the caches of their hosts were cleared for this run, for a program's log of MLPerf.
CACHES_CLEARED = "GAUDI_RUN_CACHES_CLEARED"
# How often gaudi-run has started this run again, and SLURM the job: by them ranks know that their run has begun.
RESTART = "GAUDI_RUN_RESTART"
RESTARTS = frozenset({RESTART, "SLURM_RESTART_COUNT"})
# Where trackers and stores are, and no secrets, though the names look like some.
SERVICES = frozenset(
    {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"}
    | {"WANDB_DIR", "WANDB_ENTITY", "WANDB_MODE", "WANDB_PROJECT"}
    | {"AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_PROFILE", "AWS_REGION"}
)
NAMES = frozenset(
    {CACHES_CLEARED, "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS"}
    | {"PATH", "PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS"}
    | RESTARTS
    | SERVICES
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
_LOGIN = re.compile("://[^/]*@")
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# What tells a process its rank: set by the launcher for each, or by one that this launcher runs in.
_RANKS = re.compile(
    r"(HOROVOD|OMPI_COMM_WORLD|PMI)_(LOCAL_|CROSS_)?(RANK|SIZE)|TF_CONFIG|MPI_LOCALN?RANK(ID|S)|SLURM_STEP_NUM_TASKS"
)


def choose_forwarded(environ: Mapping[str, str], asked: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the names, sorted, of the variables in `environ` that go to every rank; `asked` are the user's own.

    Raises:
        FlagError: what was asked for is not a name of a variable, or is not set.
        UnsafeError: what was asked for looks like a secret, or its value has a user or a password.
    """
    logins = list_logins(environ)
    for name in asked:
        if _NAME.fullmatch(name) is None:
            raise FlagError(
                f"--forward {name!r}: is not a name of a variable",
                flag="--forward",
                remedy="give names only, values come from here",
            )
        if is_secret(name):
            raise UnsafeError(
                f"--forward {name}: looks like a secret",
                flag="--forward",
                remedy="let the ranks read it from a file of their own",
            )
        if name in logins:
            raise UnsafeError(
                f"--forward {name}: there is a user or a password in its URL",
                flag="--forward",
                remedy="let the ranks read them from a file of their own",
            )
        if name not in environ:
            raise FlagError(
                f"--forward {name}: is not set here", flag="--forward", remedy="set it, or leave the flag out"
            )
    found = {name for name in environ if name in NAMES or name.startswith(PREFIXES)}
    good = {name for name in found if _NAME.fullmatch(name) and not is_secret(name) and not _RANKS.fullmatch(name)}
    return tuple(sorted(good.difference(logins).union(asked)))


def list_logins(environ: Mapping[str, str]) -> list[str]:
    """List the variables of services whose URL has a user or a password in it, and which stay here for that."""
    return sorted(name for name in SERVICES.intersection(environ) if _LOGIN.search(environ[name]))


def count_restarts(environ: Mapping[str, str]) -> int:
    """Return how often this run was started again, by gaudi-run and by SLURM."""
    values = (environ.get(name, "") for name in RESTARTS)
    return sum(int(value) for value in values if value.isdecimal())


def without_rank(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those that make a process a rank of a run."""
    own = {COORDINATOR, TOKEN, STORE_TOKEN, ENGINE_VARIABLE, WORKER, SIZES}
    return {name: value for name, value in environ.items() if name not in own and not _RANKS.fullmatch(name)}


def choose_local(environ: Mapping[str, str], *, ssh: bool) -> tuple[str, ...]:
    """Return the names of the further variables that a process on this machine keeps; `ssh` where it logs in."""
    names = LOCAL_NAMES | SLURM_NAMES | (SSH_NAMES if ssh else frozenset())
    return tuple(sorted(names.intersection(environ)))


def is_secret(name: str) -> bool:
    """Return whether a variable of this name may hold a secret."""
    return name not in SERVICES and _SECRET.search(name) is not None


def refuse_ranks(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if the environment makes this process a rank of some run already."""
    found = sorted(name for name in environ if _RANKS.fullmatch(name))
    if found:
        raise ConfigurationError(
            f"{', '.join(found)} set: gaudi-run is already a rank of a run",
            field=found[0],
            remedy="start it once, or unset them",
        )


@dataclass(frozen=True)
class CommandLine:
    """A command line that a launch starts.

    Attributes:
        hosts: the hosts of its ranks.
        first_rank: the lowest of its ranks.
        last_rank: the highest; each rank between is a process of this command, unless it starts them all itself.
        argv: the program and its arguments.
        reach: the arguments that reach the host; empty for this machine.
    """

    hosts: tuple[str, ...]
    first_rank: int
    last_rank: int
    argv: tuple[str, ...]
    reach: tuple[str, ...] = ()


def _describe(process: Process) -> Iterable[str]:
    yield process.name
    if process.reach:
        yield "  by way of"
        yield from (f"    {_show(word)}" for word in process.reach)
    yield "  arguments"
    yield from (f"    {_show(word)}" for word in process.argv)
    if process.processors:
        yield f"  processors {','.join(map(str, process.processors))}"
    if process.environment:
        yield "  variables set"
        yield from (f"    {name}={_show(value)}" for name, value in sorted(process.environment.items()))
    if process.made:
        yield "  variables made when it starts"
        yield from (f"    {name}" for name in process.made)
    if process.forwarded:
        yield "  variables forwarded"
        yield from (f"    {name}" for name in process.forwarded)


def _show(word: str) -> str:
    plain = word.isprintable() and word == word.strip() and word and not word.startswith('"')
    return word if plain else json.dumps(word)
