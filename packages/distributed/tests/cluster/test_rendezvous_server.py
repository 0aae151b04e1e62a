"""The meeting point answers as Horovod's ranks ask."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import pytest

from gaudi_distributed.cluster import rendezvous
from gaudi_distributed.cluster.rendezvous import STORE_TOKEN, RendezvousServer


def connect(server: RendezvousServer) -> HTTPConnection:
    environment = server.environment
    port = int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    return HTTPConnection(environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port, timeout=600)


def ask(
    server: RendezvousServer,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, bytes]:
    connection = connect(server)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_what_was_put_is_got() -> None:
    with RendezvousServer("127.0.0.1") as server:
        assert ask(server, "GET", "/global/0")[0] == 404
        assert ask(server, "PUT", "/global/0", b"\x00\xff") == (200, b"")
        assert ask(server, "GET", "/global/0") == (200, b"\x00\xff")
        assert ask(server, "GET", "/global/1")[0] == 404
        assert ask(server, "DELETE", "/global/0")[0] == 200


def test_a_value_is_bounded() -> None:
    with RendezvousServer("127.0.0.1") as server:
        connection = connect(server)
        connection.putrequest("PUT", "/global/0")
        connection.putheader("Content-Length", str((1 << 20) + 1))
        connection.endheaders()  # the refusal does not wait for what it is about
        assert connection.getresponse().status == 400
        connection.close()


def test_a_value_that_is_not_there_yet_is_waited_for() -> None:
    """Else each rank would ask for it every 10 ms."""
    with RendezvousServer("127.0.0.1") as server:
        connection = connect(server)
        connection.request("GET", "/global/1")
        assert ask(server, "PUT", "/global/1", b"late") == (200, b"")
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"late")
        connection.close()
        mine = {"X-Gaudi-Run": server.environment[STORE_TOKEN]}
        assert ask(server, "GET", "/gaudi_run/assignment_1", headers=mine) == (404, b"")  # its workers do other things


@pytest.mark.parametrize("headers", [{}, {"X-Gaudi-Run": "x"}, {"X-Gaudi-Run": "\xff"}])
def test_strangers_say_nothing_to_the_launcher_or_its_workers(headers: dict[str, str]) -> None:
    with RendezvousServer("127.0.0.1") as server:
        for path in ("/gaudi_run/leave_1", "/gaudi_run/assignment_1"):
            assert ask(server, "PUT", path, b"x", headers)[0] == 403
            assert ask(server, "GET", path, None, headers)[0] == 403
        assert server.values == {}


@pytest.mark.costly
def test_many_ranks_find_each_other() -> None:
    ranks = range(256)
    with RendezvousServer("127.0.0.1") as server, ThreadPoolExecutor(len(ranks)) as pool:

        def meet(rank: int) -> list[bytes]:
            assert ask(server, "PUT", f"/global/{rank}", b"%d" % rank)[0] == 200
            others = [(rank + step) % len(ranks) for step in (1, 2, 4, 8, 16, 32, 64, 128)]
            found = []
            for other in others:
                while (answer := ask(server, "GET", f"/global/{other}"))[0] == 404:
                    pass
                found.append(answer[1])
            assert found == [b"%d" % other for other in others]
            return found

        assert len(list(pool.map(meet, ranks))) == len(ranks)
        assert len(server.values) == len(ranks)


def test_who_says_nothing_keeps_nobody_out() -> None:
    with RendezvousServer("127.0.0.1") as server:
        silent = [connect(server) for _ in range(64)]
        for connection in silent:
            connection.connect()
        assert ask(server, "PUT", "/global/0", b"1") == (200, b"")
        for connection in silent:
            connection.close()


def test_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_MAX_WAITING", 2)
    with RendezvousServer("127.0.0.1") as server:
        strangers = [connect(server) for _ in range(5)]
        for stranger in strangers:
            stranger.connect()
        assert ask(server, "PUT", "/global/0", b"a") == (200, b"")
        assert strangers[0].sock.recv(1) == b""  # closed
        for stranger in strangers:
            stranger.close()


def test_who_does_not_read_stops_nobody() -> None:
    with RendezvousServer("127.0.0.1") as server:
        assert ask(server, "PUT", "/global/0", bytes(1 << 20)) == (200, b"")
        deaf = connect(server)
        deaf.connect()
        deaf.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.request("GET", "/global/0")
        assert ask(server, "PUT", "/global/1", b"a") == (200, b"")
        deaf.close()
