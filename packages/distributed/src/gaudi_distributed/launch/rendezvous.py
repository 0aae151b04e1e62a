"""Horovod's meeting point for Gloo: a small store of names and values over HTTP, as its ranks ask for it at start."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_MAX_VALUE = 1 << 20
_MAX_KEYS = 1 << 20


class Rendezvous(ThreadingHTTPServer):
    """Listens from when it is entered until it is left; ranks put, get and delete `/scope/key`.

    Raises:
        OSError: the address is not one of this machine.
    """

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.lock = threading.Lock()
        self.values: dict[str, bytes] = {}
        self._thread = threading.Thread(target=self.serve_forever, name="rendezvous", daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which Horovod finds it."""
        host, port = self.server_address[:2]
        return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": str(host), "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}

    def __enter__(self) -> Rendezvous:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = 10
    server: Rendezvous

    def do_GET(self) -> None:
        with self.server.lock:
            value = self.server.values.get(self.path)
        self._answer(404 if value is None else 200, value or b"")

    def do_PUT(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > _MAX_VALUE:
            return self._answer(400)
        value = self.rfile.read(int(length))
        with self.server.lock:
            full = len(self.server.values) >= _MAX_KEYS
            if not full:
                self.server.values[self.path] = value
        return self._answer(507 if full else 200)

    def do_DELETE(self) -> None:
        """A rank is done with a scope; what it stored goes with the launcher, as ranks of one run meet once."""
        self._answer(200)

    def _answer(self, status: int, content: bytes = b"") -> None:
        with contextlib.suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that the server gives
        """Say nothing: the terminal belongs to the ranks."""
