"""Run `gaudi-run`: parse its flags, then start processes, write a job or show what would run."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gaudi_distributed.errors import MAX_ERROR, find_output_fault, open_output, say, shorten
from gaudi_distributed.launch.elastic import start_elastic
from gaudi_distributed.launch.experiments import list_experiments, run_experiment
from gaudi_distributed.launch.flags import DOCTOR, INSTALL_HOROVOD, PROGRAM, STATUS, parse_flags
from gaudi_distributed.launch.guard import end_children, keep_orphans
from gaudi_distributed.launch.schedulers import is_job_file, write_job_file
from gaudi_distributed.launch.status import run_status

_SOFTWARE, _IO, _STOPPED = 70, 74, 75


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments (those of the command line when None) and leave the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_output()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    own = keep_orphans()
    try:
        status: Any = launch(arguments, os.environ)
    except SystemExit as end:
        status = end.code
    finally:
        end_children(own)  # of a guard that was killed: mpirun ends with it, and leaves ranks
    if (fault := find_output_fault()) is not None and not status:
        status = _end(fault)
    sys.exit(status)


def launch(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command line and return the exit status; errors are printed on standard error."""
    try:
        if list(arguments[:1]) == [DOCTOR]:
            # Not even bytecode is written of the modules that are imported now.
            sys.dont_write_bytecode = True
            from gaudi_distributed.doctor.cli import run_doctor

            return run_doctor(arguments[1:], environ)
        if list(arguments[:1]) == [INSTALL_HOROVOD]:
            from gaudi_distributed.launch.install_horovod import run_install

            return run_install(arguments[1:], environ)
        if list(arguments[:1]) == [STATUS]:
            return run_status(arguments[1:])
        options = parse_flags(arguments)
        if is_job_file(options):
            write_job_file(options, environ)
        elif options.host_discovery_script is not None or options.max_np is not None or options.min_np > 1:
            start_elastic(options, environ)
        else:
            for experiment in list_experiments(options, environ):
                run_experiment(experiment, environ)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            say(*traceback.format_exc().splitlines(), error=True)
        return _end(error)


def _end(error: BaseException) -> int:
    """Print the error that ends the program, and return its exit status."""
    say(shorten(f"{PROGRAM}: error: {_describe(error)}", MAX_ERROR), error=True)
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    if isinstance(error, KeyboardInterrupt):
        return _STOPPED
    return _IO if isinstance(error, (OSError, MemoryError)) else _SOFTWARE


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "there is not enough memory; free some, or start fewer processes"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{Path(error.filename)}: {error.strerror}"
    text = " ".join(str(error).split())
    return text if hasattr(error, "exit_status") else f"{type(error).__name__}: {text}; --debug shows where"


if __name__ == "__main__":
    main()
