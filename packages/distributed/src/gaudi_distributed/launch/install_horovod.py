"""Run the subcommand `gaudi-run install-horovod`: build, install and check Horovod, and report it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gaudi_distributed.comm.horovod_engine import FRAMEWORKS, TITLES, Framework
from gaudi_distributed.errors import FlagError, MissingProgramError
from gaudi_distributed.launch.flags import INSTALL_HOROVOD, PROGRAM, Parser, split_command
from gaudi_distributed.launch.horovod_wheel import (
    HOROVOD,
    PARTS,
    Build,
    Check,
    ask_horovod,
    build_wheel,
    cache_folder,
    choose_frameworks,
    find_tools,
    find_variables,
    find_wheel,
    inspect_environment,
    install_wheel,
    require_parts,
)

NAME = f"{PROGRAM} {INSTALL_HOROVOD}"
_DESCRIPTION = f"""Build Horovod {HOROVOD} for an environment that has TensorFlow or MXNet, install it there, check it.
A build takes minutes; its wheel is kept in ~/.cache/gaudi/horovod by the versions that it is compiled against.
It needs a C++ compiler, make and, for MPI, Open MPI: apt-get install g++ make openmpi-bin libopenmpi-dev"""


@dataclass(frozen=True)
class Flags:
    """The values of the flags; a framework is None if neither `--with_` nor `--without_` was given."""

    python: Path
    tensorflow: bool | None
    mxnet: bool | None
    mpi: bool
    gloo: bool
    constraint: tuple[str, ...]
    rebuild: bool
    dry_run: bool
    json: bool


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
        tools = find_tools(build, environ)
        if not flags.dry_run:
            log = cache_folder(environ) / build.key / "build.log"
            sys.stderr.write(f"{PROGRAM}: building Horovod, which takes minutes; what happens is in {log}\n")
            started = time.monotonic()
            wheel = build_wheel(build, tools, environ)
            seconds = time.monotonic() - started
    check = Check()
    if wheel is not None and not flags.dry_run:
        install_wheel(build, wheel, environ, flags.constraint)
        check = ask_horovod(build, environ)
        require_parts(build, check)
    facts = describe(build, wheel, check, seconds, environ)
    sys.stdout.write(json.dumps(facts, indent=2) + "\n" if flags.json else format_report(facts))
    return 0


def parse_flags(arguments: Sequence[str]) -> Flags:
    """Return the flags; FlagError for one that does not exist, a value that it does not take, or a program."""
    parser = Parser(
        prog=NAME,
        usage=f"{NAME} [flags]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    where = parser.add_argument_group("environment")
    where.add_argument(
        "--python", type=Path, default=Path(sys.executable), metavar="PATH", help="its interpreter; default: this one"
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
            help=f"fail where {title} is not installed; default: for {title} where it is",
        )
        either.add_argument(
            f"--without_{framework}", dest=framework, action="store_const", const=False, help=f"not for {title}"
        )
    parts.add_argument("--without_mpi", dest="mpi", action="store_false", help="ranks talk by Gloo alone")
    parts.add_argument("--without_gloo", dest="gloo", action="store_false", help="ranks talk by MPI alone")
    parts.add_argument("--rebuild", action="store_true", help="build even where the cache has the wheel")
    output = parser.add_argument_group("output")
    output.add_argument("--dry_run", action="store_true", help="show what would be built; change nothing")
    output.add_argument("--json", action="store_true", help="JSON in place of the report")
    output.add_argument("--debug", action="store_true", help="show the traceback of an error")
    words, command = split_command(parser, arguments)
    values = vars(parser.parse_args(words))
    if command:
        raise FlagError(
            f"{command[0]!r} stands where a flag should",
            remedy=f"this starts no program (see {NAME} --help)",
        )
    for name in values["constraint"]:
        if not Path(name).is_file():
            raise MissingProgramError(
                f"--constraint {name}: there is no such file",
                flag="--constraint",
                path=name,
            )
    # The path of a link in a virtual environment is what tells that environment.
    values |= {"constraint": tuple(values["constraint"]), "python": values["python"].absolute()}
    return Flags(**{field.name: values[field.name] for field in fields(Flags)})


def describe(
    build: Build, wheel: Path | None, check: Check, seconds: float, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the facts of the report; `wheel` is None where it is still to be built, `seconds` 0 where it was not."""
    return {
        "horovod": HOROVOD,
        "python": str(build.environment.python),
        "wheel": None if wheel is None else str(wheel),
        "folder": str(cache_folder(environ) / build.key),
        "built_in_seconds": round(seconds, 1) or None,
        "installed": bool(check.parts),
        "mpi": build.mpi,
        "gloo": build.gloo,
        "frameworks": {
            name: {"version": version, "built": dict(check.parts.get(name, {}))}
            for name, version in build.frameworks.items()
        },
    }


def format_report(facts: Mapping[str, Any]) -> str:
    """Return the facts as lines for a reader."""
    frameworks = facts["frameworks"]
    for_all = " and ".join(f"{TITLES[name]} {each['version']}" for name, each in frameworks.items())
    asked = " and ".join(PARTS[name] for name in ("mpi", "gloo") if facts[name])
    minutes = facts["built_in_seconds"]
    if facts["wheel"] is None:
        wheel = f"to be built, in {facts['folder']}"
    else:
        wheel = f"{facts['wheel']} ({'from the cache' if minutes is None else f'built in {minutes / 60:.1f} minutes'})"
    lines = [
        f"Horovod {facts['horovod']} for {for_all}, with {asked}",
        f"  python      {facts['python']}",
        f"  wheel       {wheel}",
    ]
    if not facts["installed"]:
        return "\n".join([*lines, "  nothing was changed (--dry_run)"]) + "\n"
    for name, each in frameworks.items():
        has = ", ".join(PARTS[part] for part, is_in in each["built"].items() if is_in)
        lacks = ", ".join(PARTS[part] for part, is_in in each["built"].items() if not is_in)
        lines.append(f"  {name:10}  imported; with {has}; without {lacks}")
    return "\n".join(lines) + "\n"
