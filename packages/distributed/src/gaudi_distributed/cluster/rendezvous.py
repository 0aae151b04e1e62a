"""Serve the store where Gloo's ranks find each other, and through which elastic workers ask the launcher for a rank.

The store holds names and values over HTTP. The launcher assigns ranks to workers in rounds; a worker is a client.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from gaudi_distributed.cluster.hosts import RankAssignment, assign_ranks
from gaudi_distributed.errors import ConfigurationError, PeerLostError

WORKER = "GAUDI_RUN_WORKER"
ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
# The secret that opens what the launcher and its workers say to each other.
STORE_TOKEN, _TOKEN_HEADER = "GAUDI_RUN_STORE_TOKEN", "x-gaudi-run"
# How many ranks a round may have, as numbers with commas between.
SIZES = "GAUDI_RUN_SIZES"
SCOPE = "/gaudi_run"
# What Horovod itself looks up when it is begun anew in its elastic mode: the same numbers once more.
HOROVOD_SCOPE = "/rank_and_size"
CYCLE_VARIABLE, FUSION_VARIABLE = "HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD"
_POLL_SECONDS, _HEARTBEAT_SECONDS, _TIMEOUT = 0.1, 1.0, 30.0


class Rendezvous:
    """Form rounds of the workers that run.

    Args:
        min_size: ranks that a round needs.
        max_size: ranks that it may have; a round has as many as divide this.

    Attributes:
        number: of this round, from 1; 0: there was none.
        is_last: in rounds to come, those that are left of this one save what they know, however few they are.
    """

    def __init__(self, min_size: int, max_size: int) -> None:
        self.number, self.is_last = 0, False
        self._min_size, self._max_size = min_size, max_size
        self._hosts: dict[int, str] = {}
        self._waiting: dict[int, float] = {}
        self._leaving = set[int]()
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
        self._leaving.discard(worker)
        if worker in self._members:
            self._members.remove(worker)

    def leave(self, worker: int) -> None:
        """Leave a worker that runs out of the rounds to come."""
        if worker in self._hosts:
            self._leaving.add(worker)

    def find_leaving(self, hosts: Iterable[str]) -> list[int]:
        """Return the workers that leave, and those on hosts that are no longer listed."""
        listed = set(hosts)
        return [worker for worker, host in self._hosts.items() if worker in self._leaving or host not in listed]

    def must_stop(self, hosts: Iterable[str]) -> bool:
        """Return whether some worker of this round leaves, too few stay, and none waits that could take over."""
        staying = [worker for worker in self._members if worker not in self._leaving]
        if len(staying) == len(self._members) or self._fit(staying):
            return False
        return self._leaving.issuperset(self._choose(hosts))

    def find_spare(self, hosts: Iterable[str]) -> list[int]:
        """Return the workers that wait beside a round, and will be in none."""
        unwanted = self._waiting if self.is_last else self.find_leaving(hosts)
        return [worker for worker in unwanted if worker in self._waiting and worker not in self._members]

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
        """Return the workers of the next round by rank: those of this one, then waiting ones; none if too few.

        The first is always one of this round, for others have not its state. Where none of them may stay, one stays for
        a round beside those that take over.
        """
        if self.is_last:
            return self._fit(self._members, 1)
        leaving = set(self.find_leaving(hosts))
        staying = [worker for worker in self._members if worker not in leaving]
        coming = [worker for worker in sorted(self._waiting) if worker not in leaving and worker not in self._members]
        if not staying and coming:
            staying = self._members[:1]
        return self._fit([*staying, *coming]) if staying or self.number == 0 else []

    def _fit(self, able: Sequence[int], least: int = 0) -> list[int]:
        """Return as many of the workers as a round may have."""
        sizes = list_sizes(least or self._min_size, self._max_size)
        return list(able[: max((size for size in sizes if size <= len(able)), default=0)])


def list_sizes(least: int, most: int) -> list[int]:
    """List the numbers of ranks that a round may have: those that divide the largest, so that a batch is shared."""
    return [size for size in range(least, most + 1) if most % size == 0]


_MAX_VALUE = 1 << 20
_MAX_KEYS = 1 << 20
_MAX_HEAD = 1 << 13
# Bytes that are read at once: more than any request but those that put the addresses of many ranks.
_PIECE = 1 << 13
# Connections that wait to be accepted; the kernel's own bound is 4096 by default.
_BACKLOG = 1024
# A request has so long to come whole, from a rank of a busy host, too; and a value has so long to be put by another
# rank, for which ranks would ask every 10 ms.
_REQUEST_SECONDS, _HOLD_SECONDS = 60.0, 2.0
# The one thread waits so long at most for a client that does not read.
_ANSWER_SECONDS = 1.0
# Connections without a whole request; a stranger who holds more loses the oldest.
_MAX_WAITING = 2048
_TICK = 0.25
_REASONS = {
    200: b"OK",
    400: b"Bad Request",
    403: b"Forbidden",
    404: b"Not Found",
    501: b"Not Implemented",
    507: b"Insufficient Storage",
}


@dataclass
class _Request:
    """A connection with one request, which may not be there yet."""

    connection: socket.socket
    since: float
    received: bytearray = field(default_factory=bytearray)
    path: str = ""


class RendezvousServer:
    """Serve names and values over HTTP while it is entered; ranks put, get and delete `/scope/key`.

    One thread serves all, and most of its time is the kernel's: Horovod opens a connection for each request, and each
    rank makes five for each other rank, and five more for each of its host. A value that is not there yet is waited
    for, but not those in the scope of gaudi-run's own workers, which needs the token in a header.

    Raises:
        OSError: the address is not one of this machine.
    """

    def __init__(self, address: str, port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._address = address
        self._token = secrets.token_hex(32)
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._reading: dict[socket.socket, _Request] = {}
        self._held: dict[str, list[_Request]] = {}
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables by which Horovod and workers find it; the token is a secret."""
        return {ADDRESS: self._address, PORT: str(self._listener.getsockname()[1]), STORE_TOKEN: self._token}

    def __enter__(self) -> RendezvousServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closing = True
        self._thread.join()
        self._selector.close()
        self._listener.close()
        for request in (*self._reading.values(), *(each for held in self._held.values() for each in held)):
            request.connection.close()

    def _serve(self) -> None:
        checked = 0.0
        while not self._is_closing:
            for key, _ in self._selector.select(_TICK):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            if (now := time.monotonic()) - checked >= _TICK:
                checked = now
                self._give_up(now)

    def _accept(self) -> None:
        """Accept those that wait, but not for ever; most have sent their request already."""
        for _ in range(_BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._drop_oldest()
                return
            if len(self._reading) >= _MAX_WAITING:
                self._drop_oldest()
            self._read(_Request(connection, time.monotonic()))

    def _drop_oldest(self) -> None:
        """Close the connection that has said nothing whole for longest; without any, leave others time to end."""
        if not self._reading:
            time.sleep(_TICK)
            return
        oldest = next(iter(self._reading))
        self._selector.unregister(oldest)
        del self._reading[oldest]
        oldest.close()

    def _read(self, request: _Request) -> None:
        """Read what there is, and answer once the request is whole."""
        content: bytes | None
        try:
            content = request.connection.recv(_PIECE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            content = None
        except OSError:
            content = b""
        request.received += content or b""
        is_whole = bool(content) and self._handle(request)
        if content == b"" or is_whole:
            if self._reading and self._reading.pop(request.connection, None) is not None:
                self._selector.unregister(request.connection)
            if not is_whole:
                request.connection.close()
        elif request.connection not in self._reading:
            self._reading[request.connection] = request
            self._selector.register(request.connection, selectors.EVENT_READ, request)

    def _handle(self, request: _Request) -> bool:
        """Answer a request, or hold it; return whether it was whole."""
        head, end, body = request.received.partition(b"\r\n\r\n")
        if not end:
            return len(head) > _MAX_HEAD and self._answer(request, 400)
        method, _, rest = head.partition(b" ")
        request.path = rest.partition(b" ")[0].decode("latin-1")
        is_own = request.path.startswith(f"{SCOPE}/")
        if method == b"GET" and not is_own:  # nearly all are; one with a content is answered as one without
            return self._get(request)
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
        }
        if is_own and not hmac.compare_digest(headers.get(_TOKEN_HEADER, "").encode(), self._token.encode()):
            return self._answer(request, 403)
        if method == b"GET":
            return self._get(request)
        length = headers.get("content-length", "" if method == b"PUT" else "0")
        if not (length.isascii() and length.isdigit()) or len(length) > 8 or int(length) > _MAX_VALUE:
            return self._answer(request, 400)
        if len(body) < int(length):
            return False
        if method == b"PUT":
            return self._put(request, bytes(body[: int(length)]))
        # A rank is done with a scope: its values are kept until the launcher ends.
        return self._answer(request, 200 if method == b"DELETE" else 501)

    def _put(self, request: _Request, value: bytes) -> bool:
        with self.lock:
            is_full = len(self.values) >= _MAX_KEYS
            if not is_full:
                self.values[request.path] = value
        for waiting in [] if is_full else self._held.pop(request.path, []):
            self._answer(waiting, 200, value)
        return self._answer(request, 507 if is_full else 200)

    def _get(self, request: _Request) -> bool:
        with self.lock:
            value = self.values.get(request.path)
        if value is not None:
            return self._answer(request, 200, value)
        if request.path.startswith((f"{SCOPE}/", f"{HOROVOD_SCOPE}/")):
            return self._answer(request, 404)
        request.since = time.monotonic()
        self._held.setdefault(request.path, []).append(request)
        return True

    def _answer(self, request: _Request, status: int, content: bytes = b"") -> bool:
        answer = b"HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        answer %= status, _REASONS[status], len(content), content
        with contextlib.suppress(OSError):
            try:
                # The kernel takes the values of some thousand ranks at once.
                sent = request.connection.send(answer, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            if sent < len(answer):
                request.connection.settimeout(_ANSWER_SECONDS)
                request.connection.sendall(answer[sent:])
        request.connection.close()
        return True

    def _give_up(self, now: float) -> None:
        """Answer those that have waited for long, and drop those that do not go on."""
        for path, held in list(self._held.items()):
            late = [each for each in held if now - each.since > _HOLD_SECONDS]
            for request in late:
                self._answer(request, 404)
            self._held[path] = [each for each in held if each not in late]
            if not self._held[path]:
                del self._held[path]
        for request in [each for each in self._reading.values() if now - each.since > _REQUEST_SECONDS]:
            self._selector.unregister(request.connection)
            self._reading.pop(request.connection).connection.close()


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a worker of an elastic run."""
    return WORKER in environ


class RendezvousClient:
    """Ask the launcher for this worker's next rank.

    Raises:
        ConfigurationError: the variables are not those of a launcher, or Horovod could not begin a second time.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        missing = [name for name in (ADDRESS, PORT, STORE_TOKEN) if name not in environ]
        if missing or not environ[PORT].isdecimal() or not environ[WORKER].isdecimal():
            raise ConfigurationError(
                f"{WORKER} is {environ[WORKER]!r} and {', '.join(missing) or PORT} not as gaudi-run sets it",
                field=WORKER,
                remedy="start the run through gaudi-run, or unset it",
            )
        if CYCLE_VARIABLE in environ:
            # With this and the other both fixed, nothing is left to tune, and Horovod 0.28.1 writes past the end of it.
            raise ConfigurationError(
                f"{CYCLE_VARIABLE} is set, and {FUSION_VARIABLE} is for every run; with both, Horovod ends by signal "
                "11 when the processes change",
                field=CYCLE_VARIABLE,
                remedy="unset the first",
            )
        self._worker = environ[WORKER]
        self._address = environ[ADDRESS], int(environ[PORT])
        self._headers = {_TOKEN_HEADER: environ[STORE_TOKEN]}
        self._round = 0
        threading.Thread(target=self._give_signs_of_life, name="heartbeats", daemon=True).start()

    def _give_signs_of_life(self) -> None:
        """Send heartbeats, by whose lack the launcher knows of a worker that is frozen, be it the only one."""
        for number in count():
            # Of a loss of the launcher the main thread knows.
            with contextlib.suppress(PeerLostError):
                self._request("PUT", f"{SCOPE}/beat_{self._worker}", b"%d" % number)
            time.sleep(_HEARTBEAT_SECONDS)

    def next_assignment(self, is_asked_to_end: Callable[[], bool] = lambda: False) -> dict[str, str] | None:
        """Wait for the next round and return the environment variables of this worker's rank.

        None means that the worker is no longer needed.

        Raises:
            PeerLostError: the launcher is gone.
        """
        self._request("PUT", f"{SCOPE}/ask_{self._worker}", b"1")
        is_told = False
        while True:
            if not is_told and is_asked_to_end():
                is_told = True
                self.leave()
            answer = json.loads(self._request("GET", f"{SCOPE}/assignment_{self._worker}") or b'{"round": 0}')
            if answer["round"] > self._round:
                self._round = answer["round"]
                variables: dict[str, str] | None = answer["variables"]
                return variables
            time.sleep(_POLL_SECONDS)

    def hosts_updated(self) -> bool:
        """Return whether workers wait to join, or some are to leave."""
        return self._request("GET", f"{SCOPE}/changing") == b"1"

    def leave(self) -> bool:
        """Tell the launcher that this process is asked to end; return False where all are, or nobody answers."""
        try:
            self._request("PUT", f"{SCOPE}/leave_{self._worker}", b"1")
            return self._request("GET", f"{SCOPE}/stopping") != b"1"
        except PeerLostError:
            return False

    def _request(self, method: str, path: str, content: bytes | None = None) -> bytes:
        """Return the value of a path; empty if there is none."""
        import http.client  # 15 ms, which --help does not need

        connection = http.client.HTTPConnection(*self._address, timeout=_TIMEOUT)
        try:
            connection.request(method, path, content, self._headers)
            answer = connection.getresponse()
            value = answer.read()
            return value if answer.status == http.client.OK else b""
        except (OSError, http.client.HTTPException) as error:
            raise PeerLostError(
                f"worker {self._worker}: the launcher at {self._address[0]}:{self._address[1]} does not answer "
                f"({error})",
                remedy="the same command continues from the last checkpoint",
            ) from error
        finally:
            connection.close()
