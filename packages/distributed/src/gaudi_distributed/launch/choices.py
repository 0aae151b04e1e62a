"""Complete the flags of a launch from the preset, the environment and the machine, and refuse contradictions."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from gaudi_distributed.cluster.hosts import Cluster, find_cluster, name_source
from gaudi_distributed.devices.habana import ScaleOut, check_hcl_config, hccl_environment, hcl_config
from gaudi_distributed.devices.machine import (
    Cores,
    count_cores,
    deal_cores,
    describe_jemalloc,
    preload_jemalloc,
    read_sockets,
)
from gaudi_distributed.errors import ConfigurationError, FlagError, MissingProgramError
from gaudi_distributed.launch.flags import Options
from gaudi_distributed.launch.presets import Accelerator, Preset, find_preset
from gaudi_distributed.launch.processes import (
    CONTAINER_SSH_PORT,
    GLOO_RANKS,
    SSH_PORT,
    Backend,
    Ssh,
    choose_gloo_seconds,
)

# What the kernel reads of a script: its interpreter ends at a blank.
_MAX_FIRST_LINE, _SCRIPT = 256, re.compile(rb"#![ \t]*([^ \t\n\0]+)")
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,14}", re.ASCII)
# They name hosts, and may say how many ranks each has.
_HOST_VARIABLES = ("MULTI_HLS_IPS", "SLURM_JOB_NODELIST", "OMPI_MCA_orte_default_hostfile")


def choose_preset(options: Options) -> tuple[Preset | None, tuple[str, ...]]:
    """Return the preset, if one is named, and the command; FlagError if there is no command."""
    preset = None if options.preset is None else find_preset(options.preset)
    command = options.command if preset is None else preset.complete(options.command, str(options.preset))
    if not command:
        raise FlagError("does not name a program", remedy="write it with its arguments behind the flags")
    return preset, command


def choose_accelerator(options: Options, preset: Preset | None) -> Accelerator:
    """Return the kind of device that ranks get."""
    return options.accelerator or (preset.accelerator if preset is not None else "none")


def choose_cluster(options: Options, preset: Preset | None, environ: Mapping[str, str]) -> tuple[Cluster, str]:
    """Return the hosts with their ranks, and what named them; ConfigurationError if they are not the preset's."""
    ranks, slots = options.np, options.num_workers_per_hls
    if preset is not None:
        if ranks not in (None, preset.ranks) or slots not in (None, preset.slots):
            raise ConfigurationError(
                f"--preset {options.preset}: is for {preset.ranks} ranks, {preset.slots} on a host",
                flag="--preset",
                remedy="leave out --np and --num_workers_per_hls, or the preset",
            )
        ranks = preset.ranks
    names_hosts = any(name in environ for name in _HOST_VARIABLES)
    if not names_hosts and all(flag is None for flag in (ranks, slots, options.hosts, options.hostfile)):
        raise FlagError("gives neither a number of ranks nor hosts", flag="--np", remedy="give --np or --hosts")
    cluster, source = find_cluster(
        environ,
        hosts=options.hosts,
        hostfile=options.hostfile,
        np=ranks,
        slots=slots,
        first_port=options.first_port,
    )
    if preset is not None and [host.slots for host in cluster.hosts] != [preset.slots] * preset.hosts:
        raise ConfigurationError(
            f"--preset {options.preset}: needs {preset.hosts} hosts with {preset.slots} ranks each",
            flag="--preset",
            remedy="name them",
        )
    return cluster, source


def choose_shape(options: Options, preset: Preset | None) -> tuple[int, int]:
    """Return the number of hosts, and of ranks on each, that a scheduler's job asks for."""
    if options.hosts is not None or options.hostfile is not None:
        raise FlagError(
            "--slurm_script and --mpijob: the scheduler gives hosts",
            flag="--slurm_script",
            remedy="leave out --hosts and --hostfile",
        )
    if preset is not None:
        return preset.hosts, preset.slots
    slots = options.num_workers_per_hls or options.np
    if slots is None:
        raise FlagError(
            "does not give a number of ranks",
            flag="--np",
            remedy="give --np, and --num_workers_per_hls for several hosts",
        )
    hosts, rest = divmod(options.np or slots, slots)
    if rest or not hosts:
        raise ConfigurationError(
            f"--np {options.np}: is not a multiple of --num_workers_per_hls {slots}", flag="--np", remedy="give one"
        )
    return hosts, slots


def choose_backend(
    options: Options, preset: Preset | None, environ: Mapping[str, str], ranks: int = 1
) -> tuple[Backend, str]:
    """Return what starts the ranks, with a line about more ranks than Gloo starts well, or "".

    It is the flag's, the preset's, Open MPI if mpirun is found, or Gloo.
    """
    backend = options.backend or (preset.backend if preset is not None else None)
    has_mpi = choose_mpi_root(options.mpi_root, environ) is not None or _find("mpirun", environ) is not None
    backend = backend or ("openmpi" if has_mpi else "gloo")
    if backend != "gloo" or ranks <= GLOO_RANKS or options.max_np is not None:
        return backend, ""
    remedy = "--backend openmpi is faster" if has_mpi else "Open MPI, which is faster, is not found"
    return backend, f"{ranks} ranks may need {choose_gloo_seconds(ranks)} s to meet through Gloo; {remedy}"


def choose_mpi_root(flag: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the absolute path of Open MPI from --mpi_root or MPI_ROOT; None if not given."""
    root = flag or environ.get("MPI_ROOT") or None
    if root is not None and (not root.startswith("/") or not root.isprintable() or set(root) & set(" \"'\\$`;&|")):
        raise ConfigurationError(
            f"MPI_ROOT {root!r}: is not an absolute path without blanks and quotes",
            field="MPI_ROOT",
            remedy="write one like /opt/openmpi",
        )
    return root


def choose_interface(flag: str | None, environ: Mapping[str, str]) -> str | None:
    """Return the network between the hosts, from --interface or MPI_TCP_INCLUDE; None if not given."""
    variable = environ.get("MPI_TCP_INCLUDE")
    for source, value in (("--interface", flag), ("MPI_TCP_INCLUDE", variable)):
        if value is not None:
            check_interface(value, source)
    if flag is not None and variable not in (None, flag):
        raise ConfigurationError(
            f"--interface is {flag}, MPI_TCP_INCLUDE {variable}", flag="--interface", remedy="give one"
        )
    return variable if flag is None else flag


def check_interface(text: str, source: str) -> None:
    """Raise FlagError unless it is an interface's name, or an IPv4 network like 10.0.0.0/24."""
    if "/" in text:
        try:
            ipaddress.IPv4Interface(text)
        except ValueError as error:
            raise FlagError(
                f"{source} {text!r}: is not a network ({error})",
                **name_source(source),
                remedy="write one like 10.0.0.0/24",
            ) from None
    elif _INTERFACE.fullmatch(text) is None:
        raise FlagError(
            f"{source} {text!r}: is not an interface",
            **name_source(source),
            remedy="write a name like eth0, or a network like 10.0.0.0/24",
        )


def choose_ssh(port: int | None, config: str | None, source: str, environ: Mapping[str, str]) -> Ssh:
    """Return how hosts are reached; `port` and `config` are those of the flags, `source` names the hosts.

    Without a flag, the port is that of DOCKER_SSHD_PORT, 3022 with MULTI_HLS_IPS, or 22.
    """
    set_port = environ.get("DOCKER_SSHD_PORT", "")
    if set_port and not (set_port.isascii() and set_port.isdigit() and len(set_port) < 6):
        raise ConfigurationError(
            f"DOCKER_SSHD_PORT is {set_port!r}", field="DOCKER_SSHD_PORT", remedy="set it to a port, or unset it"
        )
    default = CONTAINER_SSH_PORT if source == "MULTI_HLS_IPS" else SSH_PORT
    if config is not None and not Path(config).is_file():
        raise MissingProgramError(f"--ssh_config {config}: does not exist", flag="--ssh_config", path=config)
    return Ssh(port or int(set_port or default), config)


def choose_cores(options: Options, cluster: Cluster) -> tuple[Cores, ...]:
    """Return the cores of each rank: the number of the flag, or an equal share of this machine's."""
    sockets = read_sockets()
    asked = options.cores_per_rank
    rank_cores = deal_cores(sockets, cluster.most_slots, asked)
    each = len(rank_cores[0]) if rank_cores else 0
    if asked is not None and asked > each:
        raise ConfigurationError(
            f"--cores_per_rank {asked}: this machine has {count_cores(sockets)} cores, {each} for each of "
            f"{cluster.most_slots} ranks",
            flag="--cores_per_rank",
            remedy="give no more",
        )
    return rank_cores


def choose_variables(
    options: Options, preset: Preset | None, cluster: Cluster, environ: Mapping[str, str]
) -> tuple[dict[str, str], dict[Path, str]]:
    """Return the variables for devices of several hosts, and files to write, by path."""
    if choose_accelerator(options, preset) != "hpu":
        if options.scale_out is not None or options.hcl_config is not None:
            raise FlagError(
                "--scale_out and --hcl_config are for Gaudis", flag="--scale_out", remedy="give --accelerator hpu, too"
            )
        return {}, {}
    scale_out: ScaleOut = "hierarchical" if environ.get("HOROVOD_HIERARCHICAL_ALLREDUCE") == "1" else "gaudi"
    scale_out = "tcp" if environ.get("HCCL_OVER_TCP") == "1" else scale_out
    scale_out = options.scale_out or (scale_out if preset is None else preset.scale_out)
    interface = choose_interface(options.interface, environ)
    name = interface if interface is not None and "/" not in interface else None
    variables = hccl_environment(cluster, scale_out, name, environ)
    if options.hcl_config is not None:
        path = options.hcl_config.absolute()
        text = hcl_config(cluster, hierarchical=scale_out == "hierarchical")
        return {**variables, "HCL_CONFIG_PATH": str(path)}, {path: text}
    if "HCL_CONFIG_PATH" in environ:
        check_hcl_config(environ["HCL_CONFIG_PATH"], cluster)
    return variables, {}


def choose_jemalloc(options: Options, image: str | None, environ: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Return a line about jemalloc, and the variable that preloads it; `image` is that of a container, if any."""
    if not options.jemalloc:
        return "jemalloc: not used, by --no_jemalloc", {}
    if image is not None:
        return f"jemalloc: not used, for what this machine has is not inside {image}", {}
    variables = preload_jemalloc(environ)
    if variables:
        return f"jemalloc: used, by LD_PRELOAD={variables['LD_PRELOAD']}", variables
    return describe_jemalloc(environ), {}


def find_program(name: str, environ: Mapping[str, str]) -> str:
    """Return the program as it can be started here: as named if it is found so, else the one beside this Python.

    Raises:
        MissingProgramError: it is in neither, cannot be executed, or is a script whose interpreter cannot be.
    """
    found = _find(name, environ)
    beside = Path(sys.executable).parent / name
    if found is None and "/" not in name and os.access(beside, os.X_OK) and beside.is_file():
        name = found = str(beside)
    if found is None or not stat.S_ISREG(_read_mode(found)):
        raise _make_program_error(name)
    _check_interpreter(name, found)
    return name


def _make_program_error(name: str) -> MissingProgramError:
    """Return the error for a program that cannot be started, by what there is of that name."""
    mode = _read_mode(name)
    if stat.S_ISREG(mode) and not os.access(name, os.X_OK):
        runner = "python" if name.endswith(".py") else "sh"
        fault, remedy = "is not executable", f"name what runs it, like {runner} {name}, or make it so by chmod +x"
    elif stat.S_ISREG(mode):
        fault, remedy = "is in the working folder, which is not in PATH", f"write ./{name}"
    elif stat.S_ISDIR(mode) and "/" in name:
        fault, remedy = "is a folder", "name a program"
    elif mode and "/" in name:
        fault, remedy = "is no file", "name a program"
    elif "/" in name:
        fault, remedy = "does not exist", "correct its path"
    else:
        fault, remedy = f"is not in PATH, nor beside {sys.executable}", "install it, or name its path"
    return MissingProgramError(f"program {name!r}: {fault}", path=name, remedy=remedy)


def _read_mode(path: str) -> int:
    """Return kind and permissions of what a path leads to; 0 where that is nothing, or may not be known."""
    try:
        return Path(path).stat().st_mode
    except OSError:
        return 0


def _check_interpreter(name: str, path: str) -> None:
    """Raise MissingProgramError for a script whose first line names what cannot be executed.

    The system would say that the script itself is not there, and mpirun nothing but a number.
    """
    try:
        with open(path, "rb") as file:
            found = _SCRIPT.match(file.read(_MAX_FIRST_LINE))
    except OSError:  # it may be executed, and not read
        return
    interpreter = "" if found is None else os.fsdecode(found[1])
    if not interpreter or (stat.S_ISREG(_read_mode(interpreter)) and os.access(interpreter, os.X_OK)):
        return
    raise MissingProgramError(
        f"program {name!r}: its first line names {interpreter!r}, which is not there or not executable",
        path=name,
        record="line 1",
        remedy="end its lines as Unix does" if interpreter.endswith("\r") else "correct it, or install that",
    )


def _find(name: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=environ.get("PATH", os.defpath))
