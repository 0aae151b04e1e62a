"""All checks, in the order of the table."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gaudi_distributed.cluster.cluster import own_address
from gaudi_distributed.devices.devices import DeviceKind
from gaudi_distributed.devices.machine import Machine
from gaudi_distributed.doctor import accelerators, engines, network, storage
from gaudi_distributed.doctor import network as remote_hosts
from gaudi_distributed.doctor import storage as memory
from gaudi_distributed.doctor import system as clock
from gaudi_distributed.doctor import system as libraries
from gaudi_distributed.doctor import system as limits
from gaudi_distributed.doctor import system as processor
from gaudi_distributed.doctor.findings import Finding, Request
from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.horovod_build.environment import DISTRIBUTIONS


def examine(machine: Machine, request: Request) -> list[Finding]:
    """Return what was found: of this machine, then of each other host. Takes seconds, and more for hosts far away."""
    device, finding = accelerators.judge_device(request.device, machine)
    cpu = processor.gather_processor(machine, os.sched_getaffinity(0))
    found = [
        processor.judge_processor(cpu),
        processor.judge_cores(cpu, request.ranks_here),
        finding,
        processor.judge_bf16(cpu, device),
    ]
    tensorflow = libraries.read_versions(*DISTRIBUTIONS["tensorflow"])
    habana = libraries.read_versions("habana-tensorflow").get("habana-tensorflow")
    gaudi = accelerators.gather_gaudi(machine)
    found += [
        accelerators.judge_gaudi(gaudi, device),
        accelerators.judge_synapse(gaudi, habana, tensorflow, device),
        accelerators.judge_gpu(accelerators.gather_gpu(machine), machine, device),
        libraries.judge_python(sys.version_info[:2]),
        libraries.judge_tensorflow(tensorflow, device),
        libraries.judge_jemalloc(machine),
    ]
    found += _examine_memory(machine, request, device, cpu.logical)
    found += _examine_ways(machine, request, device)
    return found


def _examine_memory(machine: Machine, request: Request, device: DeviceKind, logical: int) -> Iterator[Finding]:
    """Yield what is said of memory, files and disk."""
    available = memory.gather_memory(machine)
    yield memory.judge_memory(available)
    if request.data_dir is not None:
        yield memory.judge_data_set(memory.gather_data_set(request.data_dir), available, request.ranks_here)
    yield memory.judge_huge_pages(available, device, logical)
    yield storage.judge_shared_memory(storage.gather_space(machine, Path("/dev/shm")), request.ranks_here)
    mine = limits.gather_limits()
    yield limits.judge_files(mine)
    yield limits.judge_locked(mine, device)
    yield storage.judge_disk(storage.gather_space(machine, request.model_dir), request.model_dir)
    yield clock.judge_clock(clock.gather_clock(machine), len(request.cluster.hosts))


def _examine_ways(machine: Machine, request: Request, device: DeviceKind) -> Iterator[Finding]:
    """Yield what is said of the ways that ranks talk by."""
    mpi = engines.gather_mpi(machine, request.mpi_root)
    yield engines.judge_mpi(mpi, request)
    yield engines.judge_horovod(engines.gather_horovod(machine.environ), mpi, request)
    interfaces = network.gather_interfaces(machine)
    yield network.judge_interfaces(interfaces, request, _find_route(request))
    sockets = network.judge_sockets(interfaces, machine, request, device)
    if sockets is not None:
        yield sockets
    starter = remote_hosts.find_starter(request, engines.choose_backend(request, mpi))
    for host in remote_hosts.gather_hosts(machine, request, starter):
        yield remote_hosts.judge_host(host, starter, mpi.version, request.ssh)


def _find_route(request: Request) -> str | None:
    """Return this machine's address on the way to another host; None where there is no way, or no other host."""
    if not request.others:
        return None
    try:
        return own_address(request.cluster, request.local_hosts, None)
    except ConfigurationError:
        return None
