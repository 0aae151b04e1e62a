"""Start a launch that was planned, watch over it, and say what ended it, once and last."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack

from gaudi_distributed.launch.flags import PROGRAM
from gaudi_distributed.launch.planning import Launch
from gaudi_distributed.launch.rendezvous import Rendezvous
from gaudi_distributed.launch.running import ALONE, OutputLog, RunEndedError, Supervision, run_processes
from gaudi_distributed.supervision.bounds import read_bounds
from gaudi_distributed.supervision.coordinator import Coordinator


def start(launch: Launch, environ: Mapping[str, str], log: OutputLog | None = None) -> None:
    """Run it, its output to the log, too; RunEndedError, with the exit status, says what ended it other than well."""
    for note in launch.notes:
        say(note, log)
    for path, text in launch.files.items():
        path.write_text(text, encoding="utf-8")
    plan = launch.plan
    made: dict[str, str] = {}
    with ExitStack() as stack:
        coordinator = None
        if launch.supervised:
            bounds = read_bounds(environ)
            coordinator = stack.enter_context(Coordinator(plan.cluster.size, address=launch.address, bounds=bounds))
            made |= coordinator.environment
        if plan.backend == "gloo" and launch.supervised:
            made |= stack.enter_context(Rendezvous(launch.address)).environment
        try:
            run_processes(
                launch.processes,
                environ,
                made,
                grace=plan.grace,
                tags=plan.tag_output,
                log=log,
                supervision=ALONE if coordinator is None else _listen_to(coordinator),
            )
        except RunEndedError as error:
            if coordinator is not None and coordinator.cause is not None:
                raise RunEndedError(coordinator.cause.describe(), coordinator.cause.status) from error
            raise


def say(text: str, log: OutputLog | None = None) -> None:
    """Write a line of the launcher's own to standard error, and to the log."""
    line = f"{PROGRAM}: {text}\n"
    sys.stderr.write(line)
    sys.stderr.flush()
    if log is not None:
        log.write(line.encode())


def _listen_to(coordinator: Coordinator) -> Supervision:
    return Supervision(
        is_heard=lambda: coordinator.has_ranks,
        is_over=lambda: coordinator.cause is not None,
        ask_to_stop=coordinator.request_stop,
    )
