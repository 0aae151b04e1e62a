"""A manifest of Kubeflow's MPI operator (MPIJob, kubeflow.org/v2beta1) whose launcher runs gaudi-run.

It is JSON, which kubectl reads as well as YAML, so that no value can be read as anything but text. Fields are those of
the operator's types.go and of Kubernetes' core/v1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from gaudi_distributed.cluster import Cluster
from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.presets import Accelerator

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


@dataclass(frozen=True)
class Mount:
    """A volume of the workers' pods.

    Attributes:
        source: name of a claim (PersistentVolumeClaim), or path of a folder on the node.
        path: where the pod sees it.
        read_only: whether it may not write there.
    """

    source: str
    path: str
    read_only: bool = False

    @property
    def volume(self) -> dict[str, Any]:
        """The source as Kubernetes writes it."""
        if self.source.startswith("/"):
            return {"hostPath": {"path": self.source, "type": "Directory"}}
        claim: dict[str, Any] = {"claimName": self.source}
        return {"persistentVolumeClaim": claim | ({"readOnly": True} if self.read_only else {})}


@dataclass(frozen=True)
class Pod:
    """What each worker's pod has, besides its devices.

    Attributes:
        image: that it runs.
        mounts: its volumes.
        shared_memory: size of /dev/shm, like "8Gi"; None: 1 GiB for each rank.
        huge_pages: huge pages of 2 MiB, like "21120Mi"; None: with Gaudis what they need, else none.
        memory: limit, like "409Gi", which the shared memory counts to; None: with Gaudis what they need, else none.
        cpus: limit; None: none.
        ssh_folder: where the operator mounts the job's keys.
        ssh_port: where the workers' sshd listens; None: that of the images of containers/, or 22 for root.

    Raises:
        FlagError: a value is not of its form, or two contradict each other.
    """

    image: str
    mounts: tuple[Mount, ...] = ()
    shared_memory: str | None = None
    huge_pages: str | None = None
    memory: str | None = None
    cpus: int | None = None
    ssh_folder: str = IMAGE_SSH
    ssh_port: int | None = None

    def __post_init__(self) -> None:
        if not self.ssh_folder.startswith("/") or not self.ssh_folder.isprintable():
            raise FlagError(f"--job_ssh {self.ssh_folder!r}: give the whole path inside the image, like {ROOT_SSH}")
        paths = [PurePosixPath(mount.path) for mount in self.mounts]
        for path in paths:
            taken = [*map(PurePosixPath, (*_RESERVED, self.ssh_folder))]
            if path in taken or paths.count(path) > 1:
                raise FlagError(f"--mount {path}: is taken already; mount it elsewhere")
        shared, memory = (
            parse_size(*each) for each in (("--job_shm", self.shared_memory), ("--job_memory", self.memory))
        )
        if shared and memory and shared > memory:
            raise FlagError(f"--job_shm {self.shared_memory}: counts to --job_memory {self.memory}; give less")
        if parse_size("--job_hugepages", self.huge_pages) % (2 << 20):
            raise FlagError(f"--job_hugepages {self.huge_pages}: is no multiple of 2Mi; round it up")

    @property
    def port(self) -> int:
        """Where the workers' sshd listens."""
        return self.ssh_port or (22 if self.ssh_folder == ROOT_SSH else IMAGE_SSH_PORT)


def parse_size(flag: str, text: str | None) -> int:
    """Return the bytes of a size like "64Gi", 0 for None; FlagError names the flag where it is none."""
    if text is None:
        return 0
    found = _SIZE.fullmatch(text)
    if found is None:
        raise FlagError(f"{flag} {text!r}: write it like 64Gi, with Ki, Mi, Gi or Ti")
    return int(found[1]) * _UNITS[found[2]]


def parse_mount(text: str) -> Mount:
    """Return the volume of "claim:/inside", "/node:/inside" or one of them with ":ro"; FlagError where it is none."""
    found = _MOUNT.fullmatch(text)
    if found is not None and text.isprintable():
        source = found["source"]
        if ".." not in PurePosixPath(source).parts and (source.startswith("/") or _CLAIM.fullmatch(source)):
            return Mount(source, found["path"], found["read_only"] == ":ro")
    raise FlagError(f"--mount {text!r}: write it like claim:/inside or /node:/inside, and :ro behind to read only")


def check_job_name(name: str) -> None:
    """Raise FlagError unless it is a label of RFC 1035, as names in Kubernetes are."""
    if _NAME.fullmatch(name) is None:
        raise FlagError(f"--job_name {name!r}: write at most 63 small letters, digits and hyphens, a letter first")


def write_mpi_job(name: str, cluster: Cluster, pod: Pod, accelerator: Accelerator, inner: Sequence[str]) -> str:
    """Return the manifest: a worker for each host with its devices, and a launcher whose command is `inner`.

    The launcher is created when the sshd of every worker answers. In the images of containers/ the key of a host is the
    key of the job, which the operator mounts into all of its pods; other images have host keys and ssh_known_hosts of
    their own.
    """
    limits = choose_limits(pod, cluster.most_slots, accelerator)
    launcher = {
        "name": "launcher",
        "image": pod.image,
        # Kubernetes reads $(NAME) in a command, and $$ as a dollar.
        "command": [word.replace("$", "$$") for word in inner],
        **_limit({name: limit for name, limit in {"cpu": "1", "memory": "2Gi"}.items() if name in limits}),
    }
    manifest = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name},
        "spec": {
            "slotsPerWorker": cluster.most_slots,
            "sshAuthMountPath": pod.ssh_folder,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, {"containers": [launcher]}),
                "Worker": _replicas(len(cluster.hosts), describe_worker(pod, limits, cluster.most_slots, accelerator)),
            },
        },
    }
    return json.dumps(manifest, indent=2) + "\n"


def choose_limits(pod: Pod, slots: int, accelerator: Accelerator) -> dict[str, str | int]:
    """Return the limits of a worker with so many ranks, by resource; requests are the same where none are given."""
    is_gaudi = accelerator == "hpu"
    huge_pages = pod.huge_pages or (f"{_GAUDI_HUGE_PAGES_MIB * slots}Mi" if is_gaudi else None)
    memory = pod.memory or (f"{_GAUDI_MEMORY_GIB * slots}Gi" if is_gaudi else None)
    if huge_pages and not memory and pod.cpus is None:
        raise FlagError("--job_hugepages: Kubernetes gives them to pods with a limit; give --job_memory, too")
    resource = _RESOURCES.get(accelerator)
    limits: dict[str, str | int | None] = {
        **({} if resource is None else {resource: slots}),
        "cpu": None if pod.cpus is None else str(pod.cpus),
        "memory": memory,
        "hugepages-2Mi": huge_pages,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


def describe_worker(pod: Pod, limits: Mapping[str, str | int], slots: int, accelerator: Accelerator) -> dict[str, Any]:
    """Return the specification of a worker's pod."""
    # Docker's and containerd's /dev/shm has 64 MB, in which ranks of one host do not fit.
    memory = {"medium": "Memory", "sizeLimit": pod.shared_memory or f"{slots}Gi"}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": _SHARED_MEMORY}]
    if "hugepages-2Mi" in limits:
        volumes.append({"name": "huge-pages", "emptyDir": {"medium": "HugePages-2Mi"}})
        mounts.append({"name": "huge-pages", "mountPath": _HUGE_PAGES})
    for number, mount in enumerate(pod.mounts):
        volumes.append({"name": f"mount-{number}", **mount.volume})
        read_only = {"readOnly": True} if mount.read_only else {}
        mounts.append({"name": f"mount-{number}", "mountPath": mount.path, **read_only})
    container = {
        "name": "worker",
        "image": pod.image,
        # Without a command the operator starts root's sshd.
        **({} if pod.ssh_folder == ROOT_SSH else {"command": [*_IMAGE_SSHD, str(pod.port)]}),
        "readinessProbe": {"tcpSocket": {"port": pod.port}, "periodSeconds": 2},
        **_limit(limits),
        # The vendor's library sets priorities.
        **({"securityContext": {"capabilities": {"add": ["SYS_NICE"]}}} if accelerator == "hpu" else {}),
        "volumeMounts": mounts,
    }
    return {"containers": [container], "volumes": volumes}


def _limit(limits: Mapping[str, str | int]) -> dict[str, Any]:
    return {"resources": {"limits": dict(limits)}} if limits else {}


def _replicas(number: int, specification: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": number, "restartPolicy": "Never", "template": {"spec": dict(specification)}}
