"""Run the subcommand `gaudi-run install-horovod`: build, install and check Horovod, and report it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gaudi_distributed.comm.horovod_engine import FRAMEWORKS, TITLES, Framework
from gaudi_distributed.comm.horovod_wheel import (
    HOROVOD,
    NOWHERE,
    Build,
    build_wheel,
    cache_folder,
    choose_frameworks,
    find_cmake,
    find_variables,
    find_wheel,
    inspect_environment,
    install_wheel,
)
from gaudi_distributed.errors import ConfigurationError, MissingProgramError, say
from gaudi_distributed.launch.flags import INSTALL_HOROVOD, PROGRAM, Parser, parse_subcommand

NAME = f"{PROGRAM} {INSTALL_HOROVOD}"
_DESCRIPTION = f"""Build Horovod {HOROVOD} for an environment that has TensorFlow or MXNet, install it there, check it.
A build takes minutes; its wheel is kept in ~/.cache/gaudi/horovod by the versions that it is compiled against.
It needs a C++ compiler, make and, for MPI, Open MPI: apt-get install g++ make openmpi-bin libopenmpi-dev"""
# Parts that Horovod can be built with, by the name of its function without "_built".
PARTS: Mapping[str, str] = {
    "mpi": "MPI",
    "gloo": "Gloo",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "rocm": "ROCm",
    "ccl": "oneCCL",
    "ddl": "DDL",
}
_CHECK_SECONDS = 300.0
_ASK_PARTS = """
import importlib, json, sys
names, answers = sys.argv[1].split(","), {}
for framework in sys.argv[2:]:
    try:
        module = importlib.import_module(f"horovod.{framework}")
        answers[framework] = {name: bool(getattr(module, f"{name}_built")()) for name in names}
    except Exception as error:
        answers[framework] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(answers))
"""


Parts = Mapping[Framework, Mapping[str, bool]]


def check_horovod(build: Build, environ: Mapping[str, str]) -> Parts:
    """Import Horovod for each framework of the build in the build's environment.

    Returns:
        of each framework whether MPI, Gloo and so on are built in, by the names of `PARTS`.

    Raises:
        ConfigurationError: the interpreter did not answer, or Horovod does not work with a framework, or lacks what
            the build asked for.
    """
    python = build.environment.python
    command = [str(python), "-E", "-c", _ASK_PARTS, ",".join(PARTS), *build.frameworks]
    # The frameworks' notes about devices and instructions would hide what matters.
    variables = {**environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command,
            cwd=NOWHERE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            env=variables,
        )
        answers = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigurationError(
            f"{python} does not say how Horovod was built: {error}", path=python, remedy="try again"
        ) from error
    parts: dict[Framework, Mapping[str, bool]] = {}
    for framework in build.frameworks:
        if isinstance(answers[framework], str):
            first = next(iter(answers[framework].splitlines()), "")
            raise ConfigurationError(
                f"Horovod was installed, but does not work with {TITLES[framework]}: {first}",
                remedy="install what is missing, or build it anew with --rebuild",
            )
        parts[framework] = answers[framework]
    for framework, built in parts.items():
        for name, is_wanted in (("mpi", build.mpi), ("gloo", build.gloo)):
            if is_wanted and not built[name]:
                raise ConfigurationError(
                    f"Horovod was installed for {TITLES[framework]} without {PARTS[name]}",
                    remedy="build it anew with --rebuild, or leave it out on purpose",
                )
    return parts


def run_install(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Build and install as the flags say, print the report, and return 0.

    Raises:
        FlagError: an unknown flag, or a value that it does not take.
        MissingProgramError: the interpreter, a compiler, Open MPI, CMake or pip is not there.
        ConfigurationError: Horovod cannot be built for the environment, or does not work there.
    """
    flags = parse_flags(arguments)
    environment = inspect_environment(flags.python)
    wanted: dict[Framework, bool | None] = {"tensorflow": flags.tensorflow, "mxnet": flags.mxnet}
    frameworks = choose_frameworks(environment, wanted)
    build = Build(environment, frameworks, flags.mpi, flags.gloo, find_variables(environ))
    wheel = None if flags.rebuild else find_wheel(build, environ)
    seconds = 0.0
    if wheel is None:
        cmake = find_cmake(build, environ)
        if not flags.dry_run:
            log = cache_folder(environ) / build.key / "build.log"
            say(f"{PROGRAM}: building Horovod, which takes minutes; what happens is in {log}", error=True)
            started = time.monotonic()
            wheel = build_wheel(build, cmake, environ)
            seconds = time.monotonic() - started
    parts: Parts = {}
    if wheel is not None and not flags.dry_run:
        install_wheel(build, wheel, environ, flags.constraint)
        parts = check_horovod(build, environ)
    report = {
        "horovod": HOROVOD,
        "python": str(build.environment.python),
        "wheel": None if wheel is None else str(wheel),
        "folder": str(cache_folder(environ) / build.key),
        "built_in_seconds": round(seconds, 1) or None,
        "installed": bool(parts),
        "mpi": build.mpi,
        "gloo": build.gloo,
        "frameworks": {
            name: {"version": version, "built": dict(parts.get(name, {}))} for name, version in frameworks.items()
        },
    }
    say(*(json.dumps(report, indent=2) if flags.json else format_report(report)).splitlines())
    return 0


def parse_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the flags; a framework is None if neither `--with_` nor `--without_` was given.

    Raises:
        FlagError: a flag that does not exist, a value that it does not take, or a program.
        MissingProgramError: there is no file of constraints.
    """
    parser = Parser(NAME, _DESCRIPTION)
    where = parser.add_argument_group("environment")
    where.add_argument(
        "--python",
        type=Path,
        default=Path(sys.executable),
        metavar="PATH",
        help="interpreter of the environment; default: this one",
    )
    where.add_argument(
        "--constraint",
        "-c",
        action="append",
        default=[],
        metavar="FILE",
        help="pip's constraints for what Horovod requires: cloudpickle, packaging, psutil, PyYAML",
    )
    parts = parser.add_argument_group("build")
    for framework in FRAMEWORKS:
        either = parts.add_mutually_exclusive_group()
        title = TITLES[framework]
        either.add_argument(
            f"--with_{framework}",
            dest=framework,
            action="store_const",
            const=True,
            help=f"fail if {title} is not installed; default: build for {title} if it is installed",
        )
        either.add_argument(
            f"--without_{framework}",
            dest=framework,
            action="store_const",
            const=False,
            help=f"do not build for {title}",
        )
    parts.add_argument("--without_mpi", dest="mpi", action="store_false", help="without MPI")
    parts.add_argument("--without_gloo", dest="gloo", action="store_false", help="without Gloo")
    parts.add_argument("--rebuild", action="store_true", help="build even if the wheel is cached")
    output = parser.add_argument_group("output")
    output.add_argument("--dry_run", action="store_true", help="show what would be built; change nothing")
    output.add_argument("--json", action="store_true", help="print JSON instead of the report")
    output.add_argument("--debug", action="store_true", help="show the traceback of an error")
    flags = parse_subcommand(parser, arguments)
    for name in flags.constraint:
        if not Path(name).is_file():
            raise MissingProgramError(f"--constraint {name}: does not exist", flag="--constraint", path=name)
    # The path of a link in a virtual environment is what tells that environment.
    flags.python = flags.python.absolute()
    return flags


def format_report(report: Mapping[str, Any]) -> str:
    """Return the report as text."""
    frameworks = report["frameworks"]
    for_all = " and ".join(f"{TITLES[name]} {each['version']}" for name, each in frameworks.items())
    asked = " and ".join(PARTS[name] for name in ("mpi", "gloo") if report[name])
    minutes = report["built_in_seconds"]
    if report["wheel"] is None:
        wheel = f"to be built, in {report['folder']}"
    else:
        wheel = f"{report['wheel']} ({'from the cache' if minutes is None else f'built in {minutes / 60:.1f} minutes'})"
    lines = [
        f"Horovod {report['horovod']} for {for_all}, with {asked}",
        f"  python      {report['python']}",
        f"  wheel       {wheel}",
    ]
    if not report["installed"]:
        return "\n".join([*lines, "  nothing was changed (--dry_run)"]) + "\n"
    for name, each in frameworks.items():
        has = ", ".join(PARTS[part] for part, is_in in each["built"].items() if is_in)
        lacks = ", ".join(PARTS[part] for part, is_in in each["built"].items() if not is_in)
        lines.append(f"  {name:10}  imported; with {has}; without {lacks}")
    return "\n".join(lines) + "\n"
