"""The subcommand `gaudi-run doctor`: from its flags to the table."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from gaudi_distributed.cluster.cluster import HostRequest, find_cluster, find_local_hosts
from gaudi_distributed.devices.devices import DEVICE_CHOICES, DeviceChoice
from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor.examination import examine
from gaudi_distributed.doctor.findings import Request, exit_status, format_json, format_table
from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.choices import choose_interface, choose_mpi_root, choose_ssh
from gaudi_distributed.launch.flags import DOCTOR, PROGRAM, Parser, add_hosts, add_reach, split_command
from gaudi_distributed.launch.processes import BACKENDS, Backend

NAME = f"{PROGRAM} {DOCTOR}"
_DESCRIPTION = """Say what this machine has and what a run would meet. It changes nothing.
With the flags of a run it looks at what that run needs, and at its hosts."""


@dataclass(frozen=True)
class Flags:
    """The flags by their names; None where one was not given."""

    device: DeviceChoice
    data_dir: Path | None
    model_dir: Path
    backend: Backend | None
    np: int | None
    hosts: str | None
    hostfile: Path | None
    num_workers_per_hls: int | None
    interface: str | None
    ssh_port: int | None
    ssh_config: str | None
    remote_python: str | None
    mpi_root: str | None
    json: bool


def run_doctor(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Examine this machine for the run that the flags describe, print the table, and return 0, or 78 with a fault.

    Raises:
        FlagError: an unknown flag, or a value that it does not take.
        ConfigurationError: hosts that are none, or contradict each other.
    """
    flags = parse_flags(arguments)
    findings = examine(Machine(Path("/"), dict(environ)), _make_request(flags, environ))
    host = os.uname().nodename
    sys.stdout.write(format_json(findings, host) if flags.json else format_table(findings, host))
    return exit_status(findings)


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Return the flags; FlagError for one that does not exist, a value that it does not take, or a program."""
    parser = Parser(
        prog=NAME,
        usage=f"{NAME} [flags]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--device", choices=DEVICE_CHOICES, default="auto", help="as the programs take it; default: auto")
    run.add_argument("--data_dir", type=Path, metavar="DIR", help="records, to be compared with the memory")
    run.add_argument("--model_dir", type=Path, default=Path(), metavar="DIR", help="where it writes; default: here")
    run.add_argument("--backend", choices=BACKENDS, help="what starts the ranks; default: gaudi-run's choice")
    add_hosts(parser.add_argument_group("ranks and hosts"))
    add_reach(parser.add_argument_group("other hosts"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON in place of the table")
    output.add_argument("--debug", action="store_true", help="show the traceback of an error")
    words, command = split_command(parser, arguments)
    values = vars(parser.parse_args(words))
    if command:
        raise FlagError(f"{command[0]!r} stands where a flag should; the doctor starts no program (see {NAME} --help)")
    return Flags(**{field.name: values[field.name] for field in fields(Flags)})


def _make_request(flags: Flags, environ: Mapping[str, str]) -> Request:
    asked = HostRequest(flags.hosts, flags.hostfile, flags.np, flags.num_workers_per_hls)
    cluster, source = find_cluster(asked, environ)
    return Request(
        device=flags.device,
        cluster=cluster,
        local_hosts=find_local_hosts(cluster),
        backend=flags.backend,
        data_dir=flags.data_dir,
        model_dir=flags.model_dir,
        interface=choose_interface(flags, environ),
        ssh=choose_ssh(flags, source, environ),
        remote_python=flags.remote_python or sys.executable,
        mpi_root=choose_mpi_root(flags, environ),
    )
