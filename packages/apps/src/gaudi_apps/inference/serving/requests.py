"""Take requests: bound what arrives in size and time before it is decoded, refuse the rest as JSON, and count all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from tornado.iostream import StreamClosedError
from tornado.log import app_log
from tornado.web import RequestHandler, stream_request_body

from gaudi_apps.inference.serving.models import LONGEST_START, RefusedError, require_kind
from gaudi_apps.inference.serving.service import DrawKind, ImageService

# After a refusal, what still comes is read for so long and so far: a client that still sends may not see it otherwise.
LINGER_SECONDS, LINGER_BYTES = 2.0, 2**26
LONGEST_LENGTH = 15  # digits
HEADERS = {
    "Server": "gaudi-apps",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
REMEDIES = {
    404: "see / for the page and /openapi.json for all paths",
    405: "see /openapi.json",
    500: "tell the operator",
}
REASONS = {404: "there is nothing at this path", 405: "this path does not take this method", 500: "the server failed"}


@stream_request_body
class BaseHandler(RequestHandler):
    """A request, which is counted, whose errors are JSON, and whose body is dropped where none is asked for."""

    path_label: ClassVar[str] = "other"
    allowed: ClassVar[str] = "GET, HEAD"

    def initialize(self, state: ImageService) -> None:
        """Keep the server."""
        self.state, self._began = state, time.monotonic()
        self._is_counted = self._is_ended = self.is_refused = False
        self._dropped = 0
        self._limit: asyncio.TimerHandle | None = None
        state.begin_request()

    def set_default_headers(self) -> None:
        """Set what every answer has."""
        for name, value in HEADERS.items():
            self.set_header(name, value)

    def prepare(self) -> None:
        """Refuse another method, and more of a body than an answer is worth."""
        connection: Any = self.request.connection
        connection.set_max_body_size(2**50)  # what arrives is counted here
        connection.set_body_timeout(2 * (self.state.flags.timeout_s + LINGER_SECONDS))  # a time-out is answered before
        if self.state.is_stopping:
            self.set_header("Connection", "close")
        if self.request.method not in self.allowed.split(", "):
            self.refuse(RefusedError(405, REASONS[405], REMEDIES[405]))

    def data_received(self, chunk: bytes) -> None:
        """Drop a part of the body."""
        self._dropped += len(chunk)
        if self._dropped > LINGER_BYTES:
            self._finish_if_open()

    def refuse(self, error: RefusedError) -> None:
        """Answer while the body may still be arriving, and close the connection a little later."""
        self.is_refused = True
        self.set_header("Connection", "close")
        self.write_refusal(error)
        _forget(self.flush())
        self.end_limit()
        self._limit = asyncio.get_running_loop().call_later(LINGER_SECONDS, self._finish_if_open)
        headers = self.request.headers
        # Nothing comes, and Tornado would ask for it; or so much is announced that Tornado would answer as well.
        if (
            headers.get("Expect", "").lower() == "100-continue"
            or len(headers.get("Content-Length", "")) > LONGEST_LENGTH
        ):
            self.finish()

    async def refuse_method(self) -> None:
        """End the refusal of another method, now that the body is there."""
        self._finish_if_open()

    get = head = post = put = patch = delete = options = refuse_method

    def _finish_if_open(self) -> None:
        if not self._finished:
            self.finish()

    def end_limit(self) -> None:
        """End what bounds the time of the request."""
        if self._limit is not None:
            self._limit.cancel()

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

    def finish(self, chunk: Any = None) -> asyncio.Future[None]:
        """End the answer; a client that does not take it in time is closed."""
        sent: asyncio.Future[None] = super().finish(chunk)
        stream: Any = getattr(self.request.connection, "stream", None)
        if stream is None or sent.done():
            self._end(sent)
        else:
            limit = asyncio.get_running_loop().call_later(self.state.flags.timeout_s, stream.close)
            sent.add_done_callback(lambda _: self._end(sent, limit))
        return sent

    def _end(self, sent: asyncio.Future[None] | None = None, limit: asyncio.TimerHandle | None = None) -> None:
        if limit is not None:
            limit.cancel()
        if sent is not None and not sent.cancelled():
            sent.exception()  # the client has left, which is counted
        if not self._is_ended:
            self._is_ended = True
            self.state.end_request()
        stream: Any = getattr(self.request.connection, "stream", None)
        if stream is not None and (self.is_refused or self.state.is_stopping):
            stream.close()  # Tornado goes by the head of the request alone

    def on_finish(self) -> None:
        """Count the answer."""
        self.end_limit()
        self._count(self.get_status())

    def on_connection_close(self) -> None:
        """Count a client that left before its answer."""
        self.end_limit()
        self._count(499)
        self._end()
        super().on_connection_close()

    def _count(self, status: int) -> None:
        if not self._is_counted:
            self._is_counted = True
            self.state.count_answer(self.path_label, status, time.monotonic() - self._began)


class ImageHandler(BaseHandler):
    """Take an image in the body of a request; its bytes are counted as they come, whatever the head announces."""

    allowed = "POST"
    draws: ClassVar[bool] = False

    def initialize(self, state: ImageService) -> None:
        """Keep the server, and bound the time in which the body arrives."""
        super().initialize(state)
        self._body = bytearray()
        self._work: asyncio.Future[Any] | None = None
        self._limit = asyncio.get_running_loop().call_later(state.flags.timeout_s, self._time_out)

    def prepare(self) -> None:
        """Refuse what the head tells already."""
        super().prepare()
        if not self.is_refused:
            self._attempt(self._judge_head)

    def _judge_head(self) -> None:
        for name in self.request.query_arguments:
            raise RefusedError(400, f"there is no parameter {name[:100]!r}", "leave it out; flags are of the server")
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
        if self.is_refused:
            super().data_received(chunk)
        else:
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
        if self.is_refused:
            self._finish_if_open()
            return
        self.end_limit()
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

    def _choose_drawing(self) -> DrawKind | None:
        if not self.draws:
            return None
        accepted = self.request.headers.get("Accept", "")
        return "png" if "image/png" in accepted and "image/jpeg" not in accepted else "jpeg"

    def on_connection_close(self) -> None:
        """Forget a client that left; its image is not computed, unless that has begun."""
        if self._work is not None:
            self._work.cancel()
        self._release_body()
        super().on_connection_close()

    def on_finish(self) -> None:
        """Count the answer."""
        self._release_body()
        super().on_finish()

    def refuse(self, error: RefusedError) -> None:
        """Forget what has arrived, and refuse the rest."""
        self._release_body()
        super().refuse(error)

    def _release_body(self) -> None:
        self.state.body_bytes -= len(self._body)
        self._body = bytearray()

    def _attempt(self, judge: Callable[[], None]) -> None:
        try:
            judge()
        except RefusedError as error:
            self.refuse(error)

    def _time_out(self) -> None:
        seconds = self.state.flags.timeout_s
        self.refuse(RefusedError(408, f"the request did not arrive within {seconds:g} s", "send it faster"))


def _forget(sent: Awaitable[None]) -> None:
    """Leave it to the handler to find that the client has left."""

    async def wait() -> None:
        try:
            await sent
        except StreamClosedError:
            app_log.debug("a client left before its refusal")

    asyncio.ensure_future(wait())  # noqa: RUF006
