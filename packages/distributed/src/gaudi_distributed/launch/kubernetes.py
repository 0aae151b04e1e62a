"""A manifest of Kubeflow's MPI operator (MPIJob, kubeflow.org/v2beta1) whose launcher runs gaudi-run.

It is JSON, which kubectl reads as well as YAML, so that no value can be read as anything but text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gaudi_distributed.cluster import Cluster
from gaudi_distributed.errors import FlagError
from gaudi_distributed.launch.presets import Accelerator

_NAME = re.compile("[a-z](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_RESOURCES = {"gpu": "nvidia.com/gpu", "hpu": "habana.ai/gaudi"}


def check_job_name(name: str) -> None:
    """Raise FlagError unless it is a label of RFC 1035, as names in Kubernetes are."""
    if _NAME.fullmatch(name) is None:
        raise FlagError(f"--job_name {name!r}: write at most 63 small letters, digits and hyphens, a letter first")


def write_mpi_job(name: str, cluster: Cluster, image: str, accelerator: Accelerator, inner: Sequence[str]) -> str:
    """Return the manifest: a worker for each host with its devices, and a launcher whose command is `inner`.

    The image has gaudi-run, sshd, host keys, and these keys in ssh_known_hosts: pods are checked like other hosts.
    """
    resource = _RESOURCES.get(accelerator)
    limits = {} if resource is None else {"resources": {"limits": {resource: cluster.most_slots}}}
    launcher = {"name": "launcher", "image": image, "command": list(inner)}
    worker = {"name": "worker", "image": image, **limits}
    manifest = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name},
        "spec": {
            "slotsPerWorker": cluster.most_slots,
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, launcher),
                "Worker": _replicas(len(cluster.hosts), worker),
            },
        },
    }
    return json.dumps(manifest, indent=2) + "\n"


def _replicas(number: int, container: Mapping[str, Any]) -> dict[str, Any]:
    return {"replicas": number, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
