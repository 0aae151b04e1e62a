"""The one process that listens to all ranks, and tells all of them when the run is over."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from gaudi_distributed.supervision.bounds import Bounds
from gaudi_distributed.supervision.causes import Cause
from gaudi_distributed.supervision.judgement import Judgement
from gaudi_distributed.supervision.messages import (
    MAX_BYTES,
    Beat,
    End,
    Failed,
    Hello,
    Left,
    Message,
    MessageError,
    State,
    Stop,
    Welcome,
    decode_message,
    encode_message,
)

# What the launcher sets for ranks: where the coordinator listens, and what to say to it.
COORDINATOR, TOKEN = "GAUDI_RUN_COORDINATOR", "GAUDI_RUN_TOKEN"
_HELLO_SECONDS = 5.0
_STRANGERS = 64


class Coordinator:
    """Listens from when it is made until it is closed, in a thread of its own.

    Who does not begin with the token is dropped without an answer, as are lines that are no messages.

    Args:
        size: how many ranks there will be.
        address: of the interface to listen on; the loopback interface reaches this machine's ranks only.
        bounds: see `Bounds`; ranks are told them.
        on_cause: called with the cause, once, from the coordinator's thread, after the ranks were told; not where they
            gave this process up, and so said themselves what happened.

    Raises:
        OSError: the address is not one of this machine.
    """

    def __init__(
        self,
        size: int,
        *,
        address: str = "127.0.0.1",
        bounds: Bounds | None = None,
        on_cause: Callable[[Cause], None] = lambda cause: None,
    ) -> None:
        self.token = secrets.token_hex(32)
        self._size, self._address, self._bounds, self._on_cause = size, address, bounds or Bounds(), on_cause
        self._cause: Cause | None = None
        self._over = threading.Event()
        self._judgement = Judgement(self._bounds, time.monotonic())
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._strangers = 0
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, address, 0, limit=MAX_BYTES))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which ranks find it; the token is a secret, so never part of a command line."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return {COORDINATOR: f"{host}:{self.port}", TOKEN: self.token}

    @property
    def cause(self) -> Cause | None:
        """What ended the run, or None: nothing did, so far."""
        return self._cause

    @property
    def has_ranks(self) -> bool:
        """Whether a rank is there that can be told something."""
        return bool(self._writers)

    @property
    def present(self) -> frozenset[int]:
        """The ranks that are under supervision now."""
        return frozenset(self._judgement.present)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until there is a cause or every rank has left, so many seconds at most; whether that is so."""
        return self._over.wait(seconds)

    def end(self, text: str, status: int) -> None:
        """End the run for a reason of the launcher's own, unless it has one already."""
        self._call(lambda: self._judgement.declare(status, text))

    def request_stop(self) -> None:
        """Ask all ranks to save and end."""
        self._call(lambda: self._tell(Stop()))

    def close(self) -> None:
        """Stop listening; ranks that are still there take it for the loss of the launcher."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, function: Callable[[], None]) -> None:
        def call() -> None:
            function()
            self._decide()

        with contextlib.suppress(RuntimeError):  # closed already, so nobody is left to be told
            self._loop.call_soon_threadsafe(call)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._watch())

    async def _watch(self) -> None:
        """Decide once a beat, and give a sign of life."""
        while not self._closing.is_set():
            self._tell(Beat())
            self._decide()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._bounds.beat_seconds)
        self._server.close()
        others = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = -1
        # A line that is too long is a ValueError, as is one that is no message; closing cancels.
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError, asyncio.CancelledError):
            rank = await self._admit(reader, writer)
            while rank >= 0 and (line := await reader.readline()):
                self._hear(rank, decode_message(line))
                self._decide()
        if rank >= 0:
            self._writers.pop(rank, None)
            self._decide()  # first, to know whether it was this process that did not answer
            self._judgement.lose(rank)
            self._decide()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """The rank of who connected, and -1 for who is none; strangers that wait are few, and not for long."""
        if self._strangers >= _STRANGERS:
            return -1
        self._strangers += 1
        try:
            line = await asyncio.wait_for(reader.readline(), _HELLO_SECONDS)
        except asyncio.TimeoutError:
            return -1
        finally:
            self._strangers -= 1
        hello = decode_message(line)
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            return -1
        if not 0 <= hello.rank < self._size or not self._judgement.join(hello.rank, hello.host, time.monotonic()):
            return -1
        bounds = self._bounds
        writer.write(encode_message(Welcome(bounds.stall_seconds, bounds.leave_seconds, bounds.beat_seconds)))
        self._writers[hello.rank] = writer
        if self._cause is not None:
            writer.write(encode_message(End(**asdict(self._cause))))
        return hello.rank

    def _hear(self, rank: int, message: Message) -> None:
        now = time.monotonic()
        if rank not in self._judgement.present:
            return
        if isinstance(message, State):
            self._judgement.hear(rank, message.step, message.phase, message.reports, now)
        elif isinstance(message, Failed):
            self._judgement.fail(rank, message.status, message.text, now, certain=message.certain)
            self._loop.call_later(self._bounds.settle_seconds, self._decide)
        elif isinstance(message, Left):
            self._judgement.leave(rank, message.status, message.text)
        else:
            raise MessageError(f"{type(message).__name__} is not for a rank to say")

    def _decide(self) -> None:
        """Tell all as soon as there is a cause, or nobody is left who could be one."""
        if self._over.is_set():
            return
        all_left = len(self._judgement.left) == self._size
        cause = self._judgement.decide(time.monotonic()) or (self._judgement.conclude() if all_left else None)
        if cause is not None:
            self._cause = cause
            self._tell(End(**asdict(cause)))
            if not self._judgement.was_given_up:
                self._on_cause(cause)
        if cause is not None or all_left:
            self._over.set()

    def _tell(self, message: Message) -> None:
        line = encode_message(message)
        for writer in self._writers.values():
            writer.write(line)
