"""Parse the flags of `gaudi-run`; the program and its arguments behind them are left as they are."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, NoReturn, get_args

from gaudi_distributed.cluster.hosts import FIRST_PORT
from gaudi_distributed.devices.habana import SCALE_OUTS, ScaleOut
from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.presets import ACCELERATORS, Accelerator, describe_presets
from gaudi_distributed.launch.processes import BACKENDS, Backend

ContainerKind = Literal["none", "docker", "singularity"]
CONTAINER_KINDS: tuple[ContainerKind, ...] = get_args(ContainerKind)
PROGRAM = "gaudi-run"
# Subcommands as the first word, elsewhere programs like any.
DOCTOR, INSTALL_HOROVOD, STATUS = "doctor", "install-horovod", "status"
_DESCRIPTION = """Start a program as several ranks: on this machine, on others over ssh, in SLURM or in Kubernetes.
The program and its arguments follow the flags: gaudi-run --np 2 ssd_train --batch_size 8
`gaudi-run doctor` checks this machine, or what a run needs; see gaudi-run doctor --help.
`gaudi-run install-horovod` builds Horovod for TensorFlow or MXNet; see gaudi-run install-horovod --help.
`gaudi-run status DIR` shows where the ranks of a run with --log_dir DIR are, and how fast they go."""


@dataclass(frozen=True)
class Options:
    """The values of the flags; None for one that was not given. `words` are the flags as given."""

    words: tuple[str, ...]
    command: tuple[str, ...]
    np: int | None
    hosts: str | None
    hostfile: Path | None
    num_workers_per_hls: int | None
    preset: str | None
    submission: bool
    min_np: int
    max_np: int | None
    host_discovery_script: Path | None
    backend: Backend | None
    cores_per_rank: int | None
    first_port: int
    interface: str | None
    ssh_port: int | None
    ssh_config: str | None
    mpi_root: str | None
    remote_python: str | None
    forward: tuple[str, ...]
    jemalloc: bool
    accelerator: Accelerator | None
    scale_out: ScaleOut | None
    hcl_config: Path | None
    container: ContainerKind
    image: str | None
    mount: tuple[str, ...]
    workdir: str | None
    slurm_script: str | None
    sbatch: tuple[str, ...]
    requeue: int
    mpijob: str | None
    job_name: str | None
    job_cpus: int | None
    job_memory: str | None
    job_shm: str | None
    job_hugepages: str | None
    job_ssh: str | None
    dry_run: bool
    tag_output: bool
    log_dir: Path | None
    control_port: int
    grace: float
    max_restarts: int
    debug: bool


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, in one line that names the nearest flag."""

    def __init__(self, prog: str, description: str, usage: str = "[flags]") -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise FlagError in place of leaving."""
        unknown = message.partition("unrecognized arguments: ")[2].split(" ")[0].partition("=")[0]
        if unknown:
            nearest = difflib.get_close_matches(unknown, list(self._option_string_actions), n=1, cutoff=0.5)
            message = f"unknown flag {unknown}" + (f"; did you mean {nearest[0]}?" if nearest else "")
        about = message.removeprefix("argument ")
        flag = unknown or about.partition(":")[0].partition("/")[0]
        raise FlagError(f"{about} (see {self.prog} --help)", flag=flag if flag.startswith("-") else None)


class _LaunchParser(Parser):
    """List the presets in the help text; only that imports the programs that registered them."""

    def format_help(self) -> str:
        """Return the help text."""
        self.epilog = describe_presets()
        return super().format_help()


def parse_flags(arguments: Sequence[str]) -> Options:
    """Return the options and, as they were given, the program and its arguments.

    Raises:
        FlagError: an unknown flag, or a value that it does not take.
        SystemExit: with status 0 after --help.
    """
    parser = make_parser()
    words, command = split_command(parser, arguments)
    values = vars(parser.parse_args(words))
    given = {field.name: values[field.name] for field in fields(Options) if field.name in values}
    for name in ("forward", "mount", "sbatch"):
        given[name] = tuple(given[name])
    return Options(words=tuple(words), command=command, **given)


def parse_subcommand(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the flags of a subcommand; FlagError for a program behind them."""
    words, command = split_command(parser, arguments)
    flags = parser.parse_args(words)
    if command:
        raise FlagError(
            f"{command[0]!r} stands in place of a flag",
            remedy=f"{parser.prog} starts no program (see {parser.prog} --help)",
        )
    return flags


def split_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the flags, hyphens in their names made underscores, and all from the first word on that is none."""
    with_value = _list_valued(parser)
    words = list(arguments)
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        name, equals, value = words[place].partition("=")
        if name.startswith("--"):
            name = "--" + name[2:].replace("-", "_")
        words[place] = name + equals + value
        place += 2 if name in with_value and not equals else 1
    command = words[place + 1 :] if words[place : place + 1] == ["--"] else words[place:]
    if command and (command[0].startswith("-") or not command[0]):
        raise FlagError(f"{command[0]!r} stands in place of the program", remedy="name the program behind the flags")
    return words[:place], tuple(command)


def without_flags(words: Sequence[str], dropped: Sequence[str]) -> tuple[str, ...]:
    """Return the flags (as in `Options.words`) without some, and without their values."""
    with_value = _list_valued(make_parser())
    kept: list[str] = []
    is_value = is_dropped = False
    for word in words:
        name, equals, _ = word.partition("=")
        if not is_value:
            is_dropped = name in dropped
        if not is_dropped:
            kept.append(word)
        is_value = not is_value and not equals and name in with_value
    return tuple(kept)


def _list_valued(parser: argparse.ArgumentParser) -> set[str]:
    """List the flags whose value is the next word, unless it stands in the same one, as in --np=2 and -xNAME."""
    return {name for action in parser._actions if action.nargs is None for name in action.option_strings}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags alone."""
    parser = _LaunchParser(PROGRAM, _DESCRIPTION, "[flags] program [arguments]")
    hosts = parser.add_argument_group("ranks and hosts")
    add_hosts(hosts)
    _add_elastic(hosts)
    _add_launch(parser.add_argument_group("how they are started"))
    add_reach(parser.add_argument_group("other hosts"))
    _add_devices(parser.add_argument_group("devices"))
    _add_containers(parser.add_argument_group("containers and schedulers"))
    _add_pods(parser.add_argument_group("each worker's pod of --mpijob"))
    _add_run(parser.add_argument_group("the launch itself"))
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 99999")
    return int(text)


def _count_or_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _port(text: str) -> int:
    """Return a port that has another one behind it, or 0."""
    if text != "0" and not 1 <= _count(text) < 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 1 to 65534")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 86400")
    return seconds


def add_hosts(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say which hosts there are, and how many ranks."""
    group.add_argument(
        "--np", "-np", type=_count, metavar="N", help="total number of ranks; default: the ranks of all hosts"
    )
    group.add_argument(
        "--hosts",
        "-H",
        metavar="A:2,B:2",
        help="hosts and ranks on each; default: those of MULTI_HLS_IPS, SLURM or Kubernetes",
    )
    group.add_argument("--hostfile", type=Path, metavar="FILE", help="file of hosts, as lines `host slots=2`")
    group.add_argument(
        "--num_workers_per_hls", type=_count, metavar="N", help="ranks on each host that has no number of its own"
    )


def _add_elastic(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host_discovery_script",
        type=Path,
        metavar="FILE",
        help="program that prints the current hosts, as lines host:slots; ranks join and leave with them, a lost "
        "rank costs the steps since the last commit",
    )
    group.add_argument(
        "--min_np", type=_count, default=1, metavar="N", help="smallest number of ranks of such a run; default: 1"
    )
    group.add_argument(
        "--max_np", type=_count, metavar="N", help="largest number of ranks of such a run; the number always divides N"
    )
    group.add_argument("--preset", metavar="NAME", help="name of a launch, see below")
    group.add_argument(
        "--submission",
        action="store_true",
        help="run MLPerf's experiments by the variables SYSTEM, CONT, DATADIR, LOGDIR, PRETRAINED_DIR and NEXP",
    )


def _add_launch(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        help="openmpi: Horovod by mpirun; gloo: Horovod by Gloo; multi_worker: tf.distribute; default: openmpi "
        "if mpirun is found, else gloo",
    )
    group.add_argument(
        "--cores_per_rank",
        type=_count_or_zero,
        metavar="N",
        help="physical cores that each rank is bound to, 0: none; default: an equal share of this machine",
    )
    group.add_argument(
        "--first_port",
        type=_count,
        default=FIRST_PORT,
        metavar="PORT",
        help="port of rank 0 for tf.distribute; default: 2410",
    )
    group.add_argument(
        "--forward",
        "-x",
        action="append",
        default=[],
        metavar="NAME",
        help="pass another variable to all ranks; secrets are refused",
    )
    group.add_argument("--no_jemalloc", dest="jemalloc", action="store_false", help="do not preload jemalloc")


def add_reach(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say how other hosts are reached."""
    group.add_argument(
        "--interface", metavar="NAME", help="network interface, or network, between the hosts; default: MPI_TCP_INCLUDE"
    )
    group.add_argument(
        "--ssh_port",
        type=_count,
        metavar="PORT",
        help="port of ssh; default: DOCKER_SSHD_PORT, 3022 with MULTI_HLS_IPS, else 22",
    )
    group.add_argument(
        "--ssh_config", metavar="FILE", help="configuration of ssh; the keys of hosts must be known in any case"
    )
    group.add_argument(
        "--mpi_root", metavar="DIR", help="folder of Open MPI on all hosts; default: MPI_ROOT, else as found in PATH"
    )
    group.add_argument("--remote_python", metavar="FILE", help="Python on other hosts; default: the path of this one")


def _add_devices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--accelerator", choices=ACCELERATORS, help="device that containers and schedulers give to ranks"
    )
    group.add_argument(
        "--scale_out",
        choices=SCALE_OUTS,
        help="network between Gaudis of several hosts: their own ports, TCP, or TCP after a reduction within each host",
    )
    group.add_argument(
        "--hcl_config", type=Path, metavar="FILE", help="write HCL_CONFIG_PATH's file, for SynapseAI before HCCL"
    )


def _add_containers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--container", choices=CONTAINER_KINDS, default="none", help="docker: all ranks inside; singularity: each rank"
    )
    for kind in CONTAINER_KINDS[1:]:
        group.add_argument(
            f"--{kind}", dest="container", action="store_const", const=kind, help=f"the same as --container {kind}"
        )
    group.add_argument(
        "--image", metavar="IMAGE", help="image; default: that of containers/ for the device and the program"
    )
    group.add_argument(
        "--mount",
        action="append",
        default=[],
        metavar="/A:/B",
        help="mount folder A as B; with --mpijob A may name a claim",
    )
    group.add_argument("--workdir", metavar="DIR", help="working folder inside")
    group.add_argument(
        "--slurm_script", metavar="FILE", help="write a script for sbatch instead of running; -: to the terminal"
    )
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="option of sbatch, like --sbatch=--time=1:00:00"
    )
    group.add_argument(
        "--requeue",
        type=_count_or_zero,
        default=0,
        metavar="N",
        help="have the job of --slurm_script queued again where it ends with 75, or at its limit of time, so often at "
        "most; default: 0",
    )
    group.add_argument(
        "--mpijob", metavar="FILE", help="write an MPIJob of Kubernetes instead of running; -: to the terminal"
    )
    group.add_argument("--job_name", metavar="NAME", help="name of the job; default: that of the program")


def _add_pods(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--job_cpus", type=_count, metavar="N", help="limit of processors; default: none")
    group.add_argument(
        "--job_memory", metavar="SIZE", help="limit of memory, like 64Gi; default: 51Gi per Gaudi, else none"
    )
    group.add_argument("--job_shm", metavar="SIZE", help="shared memory, part of the limit; default: 1Gi per rank")
    group.add_argument(
        "--job_hugepages", metavar="SIZE", help="huge pages of 2 MiB; default: 2640Mi per Gaudi, else none"
    )
    group.add_argument(
        "--job_ssh",
        metavar="DIR",
        help="folder of ssh keys in the image; default: /home/gaudi/.ssh; /root/.ssh: for images with an sshd of root",
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dry_run", action="store_true", help="show what would run, one argument per line, and exit")
    group.add_argument("--tag_output", action="store_true", help="begin each line of output with its rank")
    group.add_argument(
        "--log_dir",
        type=Path,
        metavar="DIR",
        help="add what each rank prints to DIR/rank_R.log, too, and write what `gaudi-run status DIR` shows",
    )
    group.add_argument(
        "--control_port",
        type=_port,
        default=0,
        metavar="PORT",
        help="port at which ranks of other hosts reach gaudi-run, and with Gloo the next one; default: free ones",
    )
    group.add_argument(
        "--grace",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="seconds in which ranks save and end after a signal; default: 30",
    )
    group.add_argument(
        "--max_restarts",
        type=_count_or_zero,
        default=0,
        metavar="N",
        help="start all ranks again, so often at most, where they end with 75 and nobody asked for it; default: 0",
    )
    group.add_argument("--debug", action="store_true", help="show the traceback of an error")
