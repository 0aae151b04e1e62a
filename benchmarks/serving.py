"""Serving under load: 10,000 requests of 32 clients, one in twenty hostile, and the latency at half of the most.

The server runs in a process of its own, with the network of the tests that costs next to nothing, so what is measured
is all around the network. Every answer is compared with what `Detector.predict` says of the image alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image

from benchmarks.measurement import Figure, main

TESTS = Path(__file__).resolve().parents[1] / "packages" / "apps" / "tests"
REQUESTS, CLIENTS, HOSTILE_SHARE, SEED = 10_000, 32, 0.05, 0
SHARE_DRAWN = 0.1
IMAGES = 24
SECONDS_ALLOWED, MEGABYTES_ALLOWED = 10, 2
HALF_LOAD_REQUESTS = 800
PATIENCE = 120  # seconds after which an answer that has not come never will


class Reply(NamedTuple):
    """Status, headers by lower-case names, and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """A client with a connection that it keeps, where the server lets it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the connection, opened anew where there is none."""
        if self._streams is None or self._streams[1].is_closing() or self._streams[0].at_eof():
            await self.close()
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        return self._streams

    async def close(self) -> None:
        """Leave, whatever is under way."""
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(OSError):
                await self._streams[1].wait_closed()
            self._streams = None

    async def send(self, content: bytes) -> None:
        """Send bytes; one who is refused while he sends may find that nobody reads on."""
        _, writer = await self.connect()
        writer.write(content)
        with contextlib.suppress(OSError):
            await writer.drain()

    async def read(self) -> Reply:
        """Read an answer.

        Raises:
            EOFError, OSError: the server has closed the connection without one.
        """
        reader, _ = await self.connect()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            await self.close()
        return Reply(int(head[0].split()[1]), headers, body)

    async def post(self, path: str, body: bytes) -> Reply:
        """Send an image, and read the answer; a kept connection that was closed meanwhile is opened again."""
        for is_last in (False, True):
            try:
                await self.send(make_head(path, len(body)) + body)
                return await self.read()
            except (EOFError, OSError):
                await self.close()
                if is_last:
                    raise
        raise AssertionError


def make_head(path: str, length: int | None, method: str = "POST") -> bytes:
    """Make the head of a request; without a length, its body comes in chunks."""
    body = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{body}\r\n\r\n".encode()


class Expected(NamedTuple):
    """An image, and what has to be answered to it."""

    encoded: bytes
    document: dict[str, Any]
    drawn: Any


async def send_truncated(client: Client, image: bytes) -> bool:
    """Send half of an image as if it were all."""
    reply = await client.post("/predict", image[: len(image) // 2])
    return reply.status == 422


async def send_text(client: Client, image: bytes) -> bool:
    """Send what is no image."""
    reply = await client.post("/draw", b"<svg onload=alert(1)>" * 20)
    return reply.status == 415


async def announce_huge(client: Client, image: bytes) -> bool:
    """Announce more bytes than are allowed."""
    await client.send(make_head("/predict", 10**9) + image)
    reply = await client.read()
    await client.close()
    return reply.status == 413


async def stream_huge(client: Client, image: bytes) -> bool:
    """Send more than is allowed without announcing it."""
    await client.send(make_head("/predict", None))
    part = image[:12] + bytes(2**16)
    for _ in range(MEGABYTES_ALLOWED * 10**6 // len(part) + 2):
        await client.send(b"%x\r\n%b\r\n" % (len(part), part))
    reply = await client.read()
    await client.close()
    return reply.status == 413


async def send_bomb(client: Client, image: bytes) -> bool:
    """Send a small file of 900 million pixels."""
    head = b"IHDR" + (30_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    bomb = b"\x89PNG\r\n\x1a\n\x00\x00\x00\r" + head + zlib.crc32(head).to_bytes(4, "big") + bytes(1000)
    reply = await client.post("/predict", bomb)
    return reply.status == 413


async def send_slowly(client: Client, image: bytes) -> bool:
    """Send a byte now and then."""
    await client.send(make_head("/predict", len(image)) + image[:20])
    answer = asyncio.ensure_future(client.read())
    for place in itertools.count(20):
        await asyncio.wait((answer,), timeout=0.5)
        if answer.done():
            break
        await client.send(image[place : place + 1])
    await client.close()
    return answer.result().status == 408


async def send_head_slowly(client: Client, image: bytes) -> bool:
    """Begin a head and never end it; the server closes the connection."""
    await client.close()
    reader, _ = await client.connect()
    await client.send(b"POST /predict HTTP/1.1\r\nHost: ")
    rest = await reader.read()
    await client.close()
    return rest == b""


async def leave_early(client: Client, image: bytes) -> bool:
    """Leave in the middle of the body."""
    await client.send(make_head("/predict", len(image)) + image[: len(image) // 2])
    await client.close()
    return True


async def leave_unanswered(client: Client, image: bytes) -> bool:
    """Send all and do not wait."""
    await client.send(make_head("/predict", len(image)) + image)
    await client.close()
    return True


async def use_other_method(client: Client, image: bytes) -> bool:
    """Put an image."""
    await client.send(make_head("/predict", len(image), "PUT") + image)
    reply = await client.read()
    await client.close()
    return reply.status == 405


HOSTILE: tuple[Callable[[Client, bytes], Awaitable[bool]], ...] = (
    send_truncated,
    send_text,
    announce_huge,
    stream_huge,
    send_bomb,
    send_slowly,
    send_head_slowly,
    leave_early,
    leave_unanswered,
    use_other_method,
)


def is_right(reply: Reply, expected: Expected, *, drawn: bool) -> bool:
    """Tell whether an answer is what the image alone gives: boxes within half a pixel, scores within .001."""
    if reply.status != 200:
        return False
    if drawn:
        with tempfile.SpooledTemporaryFile() as file:
            file.write(reply.body)
            found = np.asarray(Image.open(file).convert("RGB"), np.float32)
        return found.shape == expected.drawn.shape and float(np.abs(found - expected.drawn).mean()) < 6
    document = json.loads(reply.body)
    pairs = list(zip(document["detections"], expected.document["detections"], strict=False))
    return (
        len(document["detections"]) == len(expected.document["detections"])
        and (document["height"], document["width"]) == (expected.document["height"], expected.document["width"])
        and all(one["category_id"] == other["category_id"] for one, other in pairs)
        and all(np.allclose(one["bbox"], other["bbox"], atol=0.5) for one, other in pairs)
        and all(abs(one["score"] - other["score"]) < 1e-3 for one, other in pairs)
    )


def predict_alone(weights: Path, images: Sequence[bytes]) -> list[Expected]:
    """Predict on each image by itself."""
    import gaudi_models.ssd

    names = runpy.run_path(str(TESTS / "small_serve.py"))["NAMES"]
    gaudi_models.ssd.build_ssd = partial(runpy.run_path(str(TESTS / "small_ssd.py"))["build_small_ssd"], names=names)
    from gaudi_apps.detection.detector import Detector

    detector = Detector.load(weights)
    expected = []
    for image in images:
        found = detector.predict(image)
        rows = [{**row, "class": name} for row, name in zip(found.to_coco(), found.names, strict=True)]
        document = {"height": found.height, "width": found.width, "detections": rows}
        expected.append(Expected(image, document, np.asarray(found.draw(), np.float32)))
    return expected


@contextlib.contextmanager
def run_server(weights: Path) -> Iterator[tuple[psutil.Process, int]]:
    """Start a server and wait until it is ready; yield its process and its port."""
    limits = ["--max_megabytes", MEGABYTES_ALLOWED, "--timeout_s", SECONDS_ALLOWED]
    words = [sys.executable, TESTS / "small_serve.py", "serve", "--model_dir", weights, "--port", 0, *limits]
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
    try:
        lines = process.stdout or ()
        address = next(iter(lines), "").partition(": listens")[0]
        if "ready" not in next(iter(lines), ""):
            raise SystemExit("the server did not become ready")
        yield psutil.Process(process.pid), int(address.rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


class Load(NamedTuple):
    """Hold what came of many requests.

    Attributes:
        seconds: of all.
        latencies: seconds of each image that was answered.
        counts: of requests by kind; those that went wrong are named ``wrong ...``.
        memory: resident bytes of the server after each thousand.
    """

    seconds: float
    latencies: list[float]
    counts: Counter[str]
    memory: list[int]


async def load_fully(server: psutil.Process, port: int, expected: Sequence[Expected]) -> Load:
    """Send all requests, each client its next one as soon as it has its answer."""
    numbers, load = iter(range(REQUESTS)), Load(0.0, [], Counter(), [])

    async def work() -> None:
        client = Client(port)
        for number in numbers:
            await asyncio.wait_for(send_one(client, number, expected, load), PATIENCE)
            if (number + 1) % 1000 == 0:
                load.memory.append(server.memory_info().rss)
        await client.close()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CLIENTS)))
    return load._replace(seconds=time.perf_counter() - started)


async def send_one(client: Client, number: int, expected: Sequence[Expected], load: Load) -> None:
    """Send the request of a number, which decides what it is, and judge the answer."""
    generator = np.random.default_rng([SEED, number])
    one = expected[int(generator.integers(len(expected)))]
    if generator.random() < HOSTILE_SHARE:
        hostile = HOSTILE[int(generator.integers(len(HOSTILE)))]
        name = hostile.__name__
        good = False
        with contextlib.suppress(EOFError, OSError):
            good = await hostile(client, one.encoded)
        await client.close()
    else:
        drawn = bool(generator.random() < SHARE_DRAWN)
        name = "draw" if drawn else "predict"
        started = time.perf_counter()
        reply = await client.post(f"/{name}", one.encoded)
        load.latencies.append(time.perf_counter() - started)
        good = is_right(reply, one, drawn=drawn)
    load.counts[name if good else f"wrong {name}"] += 1


async def load_evenly(port: int, expected: Sequence[Expected], rate: float) -> list[float]:
    """Send images at random moments, so many a second, however long answers take; return the seconds of each."""
    generator, clients, latencies = np.random.default_rng(SEED), [Client(port) for _ in range(CLIENTS)], list[float]()
    free: asyncio.Queue[Client] = asyncio.Queue()
    for client in clients:
        free.put_nowait(client)

    async def ask(due: float) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        client = await free.get()
        await client.post("/predict", expected[len(latencies) % len(expected)].encoded)
        latencies.append(time.perf_counter() - due)
        free.put_nowait(client)

    moments = time.perf_counter() + 0.1 + np.cumsum(generator.exponential(1 / rate, HALF_LOAD_REQUESTS))
    await asyncio.wait_for(asyncio.gather(*map(ask, moments.tolist())), 30 * PATIENCE)
    for client in clients:
        await client.close()
    return latencies


def run(budget_seconds: float) -> Iterator[Figure]:
    """Measure; about as many seconds as the requests need, whatever the budget."""
    small = runpy.run_path(str(TESTS / "small_serve.py"))
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "small.safetensors"
        small["write_small_weights"](weights, runpy.run_path(str(TESTS / "small_ssd.py"))["build_small_ssd"])
        expected = predict_alone(weights, small["make_images"](IMAGES))
        with run_server(weights) as (server, port):
            load = asyncio.run(load_fully(server, port, expected))
            rate = len(load.latencies) / load.seconds
            latencies = asyncio.run(load_evenly(port, expected, rate / 2))
    wrong = sum(count for name, count in load.counts.items() if name.startswith("wrong"))
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(load.counts.items()))
    title = f"serving, {CLIENTS} clients"
    yield Figure(f"{title}: wrong answers of {REQUESTS}", wrong, "", most=0, note=kinds, details=dict(load.counts))
    mib = [round(one / 2**20) for one in load.memory]
    growth = load.memory[-1] / load.memory[0]
    yield Figure(f"{title}: memory, last thousand over first", growth, most=1.05, note=f"{mib[0]}, {mib[-1]} MiB",
                 details={"mib": mib})  # fmt: skip
    yield Figure(f"{title}: highest load", rate, "images/s", note=describe(load.latencies))
    for name, place in (("p50", 49), ("p99", 98)):
        value = 1000 * statistics.quantiles(latencies, n=100)[place]
        yield Figure(f"{title}: {name} at half of it", value, "ms", note=f"{rate / 2:.1f} images/s, at random moments")


def describe(latencies: Sequence[float]) -> str:
    """Describe latencies in milliseconds."""
    cuts = statistics.quantiles(latencies, n=100)
    return f"p50 {1000 * cuts[49]:.0f}, p99 {1000 * cuts[98]:.0f} ms"


if __name__ == "__main__":
    main(run)
