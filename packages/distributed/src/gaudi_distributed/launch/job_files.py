"""Files for schedulers, which start gaudi-run themselves: a script for sbatch, a manifest for Kubernetes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gaudi_distributed.cluster import Cluster, Host
from gaudi_distributed.errors import ConfigurationError, FlagError
from gaudi_distributed.launch import choices
from gaudi_distributed.launch.containers import Container
from gaudi_distributed.launch.flags import PROGRAM, Options, without_flags
from gaudi_distributed.launch.forwarding import choose_forwarded
from gaudi_distributed.launch.kubernetes import IMAGE_SSH, Pod, check_job_name, parse_mount, write_mpi_job
from gaudi_distributed.launch.slurm import SlurmJob, write_slurm_script
from gaudi_distributed.launch.submission import VARIABLES, list_launches

_JOB = ("--slurm_script", "--sbatch", "--mpijob", "--job_name", "--dry_run")
# What a pod has, by the names of Options.
_POD = ("job_cpus", "job_memory", "job_shm", "job_hugepages", "job_ssh")


def is_job_file(options: Options) -> bool:
    """Tell whether a file is to be written in place of a run; FlagError for flags that have no meaning then."""
    if options.slurm_script is not None and options.mpijob is not None:
        raise FlagError("--slurm_script and --mpijob: give one of them")
    if options.sbatch and options.slurm_script is None:
        raise FlagError("--sbatch goes with --slurm_script")
    if options.job_name is not None and options.slurm_script is None and options.mpijob is None:
        raise FlagError("--job_name goes with --slurm_script or --mpijob")
    if options.mpijob is None and any(getattr(options, name) is not None for name in _POD):
        raise FlagError(f"{', '.join(f'--{name}' for name in _POD)} go with --mpijob")
    return options.slurm_script is not None or options.mpijob is not None


def make_job_file(options: Options, environ: Mapping[str, str]) -> str:
    """Return its text."""
    preset, command = choices.choose_preset(list_launches(options, environ)[0])
    hosts, slots = choices.choose_shape(options, preset)
    accelerator = choices.choose_accelerator(options, preset)
    name = options.job_name or Path(command[0]).stem.lower().replace("_", "-")
    check_job_name(name)
    if options.slurm_script is not None:
        if options.container == "docker":
            raise ConfigurationError("--container docker: jobs of SLURM use singularity; give --container singularity")
        # gaudi-run reads the submission's variables inside the job, too.
        read_inside = [name for name in VARIABLES if options.submission and name in environ]
        forwarded = choose_forwarded(environ, (*options.forward, *read_inside))
        job = SlurmJob(name, hosts, slots, options.sbatch, forwarded)
        launcher = (sys.executable, "-m", "gaudi_distributed.launch")
        inner = (*launcher, *without_flags(options.words, _JOB), *options.command)
        return write_slurm_script(job, accelerator, inner)
    pod = _choose_pod(options)
    cluster = Cluster(tuple(Host(f"worker-{number}", slots) for number in range(hosts)))
    # Cores of the launcher's pod say nothing of the workers'.
    dropped = (*_JOB, "--image", "--mount", "--cores_per_rank", "--ssh_port", *(f"--{name}" for name in _POD))
    flags = ("--cores_per_rank", str(options.cores_per_rank or 0), "--ssh_port", str(pod.port))
    inner = (PROGRAM, *flags, *without_flags(options.words, dropped), *options.command)
    return write_mpi_job(name, cluster, pod, accelerator, inner)


def _choose_pod(options: Options) -> Pod:
    """Return what the workers' pods have; FlagError for flags that have no meaning there."""
    if options.container != "none" or options.workdir or options.image is None:
        raise FlagError("--mpijob: needs --image, and neither --container nor --workdir")
    Container("docker", options.image)  # is checked by being made
    return Pod(
        options.image,
        mounts=tuple(map(parse_mount, options.mount)),
        shared_memory=options.job_shm,
        huge_pages=options.job_hugepages,
        memory=options.job_memory,
        cpus=options.job_cpus,
        ssh_folder=options.job_ssh or IMAGE_SSH,
        ssh_port=options.ssh_port,
    )


def write_job_file(options: Options, environ: Mapping[str, str]) -> None:
    """Write it to where the flag says, as a whole or not at all; to standard output for - and with --dry_run."""
    text = make_job_file(options, environ)
    target = options.slurm_script or options.mpijob
    if options.dry_run or target is None or target == "-":
        sys.stdout.write(text)
        return
    beside = Path(f"{target}.part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, target)
