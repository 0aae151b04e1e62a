"""Listen to all ranks, decide which failure ended the run, and tell all ranks."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import math
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gaudi_distributed.errors import MessageError
from gaudi_distributed.failure.messages import (
    CONTINUE,
    FIRST,
    JOIN,
    LOST,
    MAX_BYTES,
    STALL,
    START,
    Failed,
    FailureCause,
    Heartbeat,
    Hello,
    Left,
    Message,
    State,
    Timeouts,
    bound_status,
    decode_message,
    encode_message,
)

# What the launcher sets for ranks: where the coordinator listens, and what to say to it.
COORDINATOR, TOKEN = "GAUDI_RUN_COORDINATOR", "GAUDI_RUN_TOKEN"
_HELLO_SECONDS, _STATE_SECONDS = 5.0, 2.0
# Connections without the token: more than are accepted until those before them are heard, which is in the third turn of
# the loop. The system holds all others.
_STRANGERS, _ACCEPTED_IN_A_TURN, _BACKLOG = 256, 64, 1024


class Coordinator:
    """Accept connections of ranks in a thread of its own, until it is closed.

    A connection that does not begin with the token, or sends a line that is not a message, is dropped unanswered. Of
    those that have said nothing yet, the oldest of the address with the most makes room for the next one, so nobody
    keeps a rank out by holding connections.

    Args:
        size: number of ranks.
        address: of the interface to listen on; the loopback interface reaches this machine's ranks only.
        timeouts: see `Timeouts`; ranks are told them.
        hosts: of the ranks, where they are known before a rank says its own.
        awaits_starter: whether what starts the ranks ends them all for one that fails, and says so afterwards only, as
            mpirun does: while a rank has not joined, the loss of another is then not taken for the cause at once.
        settle_seconds: time that an uncertain error waits for the failure that it may follow from.
        port: to listen on; 0: a free one.
        on_state: called with `FailureDetector.describe` every two seconds, from a thread of its own, and at the end.
        on_cause: called once with the cause, from the coordinator's thread, after the ranks were told; not if the ranks
            took this process for lost, and reported that themselves.

    Raises:
        OSError: the address is not one of this machine, or the port is taken.
    """

    def __init__(
        self,
        size: int,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        timeouts: Timeouts | None = None,
        hosts: Sequence[str] = (),
        awaits_starter: bool = False,
        settle_seconds: float = 1.0,
        on_state: Callable[[dict[str, Any]], None] | None = None,
        on_cause: Callable[[FailureCause], None] = lambda cause: None,
    ) -> None:
        self.token = secrets.token_hex(32)
        self._on_state = on_state
        self._size, self._address, self._timeouts, self._on_cause = size, address, timeouts or Timeouts(), on_cause
        self._cause: FailureCause | None = None
        self._over = threading.Event()
        self._settle_seconds = settle_seconds
        self._detector = FailureDetector(
            self._timeouts, settle_seconds, time.monotonic(), size, hosts=hosts, awaits_starter=awaits_starter
        )
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._strangers: dict[asyncio.StreamWriter, str] = {}  # their addresses, the oldest first
        self._loop = asyncio.new_event_loop()
        listener = socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        self.port: int = listener.getsockname()[1]
        serving = asyncio.start_server(self._serve, sock=listener, limit=MAX_BYTES, backlog=_ACCEPTED_IN_A_TURN)
        self._server = self._loop.run_until_complete(serving)
        listener.listen(_BACKLOG)
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables by which ranks find it; the token is a secret, so never part of a command line."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return {COORDINATOR: f"{host}:{self.port}", TOKEN: self.token}

    @property
    def cause(self) -> FailureCause | None:
        """Return what ended the run; None so far."""
        return self._cause

    @property
    def has_ranks(self) -> bool:
        """Return whether any rank is connected."""
        return bool(self._writers)

    @property
    def present(self) -> frozenset[int]:
        """Return the ranks that are connected."""
        return frozenset(self._detector.present)

    @property
    def missing(self) -> frozenset[int]:
        """Return the ranks that never connected."""
        return frozenset(self._detector.missing)

    @property
    def was_joined(self) -> bool:
        """Return whether any rank ever connected; not every program connects its ranks."""
        return len(self.missing) < self._size

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until there is a cause or every rank has left; False if that takes longer than `seconds`."""
        return self._over.wait(seconds)

    def end(self, text: str, status: int) -> None:
        """End the run for a reason of the launcher's own, unless it has one already."""
        self._call(self._detector.abort, bound_status(status), text)

    def request_stop(self) -> None:
        """Ask all ranks to save and end."""
        self._call(self._tell, Heartbeat(stop=True))

    def close(self) -> None:
        """Stop listening; ranks that are still there take it for the loss of their launcher."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        def call() -> None:
            function(*arguments)
            self._decide()

        with contextlib.suppress(RuntimeError):  # closed already, so nobody is left to be told
            self._loop.call_soon_threadsafe(call)

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._watch())

    async def _watch(self) -> None:
        """Send a heartbeat and check for a failure, once per interval."""
        write, stating, stated = self._on_state, None, 0.0
        while not self._closing.is_set():
            self._tell(Heartbeat())
            self._decide()
            now = time.monotonic()
            # A disk may be slow, for which no rank has to wait.
            if write is not None and now - stated > _STATE_SECONDS and (stating is None or stating.done()):
                stating, stated = self._loop.run_in_executor(None, write, self._detector.describe(now)), now
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._timeouts.heartbeat_seconds)
        self._server.close()
        if write is not None and stating is not None:
            await stating
            await self._loop.run_in_executor(None, write, self._detector.describe(time.monotonic()))
        for _ in range(3):  # those that were accepted last have to begin, else asyncio shows a traceback of each
            await asyncio.sleep(0)
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
                message = decode_message(line)
                self._on_message(rank, message)
                if not isinstance(message, State):  # progress ends no run, and deciding looks at all ranks
                    self._decide()
        if rank >= 0:
            self._writers.pop(rank, None)
            self._decide()  # first, to know whether it was this process that did not answer
            self._detector.on_disconnect(rank, time.monotonic())
            self._decide()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        """Return the rank that connected, -1 for a stranger; few strangers may wait, and not for long."""
        self._strangers[writer] = str(writer.get_extra_info("peername", ("",))[0])
        if len(self._strangers) > _STRANGERS:
            [(crowd, _)] = Counter(self._strangers.values()).most_common(1)
            oldest = next(each for each, address in self._strangers.items() if address == crowd)
            del self._strangers[oldest]
            oldest.transport.abort()
        try:
            line = await asyncio.wait_for(reader.readline(), _HELLO_SECONDS)
        except asyncio.TimeoutError:
            return -1
        finally:
            self._strangers.pop(writer, None)
        hello = decode_message(line)
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            return -1
        if not 0 <= hello.rank < self._size or not self._detector.on_join(hello.rank, hello.host, time.monotonic()):
            return -1
        writer.write(encode_message(self._timeouts))
        self._writers[hello.rank] = writer
        if self._cause is not None:
            writer.write(encode_message(self._cause))
        return hello.rank

    def _on_message(self, rank: int, message: Message) -> None:
        now = time.monotonic()
        if rank not in self._detector.present:
            return
        if isinstance(message, State):
            self._detector.on_heartbeat(rank, message, now)
        elif isinstance(message, Failed):
            self._detector.on_failure(rank, message.status, message.text, now, certain=message.certain)
            self._loop.call_later(self._settle_seconds, self._decide)
        elif isinstance(message, Left):
            self._detector.on_leave(rank, message.status, message.text)
        else:
            raise MessageError(f"{type(message).__name__} is not for a rank to say")

    def _decide(self) -> None:
        """Tell all as soon as there is a cause, or nobody is left who could be one."""
        if self._over.is_set():
            return
        all_left = len(self._detector.left) == self._size
        cause = self._detector.check(time.monotonic()) or (self._detector.conclude() if all_left else None)
        if cause is not None:
            self._cause = cause
            self._tell(cause)
            if not self._detector.was_given_up:
                self._on_cause(cause)
        if cause is not None or all_left:
            self._over.set()

    def _tell(self, message: Message) -> None:
        line = encode_message(message)
        for writer in self._writers.values():
            writer.write(line)


# In these phases one rank works and the others wait, on a disk or a library that reports no progress.
PATIENT_PHASES, PATIENCE = frozenset({"checkpoint", "scoring"}), 10
_START = "start"  # a training reports it first, and then all that it does
_STEP, _UPLOAD = "step", "upload"
_LONG_PHASES, _LONG_FACTOR = frozenset({"export", _UPLOAD}), 4  # a report covers a whole export, or one file
_MISSED_HEARTBEATS = 3
_STEPS_OF_SPEED = 64
_STARTER_SECONDS = 15.0  # that mpirun may take to end its other ranks, and to say which one failed


@dataclass
class _Rank:
    host: str
    heard: float
    moved: float
    step: int = 0
    phase: str = _START
    reports: int = 0
    seen: dict[str, int] = field(default_factory=dict)  # reports by phase: a device may have to compile in the first
    has_long_calls: bool = False  # of several steps, which have one report

    def find_bound(self, timeouts: Timeouts, *, is_training: bool) -> tuple[float, str]:
        """Return for how many seconds it may report nothing, and the variable that sets that.

        What does not train, as a prediction does, may report nothing, so it has a bound only in a phase that it reports
        again and again.
        """
        if self.phase == _START:
            return (timeouts.start_seconds, START) if is_training else (math.inf, "")
        usual = timeouts.stall_seconds * (PATIENCE if self.phase in PATIENT_PHASES else 1)
        if self.seen.get(self.phase, 0) < 2 or self.phase == _UPLOAD or (self.phase == _STEP and self.has_long_calls):
            if not is_training:
                return math.inf, ""
            factor = _LONG_FACTOR if self.phase in _LONG_PHASES else 1
            return max(usual, timeouts.first_seconds * factor), FIRST
        return usual, STALL


class FailureDetector:
    """Find the first failure among ranks from their heartbeats. Times are seconds of a monotonic clock.

    Attributes:
        left: ranks that have left.
        was_given_up: whether this process was stopped for so long that ranks took it for lost.
    """

    def __init__(
        self,
        timeouts: Timeouts,
        settle_seconds: float,
        now: float,
        size: int,
        *,
        hosts: Sequence[str] = (),
        awaits_starter: bool = False,
    ) -> None:
        self._timeouts, self._settle_seconds = timeouts, settle_seconds
        self._size, self._hosts, self._awaits_starter = size, hosts, awaits_starter
        self._ranks: dict[int, _Rank] = {}
        self._first_joined: float | None = None
        self._looked = now
        self._certain: FailureCause | None = None
        self._doubtful: tuple[float, FailureCause] | None = None
        self._stopped: FailureCause | None = None
        self._steps = deque([(now, 0)], maxlen=_STEPS_OF_SPEED)  # when the run reached its last ones
        self._images, self._saved = 0, -1
        self.left: set[int] = set()
        self.was_given_up = False

    @property
    def present(self) -> set[int]:
        """Return the ranks that joined and did not leave."""
        return set(self._ranks)

    @property
    def missing(self) -> set[int]:
        """Return the ranks that never joined."""
        return set(range(self._size)) - self.present - self.left

    def on_join(self, rank: int, host: str, now: float) -> bool:
        """Add a rank; False if it joined before."""
        if rank in self._ranks or rank in self.left:
            return False
        self._first_joined = now if self._first_joined is None else self._first_joined
        self._ranks[rank] = _Rank(host, heard=now, moved=now)
        return True

    def on_heartbeat(self, rank: int, told: State, now: float) -> None:
        """Note the progress of a rank, and the number of its reports."""
        state = self._ranks[rank]
        state.heard = now
        if told.reports != state.reports:
            counted = told.reports - state.reports if told.phase == state.phase else 1
            state.seen[told.phase] = state.seen.get(told.phase, 0) + counted
            if told.phase == state.phase == _STEP:
                state.has_long_calls = told.step - state.step > counted
            state.step, state.phase, state.reports, state.moved = told.step, told.phase, told.reports, now
            self._images, self._saved = max(self._images, told.images), max(self._saved, told.saved)
            if told.step > self._steps[-1][1]:
                self._steps.append((now, told.step))

    def on_failure(self, rank: int, status: int, text: str, now: float, *, certain: bool) -> None:
        """Note an error of a rank; one that is not certain may follow from another rank's failure."""
        cause = self._cause(rank, status, text)
        self._ranks.pop(rank)
        self.left.add(rank)
        if certain:
            self._certain = self._certain or cause
        else:
            self._doubt(cause, now)

    def on_leave(self, rank: int, status: int, text: str) -> None:
        """Note that a rank is done; with a nonzero status the others are about to stop, too."""
        if status:
            self._stopped = self._stopped or self._cause(rank, status, text)
        self._ranks.pop(rank)
        self.left.add(rank)

    def on_disconnect(self, rank: int, now: float) -> None:
        """Note that the connection of a rank is gone."""
        if rank in self._ranks:
            text = f"its process was killed or crashed; see its output and the kernel's; {CONTINUE}"
            cause = self._cause(rank, LOST, text)
            # mpirun ends this one for another, which never joined or whose host is lost.
            if self._awaits_starter and (self.missing or self._is_any_quiet(now)):
                self._doubt(cause, now)
            else:
                self._certain = self._certain or cause
            self._ranks.pop(rank)
            self.left.add(rank)

    def _doubt(self, cause: FailureCause, now: float) -> None:
        """Take something for the cause unless another one is found meanwhile."""
        wait = _STARTER_SECONDS if self._awaits_starter and self.missing else self._settle_seconds
        self._doubtful = self._doubtful or (now + wait, cause)

    def abort(self, status: int, text: str) -> None:
        """End the run for a reason of the launcher."""
        self._certain = self._certain or FailureCause(-1, "", 0, "", status, text)

    def check(self, now: float) -> FailureCause | None:
        """Return the failure that ends the run, if there is one; call it at least once per heartbeat."""
        # Where this process itself was stopped for a while, ranks were not silent: nobody listened.
        if (deaf := now - self._looked) > 2 * self._timeouts.heartbeat_seconds:
            self.was_given_up = self.was_given_up or deaf > self._timeouts.stall_seconds
            if self._first_joined is not None:
                self._first_joined += deaf
            for state in self._ranks.values():  # of which some were heard since
                state.heard, state.moved = min(state.heard + deaf, now), min(state.moved + deaf, now)
        self._looked = now
        if self._certain is None:
            self._certain = self._find_silent(now) or self._find_absent(now) or self._find_still(now)
        if self._certain is None and self._doubtful is not None and not self._is_any_quiet(now):
            due, cause = self._doubtful
            self._certain = cause if now >= due else None
        return self._certain

    def conclude(self) -> FailureCause | None:
        """Return the failure once all ranks have left: one that `check` held back, or the request to stop."""
        doubtful = None if self._doubtful is None else self._doubtful[1]
        return self._certain or doubtful or self._stopped

    def describe(self, now: float) -> dict[str, Any]:
        """Return the state of the run as JSON values.

        Returns:
            ``ranks``: rank, host, step, phase, seconds since it was heard and since it went on, of those connected;
            ``missing`` and ``left``: ranks; ``size``; ``step``: the furthest; ``steps_per_second`` over the last steps;
            ``images``: of a step; ``saved``: step of the last checkpoint, -1: none; ``ended``: why.
        """
        ranks = [
            [rank, each.host, each.step, each.phase, round(now - each.heard, 1), round(now - each.moved, 1)]
            for rank, each in sorted(self._ranks.items())
        ]
        (first, start), (last, end) = self._steps[min(1, len(self._steps) - 1)], self._steps[-1]
        ended = "" if (cause := self.conclude()) is None else cause.describe()
        speed = {"step": end, "steps_per_second": (end - start) / (last - first) if last > first else 0.0}
        lists = {"ranks": ranks, "missing": sorted(self.missing), "left": sorted(self.left)}
        return lists | speed | {"size": self._size, "images": self._images, "saved": self._saved, "ended": ended}

    def _is_any_quiet(self, now: float) -> bool:
        """Return whether a rank misses heartbeats; it may be the one that others cannot reach."""
        return any(
            now - state.heard > _MISSED_HEARTBEATS * self._timeouts.heartbeat_seconds for state in self._ranks.values()
        )

    def _find_silent(self, now: float) -> FailureCause | None:
        bound = self._timeouts.stall_seconds
        silent = [rank for rank, state in self._ranks.items() if now - state.heard > bound]
        if not silent:
            return None
        rank = min(silent, key=lambda rank: self._ranks[rank].heard)
        text = f"has not answered for {bound:g} s: stopped, or its machine or network is lost; look there; {CONTINUE}"
        return self._cause(rank, LOST, text)

    def _find_absent(self, now: float) -> FailureCause | None:
        """Return the lack of a rank that others have waited for; a program of which no rank joins has no such bound."""
        bound = self._timeouts.join_seconds
        if self._first_joined is None or now - self._first_joined <= bound or not self.missing:
            return None
        ranks = sorted(self.missing)
        text = (
            f"has not begun {bound:g} s after the first rank did ({len(ranks)} of {self._size} have not); see its "
            f"output and its host, or raise {JOIN}; {CONTINUE}"
        )
        host = self._hosts[ranks[0]] if self._hosts else "an unknown host"
        return FailureCause(ranks[0], host, 0, "start", LOST, text)

    def _find_still(self, now: float) -> FailureCause | None:
        """Return the stall of the rank that all wait for, if no rank makes progress."""
        if not self._ranks or self._is_any_quiet(now):
            return None
        states = self._ranks.values()
        is_training = any(_START in state.seen for state in states)
        bound, variable = max(state.find_bound(self._timeouts, is_training=is_training) for state in states)
        if self.left:  # the others may do what takes long and needs no other rank
            bound, variable = max((bound, variable), (self._timeouts.start_seconds, START))
        if now - max(state.moved for state in states) <= bound:
            return None
        ranks = self._ranks  # of those at a step, the others wait for one that has not begun, however late it came
        rank = min(ranks, key=lambda rank: (ranks[rank].step, ranks[rank].phase != _START, ranks[rank].moved))
        text = (
            f"no rank has made progress for {bound:g} s, and this one stopped first; see what it waits for "
            f"(py-spy dump), or raise {variable}; {CONTINUE}"
        )
        return self._cause(rank, LOST, text)

    def _cause(self, rank: int, status: int, text: str) -> FailureCause:
        state = self._ranks[rank]
        return FailureCause(rank, state.host, state.step, state.phase, status, text)
