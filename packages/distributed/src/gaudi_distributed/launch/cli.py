"""The program `gaudi-run`: from flags and environment to processes, or to a text that says what would run."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gaudi_distributed.launch.elastic import start_elastic
from gaudi_distributed.launch.experiments import run_experiment
from gaudi_distributed.launch.flags import DOCTOR, INSTALL_HOROVOD, PROGRAM, Options, parse_flags
from gaudi_distributed.launch.job_files import is_job_file, write_job_file
from gaudi_distributed.launch.submission import list_experiments
from gaudi_distributed.streams import tolerate_closed_readers

_SOFTWARE, _IO, _STOPPED = 70, 74, 75


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments (those of the command line when None) and leave the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    tolerate_closed_readers()
    sys.exit(launch(arguments, os.environ))


def launch(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Do what the arguments say and return the exit status; errors are told on standard error."""
    try:
        if list(arguments[:1]) == [DOCTOR]:
            return _examine(arguments[1:], environ)
        if list(arguments[:1]) == [INSTALL_HOROVOD]:
            return _install_horovod(arguments[1:], environ)
        return _launch(parse_flags(arguments), environ)
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.write(f"{PROGRAM}: error: {_describe(error)}\n")
        return _status_of(error)


def _launch(options: Options, environ: Mapping[str, str]) -> int:
    if is_job_file(options):
        write_job_file(options, environ)
        return 0
    if options.host_discovery_script is not None or options.max_np is not None:
        start_elastic(options, environ)
        return 0
    for experiment in list_experiments(options, environ):
        run_experiment(experiment, environ)
    return 0


def _examine(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    # Not even bytecode is written of the modules that are imported now.
    sys.dont_write_bytecode = True
    from gaudi_distributed.doctor.cli import run_doctor

    return run_doctor(arguments, environ)


def _install_horovod(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    from gaudi_distributed.horovod_build.cli import run_install

    return run_install(arguments, environ)


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{Path(error.filename)}: {error.strerror}"
    text = " ".join(str(error).split())
    return text if hasattr(error, "exit_status") else f"{type(error).__name__}: {text}; --debug shows where"


def _status_of(error: BaseException) -> int:
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    if isinstance(error, KeyboardInterrupt):
        return _STOPPED
    return _IO if isinstance(error, OSError) else _SOFTWARE


if __name__ == "__main__":
    main()
