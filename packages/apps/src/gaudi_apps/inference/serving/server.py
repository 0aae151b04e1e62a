"""Serve a trained network over HTTP: listen, queue, join images into batches, and end without losing an answer.

Tornado is the server, for it is one wheel without dependencies, and bounds the time of a request's head, which uvicorn
leaves open.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import PIL.Image
import prometheus_client
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.log import app_log, gen_log
from tornado.netutil import bind_sockets

from gaudi_apps.inference.serving.handlers import make_application
from gaudi_apps.inference.serving.models import RefusedError, ServedModel
from gaudi_apps.runtime.errors import AddressError
from gaudi_datasets.program import count_things
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.inference.serving.flags import ServeFlags

MOST_CONNECTIONS = 512
MOST_HEADER_BYTES, READ_BYTES = 16 * 1024, 64 * 1024
RETRY_SECONDS = 1
# Bodies that have begun to arrive take no more memory than this, or eight of the largest, whichever is more.
BODY_BYTES, BODIES = 2**28, 8
LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

DrawKind = Literal["jpeg", "png"]
Item = TypeVar("Item")
Result = TypeVar("Result")


class _Waiting(NamedTuple):
    """An item that waits, since when by the clock of the loop, and what gets its result."""

    item: Any
    since: float
    future: asyncio.Future[Any]


class Batcher(Generic[Item, Result]):
    """Compute items in batches: a batch closes when it is full, or some time after its first item came.

    While a batch is computed, items gather for the next one. All methods are called in the thread of the event loop.

    Args:
        compute: returns the results of a batch, in its order; is called in `thread`.
        thread: with one worker.
        max_batch: items of a batch, at most.
        max_delay_seconds: that an item waits for others while nothing is computed, at most.
        on_batch: gets the number of items of each batch that was computed.
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Item]], Sequence[Result]],
        thread: ThreadPoolExecutor,
        *,
        max_batch: int,
        max_delay_seconds: float,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._compute, self._thread, self._on_batch = compute, thread, on_batch
        self._max_batch, self._max_delay = max_batch, max_delay_seconds
        self._waiting: deque[_Waiting] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Return the number of items that wait for their batch."""
        return len(self._waiting)

    async def submit(self, item: Item) -> Result:
        """Return the result of an item; one whose caller is cancelled before its batch begins is not computed.

        Raises:
            Exception: what computing the batch raised.
        """
        loop = asyncio.get_running_loop()
        waiting = _Waiting(item, loop.time(), loop.create_future())
        self._waiting.append(waiting)
        self._begin_if_due()
        result: Result = await waiting.future
        return result

    def _begin_if_due(self) -> None:
        """Begin a batch that is full or has waited long enough, or ask to be called when that will be so."""
        if self._running is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting and self._waiting[0].future.done():  # its caller has left
            self._waiting.popleft()
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        due = self._waiting[0].since + self._max_delay
        if len(self._waiting) < self._max_batch and loop.time() < due:
            self._timer = loop.call_at(due, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        self._timer = None
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch:
            waiting = self._waiting.popleft()
            if not waiting.future.done():
                batch.append(waiting)
        if batch:
            self._running = asyncio.get_running_loop().create_task(self._run(batch))

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(self._thread, self._compute, [one.item for one in batch])
            for one, result in zip(batch, results, strict=True):
                if not one.future.done():
                    one.future.set_result(result)
            self._on_batch(len(batch))
        except Exception as error:
            for one in batch:
                if not one.future.done():
                    one.future.set_exception(error)
        finally:
            self._running = None
        self._begin_if_due()


class Metrics:
    """Count what the server does, in a registry of its own.

    Attributes:
        registry: of Prometheus.
        requests: by path and status; 499: the client left.
        seconds: from the head of a request to its answer, by path.
        images: that were answered.
        batches: the number of images in each batch.
    """

    def __init__(self, queue_length: Callable[[], float]) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        own: Any = {"registry": self.registry, "namespace": "gaudi"}
        self.requests = prometheus_client.Counter("requests", "Requests by path and status.", ["path", "status"], **own)
        self.seconds = prometheus_client.Histogram(
            "request_seconds", "Seconds from head to answer.", ["path"], buckets=LATENCIES, **own
        )
        self.images = prometheus_client.Counter("images", "Images that were answered.", **own)
        self.batches = prometheus_client.Histogram("batch_size", "Images of a batch.", buckets=SIZES, **own)
        queue = prometheus_client.Gauge("queue_length", "Images that wait for their answer.", **own)
        queue.set_function(queue_length)
        prometheus_client.ProcessCollector(registry=self.registry)  # memory, processors, files

    def render(self) -> bytes:
        """Return all in the text format of Prometheus."""
        return prometheus_client.generate_latest(self.registry)


class ImageService:
    """A network with its queue, limits and counts; what the handlers of requests ask.

    Args:
        flags: of the server.

    Attributes:
        model: the network; None before it is loaded.
        open_requests: that are not answered yet.
        answered: images, so far.
        queued: images that have arrived and wait for their answer.
        body_bytes: of requests that are arriving.
        is_stopping: whether the server takes no requests any more.
    """

    def __init__(self, flags: ServeFlags) -> None:
        self.flags = flags
        self.model: ServedModel | None = None
        self.open_requests = self.answered = self.queued = self.body_bytes = 0
        self.is_stopping = False
        self.metrics = Metrics(lambda: self.queued)
        self.max_bytes, self.max_pixels = round(flags.max_megabytes * 1e6), round(flags.max_megapixels * 1e6)
        self._most_body_bytes = max(BODY_BYTES, BODIES * self.max_bytes)
        self._all_answered = asyncio.Event()
        self._network = ThreadPoolExecutor(1, "network")
        self._decoders = ThreadPoolExecutor(flags.decoders, "decoder")
        self._batcher: Batcher[Any, Any] = Batcher(
            self._predict,
            self._network,
            max_batch=flags.max_batch,
            max_delay_seconds=flags.max_delay_ms / 1000,
            on_batch=self.metrics.batches.observe,
        )

    def _predict(self, images: Any) -> list[Any]:
        if self.model is None:
            raise RuntimeError("the network is not loaded")
        return self.model.predict(images)

    async def load(self) -> None:
        """Load the network and warm it up, in the thread that will compute; errors are those of `ServedModel.load`."""
        model = await asyncio.get_running_loop().run_in_executor(self._network, self._load)
        self.model = model

    def _load(self) -> ServedModel:
        flags = self.flags
        options = {"score_threshold": flags.score_threshold, "top": flags.top, "max_pixels": self.max_pixels}
        model = ServedModel.load(flags.model_dir, runtime=flags.runtime, **options)  # type: ignore[arg-type]
        model.warm_up(flags.max_batch)
        return model

    def require_model(self) -> ServedModel:
        """Return the network.

        Raises:
            RefusedError: 503; it is not loaded yet, or the server ends.
        """
        if self.is_stopping:
            raise RefusedError(503, "the server ends", "ask another one", retry_seconds=RETRY_SECONDS)
        if self.model is None:
            raise RefusedError(503, "the network is being loaded", "wait for /readyz", retry_seconds=RETRY_SECONDS)
        return self.model

    def require_room(self, num_bytes: int = 0) -> None:
        """Check that one more image may wait, and so many more bytes of a body may be held.

        Raises:
            RefusedError: 429.
        """
        if self.queued >= self.flags.max_queue:
            raise RefusedError(429, f"{self.queued} images wait already", "send less", retry_seconds=RETRY_SECONDS)
        if self.body_bytes + num_bytes > self._most_body_bytes:
            raise RefusedError(429, "too much is arriving at once", "send less", retry_seconds=RETRY_SECONDS)

    async def answer(self, encoded: bytes, draw: DrawKind | None) -> dict[str, Any] | bytes:
        """Predict on an image; return what JSON has, or the drawn image.

        Raises:
            RefusedError: 413, 415, 422; see `ServedModel.prepare`. 429, 503: see `require_room` and `require_model`.
                503; it was not answered in time.
        """
        model = self.model or self.require_model()
        self.require_room()
        self.queued += 1
        try:
            answer = await asyncio.wait_for(self._answer(model, encoded, draw), self.flags.timeout_s)
        except asyncio.TimeoutError:
            message = f"not answered within {self.flags.timeout_s:g} s"
            raise RefusedError(503, message, "send it later", retry_seconds=RETRY_SECONDS) from None
        finally:
            self.queued -= 1
        self.answered += 1
        self.metrics.images.inc()
        return answer

    async def _answer(self, model: ServedModel, encoded: bytes, draw: DrawKind | None) -> dict[str, Any] | bytes:
        loop = asyncio.get_running_loop()
        image = await loop.run_in_executor(self._decoders, model.prepare, encoded)
        result = await self._batcher.submit(image)
        if draw is None:
            return model.describe(result)
        return await loop.run_in_executor(self._decoders, model.draw, result, draw)

    def begin_request(self) -> None:
        """Count a request that the server has to answer before it ends."""
        self.open_requests += 1

    def end_request(self, path: str, status: int, seconds: float) -> None:
        """Count an answer, or 499 for a client that left."""
        self.open_requests -= 1
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        if self.is_stopping and not self.open_requests:
            self._all_answered.set()

    async def finish_requests(self) -> None:
        """Refuse what comes from now on, and wait until all that came before is answered, which `timeout_s` bounds."""
        self.is_stopping = True
        if self.open_requests:
            await self._all_answered.wait()

    def close(self) -> None:
        """End the threads once they have done what they do."""
        for pool in (self._decoders, self._network):
            pool.shutdown(wait=True, cancel_futures=True)


class BoundedServer(HTTPServer):
    """An HTTP server with a bound on open connections; one too many is told so and closed."""

    def handle_stream(self, stream: IOStream, address: Any) -> None:
        """Serve a connection."""
        if len(self._connections) < MOST_CONNECTIONS:
            super().handle_stream(stream, address)
            return
        head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: {RETRY_SECONDS}\r\n"
        written = stream.write(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        written.add_done_callback(lambda _: (written.exception(), stream.close()))


def listen(host: str, port: int) -> list[socket.socket]:
    """Listen on an address.

    Raises:
        AddressError: another program listens there, or the address is none of this machine.
    """
    try:
        return bind_sockets(port, host, family=socket.AF_UNSPEC if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = error.strerror or str(error)
        raise AddressError(
            f"cannot listen on {host} port {port} ({reason})", flag="--port", remedy="give another --port or --host"
        ) from None


class _SayHandler(logging.Handler):
    """Print what Tornado reports, escaped; with a traceback only in debug."""

    def __init__(self, debug: bool) -> None:
        super().__init__(logging.WARNING)
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().splitlines()[0] if record.msg else record.levelname
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        say(f"warning: {text}", error=True)
        if self._debug and record.exc_info:
            say(*logging.Formatter().formatException(record.exc_info).splitlines(), error=True)


def run_server(flags: ServeFlags) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what has come; a second one interrupts at once.

    Raises:
        AddressError: see `listen`.
        GaudiError, WeightsError: see `ServedModel.load`.
        KeyboardInterrupt: a second signal.
    """
    # Pillow warns of what is refused by a lower bound than its own.
    warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)
    sockets = listen(flags.host, flags.port)

    async def run() -> None:
        stop = asyncio.Event()
        _stop_at_signals(stop)
        await serve(flags, sockets, stop)

    asyncio.run(run())


async def serve(flags: ServeFlags, sockets: list[socket.socket], stop: asyncio.Event) -> None:
    """Serve on sockets until an event is set, then finish what has come; raises as `ServedModel.load` does."""
    for log in (app_log, gen_log, logging.getLogger("asyncio")):
        log.handlers, log.propagate = [_SayHandler(flags.debug)], False
    state = ImageService(flags)
    server = BoundedServer(
        make_application(state),
        idle_connection_timeout=flags.timeout_s,  # of a head, too
        max_header_size=MOST_HEADER_BYTES,
        chunk_size=READ_BYTES,
        max_buffer_size=16 * READ_BYTES,
        max_body_size=READ_BYTES,  # of a request without an image
        body_timeout=flags.timeout_s,
    )
    server.add_sockets(sockets)
    host, port = sockets[0].getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    say(f"{url}: listens, and loads {flags.model_dir}")
    loading, stopping = asyncio.ensure_future(state.load()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            model = state.require_model()
            say(f"{url}: ready, a {model.kind} of {count_things(len(model.classes), 'class')}")
            await stopping
        say(f"{url}: ends, and finishes {count_things(state.open_requests, 'request')}")
    finally:
        server.stop()
        await state.finish_requests()
        await server.close_all_connections()
        stopping.cancel()
        state.close()
    say(f"{url}: ended, {count_things(state.answered, 'image')} answered")


def _stop_at_signals(stop: asyncio.Event) -> None:
    """Set the event at the first SIGTERM, SIGINT or SIGHUP that is not ignored, and be interrupted by a second one."""
    loop = asyncio.get_running_loop()

    def note() -> None:
        for number in noted:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler)
        stop.set()

    noted = [one for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    for number in noted:
        loop.add_signal_handler(number, note)
