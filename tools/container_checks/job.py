"""A job of Kubernetes without Kubernetes: containers in networks of their own, keys as the operator mounts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.container_checks.docker import SUM, TALK, check_talk
from tools.container_checks.images import LIMITS, CheckError, Images, call, require, say


def check_job(images: Images, image: str) -> None:
    """Play the MPI operator: run the pods of a manifest of gaudi-run's as containers in networks of their own."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pods = stack.enter_context(open_pods("launcher", "worker0", "worker1"))
        command = ["python", "-c", SUM.format(one=TALK["default"])]
        flags = ["--np", "4", "--num_workers_per_hls", "2", "--mpijob", "-", "--image", image]
        job = json.loads(call([sys.executable, "-m", "gaudi_distributed.launch", *flags, *command]))
        containers = {
            name: replica["template"]["spec"]["containers"][0]
            for name, replica in job["spec"]["mpiReplicaSpecs"].items()
        }
        make_keys(folder / "keys")
        (folder / "mpi").mkdir()
        workers = [pods[name] for name in ("worker0", "worker1")]
        slots = job["spec"]["slotsPerWorker"]
        (folder / "mpi" / "hostfile").write_text("".join(f"{each.address} slots={slots}\n" for each in workers))
        mount = ["--volume", f"{folder / 'keys'}:{job['spec']['sshAuthMountPath']}:ro"]
        for pod in workers:
            stack.enter_context(start_worker(images, pod, image, mount, containers["Worker"]["command"]))
        wait_for_workers(pods["launcher"], workers, containers["Worker"]["readinessProbe"]["tcpSocket"]["port"])
        # Kubernetes reads $$ in a command as a dollar.
        launcher = [word.replace("$$", "$") for word in containers["Launcher"]["command"]]
        mount += ["--volume", f"{folder / 'mpi'}:/etc/mpi:ro", "--env", "KUBERNETES_SERVICE_HOST=10.0.0.1"]
        mount += ["--env", "OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile"]
        prefix = pods["launcher"].prefix
        check_talk(images.run(image, *launcher, flags=mount, prefix=prefix), 4, 1000)
        make_keys(folder / "other")
        shutil.copy(folder / "other" / "id_rsa.pub", folder / "keys" / "id_rsa.pub")
        try:
            images.run(image, *launcher, flags=mount, prefix=prefix)
        except CheckError as error:
            require("Host key verification failed" in str(error), f"a job with another key ended by: {error}")
        else:
            raise CheckError("hosts with another key than the job's were taken")
    say("default: a job of Kubernetes, two workers with two ranks each; a host with another key is refused")


@dataclass(frozen=True)
class Pod:
    """A network of its own, by its name, and the address in it."""

    namespace: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """The command that enters it."""
        # Not `ip netns exec`, which hides the control groups.
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]


@contextmanager
def open_pods(*names: str) -> Iterator[dict[str, Pod]]:
    """Yield networks by their names, on one bridge."""
    bridge = f"gcc{os.getpid() % 100000}"
    with ExitStack() as stack:
        call(["ip", "link", "add", bridge, "type", "bridge"])
        stack.callback(call, ["ip", "link", "del", bridge])
        call(["ip", "link", "set", bridge, "up"])
        pods = {}
        for number, name in enumerate(names, start=1):
            pod = pods[name] = Pod(f"{bridge}-{name}", f"10.79.0.{number}")
            call(["ip", "netns", "add", pod.namespace])
            stack.callback(call, ["ip", "netns", "del", pod.namespace])
            wire = f"{bridge}{number}"
            call(["ip", "link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", pod.namespace])
            call(["ip", "link", "set", wire, "master", bridge, "up"])
            call(["ip", "-n", pod.namespace, "addr", "add", f"{pod.address}/24", "dev", "eth0"])
            for device in ("lo", "eth0"):
                call(["ip", "-n", pod.namespace, "link", "set", device, "up"])
        yield pods


def make_keys(folder: Path) -> None:
    """Make the keys of a job as the operator mounts them: of the same kind, and everybody's to read."""
    folder.mkdir()
    call(
        ["ssh-keygen", "-q", "-m", "PEM", "-t", "ecdsa", "-b", "521", "-N", "", "-C", "", "-f", str(folder / "id_rsa")]
    )
    shutil.copy(folder / "id_rsa.pub", folder / "authorized_keys")
    for path in folder.iterdir():
        path.chmod(0o644)


@contextmanager
def start_worker(images: Images, pod: Pod, image: str, flags: Sequence[str], command: Sequence[str]) -> Iterator[None]:
    """Run a worker's command in a container until the end of the block."""
    name = f"{pod.namespace}-sshd"
    run = [*images.podman, "run", "--rm", "--name", name, "--network", "host", *LIMITS, *flags, image]
    process = subprocess.Popen([*pod.prefix, *run, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        call([*images.podman, "rm", "--force", "--time", "0", name])
        process.wait()


def wait_for_workers(launcher: Pod, workers: Sequence[Pod], port: int) -> None:
    """Probe the workers' port as Kubernetes does, until all of them answer."""
    script = (
        "import socket, sys, time\n"
        "for address in sys.argv[2:]:\n"
        "    for attempt in range(120):\n"
        "        try:\n"
        "            socket.create_connection((address, int(sys.argv[1])), 1).close()\n"
        "            break\n"
        "        except OSError:\n"
        "            time.sleep(0.5)\n"
        "    else:\n"
        "        sys.exit(f'{address} does not listen')\n"
    )
    call([*launcher.prefix, sys.executable, "-c", script, str(port), *(worker.address for worker in workers)])
