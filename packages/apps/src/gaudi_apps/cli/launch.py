"""Start the processes that flags ask for, through the launcher of `gaudi-run`, or say what would be started.

A process becomes the launcher, as the originals' demo scripts did. The launcher runs the same command as each rank, and
that finds its rank in the environment and starts nothing further.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from gaudi_apps.cli.flags import DistributionFlags
from gaudi_apps.runtime.process_group import FindDevice, find_request
from gaudi_datasets.errors import FlagError
from gaudi_distributed import ConfigurationError, DeviceError
from gaudi_distributed.cluster.rank_info import is_launched
from gaudi_distributed.comm.horovod_engine import require_horovod

if TYPE_CHECKING:
    from gaudi_distributed.launch.planning import CommandLine

LAUNCHER = "gaudi_distributed.launch"
_HOSTS = "MULTI_HLS_IPS"


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
            ranks = (
                f"rank {line.first_rank}"
                if line.first_rank == line.last_rank
                else (f"ranks {line.first_rank} to {line.last_rank}")
            )
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
        sys.stderr.write(f"{_HOSTS} has no effect without --use_horovod or --distribution_strategy: 1 process\n")
    arguments = list_launcher_words(flags, environ, find_device, command)
    if arguments is not None:
        check_engine(flags, find_device)
        become_launcher(arguments)


def become_launcher(words: Sequence[str]) -> NoReturn:
    """Go on as `gaudi-run` with these arguments, in this process."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", LAUNCHER, *words])


def list_launcher_words(
    flags: DistributionFlags, environ: Mapping[str, str], find_device: FindDevice, command: Sequence[str]
) -> list[str] | None:
    """Return what gaudi-run is given; None: there is nothing to start. See `start_processes`."""
    if not flags.has_engine or flags.worker_hosts is not None or is_launched(environ):
        return None
    engine = "--use_horovod" if flags.use_horovod else f"--distribution_strategy {flags.distribution_strategy}"
    if flags.kubernetes_run:
        raise FlagError(
            "--kubernetes_run: Kubernetes starts the processes, and it started none here; run this command by the "
            "mpirun of an MPIJob (`gaudi-run --mpijob`), or leave the flag out to start them here",
            flag="--kubernetes_run",
        )
    request = find_request(flags, environ, find_device)
    if request is None:
        raise FlagError(
            f"{engine}: no processes were launched",
            flag=engine.partition(" ")[0],
            remedy="give --num_workers_per_hls N, or --hvd_workers N, or start by `gaudi-run --np N`",
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
