"""Connect a rank to the coordinator: report its progress, and end its process when the run is over."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

from gaudi_distributed.cluster.rank_info import RankInfo
from gaudi_distributed.comm.communicator import Communicator
from gaudi_distributed.devices.machine import LOOPBACK, address_towards
from gaudi_distributed.errors import ConfigurationError, MessageError, PeerLostError
from gaudi_distributed.failure.coordinator import COORDINATOR, TOKEN, Coordinator
from gaudi_distributed.failure.messages import (
    CONTINUE,
    LOST,
    MAX_BYTES,
    Failed,
    FailureCause,
    Heartbeat,
    Hello,
    Left,
    State,
    Timeouts,
    bound_status,
    decode_message,
    encode_message,
    read_timeouts,
)

_CONNECT_SECONDS = 15.0
# In a run of more ranks progress goes with the heartbeats: the coordinator hears a thousand ranks, but not each step.
_MOST_TELLING_EACH_STEP = 64
_SAVING = "checkpoint"
Announce = Callable[[str], None]


@dataclass(frozen=True)
class CoordinatorInfo:
    """The process that holds the coordinator.

    Attributes:
        host: address at which it listens.
        port: the same.
        rank: of the process; -1: the launcher.
        name: of its machine.
        reporter: the rank that reports it if the coordinator's connection closes.
        timeout_reporter: the rank that reports it if the coordinator no longer answers.
    """

    host: str
    port: int
    rank: int = -1
    name: str = ""
    reporter: int = 0
    timeout_reporter: int = 0


class RankClient:
    """Keep a rank's connection to the coordinator, in two daemon threads.

    Once the run is over, the main thread leaves at its next report, or has some seconds to leave by itself; then the
    process is ended from here, whatever the main thread waits in.

    Args:
        rank_info: of the rank.
        info: where the coordinator is.
        token: the secret that it expects.
        announce: called with a line about the loss of the coordinator, on the rank that reports it.
        hosted: the coordinator itself, if it is in this process, which then stays until no other rank needs it.

    Raises:
        PeerLostError: nobody answers there, or not to this token.
    """

    def __init__(
        self,
        rank_info: RankInfo,
        info: CoordinatorInfo,
        token: str,
        announce: Announce,
        hosted: Coordinator | None = None,
    ) -> None:
        self._rank_info, self._coordinator, self._announce, self._hosted = rank_info, info, announce, hosted
        self._state = State(0, "start", 0)
        self._over = threading.Event()
        self._has_left = self._stop_requested = False
        self._cause: FailureCause | None = None
        self._socket, self._lines, self._timeouts = _connect(info, Hello(token, rank_info.rank, rank_info.host))
        # A wait that takes as long as this is the other end's silence; sending never waits.
        self._socket.settimeout(self._timeouts.stall_seconds)
        self._sender, self._sending, self._unsent = self._socket.dup(), threading.Lock(), b""
        self._sender.setblocking(False)
        for work in (self._give_signs_of_life, self._listen):
            threading.Thread(target=work, name="supervision", daemon=True).start()

    @property
    def cause(self) -> FailureCause | None:
        """Return what ended the run; None while it goes on."""
        return self._cause

    @property
    def stop_requested(self) -> bool:
        """Return whether the launcher asks all ranks to save and end; ranks learn of it at different steps."""
        return self._stop_requested

    def set_progress(self, step: int, phase: str, images: int = 0) -> None:
        """Report the number of steps done, the next phase, and the images of a step on all ranks, where they are known.

        It takes microseconds and never blocks.

        In a run of more than 64 ranks the report goes with the next heartbeat, so the step that is named for a killed
        rank may be as old as that. Once the run is over, the process ends here: what it would compute is not wanted.

        Phases are ``"start"``, ``"broadcast"``, ``"step"``, ``"evaluation"`` (at each batch), ``"scoring"``,
        ``"checkpoint"``, ``"export"`` and ``"upload"`` (at each file). A training reports ``"start"`` first: it is over
        if no other report follows for too long, see `Timeouts`, of which the long ones are for ``"start"`` and for the
        first report of a phase. Any other work has a bound from the second report of a phase on.
        """
        if self._cause is not None:
            if self._hosted is not None:  # the others have yet to hear of it
                time.sleep(self._timeouts.leave_seconds)
            exit_now(self._cause.status)
        before = self._state
        saved = before.step if before.phase == _SAVING else before.saved
        self._state = State(step, phase, before.reports + 1, images or before.images, saved)
        if self._rank_info.size <= _MOST_TELLING_EACH_STEP:
            self._send(self._state)

    def report_failure(self, text: str, status: int, *, certain: bool = True) -> FailureCause:
        """Report an error of this rank, and return what ended the run: this, or what came first.

        An error of communication is not `certain`: it follows, as a rule, from the loss of another rank. The rank that
        hosts the coordinator waits until the line about what ended the run is shown.
        """
        status = bound_status(status)
        self._send(self._state)
        self._send(Failed(status, text, certain))
        # Whether another rank is silent is known after that bound.
        patience = 0.0 if certain else self._timeouts.stall_seconds
        self._over.wait(patience + self._timeouts.leave_seconds)
        rank_info, state = self._rank_info, self._state
        cause = self._cause or FailureCause(rank_info.rank, rank_info.host, state.step, state.phase, status, text)
        if self._hosted is not None:
            self._hosted.wait(self._timeouts.leave_seconds)
        return cause

    def leave(self, text: str = "", status: int = 0) -> FailureCause | None:
        """Report that this rank is done, or stopped as all ranks do; return what ended the run before.

        The rank that hosts the coordinator waits for the others first.
        """
        status = status and bound_status(status)
        if self._cause is None:
            self._has_left = True
            self._send(self._state)
            self._send(Left(status, text))
        if self._hosted is None:
            return self._cause
        self._hosted.wait()
        return self._hosted.cause

    def _send(self, message: State | Failed | Left) -> None:
        """Send what the connection takes; progress is dropped while the other end does not read."""
        with self._sending, contextlib.suppress(OSError):  # of a loss the listening thread knows
            if not self._unsent or not isinstance(message, State):
                self._unsent += encode_message(message)
            self._unsent = self._unsent[self._sender.send(self._unsent) :]

    def _give_signs_of_life(self) -> None:
        while not self._over.wait(self._timeouts.heartbeat_seconds):
            self._send(self._state)

    def _listen(self) -> None:
        silent = False
        try:
            while line := self._lines.readline(MAX_BYTES + 1):
                message = decode_message(line)
                if isinstance(message, FailureCause):
                    self._finish(message)
                self._stop_requested |= isinstance(message, Heartbeat) and message.stop
        except TimeoutError:
            silent = True
        except (OSError, MessageError):
            pass
        if not self._has_left:
            cause = self._on_coordinator_lost(silent=silent)
            if self._rank_info.rank == (self._coordinator.timeout_reporter if silent else self._coordinator.reporter):
                self._announce(cause.describe())
            self._finish(cause)

    def _on_coordinator_lost(self, *, silent: bool) -> FailureCause:
        rank_info, state, info = self._rank_info, self._state, self._coordinator
        what = "was killed or crashed"
        if silent:
            what = (
                f"has not answered for {self._timeouts.stall_seconds:g} s: stopped, or its machine or network is lost"
            )
        if info.rank >= 0:
            return FailureCause(info.rank, info.name, state.step, state.phase, LOST, f"its process {what}; {CONTINUE}")
        text = f"the launcher of this run {what}; {CONTINUE}"
        return FailureCause(rank_info.rank, rank_info.host, state.step, state.phase, LOST, text)

    def _finish(self, cause: FailureCause) -> None:
        """Let the main thread leave, and end the process where it does not."""
        self._cause = cause
        self._over.set()
        time.sleep(self._timeouts.leave_seconds)
        exit_now(cause.status)


def exit_now(status: int) -> None:
    """End this process whatever its other threads do; what was printed is shown, unless that waits too long."""
    flushing = threading.Thread(target=lambda: (sys.stdout.flush(), sys.stderr.flush()), daemon=True)
    flushing.start()
    flushing.join(1.0)
    os._exit(status)


def _connect(info: CoordinatorInfo, hello: Hello) -> tuple[socket.socket, BinaryIO, Timeouts]:
    """Connect, and try again while others on the same port are in the way."""
    limit = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            connection = socket.create_connection((info.host, info.port), timeout=_CONNECT_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(encode_message(hello))
            lines = connection.makefile("rb")
            answer = decode_message(lines.readline(MAX_BYTES + 1))
            if isinstance(answer, Timeouts):
                return connection, lines, answer
            fault = "says no welcome"
        except (OSError, MessageError) as error:
            fault = f"{error.strerror or error}" if isinstance(error, OSError) else "closed the connection"
        if time.monotonic() > limit:
            raise PeerLostError(
                f"rank {hello.rank} on {hello.host}: the coordinator of this run at {info.host}:{info.port} {fault}",
                remedy="see that the port can be reached, and start the run again",
            )
        time.sleep(0.2)


def join_coordinator(rank_info: RankInfo, environ: Mapping[str, str], announce: Announce) -> RankClient | None:
    """Join the coordinator that gaudi-run's variables name; None if they are not set.

    It needs no communication between ranks, so join before that is opened: a rank lost meanwhile is seen, too.

    Args:
        rank_info: of this rank.
        environ: of this process.
        announce: shows a line on standard error, as the end of the run; called on rank 0 if the launcher is lost.

    Raises:
        ConfigurationError: only one of the two variables is there, or one is wrong.
        PeerLostError: nobody answers there.
    """
    endpoint, token = environ.get(COORDINATOR, ""), environ.get(TOKEN, "")
    if not endpoint and not token:
        return None
    host, _, port = endpoint.rpartition(":")
    if not token or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigurationError(
            f"{COORDINATOR} is {endpoint!r} and {TOKEN} is {'set' if token else 'not'}; gaudi-run sets both, the "
            "first as host:port",
            field=COORDINATOR,
            remedy="unset them, or start the run through gaudi-run",
        )
    return RankClient(rank_info, CoordinatorInfo(host.strip("[]"), int(port)), token, announce)


def start_coordinator(
    communicator: Communicator, rank_info: RankInfo, environ: Mapping[str, str], announce: Announce
) -> RankClient | None:
    """Start a coordinator in rank 0 for a run without gaudi-run; all ranks call this together. None for a single rank.

    Rank 0 shows what ended the run. If it is rank 0 that is lost, the next rank does: rank 1, or, where rank 0 fell
    silent and its machine may be lost with others, the first rank of another machine.

    Args:
        communicator: of the run.
        rank_info: of this rank.
        environ: of this process; see `read_timeouts`.
        announce: shows a line on standard error, as the end of the run.

    Raises:
        ConfigurationError: rank 0 finds no address that the others could reach.
        PeerLostError: rank 0 cannot be reached.
    """
    if communicator.size == 1:
        return None
    timeouts = read_timeouts(environ, communicator.size)
    hosts = [content.decode() for content in communicator.gather(rank_info.host.encode())]
    # Not the first rank after those of this host: mpirun --map-by node numbers ranks in turns.
    other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)
    coordinator: Coordinator | None = None
    said = {"fault": "", "host": "", "port": 0, "token": ""}
    if rank_info.rank == 0:
        try:
            is_local = rank_info.local_size == rank_info.size
            address = LOOPBACK if is_local else address_towards(hosts[other])
            coordinator = Coordinator(
                rank_info.size, address=address, timeouts=timeouts, on_cause=lambda cause: announce(cause.describe())
            )
            said |= {"host": address, "port": coordinator.port, "token": coordinator.token}
        except OSError as error:
            said["fault"] = f"{error}"
    said = json.loads(communicator.gather(json.dumps(said).encode())[0])
    if said["fault"]:
        raise ConfigurationError(
            f"rank 0 on {hosts[0]}: has no address at which {hosts[other]} could reach it ({said['fault']})",
            remedy="make the name known to both, or start the run through gaudi-run",
        )
    info = CoordinatorInfo(said["host"], said["port"], rank=0, name=hosts[0], reporter=1, timeout_reporter=other)
    return RankClient(rank_info, info, said["token"], announce, coordinator)
