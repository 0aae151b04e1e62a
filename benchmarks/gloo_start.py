"""The meeting of Horovod's ranks through Gloo: what real ranks ask, and how long 64 to 256 fake ones take for as much.

Real ranks are started at gaudi-run's rendezvous, which counts. Each asks by a connection of its own: for the host of
each rank before its own, and twice for the addresses of each other one. It does so in a mesh of all ranks and in one of
those of its host, for Horovod itself and again for its first process set. With h ranks on each host, n ranks make about
5 n (n + h) requests, and an answer has 136 bytes for each rank but one. Fake ranks ask for the same, in as few
processes as there are processors.

The least time is what the kernel takes for connections and bytes on both sides, spread over all processors: here, where
fake ranks and gaudi-run share them, no server is faster. Where hosts have their own processors, the time is that of
gaudi-run's one thread, which has a bound.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.measurement import Figure, main
from benchmarks.simulated_ranks import read_line

ROOT = Path(__file__).resolve().parents[1]
SIZES = (64, 128, 256)
PER_HOST = 8
ADDRESS_BYTES = 136  # of one of Gloo's addresses
MOST_SECONDS = 15.0  # of gaudi-run's processor, for 256 ranks
REAL_RANK = """
import os, sys
import horovod.tensorflow as hvd
hvd.init()
os._exit(hvd.rank() != int(os.environ["HOROVOD_RANK"]))
"""


def run(budget_seconds: float) -> Iterator[Figure]:
    """Count what real ranks ask, then measure fake ones; it takes two minutes whatever the budget is."""
    for size in (2, 4):
        counted = count_requests(size)
        yield Figure(
            f"{size} real ranks: requests",
            sum(counted.values()),
            "requests",
            least=predict_requests(size, size),
            most=predict_requests(size, size),
            details=dict(counted),
        )
    for size in SIZES:
        yield from measure_meeting(size, PER_HOST)


def predict_requests(size: int, per_host: int) -> int:
    """Return the requests of ranks on hosts with equally many of them; none asks again for what is not there yet."""

    def mesh(ranks: int) -> int:
        # Each puts its host and its addresses and deletes them, asks for hosts of those before, and twice for each.
        return 3 * ranks + ranks * (ranks - 1) // 2 + 2 * ranks * (ranks - 1)

    hosts = size // per_host
    return 2 * (mesh(size) + hosts * mesh(per_host) + per_host * mesh(hosts))


def count_requests(size: int) -> Counter[str]:
    """Return how often real ranks of Horovod on this machine ask, by the method and the kind of key.

    Raises:
        RuntimeError: a rank failed.
    """
    from gaudi_distributed.cluster.hosts import assign_ranks
    from gaudi_distributed.cluster.rendezvous import RendezvousServer

    counted: Counter[str] = Counter()

    class CountingServer(RendezvousServer):
        def _answer(self, request: object, status: int, content: bytes = b"") -> bool:
            method, path, *_ = bytes(request.received).decode("latin-1").split(" ")  # type: ignore[attr-defined]
            counted[f"{method} {'host' if '/rank_' in path else 'addresses'} {status}"] += 1
            return super()._answer(request, status, content)  # type: ignore[arg-type]

    gloo = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"}
    gloo |= {"HOROVOD_HOSTNAME": "localhost", "HOROVOD_GLOO_TIMEOUT_SECONDS": "600", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with CountingServer("127.0.0.1") as server:
        environ = {**os.environ, **gloo, **server.environment}
        ranks = [
            subprocess.Popen([sys.executable, "-c", REAL_RANK], env={**environ, **assigned.variables})
            for assigned in assign_ranks(["localhost"] * size)
        ]
        statuses = [rank.wait() for rank in ranks]
        if any(statuses):
            raise RuntimeError(f"{size} ranks of Horovod did not meet")
    return counted


def measure_meeting(size: int, per_host: int) -> Iterator[Figure]:
    """Let fake ranks meet; the server is a process of its own, as gaudi-run is."""
    with ExitStack() as stack:
        server = _start(stack, "serve()")
        port = int(read_line(server))
        count = min(os.cpu_count() or 1, size)
        bounds = [size * number // count for number in range(count + 1)]
        members = [
            _start(stack, f"meet({port}, {size}, {per_host}, {first}, {end})")
            for first, end in itertools.pairwise(bounds)
        ]
        for member in members:
            read_line(member)
        began = time.monotonic()
        for member in members:
            _tell(member)
        clients = [json.loads(read_line(member)) for member in members]
        seconds = time.monotonic() - began
        _tell(server)
        user, system = json.loads(read_line(server))
    requests = predict_requests(size, per_host)
    kernel = system + sum(one["system"] for one in clients)
    name = f"{size} ranks of {size // per_host} hosts"
    note = f"{requests} requests, {sum(one['bytes'] for one in clients) / 1e9:.2f} GB"
    details = {"server": [user, system], "clients": clients}
    yield Figure(f"{name}: meeting", seconds, "s", note=note, details=details)
    most = MOST_SECONDS if size == max(SIZES) else None
    note = f"{1e6 * (user + system) / requests:.1f} us a request"
    yield Figure(f"{name}: gaudi-run's processor", user + system, "s", most=most, note=note)
    yield Figure(f"{name}: least time on this machine", kernel / (os.cpu_count() or 1), "s")


def serve() -> None:
    """Be the rendezvous: say the port, and at last the processor seconds of this process."""
    from gaudi_distributed.cluster.rendezvous import PORT, RendezvousServer

    with RendezvousServer("127.0.0.1") as server:
        before = resource.getrusage(resource.RUSAGE_SELF)
        print(server.environment[PORT], flush=True)
        sys.stdin.readline()
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(json.dumps([used.ru_utime - before.ru_utime, used.ru_stime - before.ru_stime]), flush=True)


def meet(port: int, size: int, per_host: int, first: int, end: int) -> None:
    """Be some of the ranks, which ask in turns, one request after the other."""
    received = 0

    def ask(method: bytes, path: str, content: bytes = b"") -> None:
        nonlocal received
        with socket.socket() as connection:
            connection.connect(("127.0.0.1", port))
            head = b"%s %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % (method, path.encode(), port, len(content)) + content)
            answer = connection.recv(65536)
            if not answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 404")):
                raise RuntimeError(f"{method!r} {path}: {answer[:100]!r}")
            received += len(answer)
            while more := connection.recv(65536):
                received += len(more)

    print("ready", flush=True)
    sys.stdin.readline()
    for kind in ("", "_process_set"):
        meshes = []
        for rank in range(first, end):
            host, local = divmod(rank, per_host)
            meshes.append((f"/global{kind}", size, rank))
            meshes.append((f"/local_host{host}{kind}", per_host, local))
            meshes.append((f"/cross_{local}{kind}", size // per_host, host))
        for scope, ranks, rank in meshes:
            ask(b"PUT", f"{scope}/rank_{rank}", b"localhost")
            ask(b"PUT", f"{scope}/{rank}", bytes((ranks - 1) * ADDRESS_BYTES))
        for scope, ranks, rank in meshes:
            for other in range(rank):
                ask(b"GET", f"{scope}/rank_{other}")
            for other in (*range(rank), *range(rank + 1, ranks)):
                ask(b"GET", f"{scope}/{other}")
                ask(b"GET", f"{scope}/{other}")
        for scope, _, rank in meshes:
            ask(b"DELETE", f"{scope}/{rank}")
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"user": used.ru_utime, "system": used.ru_stime, "bytes": received}), flush=True)


def _start(stack: ExitStack, call: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"from benchmarks.gloo_start import *; {call}"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _tell(process: subprocess.Popen[str]) -> None:
    """Let a process go on."""
    if process.stdin:
        process.stdin.write("\n")
        process.stdin.flush()


if __name__ == "__main__":
    main(run)
