"""Run `gaudi-run`: parse its flags, then start processes, write a job or show what would run."""

from __future__ import annotations

import io
import os
import stat
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gaudi_distributed.launch.elastic import start_elastic
from gaudi_distributed.launch.experiments import list_experiments, run_experiment
from gaudi_distributed.launch.flags import DOCTOR, INSTALL_HOROVOD, PROGRAM, parse_flags
from gaudi_distributed.launch.schedulers import is_job_file, write_job_file

_SOFTWARE, _IO, _STOPPED = 70, 74, 75


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program with the given arguments (those of the command line when None) and leave the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    tolerate_closed_readers()
    sys.exit(launch(arguments, os.environ))


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
        options = parse_flags(arguments)
        if is_job_file(options):
            write_job_file(options, environ)
        elif options.host_discovery_script is not None or options.max_np is not None:
            start_elastic(options, environ)
        else:
            for experiment in list_experiments(options, environ):
                run_experiment(experiment, environ)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.write(f"{PROGRAM}: error: {_describe(error)}\n")
        status = getattr(error, "exit_status", None)
        if isinstance(status, int):
            return status
        if isinstance(error, KeyboardInterrupt):
            return _STOPPED
        return _IO if isinstance(error, OSError) else _SOFTWARE


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{Path(error.filename)}: {error.strerror}"
    text = " ".join(str(error).split())
    return text if hasattr(error, "exit_status") else f"{type(error).__name__}: {text}; --debug shows where"


class _Pipe(io.FileIO):
    """A pipe that drops what is written once nobody reads it."""

    def write(self, content: Any) -> int:
        """Write bytes and return their number."""
        try:
            return super().write(content)
        except BrokenPipeError:
            # The descriptor itself, so that libraries which write to it in C do not fail either.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return len(content)


def tolerate_closed_readers() -> None:
    """Make sys.stdout and sys.stderr drop what nobody reads, in place of raising BrokenPipeError.

    A program then does its work to the end, and its exit status is that of its work. A stream that is closed from the
    beginning drops everything. Streams that are no pipes, and those that somebody has replaced already, are left alone.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the program began, as by `>&-`
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
            continue
        if stream is not getattr(sys, f"__{name}__"):
            continue
        mode = os.fstat(stream.fileno()).st_mode
        if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
            continue
        stream.flush()
        pipe = _Pipe(stream.fileno(), "w", closefd=False)
        same = io.TextIOWrapper(
            pipe if stream.write_through else io.BufferedWriter(pipe),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, same)


if __name__ == "__main__":
    main()
