"""Run the subcommand `gaudi-run doctor`: parse its flags, run all checks and print the table."""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gaudi_distributed.cluster.hosts import find_cluster
from gaudi_distributed.comm.horovod_engine import DISTRIBUTIONS
from gaudi_distributed.devices.machine import Machine, find_local_hosts, gather_processor, own_address
from gaudi_distributed.devices.selection import DEVICE_CHOICES
from gaudi_distributed.doctor import accelerators, engines, network, storage, system
from gaudi_distributed.doctor.findings import Finding, Request, exit_status, format_json, format_table
from gaudi_distributed.errors import ConfigurationError, say
from gaudi_distributed.launch.choices import choose_interface, choose_mpi_root, choose_ssh
from gaudi_distributed.launch.flags import DOCTOR, PROGRAM, Parser, add_hosts, add_reach, parse_subcommand
from gaudi_distributed.launch.processes import BACKENDS

NAME = f"{PROGRAM} {DOCTOR}"
_DESCRIPTION = """Check this machine, and change nothing.
With the flags of a run, also check what that run needs, and its hosts."""


def run_checks(machine: Machine, request: Request) -> list[Finding]:
    """Return the findings of this machine, then of each other host; it takes seconds."""
    ranks = request.ranks_here
    device, finding = accelerators.check_device(request.device, machine)
    cpu = gather_processor(machine, os.sched_getaffinity(0))
    found = [
        system.check_processor(cpu),
        system.check_cores(cpu, ranks),
        finding,
        system.check_bf16(cpu, device),
    ]
    tensorflow = system.read_versions(*DISTRIBUTIONS["tensorflow"])
    habana = system.read_versions("habana-tensorflow").get("habana-tensorflow")
    gaudi = accelerators.gather_gaudi(machine)
    found += [
        accelerators.check_gaudi(gaudi, device),
        accelerators.check_synapse(gaudi, habana, tensorflow, device),
        accelerators.check_gpu(machine, device),
        system.check_python(sys.version_info[:2]),
        system.check_tensorflow(tensorflow, device),
        system.check_jemalloc(machine),
    ]
    memory = storage.gather_memory(machine)
    found.append(storage.check_memory(memory))
    if request.data_dir is not None:
        found.append(storage.check_data_set(request.data_dir, memory, ranks))
    found += [
        storage.check_huge_pages(memory, device, cpu.logical),
        storage.check_shared_memory(storage.gather_space(Path("/dev/shm")), ranks),
        system.check_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        system.check_locked(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], device),
        storage.check_disk(storage.gather_space(request.model_dir), request.model_dir),
        system.check_clock(*system.gather_clock(machine), len(request.cluster.hosts)),
    ]
    mpi = engines.gather_mpi(machine, request.mpi_root)
    found.append(engines.check_mpi(mpi, request))
    found.append(engines.check_horovod(engines.gather_horovod(machine.environ), mpi, request))
    interfaces = network.gather_interfaces()
    found.append(network.check_interfaces(interfaces, request, _find_route(request)))
    if device != "cpu":
        found.append(network.check_sockets(interfaces, machine, request, device))
    starter = network.find_starter(request, engines.choose_backend(request, mpi))
    hosts = network.gather_remote_hosts(machine, request, starter)
    return found + [network.check_remote_host(host, starter, mpi.version, request.ssh) for host in hosts]


def _find_route(request: Request) -> str | None:
    """Return this machine's address on the way to another host; None if there is none, or no other host."""
    if not request.others:
        return None
    try:
        return own_address(request.cluster, request.local_hosts, None)
    except ConfigurationError:
        return None


def run_doctor(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Examine this machine for the run that the flags describe, print the table, and return 0, or 78 with a fault.

    Raises:
        FlagError: an unknown flag, or a value that it does not take.
        ConfigurationError: hosts that are none, or contradict each other.
    """
    flags = parse_flags(arguments)
    cluster, source = find_cluster(
        environ, hosts=flags.hosts, hostfile=flags.hostfile, np=flags.np, slots=flags.num_workers_per_hls
    )
    request = Request(
        device=flags.device,
        cluster=cluster,
        local_hosts=find_local_hosts(cluster),
        backend=flags.backend,
        data_dir=flags.data_dir,
        model_dir=flags.model_dir,
        interface=choose_interface(flags.interface, environ),
        ssh=choose_ssh(flags.ssh_port, flags.ssh_config, source, environ),
        remote_python=flags.remote_python or sys.executable,
        mpi_root=choose_mpi_root(flags.mpi_root, environ),
    )
    findings = run_checks(Machine(Path("/"), dict(environ)), request)
    host = os.uname().nodename
    say(*(format_json(findings, host) if flags.json else format_table(findings, host)).splitlines())
    return exit_status(findings)


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the flags; FlagError for one that does not exist, a value that it does not take, or a program."""
    parser = Parser(NAME, _DESCRIPTION)
    run = parser.add_argument_group("the run")
    run.add_argument("--device", choices=DEVICE_CHOICES, default="auto", help="as in the programs; default: auto")
    run.add_argument(
        "--data_dir", type=Path, metavar="DIR", help="folder of records, whose size is compared with the memory"
    )
    run.add_argument(
        "--model_dir",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder that the run writes to; default: the working folder",
    )
    run.add_argument("--backend", choices=BACKENDS, help="starts the ranks; default: the choice of gaudi-run")
    add_hosts(parser.add_argument_group("ranks and hosts"))
    add_reach(parser.add_argument_group("other hosts"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of the table")
    output.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parse_subcommand(parser, arguments)
