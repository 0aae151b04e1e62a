"""Serve over HTTP: answer requests, whose images are bounded in size and time before they are decoded, start, and end.

Tornado is the server, for it is one wheel without dependencies, and bounds the time of a request's head, which uvicorn
leaves open.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import time
import warnings
from collections.abc import Awaitable, Callable
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar

import jinja2
import PIL.Image
import prometheus_client
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream, StreamClosedError
from tornado.log import app_log, gen_log
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler, stream_request_body

from gaudi_apps.inference.serving.models import LONGEST_START, RefusedError, require_kind
from gaudi_apps.inference.serving.service import RETRY_SECONDS, DrawKind, ImageService
from gaudi_apps.runtime.errors import AddressError
from gaudi_datasets.program import count_things
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.inference.serving.flags import ServeFlags

MOST_CONNECTIONS = 512
MOST_HEADER_BYTES, READ_BYTES = 16 * 1024, 64 * 1024
# After a refusal, what still comes is read for so long and so far: a client that still sends may not see it otherwise.
LINGER_SECONDS, LINGER_BYTES = 2.0, 2**26
HEADERS = {
    "Server": "gaudi-apps",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src 'self' blob: data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
REMEDIES = {
    404: "see / for the page and /openapi.json for all paths",
    405: "see /openapi.json",
    500: "tell the operator",
}
REASONS = {404: "there is nothing at this path", 405: "this path does not take this method", 500: "the server failed"}


class BaseHandler(RequestHandler):
    """A request, which is counted, and whose errors are JSON."""

    path_label: ClassVar[str] = "other"
    allowed: ClassVar[str] = "GET"

    def initialize(self, state: ImageService) -> None:
        """Keep the server."""
        self.state, self._began, self._is_counted = state, time.monotonic(), False
        state.begin_request()

    def set_default_headers(self) -> None:
        """Set what every answer has."""
        for name, value in HEADERS.items():
            self.set_header(name, value)

    def write_error(self, status_code: int, **options: Any) -> None:
        """Answer an error as JSON; of one that was not foreseen, nothing is told."""
        status = status_code if status_code in REASONS else (500 if status_code >= 500 else status_code)
        reason = REASONS.get(status, "the request cannot be understood")
        self.write_refusal(RefusedError(status_code, reason, REMEDIES.get(status, "see /openapi.json")))
        self.finish()

    def write_refusal(self, error: RefusedError) -> None:
        """Write an error, without ending the answer."""
        self.set_status(error.status)
        if error.status == 405:
            self.set_header("Allow", self.allowed)
        if error.retry_seconds is not None:
            self.set_header("Retry-After", str(error.retry_seconds))
        told = {"status": error.status, "message": error.message, "remedy": error.remedy}
        self.write_json({"error": told})

    def write_json(self, document: dict[str, Any]) -> None:
        """Write a document, with its length, so that it may be sent before the request has ended."""
        content = json.dumps(document).encode()
        self.set_header("Content-Type", "application/json")
        self.set_header("Content-Length", str(len(content)))
        self.write(content)

    def on_finish(self) -> None:
        """Count the answer."""
        self._count(self.get_status())
        self._bound_sending()

    def on_connection_close(self) -> None:
        """Count a client that left before its answer."""
        self._count(499)
        super().on_connection_close()

    def _count(self, status: int) -> None:
        if not self._is_counted:
            self._is_counted = True
            self.state.end_request(self.path_label, status, time.monotonic() - self._began)

    def _bound_sending(self) -> None:
        """Close the connection of a client that does not take its answer in time."""
        stream = getattr(self.request.connection, "stream", None)
        if stream is not None and stream.writing():
            asyncio.get_running_loop().call_later(self.state.flags.timeout_s, _close_if_writing, stream)


def _close_if_writing(stream: Any) -> None:
    if stream.writing():
        stream.close()


class MissingHandler(BaseHandler):
    """A path that there is not."""

    def prepare(self) -> None:
        """Refuse it."""
        self.send_error(404)


class HealthHandler(BaseHandler):
    """Tell that the process is alive."""

    path_label = "/healthz"

    def get(self) -> None:
        """Answer."""
        self.write_json({"status": "alive"})


class ReadyHandler(BaseHandler):
    """Tell whether the network has answered, and requests are taken."""

    path_label = "/readyz"

    def get(self) -> None:
        """Answer 200, or 503."""
        try:
            model = self.state.require_model()
        except RefusedError as error:
            self.write_refusal(error)
        else:
            self.write_json({"status": "ready", "kind": model.kind, "classes": list(model.classes)})


class MetricsHandler(BaseHandler):
    """Give the metrics to Prometheus."""

    path_label = "/metrics"

    def get(self) -> None:
        """Answer in its text format."""
        self.set_header("Content-Type", prometheus_client.CONTENT_TYPE_LATEST)
        self.write(self.state.metrics.render())


class SchemaHandler(BaseHandler):
    """Give the description of all paths, requests and answers in the form of OpenAPI."""

    path_label = "/openapi.json"

    def get(self) -> None:
        """Answer."""
        self.set_header("Content-Type", "application/json")
        self.write(_read_template("openapi.json").encode())


class PageHandler(BaseHandler):
    """Give the page to drop an image on."""

    path_label = "/"

    def get(self) -> None:
        """Answer; its script and style, and nothing else, run by the nonce of this answer."""
        nonce, model = secrets.token_urlsafe(16), self.state.model
        self.set_header("Content-Security-Policy", POLICY.format(nonce))
        template = jinja2.Environment(autoescape=True).from_string(_read_template("page.html.j2"))
        name = self.state.flags.model_dir.resolve().name.encode(errors="replace").decode()
        flags, kind = self.state.flags, None if model is None else model.kind
        limits = {"megabytes": f"{flags.max_megabytes:g}", "megapixels": f"{flags.max_megapixels:g}"}
        self.write(template.render(nonce=nonce, name=name, kind=kind, threshold=flags.score_threshold, **limits))


@cache
def _read_template(name: str) -> str:
    return (resources.files("gaudi_apps.inference.serving") / "templates" / name).read_text(encoding="utf-8")


@stream_request_body
class ImageHandler(BaseHandler):
    """Take an image in the body of a request; its bytes are counted as they come, whatever the head announces."""

    allowed = "POST"
    draws: ClassVar[bool] = False

    def initialize(self, state: ImageService) -> None:
        """Keep the server, and bound the time in which the body arrives."""
        super().initialize(state)
        self._body, self._refused, self._lingered = bytearray(), False, 0
        self._work: asyncio.Future[Any] | None = None
        self._limit = asyncio.get_running_loop().call_later(state.flags.timeout_s, self._time_out)

    def prepare(self) -> None:
        """Refuse what the head tells already."""
        connection: Any = self.request.connection
        connection.set_max_body_size(2**50)  # what arrives is counted here
        connection.set_body_timeout(2 * (self.state.flags.timeout_s + LINGER_SECONDS))  # a time-out is answered before
        if self.request.method == "POST":
            self._attempt(self._judge_head)
        else:
            self._refuse(RefusedError(405, REASONS[405], REMEDIES[405]))
        if self._refused and self.request.headers.get("Expect", "").lower() == "100-continue":
            self.finish()  # nothing comes, and Tornado would ask for it

    def _judge_head(self) -> None:
        self.state.require_model()
        self.state.require_room()
        announced = self.request.headers.get("Content-Length", "")
        # What is no number is refused by Tornado.
        if announced.isascii() and announced.isdigit():
            self._require_size(int(announced[:20]))

    def _require_size(self, num_bytes: int) -> None:
        if num_bytes > self.state.max_bytes:
            raise RefusedError(413, f"the body has more than {self.state.max_bytes} bytes", "send a smaller file")

    def data_received(self, chunk: bytes) -> None:
        """Keep a part of the body, or drop it after a refusal."""
        if self._refused:
            self._lingered += len(chunk)
            if self._lingered > LINGER_BYTES:
                self.finish()
            return
        self._attempt(lambda: self._keep(chunk))

    def _keep(self, chunk: bytes) -> None:
        self._require_size(len(self._body) + len(chunk))
        self.state.require_room(len(chunk))
        had = len(self._body)
        self._body += chunk
        self.state.body_bytes += len(chunk)
        if had < LONGEST_START <= len(self._body):
            require_kind(bytes(self._body[:LONGEST_START]))

    async def post(self) -> None:
        """Answer, now that the body is there."""
        self._limit.cancel()
        if self._refused:
            self.finish()
            return
        encoded = bytes(self._body)
        self._release_body()
        self._work = asyncio.ensure_future(self.state.answer(encoded, self._choose_drawing()))
        del encoded
        try:
            answer = await self._work
        except RefusedError as error:
            self.write_refusal(error)
            return
        except asyncio.CancelledError:  # the client has left
            return
        if isinstance(answer, bytes):
            self.set_header("Content-Type", f"image/{self._choose_drawing()}")
            self.write(answer)
        else:
            self.write_json(answer)

    def refuse_method(self) -> None:
        """End the refusal of another method, now that the body is there."""
        self.finish()

    get = head = put = patch = delete = options = refuse_method

    def _choose_drawing(self) -> DrawKind | None:
        if not self.draws:
            return None
        accepted = self.request.headers.get("Accept", "")
        return "png" if "image/png" in accepted and "image/jpeg" not in accepted else "jpeg"

    def on_connection_close(self) -> None:
        """Forget a client that left; its image is not computed, unless that has begun."""
        if self._work is not None:
            self._work.cancel()
        self._end_body()
        super().on_connection_close()

    def on_finish(self) -> None:
        """Count the answer."""
        self._end_body()
        super().on_finish()

    def _end_body(self) -> None:
        self._limit.cancel()
        self._release_body()

    def _release_body(self) -> None:
        self.state.body_bytes -= len(self._body)
        self._body = bytearray()

    def _attempt(self, judge: Callable[[], None]) -> None:
        try:
            judge()
        except RefusedError as error:
            self._refuse(error)

    def _refuse(self, error: RefusedError) -> None:
        """Answer while the body may still be arriving, and close the connection a little later."""
        self._refused = True
        self._release_body()
        self.set_header("Connection", "close")
        self.write_refusal(error)
        _forget(self.flush())
        self._limit.cancel()
        self._limit = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._finish_if_open)

    def _time_out(self) -> None:
        seconds = self.state.flags.timeout_s
        self._refuse(RefusedError(408, f"the request did not arrive within {seconds:g} s", "send it faster"))

    def _finish_if_open(self) -> None:
        if not self._finished:
            self.finish()


def _forget(sent: Awaitable[None]) -> None:
    """Leave it to the handler to find that the client has left."""

    async def wait() -> None:
        try:
            await sent
        except StreamClosedError:
            app_log.debug("a client left before its refusal")

    asyncio.ensure_future(wait())  # noqa: RUF006


class PredictHandler(ImageHandler):
    """Answer an image by JSON."""

    path_label = "/predict"


class DrawHandler(ImageHandler):
    """Answer an image by the drawn image."""

    path_label = "/draw"
    draws = True


PATHS: dict[str, type[BaseHandler]] = {
    one.path_label: one
    for one in (PageHandler, PredictHandler, DrawHandler, HealthHandler, ReadyHandler, MetricsHandler, SchemaHandler)
}


def make_application(state: ImageService) -> Application:
    """Return the paths of a server."""
    options: dict[str, Any] = {"default_handler_class": MissingHandler, "default_handler_args": {"state": state}}
    routes: list[Any] = [(path, handler, {"state": state}) for path, handler in PATHS.items()]
    return Application(routes, log_function=lambda handler: None, **options)


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
    """Set the event at the first SIGTERM, SIGINT or SIGHUP that is not ignored, and be interrupted by a second one.

    Both are callbacks of the loop, which a signal wakes; a handler of Python's own would wait for its next event.
    """
    loop = asyncio.get_running_loop()

    def note() -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, note)
