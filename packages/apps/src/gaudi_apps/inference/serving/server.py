"""Serve a trained network over HTTP: listen, start, and end without losing an answer.

Tornado is the server, for it is one wheel without dependencies, and bounds the time of a request's head, which uvicorn
leaves open.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import warnings
from typing import TYPE_CHECKING, Any

import PIL.Image
from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.log import app_log, gen_log
from tornado.netutil import bind_sockets

from gaudi_apps.runtime.errors import AddressError
from gaudi_apps.inference.serving.handlers import make_application
from gaudi_apps.inference.serving.service import RETRY_SECONDS, ImageService
from gaudi_datasets.program import count_things
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.inference.serving.flags import ServeFlags

MOST_CONNECTIONS = 512
MOST_HEADER_BYTES, READ_BYTES = 16 * 1024, 64 * 1024


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
