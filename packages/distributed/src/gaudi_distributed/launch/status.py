"""Write what ranks print and where they are into a folder, and show it: `gaudi-run status`.

The launcher writes the state as a file, so nobody has to reach it, or to know its secret, to see how a run goes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from gaudi_distributed.cluster.hosts import read_regular_file, write_file
from gaudi_distributed.cluster.rendezvous import RendezvousServer
from gaudi_distributed.errors import ConfigurationError, MissingProgramError, RankLogs, UnsafeError, say
from gaudi_distributed.failure.coordinator import Coordinator
from gaudi_distributed.failure.messages import Timeouts, show
from gaudi_distributed.launch.flags import PROGRAM, STATUS, Parser
from gaudi_distributed.launch.planning import Launch

_SHOWN_RANKS, _STALE_SECONDS = 16, 15.0
STATE_FILE, _STATE_FORMAT, _STATE_VERSION = "status.json", "gaudi-run status", 1
# Of a state, the kinds of values by name, and those of each entry of its ranks.
_STATE_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("size", "step", "images", "saved", "pid"), (int,)),
    **dict.fromkeys(("ranks", "missing", "left"), (list,)),
    **dict.fromkeys(("steps_per_second", "written"), (int, float)),
    **dict.fromkeys(("host", "ended"), (str,)),
}
_RANK_KINDS = ((int,), (str,), (int,), (str,), (int, float), (int, float))


def open_logs(folder: Path, ranks: Iterable[int]) -> RankLogs:
    """Open the logs of ranks, and begin in each what a launch adds."""
    begin = f"{PROGRAM}: begins at {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC\n"
    return RankLogs(folder, ranks, begin.encode())


def open_coordinator(launch: Launch, timeouts: Timeouts) -> Coordinator:
    """Open the coordinator of a launch, which writes the state of the ranks where they have logs.

    Raises:
        ConfigurationError: the port that was asked for cannot be listened at.
    """
    plan = launch.plan
    write = None if plan.log_dir is None else partial(_write_state, plan.log_dir / STATE_FILE, [])
    with _naming_port(plan.control_port):
        return Coordinator(
            plan.cluster.size,
            address=launch.address,
            port=plan.control_port,
            timeouts=timeouts,
            hosts=[assigned.host for assigned in plan.cluster.assign_ranks()],
            awaits_starter=plan.backend == "openmpi",
            on_state=write,
        )


def open_rendezvous(address: str, control_port: int) -> RendezvousServer:
    """Open the meeting point of Gloo's ranks, at the port behind the coordinator's, or at a free one.

    Raises:
        ConfigurationError: the port that was asked for cannot be listened at.
    """
    with _naming_port(port := control_port and control_port + 1):
        return RendezvousServer(address, port)


@contextlib.contextmanager
def _naming_port(port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not port:
            raise
        raise ConfigurationError(
            f"--control_port: port {port} cannot be listened at ({error.strerror})",
            flag="--control_port",
            remedy="give the first of two that are free",
        ) from error


def _write_state(path: Path, faults: list[Exception], state: Mapping[str, Any]) -> None:
    """Write the state of a run; that it cannot be written is said once."""
    about = {"host": socket.gethostname(), "pid": os.getpid(), "written": time.time()}
    try:
        write_file(path, encode_state({**state, **about}))
    except (OSError, UnsafeError) as error:
        if not faults:
            say(f"{PROGRAM}: the state of the run is not written: {error}", error=True)
        faults.append(error)


def encode_state(state: Mapping[str, Any]) -> str:
    """Return the text of a state: that of `FailureDetector.describe`, who writes it and when, and how the run ended."""
    return json.dumps({"format": _STATE_FORMAT, "version": _STATE_VERSION, **state}, indent=1) + "\n"


def decode_state(text: str, path: Path) -> dict[str, Any]:
    """Return the state of a text, which is that of a file.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        state = json.loads(text)
        if (state.pop("format"), state.pop("version")) != (_STATE_FORMAT, _STATE_VERSION):
            raise ValueError("of another format or version")
        if state.keys() != _STATE_KINDS.keys():
            raise ValueError("has other fields")
        checked = [(state[name], kinds) for name, kinds in _STATE_KINDS.items()]
        checked += [pair for entry in state["ranks"] for pair in zip(entry, _RANK_KINDS, strict=True)]
        checked += [(rank, (int,)) for rank in (*state["missing"], *state["left"])]
        if not all(type(value) in kinds for value, kinds in checked):
            raise TypeError("has values of other kinds")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{path}: is no state of a run ({error})", path=path, remedy="start the run again, which writes it anew"
        ) from None
    return {name: show(value) if isinstance(value, str) else value for name, value in state.items()}


def run_status(arguments: Sequence[str]) -> int:
    """Run `gaudi-run status` and return its exit status.

    Raises:
        FlagError: an unknown flag, or no folder.
        MissingProgramError: the folder has no state of a run.
        ConfigurationError: the file is damaged.
    """
    flags = parse_flags(arguments)
    path: Path = flags.folder / STATE_FILE
    try:
        text = read_regular_file(path, "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MissingProgramError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})",
            path=path,
            remedy="give the --log_dir of a run whose ranks gaudi-run watches; an elastic run has no status",
        ) from error
    say(*describe_state(flags.folder, decode_state(text, path), time.time(), most=None if flags.all else _SHOWN_RANKS))
    return 0


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the folder, and whether to show all ranks; FlagError for an unknown flag, or no folder."""
    parser = Parser(f"{PROGRAM} {STATUS}", "Show the ranks of a run: where they are, and how fast they go.", "DIR")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --log_dir of the run")
    parser.add_argument("--all", action="store_true", help=f"show all ranks, not only the last {_SHOWN_RANKS}")
    return parser.parse_args(list(arguments))


def describe_state(folder: Path, state: Mapping[str, Any], now: float, most: int | None) -> list[str]:
    """Return the lines of a state, the ranks that are behind first, at most so many of them."""
    age = max(0.0, now - state["written"])
    ranks = sorted(state["ranks"], key=lambda entry: (entry[2], -entry[5], entry[0]))
    counts = [f"{len(ranks)} of {state['size']} ranks are connected"]
    counts += [f"{len(state[name])} {word}" for name, word in (("missing", "have not begun"), ("left", "have ended"))]
    lines = [f"{folder}: {', '.join(counts)}; {PROGRAM} on {state['host']} (process {state['pid']}), {age:.0f} s ago"]
    if state["ended"]:
        lines.append(f"ended: {state['ended']}")
    elif age > _STALE_SECONDS and len(state["left"]) < state["size"]:
        lines.append(f"the state is old: {PROGRAM} there was killed, hangs, or cannot write it")
    saved = f"step {state['saved']}" if state["saved"] >= 0 else "none yet"
    speed = state["steps_per_second"]
    images = f", {speed * state['images']:.1f} images/s" if state["images"] else ""
    lines.append(f"step {state['step']}, {speed:.2f} steps/s{images}, last checkpoint: {saved}")
    if not ranks:
        return lines
    rows = [("rank", "host", "step", "phase", "heard", "progress")]
    rows += [
        (f"{rank}", host, f"{step}", at, f"{heard:g} s", f"{moved:g} s") for rank, host, step, at, heard, moved in ranks
    ]
    shown = rows if most is None else rows[: most + 1]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines += ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    if len(shown) < len(rows):
        lines.append(f"and {len(rows) - len(shown)} others, which are further; --all shows them")
    return lines
