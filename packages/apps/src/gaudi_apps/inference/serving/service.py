"""Hold a network with its queue and its limits, answer images by it in batches, and count what came."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import prometheus_client

from gaudi_apps.inference.serving.models import RefusedError, ServedModel

if TYPE_CHECKING:
    from gaudi_apps.inference.serving.flags import ServeFlags

RETRY_SECONDS = 1
STOP_SECONDS = 10.0  # that a stop takes longer than a request may arrive, be answered and its answer be taken
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
        try:
            result: Result = await waiting.future
        except asyncio.CancelledError:
            with contextlib.suppress(ValueError):  # its batch has begun
                self._waiting.remove(waiting)
            raise
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
        open_requests: whose answer is not sent yet.
        answered: images, so far.
        queued: images that have arrived and wait for their answer.
        body_bytes: of requests that are arriving or wait for their answer.
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
        self._free_decoders = asyncio.Semaphore(flags.decoders)
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
        """Predict on an image, whose bytes count until it is answered; return what JSON has, or the drawn image.

        Raises:
            RefusedError: 413, 415, 422; see `ServedModel.prepare`. 429, 503: see `require_room` and `require_model`.
                503; it was not answered in time.
        """
        model = self.model or self.require_model()
        num_bytes = len(encoded)
        self.require_room(num_bytes)
        self.body_bytes += num_bytes
        self.queued += 1
        try:
            answer = await asyncio.wait_for(self._answer(model, encoded, draw), self.flags.timeout_s)
        except asyncio.TimeoutError:
            message = f"not answered within {self.flags.timeout_s:g} s"
            raise RefusedError(503, message, "send it later", retry_seconds=RETRY_SECONDS) from None
        finally:
            self.queued -= 1
            self.body_bytes -= num_bytes
        self.answered += 1
        self.metrics.images.inc()
        return answer

    async def _answer(self, model: ServedModel, encoded: bytes, draw: DrawKind | None) -> dict[str, Any] | bytes:
        image = await self._decode(partial(model.prepare, encoded, is_drawn=draw is not None))
        result = await self._batcher.submit(image)
        if draw is None:
            return model.describe(result)
        drawn: bytes = await self._decode(model.draw, result, draw)
        return drawn

    async def _decode(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a thread for decoding once one is free.

        What waits for a thread waits here, and not in the pool, which would hold the images of clients that have left.
        """
        loop = asyncio.get_running_loop()
        await self._free_decoders.acquire()

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._free_decoders.release)

        job = self._decoders.submit(function, *arguments)
        job.add_done_callback(release)
        return await asyncio.wrap_future(job)

    def begin_request(self) -> None:
        """Count a request that the server has to answer before it ends."""
        self.open_requests += 1

    def count_answer(self, path: str, status: int, seconds: float) -> None:
        """Count an answer, or 499 for a client that left."""
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.seconds.labels(path).observe(seconds)

    def end_request(self) -> None:
        """Count a request whose answer is sent, or whose client has left."""
        self.open_requests -= 1
        if self.is_stopping and not self.open_requests:
            self._all_answered.set()

    async def finish_requests(self) -> None:
        """Refuse what comes from now on, and wait until all answers are sent, which `timeout_s` bounds three times."""
        self.is_stopping = True
        if self.open_requests:
            with contextlib.suppress(asyncio.TimeoutError):  # requests that follow on kept connections
                await asyncio.wait_for(self._all_answered.wait(), 3 * self.flags.timeout_s + STOP_SECONDS)

    def close(self) -> None:
        """End the threads once they have done what they do, which nobody waits for any more."""
        for pool in (self._decoders, self._network):
            pool.shutdown(wait=False, cancel_futures=True)
