"""Run the experiments of a submission one after another: caches cleared before, and all that is printed in a log."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from gaudi_distributed.launch.caches import CACHES_CLEARED, clear_caches, list_clearing
from gaudi_distributed.launch.choices import choose_preset
from gaudi_distributed.launch.flags import PROGRAM
from gaudi_distributed.launch.planning import Launch, plan_launch
from gaudi_distributed.launch.running import OutputLog, RunEndedError
from gaudi_distributed.launch.starting import say, start
from gaudi_distributed.launch.submission import Experiment, describe_result


def run_experiment(experiment: Experiment, environ: Mapping[str, str]) -> None:
    """Run a launch, or with `--dry_run` show it.

    A launch that is no experiment of a submission has no log, and clears no caches.

    Raises:
        RunEndedError: it did not end well.
    """
    launched = plan_launch(experiment.options, environ)
    if experiment.options.dry_run:
        sys.stdout.write(f"{_describe(experiment, launched, environ)}{launched.describe()}")
        return
    with _open_log(experiment) as log:
        try:
            _run(experiment, launched, environ, log)
        except RunEndedError as error:
            if log is not None:
                log.write(f"{PROGRAM}: error: {error}\n".encode())
            raise


def _run(experiment: Experiment, launched: Launch, environ: Mapping[str, str], log: OutputLog | None) -> None:
    if log is not None:
        say(f"beginning trial {experiment.number} of {experiment.count}; its output is in {experiment.log}, too", log)
    if experiment.clears_caches:
        fault = clear_caches(launched.plan, environ)
        if fault is not None:
            say(f"caches are not cleared, and the log of MLPerf will say so: {fault}; or set CLEAR_CACHES=0", log)
        environ = {**environ, CACHES_CLEARED: "1" if fault is None else "0"}
        launched = plan_launch(experiment.options, environ)
    started = datetime.now()
    start(launched, environ, log)
    preset, _ = choose_preset(experiment.options)
    # A launcher inside a container writes its own.
    if preset is not None and preset.result is not None and launched.supervised:
        line = f"{describe_result(preset.result, started, datetime.now(), environ)}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
        if log is not None:
            log.write(line.encode())


def _describe(experiment: Experiment, launched: Launch, environ: Mapping[str, str]) -> str:
    if experiment.log is None:
        return ""
    text = f"trial {experiment.number} of {experiment.count}\nlog {experiment.log}\n"
    if experiment.clears_caches:
        commands = [shlex.join(argv) for _, argv in list_clearing(launched.plan, environ)]
        text += "".join(f"first {command}\n" for command in commands)
    return text


@contextmanager
def _open_log(experiment: Experiment) -> Iterator[OutputLog | None]:
    if experiment.log is None:
        yield None
        return
    experiment.log.parent.mkdir(parents=True, exist_ok=True)
    with experiment.log.open("ab") as file:
        yield OutputLog(file)
