"""A web server of this machine that misbehaves as it is told, and a report that remembers what it was told."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

import pytest

Fault = Callable[["Handler", "Page"], None]


@dataclass
class Page:
    """A file on the server; each request takes the next fault, if there is one."""

    content: bytes
    etag: str = '"1"'
    takes_ranges: bool = True
    headers: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WebServer

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("Range", ""), self.headers.get("If-Range", "")))
        page = self.server.pages.get(self.path)
        if page is None:
            self.send_error(404)
        elif page.faults:
            page.faults.pop(0)(self, page)
        else:
            self.answer(page)

    def answer(
        self,
        page: Page,
        *,
        sent: int | None = None,
        piece: int = 2**16,
        after_piece: Callable[[], object] = lambda: None,
    ) -> None:
        """Send what was asked for; of it only `sent` bytes, in pieces."""
        start = self._start(page)
        if start is None:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(page.content)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(page.content) - 1}/{len(page.content)}")
        if page.etag:
            self.send_header("ETag", page.etag)
        for name, value in page.headers.items():
            self.send_header(name, value)
        body = page.content[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if sent is not None:
            body, self.close_connection = body[:sent], True
        for place in range(0, len(body), piece):
            self.wfile.write(body[place : place + piece])
            after_piece()

    def _start(self, page: Page) -> int | None:
        """Return the first byte asked for; None when it is past the end."""
        asked, version = self.headers.get("Range", ""), self.headers.get("If-Range", "")
        if not asked or not page.takes_ranges or (version and version != page.etag):
            return 0
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        return start if start < len(page.content) else None

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class WebServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages: dict[str, Page] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, path: str, content: bytes, *faults: Fault, **options: Any) -> Page:
        """Put a file on the server."""
        self.pages[path] = Page(content, faults=list(faults), **options)
        return self.pages[path]

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that leave are part of the tests."""


@dataclass
class Report:
    """The reports of a download."""

    lines: list[str] = field(default_factory=list)
    bytes: list[tuple[str, int, int | None]] = field(default_factory=list)
    counts: list[tuple[str, int, int]] = field(default_factory=list)

    def transferred(self, name: str, done: int, total: int | None) -> None:
        self.bytes.append((name, done, total))

    def counted(self, name: str, done: int, total: int) -> None:
        self.counts.append((name, done, total))

    def finished(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = WebServer()
    thread = Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture
def content() -> bytes:
    return random.Random(0).randbytes(300_000)


class Faults:
    """Ways to misbehave, for `Page.faults`."""

    @staticmethod
    def cut(sent: int) -> Fault:
        """End the connection after a number of bytes."""
        return lambda handler, page: handler.answer(page, sent=sent)

    @staticmethod
    def silent(sent: int, begun: Event | None = None) -> Fault:
        """So many bytes, and then nothing until the client leaves; `begun` is set when they are sent."""

        def fault(handler: Handler, page: Page) -> None:
            handler.answer(page, sent=sent)
            if begun is not None:
                begun.set()
            handler.connection.recv(1)

        return fault

    @staticmethod
    def slow(piece: int, after_piece: Callable[[], object] = lambda: None) -> Fault:
        """Small pieces, and what the server waits for after each."""
        return lambda handler, page: handler.answer(page, piece=piece, after_piece=after_piece)

    @staticmethod
    def wrong(handler: Handler, page: Page) -> None:
        """Other bytes of the same number."""
        handler.answer(Page(bytes(len(page.content)), page.etag, page.takes_ranges))

    @staticmethod
    def becomes(content: bytes, etag: str) -> Fault:
        """From now on the file is another."""

        def fault(handler: Handler, page: Page) -> None:
            page.content, page.etag = content, etag
            handler.answer(page)

        return fault

    @staticmethod
    def status(number: int, **headers: str) -> Fault:
        """Answer with an error, or a redirect."""

        def fault(handler: Handler, page: Page) -> None:
            handler.send_response(number)
            for name, value in headers.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        return fault

    @staticmethod
    def raw(answer: bytes) -> Fault:
        """Write these bytes instead of an answer, and end."""

        def fault(handler: Handler, page: Page) -> None:
            handler.wfile.write(answer)
            handler.close_connection = True

        return fault


@pytest.fixture
def faults() -> type[Faults]:
    return Faults
