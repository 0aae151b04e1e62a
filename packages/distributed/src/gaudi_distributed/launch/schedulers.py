"""Write files for schedulers, which start gaudi-run themselves: scripts for sbatch, and MPIJobs for Kubernetes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from gaudi_distributed.cluster.hosts import Cluster, Host, write_file
from gaudi_distributed.errors import ConfigurationError, FlagError
from gaudi_distributed.launch import choices
from gaudi_distributed.launch.containers import check_image
from gaudi_distributed.launch.experiments import list_experiments, load_series
from gaudi_distributed.launch.flags import PROGRAM, Options, without_flags
from gaudi_distributed.launch.planning import RESTARTS, choose_forwarded
from gaudi_distributed.launch.presets import Accelerator

_JOB = ("--slurm_script", "--sbatch", "--requeue", "--mpijob", "--job_name", "--dry_run")
# What a pod has, by the names of Options.
_POD = ("job_cpus", "job_memory", "job_shm", "job_hugepages", "job_ssh")


def is_job_file(options: Options) -> bool:
    """Return whether to write a file instead of running; FlagError for flags that have no meaning then."""
    if options.slurm_script is not None and options.mpijob is not None:
        raise FlagError("--slurm_script and --mpijob: give one of them", flag="--slurm_script")
    is_written = options.slurm_script is not None or options.mpijob is not None
    if is_written and (options.host_discovery_script is not None or options.max_np is not None):
        raise FlagError(
            "--host_discovery_script, --max_np: a job has the hosts that it gets",
            flag="--host_discovery_script",
            remedy="leave them out",
        )
    if options.sbatch and options.slurm_script is None:
        raise FlagError("--sbatch goes with --slurm_script", flag="--sbatch")
    if options.requeue and options.slurm_script is None:
        raise FlagError("--requeue goes with --slurm_script", flag="--requeue", remedy="or give --max_restarts")
    if options.job_name is not None and options.slurm_script is None and options.mpijob is None:
        raise FlagError("--job_name goes with --slurm_script or --mpijob", flag="--job_name")
    if options.mpijob is None and any(getattr(options, name) is not None for name in _POD):
        raise FlagError(f"{', '.join(f'--{name}' for name in _POD)} go with --mpijob", flag="--mpijob")
    return options.slurm_script is not None or options.mpijob is not None


def make_job_file(options: Options, environ: Mapping[str, str]) -> str:
    """Return the text of the script or the manifest."""
    preset, command = choices.choose_preset(list_experiments(options, environ)[0].options)
    hosts, slots = choices.choose_shape(options, preset)
    accelerator = choices.choose_accelerator(options, preset)
    name = options.job_name or Path(command[0]).stem.lower().replace("_", "-")
    # A label of RFC 1035, as names in Kubernetes are.
    if _NAME.fullmatch(name) is None:
        raise FlagError(
            f"--job_name {name!r}: is not a name of a job",
            flag="--job_name",
            remedy="write at most 63 lower-case letters, digits and hyphens, a letter first",
        )
    if options.slurm_script is not None:
        return write_slurm_script(options, environ, name, hosts, slots, accelerator)
    if options.container != "none" or options.workdir or options.image is None:
        raise FlagError("--mpijob: needs --image, and neither --container nor --workdir", flag="--mpijob")
    check_image(options.image)
    check_pod(options)
    cluster = Cluster(tuple(Host(f"worker-{number}", slots) for number in range(hosts)))
    # Cores of the launcher's pod say nothing of the workers'.
    dropped = (*_JOB, "--image", "--mount", "--cores_per_rank", "--ssh_port", *(f"--{name}" for name in _POD))
    flags = ("--cores_per_rank", str(options.cores_per_rank or 0), "--ssh_port", str(choose_ssh_port(options)))
    inner = (PROGRAM, *flags, *without_flags(options.words, dropped), *options.command)
    asked = list_asked(options, environ)
    choose_forwarded(environ, asked)  # refuses those that look like secrets
    return write_mpi_job(options, name, cluster, accelerator, inner, {name: environ[name] for name in asked})


def write_job_file(options: Options, environ: Mapping[str, str]) -> None:
    """Write it to where the flag says, as a whole or not at all; to standard output for - and with --dry_run."""
    text = make_job_file(options, environ)
    target = options.slurm_script or options.mpijob
    if options.dry_run or target is None or target == "-":
        sys.stdout.write(text)
        return
    write_file(Path(target), text)


_OPTION = re.compile(r"--[a-z][a-z-]*(?:=[A-Za-z0-9_.,:;/%@+=\[\]&|*-]+)?", re.ASCII)
_TAKEN = ("--export", "--job-name", "--nodes", "--ntasks", "--ntasks-per-node", "--wrap")


def check_sbatch_option(option: str) -> str:
    """Return it; FlagError if it does not look like an option of sbatch, or follows from the launch already."""
    if _OPTION.fullmatch(option) is None:
        raise FlagError(
            f"--sbatch {option!r}: is not an option of sbatch",
            flag="--sbatch",
            remedy="write it like --sbatch=--time=02:00:00, without blanks",
        )
    if option.partition("=")[0] in _TAKEN:
        raise FlagError(f"--sbatch {option!r}: follows from the launch already", flag="--sbatch", remedy="leave it out")
    return option


def list_asked(options: Options, environ: Mapping[str, str]) -> tuple[str, ...]:
    """List the variables that the user names, and those of a submission, which gaudi-run reads inside the job, too."""
    variables = load_series().variables if options.submission else ()
    return (*options.forward, *(name for name in variables if name in environ))


def write_slurm_script(
    options: Options, environ: Mapping[str, str], name: str, hosts: int, slots: int, accelerator: Accelerator
) -> str:
    """Return the script of a job for `slots` ranks on each of the hosts."""
    if options.container == "docker":
        raise ConfigurationError(
            "--container docker: jobs of SLURM use singularity",
            flag="--container",
            remedy="give --container singularity",
        )
    # The job has restarts of its own.
    forwarded = [name for name in choose_forwarded(environ, list_asked(options, environ)) if name not in RESTARTS]
    launcher = (sys.executable, "-m", "gaudi_distributed.launch")
    inner = (*launcher, *without_flags(options.words, _JOB), *options.command)
    sbatch = [
        f"--job-name={name}",
        f"--nodes={hosts}",
        f"--ntasks-per-node={slots}",
        # Without it, all variables of whoever submits would be in the job.
        f"--export={','.join(forwarded) or 'NONE'}",
        *((f"--gpus-per-node={slots}",) if accelerator == "gpu" else ()),
        *map(check_sbatch_option, options.sbatch),
    ]
    given = {option.partition("=")[0] for option in options.sbatch}
    # Before the limit of time, the shell of the job is told in time to save.
    early = f"--signal=B:USR1@{round(options.grace) + _SECONDS_BEFORE_LIMIT}"
    for option in (early, "--requeue", "--open-mode=append") if options.requeue else ():
        sbatch += [] if option.partition("=")[0] in given else [option]
    command = " \\\n    ".join([*(() if options.requeue else ("exec",)), *map(shlex.quote, inner)])
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in sbatch),
        "# gaudi-run takes hosts and slots from the variables of the job.",
        _REQUEUE.format(command=command, most=options.requeue) if options.requeue else command,
    ]
    return "\n".join(lines) + "\n"


_SECONDS_BEFORE_LIMIT = 30
# Whoever ends or preempts a job signals its processes with SIGTERM, and queues it again or not. USR1 tells the shell
# that the limit of time is near, and would hit during a pause. What is left is a run that ended by itself, with 75
# where it may go on.
_REQUEUE = """\
{command} &
run=$! asked= limit= heard=1
trap 'asked=1 heard=1; kill -TERM "$run"' TERM
trap 'limit=1 heard=1; kill -TERM "$run"' USR1
while [ -n "$heard" ]; do heard=; wait "$run"; status=$?; done  # a signal ends the wait
again=${{SLURM_RESTART_COUNT:-0}}
if [ "$status" = 75 ] && [ -z "$asked" ] && [ "$again" -lt {most} ]; then
    [ -n "$limit" ] || sleep $((again < 6 ? 5 << again : 300))
    scontrol requeue "$SLURM_JOB_ID"  # the same command continues from the last checkpoint
fi
exit "$status\""""


_NAME = re.compile("[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
# A claim's name is a subdomain of RFC 1123; a path is of the node.
_CLAIM = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
_MOUNT = re.compile(r"(?P<source>[^:,]+):(?P<path>/[^:,]*)(?P<read_only>:ro|:rw)?")
_SIZE = re.compile("([1-9][0-9]{0,8})(Ki|Mi|Gi|Ti)", re.ASCII)
_UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_RESOURCES = {"gpu": "nvidia.com/gpu", "hpu": "habana.ai/gaudi"}
_SHARED_MEMORY, _HUGE_PAGES = "/dev/shm", "/hugepages-2Mi"
_RESERVED = (_SHARED_MEMORY, _HUGE_PAGES, "/etc/mpi", "/")
# Where the operator mounts the keys of a job, unless it is told otherwise: the worker's command is then the operator's.
ROOT_SSH = "/root/.ssh"
# The images of containers/: their user's folder for keys, their sshd, and where it listens.
IMAGE_SSH, IMAGE_SSH_PORT = "/home/gaudi/.ssh", 2222
_IMAGE_SSHD = ("/usr/sbin/sshd", "-De", "-f", "/etc/gaudi/sshd_config", "-p")
# For each Gaudi: an eighth of what the vendor's Kubernetes guide gives a server, and of the huge pages that the
# vendor's driver installation reserves on 96 processors (220 MiB for each).
_GAUDI_MEMORY_GIB, _GAUDI_HUGE_PAGES_MIB = 51, 2640


# A volume of a pod and where the pod sees it, both as Kubernetes writes them, without their name.
Mount: TypeAlias = "tuple[dict[str, Any], dict[str, Any]]"


def check_pod(options: Options) -> None:
    """Raise FlagError for a flag of the worker's pod that is not of its form, or contradicts another."""
    paths = [PurePosixPath(parse_mount(text)[1]["mountPath"]) for text in options.mount]
    ssh_folder = options.job_ssh or IMAGE_SSH
    if not ssh_folder.startswith("/") or not ssh_folder.isprintable():
        raise FlagError(
            f"--job_ssh {ssh_folder!r}: is not an absolute path",
            flag="--job_ssh",
            remedy=f"give the path inside the image, like {ROOT_SSH}",
        )
    for path in paths:
        taken = [*map(PurePosixPath, (*_RESERVED, ssh_folder))]
        if path in taken or paths.count(path) > 1:
            raise FlagError(f"--mount {path}: is taken already", flag="--mount", remedy="mount it elsewhere")
    shared, memory = parse_size("--job_shm", options.job_shm), parse_size("--job_memory", options.job_memory)
    if shared and memory and shared > memory:
        raise FlagError(
            f"--job_shm {options.job_shm}: counts to --job_memory {options.job_memory}",
            flag="--job_shm",
            remedy="give less",
        )
    if parse_size("--job_hugepages", options.job_hugepages) % (2 << 20):
        raise FlagError(
            f"--job_hugepages {options.job_hugepages}: is not a multiple of 2Mi",
            flag="--job_hugepages",
            remedy="round it up",
        )


def choose_ssh_port(options: Options) -> int:
    """Choose the port of the workers' sshd: that of the flag, else of the images of containers/, or 22 for root."""
    return options.ssh_port or (22 if options.job_ssh == ROOT_SSH else IMAGE_SSH_PORT)


def parse_size(flag: str, text: str | None) -> int:
    """Return the bytes of a size like "64Gi", 0 for None; FlagError names the flag where it is none."""
    if text is None:
        return 0
    found = _SIZE.fullmatch(text)
    if found is None:
        remedy = "write one like 64Gi, with Ki, Mi, Gi or Ti"
        raise FlagError(f"{flag} {text!r}: is not a size", flag=flag, remedy=remedy)
    return int(found[1]) * _UNITS[found[2]]


def parse_mount(text: str) -> Mount:
    """Return the mount of "claim:/inside", "/node:/inside" or one of them with ":ro"; FlagError if it is none."""
    found = _MOUNT.fullmatch(text)
    source = "" if found is None else found["source"]
    is_folder = source.startswith("/")
    is_plain = text.isprintable() and ".." not in PurePosixPath(source).parts
    if found is None or not is_plain or not (is_folder or _CLAIM.fullmatch(source)):
        raise FlagError(
            f"--mount {text!r}: is not a mount",
            flag="--mount",
            remedy="write it like claim:/inside or /node:/inside, and :ro behind to read only",
        )
    read_only = {"readOnly": True} if found["read_only"] == ":ro" else {}
    mount = {"mountPath": found["path"], **read_only}
    if is_folder:
        return {"hostPath": {"path": source, "type": "Directory"}}, mount
    return {"persistentVolumeClaim": {"claimName": source, **read_only}}, mount


def write_mpi_job(
    options: Options,
    name: str,
    cluster: Cluster,
    accelerator: Accelerator,
    inner: Sequence[str],
    variables: Mapping[str, str],
) -> str:
    """Return the manifest: a worker for each host with its devices, and a launcher whose command is `inner`.

    The launcher has the variables, and passes them on to the ranks.

    The launcher is created when the sshd of every worker answers. In the images of containers/ the key of a host is the
    key of the job, which the operator mounts into all of its pods; other images have host keys and ssh_known_hosts of
    their own.
    """
    limits = choose_limits(options, cluster.most_slots, accelerator)
    launcher = {
        "name": "launcher",
        "image": options.image,
        "command": [_escape(word) for word in inner],
        **({"env": [{"name": key, "value": _escape(value)} for key, value in variables.items()]} if variables else {}),
        **_limit({name: limit for name, limit in {"cpu": "1", "memory": "2Gi"}.items() if name in limits}),
    }
    manifest = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name},
        "spec": {
            "slotsPerWorker": cluster.most_slots,
            "sshAuthMountPath": options.job_ssh or IMAGE_SSH,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, {"containers": [launcher]}),
                "Worker": _replicas(
                    len(cluster.hosts), describe_worker(options, limits, cluster.most_slots, accelerator)
                ),
            },
        },
    }
    return json.dumps(manifest, indent=2) + "\n"


def choose_limits(options: Options, slots: int, accelerator: Accelerator) -> dict[str, str | int]:
    """Return the limits of a worker, by resource, for its number of ranks; requests are the same unless given."""
    is_gaudi = accelerator == "hpu"
    huge_pages = options.job_hugepages or (f"{_GAUDI_HUGE_PAGES_MIB * slots}Mi" if is_gaudi else None)
    memory = options.job_memory or (f"{_GAUDI_MEMORY_GIB * slots}Gi" if is_gaudi else None)
    if huge_pages and not memory and options.job_cpus is None:
        raise FlagError(
            "--job_hugepages: Kubernetes gives them to pods with a limit",
            flag="--job_hugepages",
            remedy="give --job_memory, too",
        )
    resource = _RESOURCES.get(accelerator)
    limits: dict[str, str | int | None] = {
        **({} if resource is None else {resource: slots}),
        "cpu": None if options.job_cpus is None else str(options.job_cpus),
        "memory": memory,
        "hugepages-2Mi": huge_pages,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def describe_worker(
    options: Options, limits: Mapping[str, str | int], slots: int, accelerator: Accelerator
) -> dict[str, Any]:
    """Return the specification of a worker's pod."""
    # Docker's and containerd's /dev/shm has 64 MB, in which ranks of one host do not fit.
    memory = {"medium": "Memory", "sizeLimit": options.job_shm or f"{slots}Gi"}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": _SHARED_MEMORY}]
    if "hugepages-2Mi" in limits:
        volumes.append({"name": "huge-pages", "emptyDir": {"medium": "HugePages-2Mi"}})
        mounts.append({"name": "huge-pages", "mountPath": _HUGE_PAGES})
    for number, (volume, mount) in enumerate(map(parse_mount, options.mount)):
        volumes.append({"name": f"mount-{number}", **volume})
        mounts.append({"name": f"mount-{number}", **mount})
    container = {
        "name": "worker",
        "image": options.image,
        # Without a command the operator starts root's sshd.
        **({} if options.job_ssh == ROOT_SSH else {"command": [*_IMAGE_SSHD, str(choose_ssh_port(options))]}),
        "readinessProbe": {"tcpSocket": {"port": choose_ssh_port(options)}, "periodSeconds": 2},
        **_limit(limits),
        # The vendor's library sets priorities.
        **({"securityContext": {"capabilities": {"add": ["SYS_NICE"]}}} if accelerator == "hpu" else {}),
        "volumeMounts": mounts,
    }
    return {"containers": [container], "volumes": volumes}


def _escape(text: str) -> str:
    """Write out a text in which Kubernetes reads $(NAME), and $$ as a dollar."""
    return text.replace("$", "$$")


def _limit(limits: Mapping[str, str | int]) -> dict[str, Any]:
    return {"resources": {"limits": dict(limits)}} if limits else {}


def _replicas(number: int, specification: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": number, "restartPolicy": "Never", "template": {"spec": dict(specification)}}
