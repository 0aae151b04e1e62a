from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

import pytest

from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.failure import Coordinator, FailureCause, RankClient, Timeouts, join_coordinator
from gaudi_distributed.failure.coordinator import COORDINATOR, TOKEN
from gaudi_distributed.failure.messages import (
    MAX_BYTES,
    Heartbeat,
    Hello,
    Left,
    State,
    decode_message,
    encode_message,
)

# Ends a test that would never end.
SECONDS = 600
# Connections of the tests give no signs of life.
PATIENT = Timeouts(stall_seconds=2 * SECONDS, leave_seconds=60, heartbeat_seconds=0.2)


def connect(coordinator: Coordinator) -> socket.socket:
    return socket.create_connection(("127.0.0.1", coordinator.port), timeout=SECONDS)


def hello(coordinator: Coordinator, rank: int = 0, token: str | None = None) -> bytes:
    return encode_message(Hello(coordinator.token if token is None else token, rank, "here"))


def is_dropped(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def wait_for(lines: BinaryIO, kind: type, count: int = 1) -> None:
    """Read until so many messages of a kind have come."""
    while count:
        count -= isinstance(decode_message(lines.readline()), kind)


def join(coordinator: Coordinator, rank: int, size: int) -> RankClient:
    client = join_coordinator(RankInfo(rank, size, rank, size, f"host{rank}"), coordinator.environment, print)
    assert client is not None
    return client


def test_listens_on_the_loopback_interface_only() -> None:
    with Coordinator(2) as coordinator:
        port = coordinator.port
        assert coordinator.environment == {
            "GAUDI_RUN_COORDINATOR": f"127.0.0.1:{port}",
            "GAUDI_RUN_TOKEN": coordinator.token,
        }
        assert len(coordinator.token) == 64
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=SECONDS)


def test_ipv6() -> None:
    with Coordinator(1, address="::1", timeouts=PATIENT) as coordinator:
        assert coordinator.environment["GAUDI_RUN_COORDINATOR"] == f"[::1]:{coordinator.port}"
        join(coordinator, 0, 1).leave()
        assert coordinator.wait(SECONDS)
        assert coordinator.cause is None


def test_no_such_address() -> None:
    with pytest.raises(OSError, match=r"assign|bind"):
        Coordinator(1, address="192.0.2.1")


def test_welcome_says_the_bounds() -> None:
    with Coordinator(1, timeouts=PATIENT) as coordinator, connect(coordinator) as connection:
        connection.sendall(hello(coordinator))
        line = connection.makefile("rb").readline()
        assert decode_message(line) == PATIENT


@pytest.mark.parametrize("rank", [-1, 2, 2**40])
def test_ranks_that_there_are_not(rank: int) -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator, connect(coordinator) as connection:
        connection.sendall(hello(coordinator, rank))
        assert is_dropped(connection)


@pytest.mark.parametrize("token", ["", "0" * 64, "\u00e9"])
def test_other_tokens(token: str) -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator, connect(coordinator) as connection:
        connection.sendall(hello(coordinator, token=token))
        assert is_dropped(connection)
        assert coordinator.present == frozenset()


def test_second_of_a_rank_is_dropped_and_the_first_stays() -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        with connect(coordinator) as first, connect(coordinator) as second:
            first.sendall(hello(coordinator))
            assert first.recv(1)
            second.sendall(hello(coordinator))
            assert is_dropped(second)
            assert coordinator.present == {0}
        assert coordinator.wait(SECONDS)


@pytest.mark.parametrize(("size", "told"), [(64, [1, 2, 2]), (65, [2])])
def test_many_ranks_tell_their_progress_with_heartbeats(size: int, told: list[int]) -> None:
    """And before they leave, so that the step is right."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        environment = {COORDINATOR: f"127.0.0.1:{listener.getsockname()[1]}", TOKEN: "x"}
        steps = []

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as lines:
                lines.readline()
                connection.sendall(encode_message(replace(PATIENT, heartbeat_seconds=SECONDS)))
                while isinstance(message := decode_message(lines.readline()), State):
                    steps.append(message.step)

        thread = threading.Thread(target=answer)
        thread.start()
        client = join_coordinator(RankInfo(0, size, 0, size), environment, print)
        assert client is not None
        client.set_progress(1, "step")
        client.set_progress(2, "step")
        client.leave()
        thread.join()
    assert steps == told


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"\n" * 1000,
    b"[" * 100000 + b"\n",
    b"x" * (MAX_BYTES + 10),
    b'["Hello", {"token": 1, "rank": 0, "host": "a"}]\n',
    b'["State", {"step": 1, "phase": "step", "reports": 1}]\n',
    b"",
]


def test_garbage_and_a_port_scan_do_not_end_a_run() -> None:
    """Ranks go on while strangers connect, speak and leave as they like."""
    drawn = random.Random(0)
    with Coordinator(3, timeouts=PATIENT) as coordinator:
        first = join(coordinator, 0, 3)
        # Without a word, and more of them than are listened to at a time.
        waiting = [connect(coordinator) for _ in range(100)]
        for garbage in [*GARBAGE, *(drawn.randbytes(drawn.randrange(3000)) for _ in range(50))]:
            with connect(coordinator) as connection:
                try:
                    connection.sendall(garbage)
                    if drawn.random() < 0.5:
                        connection.shutdown(socket.SHUT_WR)
                except OSError:
                    continue  # dropped before it had said it all
        for connection in waiting:
            connection.close()
        second = join(coordinator, 1, 3)
        first.set_progress(3, "step")
        with connect(coordinator) as third:
            third.sendall(hello(coordinator, 2))
            wait_for(third.makefile("rb"), Heartbeat, 2)  # by then all that was said has been heard
            assert coordinator.cause is None
            assert coordinator.present == {0, 1, 2}
            third.sendall(encode_message(Left(0, "")))
        first.leave()
        second.leave()
        assert coordinator.wait(SECONDS)
        assert coordinator.cause is None


STRANGERS = 1000


@pytest.fixture
def many_files() -> Iterator[None]:
    """Let this process hold both ends of the strangers' connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4 * STRANGERS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_thousand_strangers_neither_keep_a_rank_out_nor_end_the_run() -> None:
    """Some say nothing, some the beginning of a message; all stay until they are dropped, and ranks come meanwhile."""
    with Coordinator(3, timeouts=PATIENT) as coordinator, contextlib.ExitStack() as stack:
        member = join(coordinator, 0, 3)
        strangers = []
        for number in range(STRANGERS):
            strangers.append(stack.enter_context(connect(coordinator)))
            if number % 2:
                strangers[-1].sendall(b'["Hello", {"token": "')
        # By the first that were dropped, the last are known to be listened to.
        assert all(is_dropped(stranger) for stranger in strangers[: STRANGERS // 2])
        second = stack.enter_context(connect(coordinator))
        second.sendall(hello(coordinator, 1))
        lines = second.makefile("rb")
        assert decode_message(lines.readline()) == PATIENT  # at the first attempt
        member.set_progress(1, "step")
        wait_for(lines, Heartbeat, 2)
        assert coordinator.cause is None
        assert coordinator.present == {0, 1}
        join(coordinator, 2, 3).leave()
        second.sendall(encode_message(Left(0, "")))
        member.leave()
        assert coordinator.wait(SECONDS)
        assert coordinator.cause is None


def test_strangers_of_an_address_make_room_for_each_other() -> None:
    with Coordinator(1, timeouts=PATIENT) as coordinator, contextlib.ExitStack() as stack:
        from_elsewhere = socket.create_connection(
            ("127.0.0.1", coordinator.port), timeout=SECONDS, source_address=("127.0.0.3", 0)
        )
        stack.enter_context(from_elsewhere)
        strangers = [stack.enter_context(connect(coordinator)) for _ in range(300)]
        assert is_dropped(strangers[0])
        from_elsewhere.sendall(hello(coordinator))
        assert decode_message(from_elsewhere.makefile("rb").readline()) == PATIENT


def test_rank_that_speaks_nonsense_is_lost() -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator, connect(coordinator) as connection:
        connection.sendall(hello(coordinator, 1) + encode_message(State(4, "step", 1)) + b"nonsense\n")
        assert coordinator.wait(SECONDS)
        assert coordinator.cause is not None
        cause = coordinator.cause
        assert (cause.rank, cause.host, cause.step, cause.phase) == (1, "here", 4, "step")


def test_cause_is_told_to_the_launcher_once() -> None:
    causes: list[FailureCause] = []
    with Coordinator(3, timeouts=PATIENT, on_cause=causes.append) as coordinator:
        *lost, last = [connect(coordinator) for _ in range(3)]
        for rank, connection in enumerate((*lost, last)):
            connection.sendall(hello(coordinator, rank))
            assert connection.recv(1)
        for connection in lost:
            connection.close()
        with last, last.makefile("rb") as lines:
            lines.readline()
            wait_for(lines, FailureCause)
            wait_for(lines, Heartbeat, 2)  # by then the other loss is known, too
        assert coordinator.wait(SECONDS)
    assert causes == [coordinator.cause]


def test_who_comes_after_the_end_is_told() -> None:
    with Coordinator(2, timeouts=PATIENT) as coordinator:
        coordinator.end("no more", 75)
        assert coordinator.wait(SECONDS)
        with connect(coordinator) as connection:
            connection.sendall(hello(coordinator))
            kinds = [json.loads(line)[0] for line, _ in zip(connection.makefile("rb"), range(2), strict=False)]
        assert "End" in kinds


def test_closing_twice() -> None:
    coordinator = Coordinator(1)
    coordinator.close()
    coordinator.close()
    coordinator.end("nobody hears", 75)
    coordinator.request_stop()
