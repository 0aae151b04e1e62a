"""The detector's training input from records in a store that is 50 ms away, against the same records in a folder.

The store is a server of this machine that speaks as much of S3 as reading needs, in a process of its own, and waits
before each answer. Run it in the environment of `nox -s remote`: `python -m benchmarks.stored_records`.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.detection_input import write_photographs
from benchmarks.measurement import Figure, compare, describe_rates, interleave, main
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.records.remote_records import RemoteRecords, use_cache
from gaudi_datasets.sampling import InputOptions

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

LATENCY = 0.05
BATCH_SIZE = 32
STEPS = 60  # of a turn; what is read ahead at its end is a seventh of that
REPEATS = 5
LEAST = 0.9


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with a file, or a range of it, after the time of the way there and back."""
        time.sleep(LATENCY)
        path = self.folder / self.path.partition("?")[0].rpartition("/")[2]
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(match[1]), min(int(match[2]), size - 1)) if match else (0, size - 1)
        with path.open("rb") as file:
            file.seek(first)
            content = file.read(last - first + 1)
        self.send_response(206 if match else 200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        self.wfile.write(content)


def serve(folder: str, port: Connection) -> None:
    """Serve the files of a folder as those of any bucket, until the process is ended; send the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"folder": Path(folder)}))
    port.send(server.server_port)
    server.serve_forever()


@contextmanager
def open_store(folder: str) -> Iterator[None]:
    """Serve a folder within a context, and name the server as the store of this process."""
    context = multiprocessing.get_context("spawn")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(folder, sent), daemon=True)
    process.start()
    names = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ.update(names, AWS_ENDPOINT_URL=f"http://127.0.0.1:{received.recv()}")
    try:
        yield
    finally:
        process.terminate()
        process.join()


def measure_input(budget_seconds: float) -> Iterator[Figure]:
    """Measure the speed of records that were fetched, and of records that are read by ranges, each time."""
    from gaudi_datasets.detection.pipeline import train_dataset

    options = InputOptions(BATCH_SIZE, threads=len(os.sched_getaffinity(0)))

    processors: dict[str, list[float]] = {}

    def read(name: str, source: RecordSource) -> Callable[[], None]:
        batches = train_dataset(source, options).take(STEPS)

        def turn() -> None:  # by an iterator of its own, so that little runs on in the turns of others
            began = time.process_time()
            for _ in batches:
                pass
            processors.setdefault(name, []).append(time.process_time() - began)

        return turn

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache, open_store(folder):
        local = write_photographs(Path(folder))
        began = time.perf_counter()
        use_cache(f"{cache}/all")
        fetched = RecordSource("s3://bucket/records", "train")
        seconds = time.perf_counter() - began
        use_cache(f"{cache}/none", 1e-9)
        ranged = RecordSource("s3://bucket/records", "train")
        sources = {"folder": local, "fetched": fetched, "ranges": ranged}
        turns = {name: read(name, source) for name, source in sources.items()}
        timings = interleave(turns, REPEATS, budget_seconds=budget_seconds)
        size = RemoteRecords("s3://bucket/records", "train").num_bytes
    note = describe_rates(timings, BATCH_SIZE * STEPS)
    name = f"detection input from a store {1000 * LATENCY:.0f} ms away"
    yield compare(f"{name}: fetched, of a folder's speed", timings, "folder", "fetched", least=LEAST, note=note)
    yield compare(f"{name}: by ranges, of a folder's speed", timings, "folder", "ranges")
    # The server above takes processors, too, which a store elsewhere does not.
    work = {kind: 1000 * statistics.median(each[1:]) / (BATCH_SIZE * STEPS) for kind, each in processors.items()}
    note = ", ".join(f"{kind} {value:.3g}" for kind, value in work.items()) + " ms of a processor an image"
    yield Figure(
        f"{name}: by ranges, of a folder's images a processor second", work["folder"] / work["ranges"], note=note
    )
    yield Figure(f"{name}: fetching", size / 1e6 / seconds, "MB/s", note=f"{len(local)} images, {size / 1e6:.0f} MB")


if __name__ == "__main__":
    main(measure_input)
