"""Real ranks and a real coordinator, beside which somebody says what is wrong.

Two ranks are processes of their own, each with the client that a training has. What a stranger says may neither end the
run nor lose a rank. What a third rank says, which knows the token, may end it; then both ranks end, with its status.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis.strategies as st
from tests.torture import mutations

if TYPE_CHECKING:
    from gaudi_distributed.failure.coordinator import Coordinator
    from gaudi_distributed.failure.messages import Timeouts

TOKEN = "t" * 32  # in an input; that of the coordinator takes its place
SIZE = 3
LONGEST_TEXT = 1300  # characters of what ended a run, which a launcher prints: MAX_TEXT, and where it was
LONGEST_END = 20.0  # seconds, until all ranks have ended
UNREADY, LOST = 3, 75


@dataclass
class Rank:
    """A process that is a rank.

    Attributes:
        pid: of the process.
        path: of the file that gets what it prints.
    """

    pid: int
    path: Path
    descriptor: int = field(init=False)

    def __post_init__(self) -> None:
        self.descriptor = os.pidfd_open(self.pid)

    @property
    def is_alive(self) -> bool:
        """Return whether it goes on."""
        return not select.select([self.descriptor], [], [], 0)[0]

    def wait(self, seconds: float) -> tuple[int | None, str]:
        """Wait for its end; return its status, None where it goes on, and what it printed."""
        has_ended = bool(select.select([self.descriptor], [], [], seconds)[0])
        if not has_ended:
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.descriptor)
        told = self.path.read_text(errors="replace")
        self.path.unlink()
        return (status if has_ended else None), told


def start_rank(work: Callable[[], None]) -> Rank:
    """Start a process that does some work, and ends with 0 after it, or with the status of its error."""
    descriptor, name = tempfile.mkstemp(prefix="torture-rank-")
    pid = os.fork()
    if not pid:
        status = 70
        try:
            for number in (signal.SIGALRM, signal.SIGPROF):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            work()
            status = 0
        except BaseException as error:
            status = getattr(error, "exit_status", 70)
            print("".join(traceback.format_exception(error)) if status == 70 else error)
            sys.stdout.flush()
        finally:
            os._exit(status)
    os.close(descriptor)
    return Rank(pid, Path(name))


def go_on(rank: int, host: str, port: int, token: str) -> None:
    """Be a rank that reports its steps until the run is over."""
    from gaudi_distributed.cluster.rank_info import RankInfo
    from gaudi_distributed.failure import rank_client

    rank_client._CONNECT_SECONDS = 1.0  # a wait that is the same in all inputs
    info = RankInfo(rank=rank, size=SIZE, local_rank=rank, local_size=SIZE, host=host)
    client = rank_client.RankClient(info, rank_client.CoordinatorInfo("127.0.0.1", port), token, print)
    step = 0
    while True:
        client.set_progress(step := step + 1, "step")
        time.sleep(0.02)


class Live:
    """A coordinator in this process, with two ranks of three."""

    def __init__(self) -> None:
        from gaudi_distributed.failure.coordinator import Coordinator

        self.unforeseen = list[logging.LogRecord]()
        self.coordinator: Coordinator = Coordinator(SIZE, timeouts=make_timeouts(), settle_seconds=0.05)
        port, token = self.coordinator.port, self.coordinator.token
        self.ranks = [start_rank(partial(go_on, rank, f"host{rank}", port, token)) for rank in (0, 1)]
        end = time.monotonic() + LONGEST_END
        while len(self.coordinator.present) < 2:
            if time.monotonic() > end:
                raise RuntimeError("the ranks do not join")
            time.sleep(0.005)

    def hear(self, said: bytes, is_stranger: bool) -> None:
        """Connect, say something, and hang up when the coordinator does."""
        with connect(self.coordinator.port) as other, contextlib.suppress(ConnectionError):  # it has hung up
            other.sendall(said)
            other.shutdown(socket.SHUT_WR)
            while other.recv(4096):
                pass
        gc.collect(0)  # asyncio tells of an exception once its task is gone
        if self.unforeseen:
            raise RuntimeError("asyncio tells of an exception")
        if is_stranger and (self.coordinator.cause is not None or len(self.coordinator.present) != 2):
            raise RuntimeError("a stranger ended the run")
        if not is_stranger and not self.coordinator.wait(0.3) and len(self.coordinator.present) < 2:
            raise RuntimeError("a rank is lost, and the run goes on")

    def end(self) -> None:
        """End the run, and see that both ranks end as they are told."""
        cause = self.coordinator.cause
        if cause is None:
            self.coordinator.end("it is over", LOST)
            self.coordinator.wait()
            cause = self.coordinator.cause
        assert cause is not None
        ends = [rank.wait(LONGEST_END) for rank in self.ranks]
        self.coordinator.close()
        if len(cause.describe()) > LONGEST_TEXT or not cause.describe().isprintable():
            raise RuntimeError("what ended the run is long, or moves a cursor")
        for status, told in ends:
            if status is None:
                raise RuntimeError("a rank goes on after the end of the run")
            if status <= 0 or "Traceback" in told:
                raise RuntimeError(f"a rank ends with {status if status <= 0 else 'a signal, or a traceback'}")


def make_timeouts() -> Timeouts:
    """Return the timeouts of a run that ends soon."""
    from gaudi_distributed.failure.messages import Timeouts

    return Timeouts(heartbeat_seconds=0.05, leave_seconds=0.5, stall_seconds=30.0)


def connect(port: int) -> socket.socket:
    """Connect to a coordinator."""
    return socket.create_connection(("127.0.0.1", port), timeout=10)


_live: list[Live] = []


def make_coordinator(folder: Path) -> st.SearchStrategy[bytes]:
    """Return lines of a stranger, and of a third rank."""
    from gaudi_distributed.failure import messages

    hello = messages.encode_message(messages.Hello(TOKEN, 2, "host"))
    further = [
        messages.encode_message(message)
        for message in (messages.State(3, "step", 7), messages.Failed(70, "text", True), messages.Left(0, ""))
    ]
    (folder / "lines").write_bytes(hello)
    changed = st.one_of(*(mutations.of_json(json.loads(line)) for line in (hello, *further)))
    first = st.just(hello.rstrip()) | mutations.of_json(json.loads(hello))
    lines = st.builds(lambda *parts: b"\n".join((*parts, b"")), first, changed, changed)
    odd = st.one_of(*(mutations.change_values(json.loads(line)).map(mutations.dump_json) for line in (hello, *further)))
    lines |= odd.map(lambda line: hello + line + b"\n")
    whole = mutations.change_bytes(hello + b"".join(further))
    strange = st.builds(lambda line: line.replace(TOKEN.encode(), b"u" * 32), lines | whole)
    return st.one_of(strange, lines, whole)


def read_coordinator(folder: Path) -> None:
    """Say lines to a coordinator that listens to two ranks; what it does not foresee it would log."""
    said = (folder / "lines").read_bytes()
    if not _live:
        _live.append(Live())
    live = _live[0]

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            live.unforeseen.append(record)

    handler = Handler()
    logging.getLogger("asyncio").addHandler(handler)
    try:
        live.hear(said.replace(TOKEN.encode(), live.coordinator.token.encode()), TOKEN.encode() not in said)
        if TOKEN.encode() in said or live.coordinator.cause is not None:
            _live.clear()
            live.end()
    except BaseException:
        _live.clear()
        raise
    finally:
        logging.getLogger("asyncio").removeHandler(handler)


def make_member(folder: Path) -> st.SearchStrategy[bytes]:
    """Return lines that a coordinator says to a rank."""
    from gaudi_distributed.failure import messages

    welcome, *further = (
        messages.encode_message(message)
        for message in (
            make_timeouts(),
            messages.Heartbeat(),
            messages.Heartbeat(stop=True),
            messages.FailureCause(1, "host1", 2, "step", LOST, "lost"),
        )
    )
    (folder / "lines").write_bytes(welcome)
    changed = st.one_of(*(mutations.of_json(json.loads(line)) for line in (welcome, *further)))
    first = st.one_of(st.just(welcome.rstrip()), st.just(welcome.rstrip()), mutations.of_json(json.loads(welcome)))
    lines = st.builds(lambda *parts: b"\n".join((*parts, b"")), first, changed, changed)
    odd = st.one_of(*(mutations.change_values(json.loads(line)).map(mutations.dump_json) for line in further))
    lines |= odd.map(lambda line: welcome + line + b"\n")
    lines |= mutations.change_values(json.loads(welcome)).map(mutations.dump_json).map(lambda line: line + b"\n")
    return lines | mutations.change_bytes(welcome + b"".join(further))


def read_member(folder: Path) -> None:
    """Say lines to a rank as its coordinator; it must end soon once the connection has, or one says so."""
    said = (folder / "lines").read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        rank = start_rank(lambda: go_on(0, "host0", port, TOKEN))
        listener.settimeout(10)
        connection, _ = listener.accept()
    with connection, contextlib.suppress(ConnectionError):
        connection.recv(4096)
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)
        while rank.is_alive and connection.recv(4096):
            pass
    status, told = rank.wait(LONGEST_END)
    if status is None:
        raise RuntimeError("the rank goes on without its coordinator")
    if status <= 0 or "Traceback" in told:
        raise RuntimeError(f"the rank ends with {status if status <= 0 else 'a signal, or a traceback'}: {told[-80:]}")
    if len(told) > LONGEST_TEXT or not " ".join(told.split("\n")).isprintable():
        raise RuntimeError("what the rank tells is long, or moves a cursor")
