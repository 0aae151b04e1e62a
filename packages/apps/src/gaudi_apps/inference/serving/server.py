"""Serve over HTTP: the paths, start, and end.

Tornado is the server, for it is one wheel without dependencies, and bounds the time of a request's head, which uvicorn
leaves open.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import prometheus_client
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.log import app_log, gen_log
from tornado.netutil import bind_sockets
from tornado.web import Application

from gaudi_apps.inference.serving.models import SCORE_THRESHOLD, RefusedError
from gaudi_apps.inference.serving.requests import REASONS, REMEDIES, BaseHandler, ImageHandler
from gaudi_apps.inference.serving.service import RETRY_SECONDS, ImageService
from gaudi_apps.runtime.errors import AddressError
from gaudi_datasets.program import count_things
from gaudi_ops.program import EX_TEMPFAIL, say

if TYPE_CHECKING:
    from gaudi_apps.inference.serving.flags import ServeFlags

MOST_CONNECTIONS = 512
MOST_HEADER_BYTES, READ_BYTES = 16 * 1024, 64 * 1024
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src 'self' blob: data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class MissingHandler(BaseHandler):
    """A path that there is not."""

    allowed = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"

    def prepare(self) -> None:
        """Refuse it."""
        super().prepare()
        if not self.is_refused:
            self.refuse(RefusedError(404, REASONS[404], REMEDIES[404]))


class HealthHandler(BaseHandler):
    """Tell that the process is alive."""

    path_label = "/healthz"

    async def get(self) -> None:
        """Answer."""
        self.write_json({"status": "alive"})

    head = get


class ReadyHandler(BaseHandler):
    """Tell whether the network has answered, and requests are taken."""

    path_label = "/readyz"

    async def get(self) -> None:
        """Answer 200, or 503."""
        try:
            model = self.state.require_model()
        except RefusedError as error:
            self.write_refusal(error)
        else:
            self.write_json({"status": "ready", "kind": model.kind, "classes": list(model.classes)})

    head = get


class MetricsHandler(BaseHandler):
    """Give the metrics to Prometheus."""

    path_label = "/metrics"

    async def get(self) -> None:
        """Answer in its text format."""
        self.set_header("Content-Type", prometheus_client.CONTENT_TYPE_LATEST)
        self.write(self.state.metrics.render())

    head = get


class SchemaHandler(BaseHandler):
    """Give the description of all paths, requests and answers in the form of OpenAPI."""

    path_label = "/openapi.json"

    async def get(self) -> None:
        """Answer."""
        self.set_header("Content-Type", "application/json")
        self.write(_read_template("openapi.json").encode())

    head = get


class PageHandler(BaseHandler):
    """Give the page to drop an image on."""

    path_label = "/"

    async def get(self) -> None:
        """Answer; its script and style, and nothing else, run by the nonce of this answer."""
        nonce, model = secrets.token_urlsafe(16), self.state.model
        self.set_header("Content-Security-Policy", POLICY.format(nonce))
        template = jinja2.Environment(autoescape=True).from_string(_read_template("page.html.j2"))
        name = Path(self.state.flags.model_dir).resolve().name.encode(errors="replace").decode()
        flags, kind = self.state.flags, None if model is None else model.kind
        limits = {"megabytes": f"{flags.max_megabytes:g}", "megapixels": f"{flags.max_megapixels:g}"}
        threshold = SCORE_THRESHOLD if flags.score_threshold is None else flags.score_threshold
        self.write(template.render(nonce=nonce, name=name, kind=kind, threshold=threshold, **limits))

    head = get


@cache
def _read_template(name: str) -> str:
    return (resources.files("gaudi_apps.inference.serving") / "templates" / name).read_text(encoding="utf-8")


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
    except (OSError, UnicodeError) as error:  # the name of a host that cannot be one
        reason = getattr(error, "strerror", None) or str(error)
        raise AddressError(
            f"cannot listen on {host} port {port} ({reason})", flag="--port", remedy="give another --port or --host"
        ) from None


class _SayHandler(logging.Handler):
    """Print what Tornado reports, escaped; with a traceback only in debug."""

    def __init__(self, debug: bool) -> None:
        super().__init__(logging.WARNING)
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], AssertionError):
            return  # Tornado's own, of a chunk that does not end as it must: clients could fill the log
        text = record.getMessage().splitlines()[0] if record.msg else record.levelname
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        say(f"warning: {text}", error=True)
        if self._debug and record.exc_info:
            say(*logging.Formatter().formatException(record.exc_info).splitlines(), error=True)


def run_server(flags: ServeFlags) -> None:
    """Serve until SIGTERM or Ctrl-C, then finish what has come; a second one ends the process at once, with 75.

    Raises:
        AddressError: see `listen`.
        GaudiError, WeightsError: see `ServedModel.load`.
    """
    sockets = listen(flags.host, flags.port)

    async def run() -> None:
        stop = asyncio.Event()
        _stop_at_signals(stop)
        await serve(flags, sockets, stop)
        # Python would wait for a thread that still loads or computes, though nobody waits for its result; and a signal
        # that comes while asyncio closes the loop would end in a traceback.
        os._exit(0)

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
    """Set the event at the first SIGTERM, SIGINT or SIGHUP that is not ignored, and end the process by a second one.

    Both are callbacks of the loop, which a signal wakes; a handler of Python's own would wait for its next event.
    """
    loop = asyncio.get_running_loop()

    def note() -> None:
        if stop.is_set():
            say("gaudi-apps: error: interrupted", error=True)
            os._exit(EX_TEMPFAIL)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            loop.add_signal_handler(number, note)
