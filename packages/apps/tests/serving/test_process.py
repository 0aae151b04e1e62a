"""Start the program as a process of its own: signals, a kill, and a second start on the same port."""

from __future__ import annotations

import http.client
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "small_serve.py"
PATIENCE_SECONDS = 600.0
pytestmark = pytest.mark.slow


class Started:
    """A server in a process of its own, which is ready."""

    def __init__(self, weights: Path, port: int = 0, *, waits: bool = True) -> None:
        words = [sys.executable, PROGRAM, "serve", "--model_dir", weights, "--port", port, "--timeout_s", 600]
        self.process = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.out = self.process.stdout
        self.port = int(self.out.readline().partition(": listens")[0].rpartition(":")[2])
        if waits:
            assert "ready" in self.out.readline()

    def post(self, image: bytes) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)
        connection.request("POST", "/predict", image)
        return connection.getresponse().status


@pytest.fixture
def start(weights: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def run(port: int = 0, *, waits: bool = True) -> Started:
        started.append(Started(weights, port, waits=waits))
        return started[-1]

    yield run
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_a_signal_finishes_what_is_in_flight_and_ends_with_0(
    start: Callable[..., Started], images: list[bytes]
) -> None:
    server = start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_SECONDS) as opened:
        head = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(images[0])
        opened.sendall(head + images[0][:40])
        assert server.post(images[1]) == 200  # so the head before it has been read
        server.process.send_signal(signal.SIGTERM)
        assert "finishes 1 request" in server.out.readline()
        opened.sendall(images[0][40:])
        reply = http.client.HTTPResponse(opened)
        reply.begin()
        assert reply.status == 200
    out, err = server.process.communicate(timeout=PATIENCE_SECONDS)
    assert server.process.returncode == 0
    assert "2 images" in out
    assert "Traceback" not in err


def test_a_killed_server_starts_again_on_its_port_and_a_second_signal_interrupts(
    start: Callable[..., Started], images: list[bytes]
) -> None:
    killed = start()
    with socket.create_connection(("127.0.0.1", killed.port)):
        assert killed.post(images[0]) == 200
        killed.process.kill()
        killed.process.wait(PATIENCE_SECONDS)
    server = start(killed.port)
    with socket.create_connection(("127.0.0.1", server.port)) as opened:
        opened.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + images[0][:40])
        assert server.post(images[1]) == 200
        server.process.send_signal(signal.SIGTERM)
        assert "finishes 1 request" in server.out.readline()
        server.process.send_signal(signal.SIGTERM)
        _, err = server.process.communicate(timeout=PATIENCE_SECONDS)
    assert server.process.returncode == 75
    assert "Traceback" not in err


@pytest.mark.parametrize(("signals", "status"), [(1, 0), (2, 75)])
def test_a_load_is_not_waited_for(start: Callable[..., Started], signals: int, status: int) -> None:
    server = start(waits=False)
    server.process.send_signal(signal.SIGTERM)
    if signals == 2:
        assert "finishes 0 requests" in server.out.readline()
        server.process.send_signal(signal.SIGTERM)
    out, err = server.process.communicate(timeout=PATIENCE_SECONDS)
    assert server.process.returncode in (status, 0)
    assert "ready" not in out
    assert "Traceback" not in err
