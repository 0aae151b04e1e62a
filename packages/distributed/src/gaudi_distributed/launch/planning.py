"""From flags and environment to the processes that are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gaudi_distributed.errors import ConfigurationError, FlagError, MissingProgramError
from gaudi_distributed.hosts import join_port
from gaudi_distributed.launch import choices, guard
from gaudi_distributed.launch.addresses import LOOPBACK, find_local_hosts, own_address
from gaudi_distributed.launch.containers import (
    CONTAINER_KINDS,
    Container,
    choose_image,
    choose_inside,
    lane_of,
    plan_docker,
    wrap_singularity,
)
from gaudi_distributed.launch.description import CommandLine, describe_processes, list_command_lines
from gaudi_distributed.launch.flags import PROGRAM, Options, without_flags
from gaudi_distributed.launch.forwarding import choose_forwarded, choose_local, refuse_ranks
from gaudi_distributed.launch.openmpi import plan_openmpi
from gaudi_distributed.launch.own_ranks import plan_gloo, plan_multi_worker
from gaudi_distributed.launch.plan import Backend, LaunchPlan, Process
from gaudi_distributed.launch.presets import Preset
from gaudi_distributed.opening import ENGINE_VARIABLE, Engine

_PLANNERS: dict[Backend, Callable[[LaunchPlan], list[Process]]] = {
    "openmpi": plan_openmpi,
    "gloo": plan_gloo,
    "multi_worker": plan_multi_worker,
}
# Flags for this side of a container.
_OUTSIDE = ("--container", *(f"--{kind}" for kind in CONTAINER_KINDS), "--image", "--mount", "--workdir", "--dry_run")


@dataclass(frozen=True)
class Launch:
    """What is started.

    Attributes:
        plan: for whom.
        processes: by what.
        address: where ranks reach this machine.
        notes: lines about how.
        files: texts to write first, by path.
        supervised: whether this launcher watches the ranks, and not one inside a container.
    """

    plan: LaunchPlan
    processes: tuple[Process, ...]
    address: str
    notes: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    supervised: bool = True

    @property
    def command_lines(self) -> tuple[CommandLine, ...]:
        """The command lines, host by host."""
        return list_command_lines(self.plan, self.processes)

    def describe(self) -> str:
        """What would be written and run, for `--dry-run`."""
        notes = "".join(f"{note}\n" for note in self.notes)
        files = "".join(f"file {path}\n{text}\n" for path, text in self.files.items())
        return f"{notes}\n{files}{describe_processes(self.processes)}"


def plan_launch(options: Options, environ: Mapping[str, str]) -> Launch:
    """Return what is started; an error carries its exit status (64, 66, 77 or 78)."""
    refuse_ranks(environ)
    preset, command = choices.choose_preset(options)
    container = _make_container(options, preset, command)
    cluster, source = choices.choose_cluster(options, preset, environ)
    backend = choices.choose_backend(options, preset, environ)
    variables, files = choices.choose_variables(options, preset, cluster, environ)
    note, preloaded = choices.choose_jemalloc(options, container, environ)
    local_hosts = find_local_hosts(cluster)
    plan = LaunchPlan(
        cluster=cluster,
        command=command,
        backend=backend,
        environment={ENGINE_VARIABLE: _name_engine(backend, cluster.size), **variables, **preloaded},
        forwarded=choose_inside(options.container, choose_forwarded(environ, options.forward)),
        binding=choices.choose_cores(options, cluster),
        local_hosts=local_hosts,
        ssh=choices.choose_ssh(options, source, environ),
        interface=choices.choose_interface(options, environ),
        mpi_root=choices.choose_mpi_root(options, environ),
        tag_output=options.tag_output,
        grace=options.grace,
        is_root=os.geteuid() == 0,
        guard=(options.remote_python or sys.executable, "-I", guard.__file__),
    )
    plan = replace(plan, kept=choose_local(environ, ssh=not plan.is_local))
    notes = [_summarize(plan), note]
    if container is not None and container.kind == "docker":
        return _plan_docker(plan, container, options, preset, notes, files)
    if container is not None:
        plan = replace(plan, command=wrap_singularity(container, choices.choose_accelerator(options, preset), command))
    return _plan_ranks(plan, options, environ, notes, files)


def _plan_docker(
    plan: LaunchPlan,
    container: Container,
    options: Options,
    preset: Preset | None,
    notes: Sequence[str],
    files: Mapping[Path, str],
) -> Launch:
    if not plan.is_local:
        raise ConfigurationError(
            "--container docker: starts containers on this machine only; start one with sshd on each host, and "
            "gaudi-run with --hosts in one of them"
        )
    inner = (PROGRAM, *without_flags(options.words, _OUTSIDE), *options.command)
    user = f"{os.geteuid()}:{os.getegid()}"
    processes = plan_docker(container, choices.choose_accelerator(options, preset), plan, inner, user)
    return Launch(plan, tuple(processes), LOOPBACK, tuple(notes), files, supervised=False)


def _plan_ranks(
    plan: LaunchPlan, options: Options, environ: Mapping[str, str], notes: list[str], files: Mapping[Path, str]
) -> Launch:
    """Plan the ranks by what the machine has; what it lacks is an error, and a note where nothing is to run here."""

    def look(find: Callable[[], str], otherwise: str) -> str:
        try:
            return find()
        except ConfigurationError as error:
            if not options.dry_run:
                raise
            notes.append(f"it would not run here: {error}")
            return otherwise

    address = look(lambda: own_address(plan.cluster, plan.local_hosts, plan.interface), "")
    if plan.local_hosts:
        program = look(lambda: choices.find_program(plan.command[0], environ), plan.command[0])
        plan = replace(plan, command=(program, *plan.command[1:]))
    if plan.backend == "openmpi":
        look(lambda: choices.find_program(plan.mpirun, environ), plan.mpirun)
        if plan.interface is None and not plan.is_local and address and ":" not in address:
            plan = replace(plan, interface=f"{address}/24")
    return Launch(plan, tuple(_PLANNERS[plan.backend](plan)), address, tuple(notes), files)


def _make_container(options: Options, preset: Preset | None, command: Sequence[str]) -> Container | None:
    """Return the container, if one was asked for; FlagError where nothing is to run an image that was named."""
    if options.container == "none":
        if options.image or options.mount or options.workdir:
            raise FlagError("--image, --mount and --workdir go with --container docker or singularity")
        return None
    image = options.image or choose_image(options.container, choices.choose_accelerator(options, preset), command)
    if options.image is None and options.container == "singularity" and not (options.dry_run or Path(image).is_file()):
        raise MissingProgramError(
            f"{image}: there is no such file; build it by apptainer build {image} containers/{lane_of(image)}.def in a "
            "clone, or name another by --image"
        )
    return Container(options.container, image, options.mount, options.workdir)


def _name_engine(backend: Backend, size: int) -> Engine:
    if size == 1:
        return "single"
    return "multi_worker" if backend == "multi_worker" else "horovod"


def _summarize(plan: LaunchPlan) -> str:
    ranks = "1 rank" if plan.cluster.size == 1 else f"{plan.cluster.size} ranks"
    hosts = ", ".join(join_port(host.name, host.slots) for host in plan.cluster.hosts)
    cores = plan.binding.cores
    bound = "not bound to cores" if cores == 0 else f"bound to {cores} {'core' if cores == 1 else 'cores'} each"
    return f"{ranks} on {hosts} by {plan.backend}, {bound}"
