"""Start servers within this process, with the network of small_ssd.py, and ask them over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import queue
import runpy
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gaudi_apps.inference.serving.flags import ServeFlags
from gaudi_apps.inference.serving.models import ServedModel
from gaudi_apps.inference.serving.server import listen, serve
from gaudi_apps.inference.serving.service import ImageService

PATIENCE_SECONDS = 600.0
SMALL = runpy.run_path(str(Path(__file__).parents[1] / "small_serve.py"))


class Answer(NamedTuple):
    """Status, headers and body of an answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> Any:
        return self.document["error"]


class Gate:
    """Hold what passes it, and tell how many images of each batch have come to it.

    Attributes:
        sizes: of the batches, as they come.
    """

    def __init__(self) -> None:
        self.sizes: queue.Queue[int] = queue.Queue()
        self._opened = threading.Event()

    def pass_through(self, size: int) -> None:
        self.sizes.put(size)
        assert self._opened.wait(PATIENCE_SECONDS)

    def open(self) -> None:
        self._opened.set()


class Running:
    """A server that runs in a thread of this process.

    Attributes:
        flags: of the server.
        port: of the server.
        ended: the path and status of each request, as it ends.
    """

    def __init__(self, flags: ServeFlags) -> None:
        self.flags, self.ended = flags, queue.Queue[tuple[str, int]]()
        sockets = listen(flags.host, 0)
        self.port = int(sockets[0].getsockname()[1])
        self._is_up, self.error = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, args=(flags, sockets))
        self._thread.start()
        assert self._is_up.wait(PATIENCE_SECONDS)

    def _run(self, flags: ServeFlags, sockets: list[socket.socket]) -> None:
        async def run() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._is_up.set()
            await serve(flags, sockets, self._stop)

        try:
            asyncio.run(run())
        except Exception as error:
            self.error.append(error)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_SECONDS)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        return read_answer(self.connect(), method, path, body, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)

    def begin(self, body: bytes, announced: int | None = None) -> socket.socket:
        """Send a head and a body, which may be shorter than is announced, and read nothing."""
        opened = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)
        length = len(body) if announced is None else announced
        opened.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length + body)
        return opened

    def wait_for_end_of(self, path: str, status: int) -> None:
        while self.ended.get(timeout=PATIENCE_SECONDS) != (path, status):
            pass

    def count(self, line: str) -> float:
        """Return the value of a metric."""
        lines = self.ask("GET", "/metrics").body.decode().splitlines()
        return float(next((one.rpartition(" ")[2] for one in lines if one.startswith(f"{line} ")), 0))

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended already
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self) -> None:
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()


def read_answer(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str
) -> Answer:
    connection.request(method, path, body, headers)
    found = connection.getresponse()
    return Answer(found.status, found.msg, found.read())


def read_reply(opened: socket.socket) -> Answer:
    """Read the answer to `Running.begin`."""
    reply = http.client.HTTPResponse(opened)
    reply.begin()
    return Answer(reply.status, reply.msg, reply.read())


@pytest.fixture(scope="session")
def images() -> list[bytes]:
    """Make six photos: JPEG, PNG, WebP, twice."""
    made: list[bytes] = SMALL["make_images"](6)
    return made


@pytest.fixture(scope="session")
def weights(small_network: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the weights that find several things in a photo."""
    path = tmp_path_factory.mktemp("served") / "small.safetensors"
    SMALL["write_small_weights"](path, small_network)
    return path


@contextlib.contextmanager
def open_starter(weights: Path, small_network: Callable[..., Any]) -> Iterator[Callable[..., Running]]:
    """Give a function that starts a server by its flags, and waits until it is ready; in the end all stop."""
    running: list[Running] = []
    count_answer = ImageService.count_answer

    def count_and_tell(state: ImageService, path: str, status: int, seconds: float) -> None:
        count_answer(state, path, status, seconds)
        running[-1].ended.put((path, status))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gaudi_apps.detection.detector.build_ssd", partial(small_network, names=SMALL["NAMES"]))

        # On a machine that does other work an answer takes longer than a user would wait.
        def run(*, waits: bool = True, timeout_s: float = 600.0, **flags: Any) -> Running:
            server = Running(ServeFlags(flags.pop("model_dir", weights), timeout_s=timeout_s, **flags))
            running.append(server)
            patch.setattr(ImageService, "count_answer", count_and_tell)
            while waits and server.ask("GET", "/readyz").status != 200:
                assert not server.error
            return server

        yield run
        for server in running:
            server.stop()
            server.join()


@pytest.fixture
def start(weights: Path, small_network: Callable[..., Any]) -> Iterator[Callable[..., Running]]:
    """Start servers of one test."""
    with open_starter(weights, small_network) as starter:
        yield starter


@pytest.fixture(scope="module")
def server(weights: Path, small_network: Callable[..., Any]) -> Iterator[Running]:
    """Start one server for all tests that only ask it: to start one costs as much as twenty requests."""
    with open_starter(weights, small_network) as starter:
        yield starter(max_megabytes=0.5, max_megapixels=1.0, max_batch=4)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Return a gate before the network, which warming up passes."""
    made, predict, warm_up = Gate(), ServedModel.predict, ServedModel.warm_up
    is_warm = threading.Event()

    def predict_later(model: ServedModel, prepared: Any) -> list[Any]:
        if is_warm.is_set():
            made.pass_through(len(prepared))
        return predict(model, prepared)

    def warm_up_freely(model: ServedModel, max_batch: int) -> None:
        warm_up(model, max_batch)
        is_warm.set()

    monkeypatch.setattr(ServedModel, "predict", predict_later)
    monkeypatch.setattr(ServedModel, "warm_up", warm_up_freely)
    yield made
    made.open()
