"""Two hosts that network namespaces play, with a cable between them, and sshd on each."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT, HUNG_PORT = 3022, 3023
# Sets the name of the host it is on, then becomes the command behind it.
NAMED = ("unshare", "--uts", "bash", "-c", 'hostname "$0" && exec "$@"')

Serve = Callable[[Sequence[str], str], AbstractContextManager[None]]


@dataclass(frozen=True)
class TwoHosts:
    """The hosts by address; `folder` holds keys, known hosts and ssh's configuration for them."""

    folder: Path
    namespaces: tuple[str, str]

    @property
    def ssh_config(self) -> Path:
        """Names the key to log in with and the file of known hosts."""
        return self.folder / "ssh_config"

    def inside(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command as it is run on host 0 or 1."""
        return ["ip", "netns", "exec", self.namespaces[host], *NAMED, f"host{host}", *command]

    def processes(self, *spared: str) -> list[int]:
        """Return the ids of the processes on both hosts, but for sshd's and those with a spared name."""
        found = []
        for namespace in self.namespaces:
            done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
            for pid in done.stdout.split():
                with suppress(OSError):  # it has ended
                    if not Path(f"/proc/{pid}/comm").read_text().startswith(("sshd", *spared)):
                        found.append(int(pid))
        return found

    def end_all(self) -> None:
        """Kill every process on both hosts."""
        for namespace in self.namespaces:
            done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True)
            for pid in done.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def unplug(self) -> None:
        """Take the cable out of the second host; each host keeps its address."""
        run("ip", "-n", self.namespaces[1], "link", "set", "wire", "down")


@contextmanager
def open_two_hosts(folder: Path, serve: Serve) -> Iterator[TwoHosts]:
    """Yield the hosts while both sshds listen; nothing of them is left afterwards. Root only."""
    first, second = (f"gaudi{os.getpid()}-{number}" for number in (0, 1))
    hosts = TwoHosts(folder, (first, second))
    with ExitStack() as stack:
        for namespace in hosts.namespaces:
            run("ip", "netns", "add", namespace)
            stack.callback(run, "ip", "netns", "delete", namespace)
            stack.enter_context(name_hosts(Path("/etc/netns") / namespace))
        run("ip", "-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
        for namespace, address in zip(hosts.namespaces, ADDRESSES, strict=True):
            run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "wire")
            for link in ("lo", "wire"):
                run("ip", "-n", namespace, "link", "set", link, "up")
        write_keys(hosts)
        for number in (0, 1):
            stack.enter_context(serve(list_sshd(hosts, number), "Server listening on "))
        yield hosts


@contextmanager
def name_hosts(folder: Path) -> Iterator[None]:
    """Write what `ip netns exec` puts over /etc: Gloo needs a host to know its own name."""
    lines = [f"{address} host{number}\n" for number, address in enumerate(ADDRESSES)]
    folder.mkdir(parents=True)
    try:
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        yield
    finally:
        shutil.rmtree(folder)


def write_keys(hosts: TwoHosts) -> None:
    """Make a key for the user and one for each host, and write what ssh has to know of them."""
    for name in ("user", "host0", "host1"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(hosts.folder / name))
    keys = [(hosts.folder / f"host{number}.pub").read_text().split()[:2] for number in (0, 1)]
    pairs = [(address, key) for address, key in zip(ADDRESSES, keys, strict=True)]
    lines = [f"[{address}]:{port} {' '.join(key)}\n" for port in (PORT, HUNG_PORT) for address, key in pairs]
    (hosts.folder / "known_hosts").write_text("".join(lines))
    hosts.ssh_config.write_text(
        f"IdentityFile {hosts.folder}/user\nIdentitiesOnly yes\nUserKnownHostsFile {hosts.folder}/known_hosts\n"
        "GlobalKnownHostsFile /dev/null\nLogLevel ERROR\n"
    )


def list_sshd(hosts: TwoHosts, number: int, port: int = PORT, **more: str) -> list[str]:
    """Return the command that runs sshd on a host, with that host's key."""
    Path("/run/sshd").mkdir(exist_ok=True)
    options = {
        "ListenAddress": f"{ADDRESSES[number]}:{port}",
        "HostKey": hosts.folder / f"host{number}",
        "AuthorizedKeysFile": hosts.folder / "user.pub",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        **more,
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return hosts.inside(number, ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *words])


def run(*command: str) -> None:
    """Run a command; AssertionError with what it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
