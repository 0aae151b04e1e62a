"""Other hosts: whether ssh reaches each without being asked anything, its clock, and what starts ranks there."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gaudi_distributed.doctor.findings import Finding, fault, ok, warning
from gaudi_distributed.doctor.machine import Machine
from gaudi_distributed.doctor.programs import Answer, ask
from gaudi_distributed.doctor.request import Request
from gaudi_distributed.launch import guard
from gaudi_distributed.launch.plan import Backend
from gaudi_distributed.launch.ssh import Ssh

_SECONDS = 40.0  # ssh itself gives up after 30
_AT_ONCE = 16
_SKEW = 1.0
_ASK_GUARD = "import os, sys; os.stat(sys.argv[1]); print(*sys.version_info[:2], sep='.')"
_REMEDIES = {
    "Host key verification failed": "log in once by hand and check the key, or add it to known_hosts",
    "Permission denied": "put your public key into authorized_keys there, or name another key in --ssh_config",
    "Could not resolve hostname": "correct the host's name, or give its address",
    "Connection refused": "start sshd there, or give its --ssh_port",
}


@dataclass(frozen=True)
class Starter:
    """What has to be on another host for ranks to be started: its name, the command that asks for it, and a remedy."""

    name: str
    command: tuple[str, ...]
    remedy: str


@dataclass(frozen=True)
class RemoteHost:
    """What a host said.

    Attributes:
        name: as it was given.
        complaint: why it could not be reached; empty where it could.
        skew: seconds that its clock is ahead of this one's; None where it did not tell.
        uncertainty: seconds that the skew may be off.
        starter: what the starter says of its version.
        starter_complaint: why that does not start there.
    """

    name: str
    complaint: str = ""
    skew: float | None = None
    uncertainty: float = 0.0
    starter: str = ""
    starter_complaint: str = ""


def find_starter(request: Request, backend: Backend) -> Starter:
    """Return what starts ranks on another host: Open MPI, or Python with gaudi-run's guard."""
    if backend == "openmpi":
        # Its daemon, which tells no version, lies beside mpirun.
        program = "mpirun" if request.mpi_root is None else f"{request.mpi_root}/bin/mpirun"
        remedy = "install the same Open MPI there, so that a shell without login finds it, or give --mpi_root"
        return Starter(program, (program, "--version"), remedy)
    command = (request.remote_python, "-I", "-B", "-c", _ASK_GUARD, guard.__file__)
    return Starter(f"{request.remote_python} with gaudi-distributed", command, "install it there, where it lies here")


def gather_hosts(machine: Machine, request: Request, starter: Starter) -> list[RemoteHost]:
    """Ask each host that is not this machine, several at once, each twice: for its time, and for the starter."""
    if not request.others:
        return []
    if shutil.which("ssh", path=machine.environ.get("PATH", "")) is None:
        return [RemoteHost(name, "ssh is not installed here") for name in request.others]

    def ask_host(name: str) -> RemoteHost:
        def reach(command: tuple[str, ...]) -> Answer:
            return ask(request.ssh.reach(name, command), machine.environ, _SECONDS)

        answer = reach(("date", "+%s.%N"))
        if answer.status != 0:
            return RemoteHost(name, answer.complaint)
        said = reach(starter.command)
        return RemoteHost(name, "", *measure_skew(answer), said.output.partition("\n")[0], said.complaint)

    with ThreadPoolExecutor(min(_AT_ONCE, len(request.others))) as pool:
        return list(pool.map(ask_host, request.others))


def judge_host(host: RemoteHost, starter: Starter, mpi_version: str, ssh: Ssh) -> Finding:
    """Judge the way to a host, and what is there; `mpi_version` is what mpirun says of its own here."""
    check = f"host {host.name}"
    facts = {"skew": host.skew, "uncertainty": host.uncertainty, "starter": host.starter}
    if host.complaint:
        by_hand = f"try ssh -p {ssh.port} by hand, and look at sshd there"
        remedy = next((text for words, text in _REMEDIES.items() if words in host.complaint), by_hand)
        return fault(check, f"ssh does not reach it: {host.complaint}", remedy, **facts)
    text = "ssh reaches it"
    if host.starter_complaint:
        return fault(check, f"{text}; no {starter.name}: {host.starter_complaint}", starter.remedy, **facts)
    if starter.command[-1] == "--version" and host.starter != mpi_version:
        return fault(check, f"{text}; it has {host.starter}, and here is {mpi_version}", starter.remedy, **facts)
    if host.skew is None:
        return warning(check, f"{text}; it does not tell its time", "look at `date` there", **facts)
    direction = "ahead" if host.skew > 0 else "behind"
    text += f"; {starter.name} is there; its clock is {abs(host.skew):.2f} s {direction}, ±{host.uncertainty:.2f} s"
    if abs(host.skew) - host.uncertainty > _SKEW:
        return warning(check, text, "synchronise both clocks, by chrony or systemd-timesyncd", **facts)
    return ok(check, text, **facts)


def measure_skew(answer: Answer) -> tuple[float | None, float]:
    """Return the seconds that a clock is ahead, and how far that may be off, from what `date +%s.%N` said.

    The middle of question and answer is taken for the moment that the clock was read at. Where `date` knows no %N, the
    second that it says may have lasted up to a whole one.
    """
    found = re.fullmatch(r"([0-9]{1,11})(?:\.([0-9]{9}))?.*", answer.output)
    if found is None:
        return None, 0.0
    half = (answer.ended - answer.began) / 2
    said = int(found[1]) + (int(found[2]) / 1e9 if found[2] else 0.5)
    return said - (answer.began + half), half + (0.0 if found[2] else 0.5)
