"""The meeting point answers as Horovod's ranks ask."""

from __future__ import annotations

from http.client import HTTPConnection

from gaudi_distributed.cluster.rendezvous import Rendezvous


def connect(place: Rendezvous) -> HTTPConnection:
    environment = place.environment
    port = int(environment["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    return HTTPConnection(environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"], port, timeout=600)


def ask(place: Rendezvous, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = connect(place)
    connection.request(method, path, body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_what_was_put_is_got() -> None:
    with Rendezvous("127.0.0.1") as place:
        assert ask(place, "GET", "/global/0")[0] == 404
        assert ask(place, "PUT", "/global/0", b"\x00\xff") == (200, b"")
        assert ask(place, "GET", "/global/0") == (200, b"\x00\xff")
        assert ask(place, "GET", "/global/1")[0] == 404
        assert ask(place, "DELETE", "/global/0")[0] == 200


def test_a_value_is_bounded() -> None:
    with Rendezvous("127.0.0.1") as place:
        connection = connect(place)
        connection.putrequest("PUT", "/global/0")
        connection.putheader("Content-Length", str((1 << 20) + 1))
        connection.endheaders()  # the refusal does not wait for what it is about
        assert connection.getresponse().status == 400
        connection.close()
