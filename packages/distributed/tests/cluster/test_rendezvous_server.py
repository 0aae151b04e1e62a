"""The meeting point answers as Horovod's ranks ask."""

from __future__ import annotations

from http.client import HTTPConnection

from gaudi_distributed.cluster.rendezvous import RendezvousServer


def connect(server: RendezvousServer) -> HTTPConnection:
    environment = server.environment
    port = int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    return HTTPConnection(environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port, timeout=600)


def ask(server: RendezvousServer, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = connect(server)
    connection.request(method, path, body)
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
