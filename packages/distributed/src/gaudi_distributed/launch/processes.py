"""Make the processes of a launch by Open MPI, Gloo or tf.distribute, here or over ssh, and check what they need."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gaudi_distributed.cluster.hosts import Cluster, RankAssignment, is_ipv6
from gaudi_distributed.cluster.rank_info import write_tf_config
from gaudi_distributed.cluster.rendezvous import ADDRESS, PORT, STORE_TOKEN, WORKER
from gaudi_distributed.comm.opening import ENGINE_VARIABLE
from gaudi_distributed.devices.machine import MPI_FOLDERS, Cores
from gaudi_distributed.errors import ConfigurationError, HostNotReachedError, MissingProgramError
from gaudi_distributed.failure.coordinator import COORDINATOR, TOKEN
from gaudi_distributed.failure.messages import JOIN
from gaudi_distributed.launch import guard

SSH_PORT = 22
# Where the originals' containers listen.
CONTAINER_SSH_PORT = 3022
# Nobody is asked for anything, an unknown host is refused, and one that no longer answers is given up in 30 s.
_OPTIONS = (
    *("BatchMode=yes", "StrictHostKeyChecking=yes"),
    *("ConnectTimeout=30", "ServerAliveInterval=10", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True)
class Ssh:
    """The port of sshd, and ssh's configuration file if it is not the user's.

    Raises:
        ConfigurationError: no such port, or a file name that mpirun would take apart.
    """

    port: int = SSH_PORT
    config: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigurationError(f"ssh port {self.port}", flag="--ssh_port", remedy="choose one of 1 to 65535")
        if self.config is not None and (self.config.startswith("-") or not _is_plain(self.config)):
            raise ConfigurationError(
                f"--ssh_config {self.config!r}: mpirun takes apart names with blanks or quotes",
                flag="--ssh_config",
                remedy="rename it",
            )

    @property
    def options(self) -> tuple[str, ...]:
        """Return the arguments of ssh, which take precedence over its configuration files."""
        config = () if self.config is None else ("-F", self.config)
        return (*config, "-p", str(self.port), *(word for option in _OPTIONS for word in ("-o", option)))

    def reach(self, host: str, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return the arguments that run `command` on the host; the shell there gets its words quoted."""
        return ("ssh", "-T", *self.options, "--", host, shlex.join(command))


def _is_plain(text: str) -> bool:
    return text.isprintable() and not any(letter in text for letter in " \"'\\")


Backend = Literal["openmpi", "gloo", "multi_worker"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True)
class LaunchPlan:
    """The settings of a launch, from which a back end makes processes.

    Attributes:
        cluster: hosts and ranks.
        command: the program and its arguments, as they were given.
        backend: what starts the ranks.
        environment: variables that are set for every rank.
        forwarded: names of variables that go from here to every rank.
        kept: names of further variables that processes on this machine keep.
        rank_cores: physical cores of each local rank; none: ranks are not bound.
        local_hosts: names of the hosts that are this machine.
        ssh: how other hosts are reached.
        interface: network interface, or subnet, between the hosts.
        mpi_root: where Open MPI is installed on all hosts; None: where it is found.
        tag_output: whether each line of output says its rank.
        log_dir: folder of the logs of the ranks, and of their state.
        control_port: port of the coordinator, before that of the rendezvous; 0: free ones.
        grace: seconds that ranks have to end after they were asked to.
        max_restarts: how often all ranks are started again where they end with 75.
        is_root: whether the user is root, which Open MPI has to be told.
        guard: what starts ranks on another host: Python there, and the module.
    """

    cluster: Cluster
    command: tuple[str, ...]
    backend: Backend = "openmpi"
    environment: Mapping[str, str] = field(default_factory=dict)
    forwarded: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    rank_cores: tuple[Cores, ...] = ()
    local_hosts: frozenset[str] = frozenset({"localhost"})
    ssh: Ssh = field(default_factory=Ssh)
    interface: str | None = None
    mpi_root: str | None = None
    tag_output: bool = False
    log_dir: Path | None = None
    control_port: int = 0
    grace: float = 30.0
    max_restarts: int = 0
    is_root: bool = False
    guard: tuple[str, ...] = ("python3", "-m", "gaudi_distributed.launch.guard")

    @property
    def cores_per_rank(self) -> int:
        """Return the physical cores of a rank; 0: ranks are not bound."""
        return len(self.rank_cores[0]) if self.rank_cores else 0

    @property
    def is_local(self) -> bool:
        """Return whether all ranks run on this machine."""
        return all(host.name in self.local_hosts for host in self.cluster.hosts)

    def list_forwarded(self, *, is_here: bool) -> tuple[str, ...]:
        """Return the names of the variables that a process gets from here, on this machine or another."""
        return tuple(sorted({*self.forwarded, *(self.kept if is_here else ())}))

    @property
    def mpirun(self) -> str:
        """Return the name or path of mpirun."""
        return "mpirun" if self.mpi_root is None else f"{self.mpi_root}/bin/mpirun"


@dataclass(frozen=True)
class Process:
    """A process to start, on this machine or by way of ssh.

    Attributes:
        name: which ranks it is, and where.
        argv: its arguments.
        environment: variables that are set for it.
        forwarded: names of variables that it gets from here.
        made: names of variables whose values are made when it starts, for this run alone.
        reach: the arguments that reach its host; empty for this machine.
        processors: logical processors that it may use; empty: all.
        rank: which rank it is; None: it starts several.
        end_signal: see `gaudi_distributed.launch.guard.Order`.
        refusals: statuses above 128 by which it says that it could not start the program; no signal has ended that.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    forwarded: tuple[str, ...]
    made: tuple[str, ...] = ()
    reach: tuple[str, ...] = ()
    processors: tuple[int, ...] = ()
    rank: int | None = None
    end_signal: int = signal.SIGTERM
    refusals: frozenset[int] = frozenset()


# What mpirun 4.1 ends with where it cannot execute the program, or does not find it, on some host: its own numbers, and
# not signals 3 and 4. A rank that a signal ends after it has joined is known by its connection.
_MPIRUN_REFUSALS = frozenset({131, 132})


def find_signal(status: int, refusals: Collection[int] = ()) -> int:
    """Return a status, below 0 where a shell says by it that a signal ended its program."""
    if status in refusals:
        return status
    return 128 - status if status > 128 and status - 128 in list(signal.Signals) else status


# Each rank of Gloo asks the launcher up to ten times for each other rank before they begin: 128 of one host take about
# 6 s of a processor, and more beside other work. Horovod gives up after 30 s unless it is told otherwise.
GLOO_RANKS, _REQUESTS_PER_PAIR, _REQUESTS_PER_SECOND = 128, 10, 4000
_GLOO_TIMEOUT, _DEFAULT_GLOO_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS", 30


def choose_gloo_seconds(ranks: int) -> int:
    """Return the seconds in which so many ranks find each other, also beside other work."""
    return max(_DEFAULT_GLOO_SECONDS, ranks * ranks * _REQUESTS_PER_PAIR // _REQUESTS_PER_SECOND)


# What workers that come and go wait for each other: a new one imports TensorFlow meanwhile.
GLOO_SECONDS = 60


def plan_gloo(plan: LaunchPlan) -> list[Process]:
    """Return the processes of Horovod with Gloo, with the variables that horovodrun sets.

    Not by horovodrun itself, which switches host key checks off and puts the whole environment into shell commands.
    """
    if plan.interface is not None and "/" in plan.interface:
        raise ConfigurationError(
            f"--interface {plan.interface}: Gloo needs the name of an interface",
            flag="--interface",
            remedy="give one like eth0",
        )
    gloo = _gloo_variables("lo" if plan.is_local else plan.interface)
    seconds = choose_gloo_seconds(plan.cluster.size)
    if seconds > _DEFAULT_GLOO_SECONDS and _GLOO_TIMEOUT not in plan.forwarded:
        gloo[_GLOO_TIMEOUT] = str(seconds)
    return _plan(
        plan, lambda assigned: {**assigned.variables, "HOROVOD_HOSTNAME": assigned.host, **gloo}, (ADDRESS, PORT)
    )


def _gloo_variables(interface: str | None) -> dict[str, str]:
    return {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        **({} if interface is None else {"HOROVOD_GLOO_IFACE": interface}),
    }


def plan_multi_worker(plan: LaunchPlan) -> list[Process]:
    """Return the processes of tf.distribute, each with its TF_CONFIG; ConfigurationError for a loopback address."""
    workers = plan.cluster.workers
    own = re.search(r"(?im)^(localhost|127\.[\d.]+|\[::1\]):", "\n".join(workers))
    if own is not None and not plan.is_local:
        remedy = "name it as the others reach it"
        raise ConfigurationError(f"host {own[1]}: is to each host that host itself", record=own[1], remedy=remedy)
    return _plan(plan, lambda assigned: {"TF_CONFIG": write_tf_config(workers, assigned.rank)})


def _plan(
    plan: LaunchPlan, variables: Callable[[RankAssignment], Mapping[str, str]], made: tuple[str, ...] = ()
) -> list[Process]:
    bound = [tuple(sorted(number for core in cores for number in core)) for cores in plan.rank_cores]
    processes = []
    for assigned in plan.cluster.assign_ranks():
        host = assigned.host
        is_here = host in plan.local_hosts
        processes.append(
            Process(
                name=f"rank {assigned.rank} on {host}",
                argv=plan.command,
                environment={**plan.environment, **variables(assigned)},
                forwarded=plan.list_forwarded(is_here=is_here),
                made=(COORDINATOR, TOKEN, *made),
                reach=() if is_here else plan.ssh.reach(host, plan.guard),
                processors=bound[assigned.local_rank] if assigned.local_rank < len(bound) else (),
                rank=assigned.rank,
            )
        )
    return processes


def plan_worker(plan: LaunchPlan, host: str, worker: int, *, is_here: bool) -> Process:
    """Return a worker of an elastic run; it asks for its rank, see `gaudi_distributed.cluster.rendezvous`."""
    variables = {
        ENGINE_VARIABLE: "horovod",
        WORKER: str(worker),
        "HOROVOD_ELASTIC": "1",
        "HOROVOD_HOSTNAME": host,
        **_gloo_variables("lo" if plan.is_local and plan.interface is None else plan.interface),
        _GLOO_TIMEOUT: str(GLOO_SECONDS),
    }
    return Process(
        name=f"worker {worker} on {host}",
        argv=plan.command,
        environment={**plan.environment, **variables},
        forwarded=plan.list_forwarded(is_here=is_here),
        made=(ADDRESS, PORT, STORE_TOKEN),
        reach=() if is_here else plan.ssh.reach(host, plan.guard),
        rank=worker,
    )


def plan_openmpi(plan: LaunchPlan) -> list[Process]:
    """Return mpirun's arguments and environment; variables reach the ranks by name, so no value is on its command line.

    Raises:
        ConfigurationError: a host is an IPv6 address, or an argument is ":", which mpirun takes for its own.
    """
    for host in plan.cluster.hosts:
        if is_ipv6(host.name):
            raise ConfigurationError(
                f"host {host.name}: mpirun reads no IPv6 addresses", remedy="name the host, or its IPv4 address"
            )
    if ":" in plan.command:
        raise ConfigurationError(
            "an argument is ':', with which mpirun begins another program", remedy="use --backend gloo"
        )
    binding = ["--bind-to", "core", "--map-by", f"socket:PE={plan.cores_per_rank}"]
    if plan.cores_per_rank == 0:
        binding = ["--bind-to", "none", "--map-by", "slot", "--oversubscribe"]
        # Ranks that share a core must not spin while they wait for each other.
        binding += ["--mca", "mpi_yield_when_idle", "1"]
    reach = []
    if not plan.is_local:
        reach += ["--mca", "plm_rsh_agent", "ssh", "--mca", "plm_rsh_args", " ".join(plan.ssh.options)]
        # A daemon of a host that is lost ends within a minute, and what it started; the default is eight.
        for name, value in (("time", "20"), ("intvl", "5"), ("probes", "4")):
            reach += ["--mca", f"oob_tcp_keepalive_{name}", value]
        if plan.interface is not None:
            reach += ["--mca", "btl_tcp_if_include", plan.interface, "--mca", "oob_tcp_if_include", plan.interface]
        if plan.mpi_root is not None:
            reach += ["--prefix", plan.mpi_root]
    hosts = ",".join(f"{host.name}:{host.slots}" for host in plan.cluster.hosts)
    made = (COORDINATOR, TOKEN)
    exported = sorted({*plan.forwarded, *plan.environment, *made})
    argv = (
        plan.mpirun,
        *(("--allow-run-as-root",) if plan.is_root else ()),
        "--np",
        str(plan.cluster.size),
        "--host",
        hosts,
        *binding,
        *reach,
        *(("--tag-output",) if plan.tag_output or plan.log_dir is not None else ()),
        *(word for name in exported for word in ("-x", name)),
        *plan.command,
    )
    name = f"ranks 0 to {plan.cluster.size - 1} on {hosts}"
    forwarded = plan.list_forwarded(is_here=True)
    made = (*made, *(MPI_FOLDERS if plan.is_local else ()))
    return [Process(name, argv, plan.environment, forwarded, made, end_signal=signal.SIGINT, refusals=_MPIRUN_REFUSALS)]


def find_working_folder() -> str:
    """Return the working folder, in which ranks run on every host; MissingProgramError if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        name = str(Path("/proc/self/cwd").readlink()).removesuffix(" (deleted)")
        raise MissingProgramError(
            f"the working folder {name} was removed",
            path=name,
            remedy="change into one that is there, also where it was made again",
        ) from None


def make_order(
    process: Process, environ: Mapping[str, str], made: Mapping[str, str], grace: float, folder: str
) -> guard.Order:
    """Return what a guard is told to start in a folder; arguments as of `start_processes`."""
    variables = {name: environ[name] for name in process.forwarded if name in environ}
    variables |= {**process.environment, **{name: made[name] for name in process.made if name in made}}
    return guard.Order(
        argv=process.argv,
        environment=variables,
        adds=bool(process.reach),
        folder=folder,
        processors=process.processors,
        grace=grace,
        end_signal=process.end_signal,
    )


_LOGINS = 16  # at a time


def check_hosts(plan: LaunchPlan, environ: Mapping[str, str], seconds: float) -> None:
    """Log in to each host that mpirun is going to reach by ssh; mpirun says neither which one failed nor why.

    Raises:
        HostNotReachedError: ssh does not reach one, or not in so many seconds.
    """
    # In a job of SLURM, or with an agent of the user's own, mpirun does not use this ssh.
    if plan.backend != "openmpi" or "SLURM_JOB_ID" in environ or "OMPI_MCA_plm_rsh_agent" in environ:
        return
    names = [host.name for host in plan.cluster.hosts if host.name not in plan.local_hosts]
    started: list[subprocess.Popen[bytes]] = []

    def reach(name: str) -> HostNotReachedError | None:
        ssh = subprocess.Popen(plan.ssh.reach(name, ("true",)), stdin=subprocess.DEVNULL)
        started.append(ssh)
        try:
            return make_ssh_error(name) if ssh.wait(seconds) else None
        except subprocess.TimeoutExpired:
            ssh.kill()
            return make_ssh_error(name, is_late=True)
        finally:
            ssh.wait()

    with ThreadPoolExecutor(_LOGINS) as pool:
        try:
            faults = [fault for fault in pool.map(reach, names) if fault is not None]
        except BaseException:  # such as a signal, for which nobody waits until ssh gives up
            pool.shutdown(wait=False, cancel_futures=True)
            for ssh in started:
                ssh.kill()
            raise
    if faults:
        raise faults[0]


def make_ssh_error(name: str, *, is_late: bool = False) -> HostNotReachedError:
    """Return the error for a host that ssh does not reach, or not in time; to start again at once would not help."""
    late = f"ssh did not reach the host in the time of {JOIN}, though it may be logged in"
    text = late if is_late else "ssh could not reach the host, or was refused; see its output above"
    return HostNotReachedError(f"{name}: {text}, and `gaudi-run doctor --hosts`", ConfigurationError.exit_status)
