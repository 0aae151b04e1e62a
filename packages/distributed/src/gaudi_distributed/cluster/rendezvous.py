"""Assign ranks to the workers of an elastic run, and serve the store where Gloo's ranks find each other."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from gaudi_distributed.cluster.elastic import ADDRESS, PORT
from gaudi_distributed.cluster.hosts import RankAssignment, assign_ranks


class Rendezvous:
    """Form rounds of the workers that run.

    Args:
        min_size: ranks that a round needs.
        max_size: ranks that it may have; a round has as many as divide this.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        self.number = 0
        self._min_size, self._max_size = min_size, max_size
        self._hosts: dict[int, str] = {}
        self._waiting: dict[int, float] = {}
        self._members: list[int] = []

    @property
    def members(self) -> tuple[int, ...]:
        """Return the workers of this round that still run, by rank."""
        return tuple(self._members)

    @property
    def in_progress(self) -> bool:
        """Return whether some worker of this round does not wait for the next one."""
        return any(worker not in self._waiting for worker in self._members)

    def count_on(self, host: str) -> int:
        """Return the number of workers on a host."""
        return Counter(self._hosts.values())[host]

    def host_of(self, worker: int) -> str:
        """Return the host of a worker."""
        return self._hosts[worker]

    @property
    def size(self) -> int:
        """Return the number of workers."""
        return len(self._hosts)

    def add(self, worker: int, host: str) -> None:
        """Add a worker that was started."""
        self._hosts[worker] = host

    def join(self, worker: int, now: float) -> None:
        """Let a worker wait for the next round."""
        if worker in self._hosts:
            self._waiting.setdefault(worker, now)

    def remove(self, worker: int) -> None:
        """Remove a worker that has ended."""
        self._hosts.pop(worker, None)
        self._waiting.pop(worker, None)
        if worker in self._members:
            self._members.remove(worker)

    def find_unlisted(self, hosts: Iterable[str]) -> list[int]:
        """Return the workers on hosts that are no longer listed."""
        listed = set(hosts)
        return [worker for worker, host in self._hosts.items() if host not in listed]

    def is_changing(self, hosts: Iterable[str]) -> bool:
        """Return whether a new round would have other workers than this one."""
        return self._choose(hosts) not in ([], self._members)

    def start_round(self, hosts: Iterable[str], now: float) -> dict[int, RankAssignment] | None:
        """Start the next round if all workers of this one wait for it, or for the first one all that were started.

        Returns:
            the assignments by worker; None: not yet, or there are too few.
        """
        hosts = list(hosts)
        needed = self._members or (list(self._hosts) if self.number == 0 else [])
        if not set(needed) <= self._waiting.keys() or not (chosen := self._choose(hosts)):
            return None
        self._members = chosen
        self.number += 1
        for worker in chosen:
            del self._waiting[worker]
        return dict(zip(chosen, assign_ranks([self._hosts[worker] for worker in chosen]), strict=True))

    def find_late(self, now: float, patience: float) -> list[int]:
        """Return the workers of this round that others have waited for longer than `patience` seconds."""
        since = min((self._waiting[worker] for worker in self._members if worker in self._waiting), default=now)
        return [worker for worker in self._members if worker not in self._waiting and now - since > patience]

    def _choose(self, hosts: Iterable[str]) -> list[int]:
        """Return the workers of the next round by rank: those of this one, then waiting ones; none if too few."""
        listed = set(hosts)
        known = [*self._members, *sorted(self._waiting.keys() - set(self._members))]
        able = [worker for worker in known if self._hosts[worker] in listed]
        sizes = (size for size in range(min(len(able), self._max_size), 0, -1) if self._max_size % size == 0)
        size = next(sizes, 0)
        return able[:size] if size >= self._min_size else []


_MAX_VALUE = 1 << 20
_MAX_KEYS = 1 << 20


class RendezvousServer(ThreadingHTTPServer):
    """Serve names and values over HTTP while it is entered; ranks put, get and delete `/scope/key`.

    Raises:
        OSError: the address is not one of this machine.
    """

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self._thread = threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables by which Horovod finds it."""
        host, port = self.server_address[:2]
        return {ADDRESS: str(host), PORT: str(port)}

    def __enter__(self) -> RendezvousServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    server: RendezvousServer

    def do_GET(self) -> None:
        with self.server.lock:
            value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MAX_VALUE:
            return self._answer(400)
        value = self.rfile.read(int(length))
        with self.server.lock:
            full = len(self.server.values) >= _MAX_KEYS
            if not full:
                self.server.values[self.path] = value
        return self._answer(507 if full else 200)

    def do_DELETE(self) -> None:
        """Accept that a rank is done with a scope; its values are kept until the launcher ends."""
        self._answer(200)

    def _answer(self, status: int, content: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that the server gives
        """Say nothing: the terminal belongs to the ranks."""
