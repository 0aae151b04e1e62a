"""Check of an installed Horovod: its module for each framework is imported in its own environment and asked."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.horovod_build.environment import NOWHERE, TITLES, Framework
from gaudi_distributed.horovod_build.wheel import Build

# What Horovod can say of itself, by the name of its function without "_built".
PARTS: Mapping[str, str] = {
    "mpi": "MPI",
    "gloo": "Gloo",
    "nccl": "NCCL",
    "cuda": "CUDA",
    "rocm": "ROCm",
    "ccl": "oneCCL",
    "ddl": "DDL",
}
_SECONDS = 300.0
_ASK = """
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


@dataclass(frozen=True)
class Check:
    """What an installed Horovod says of itself.

    Attributes:
        parts: for each framework whether MPI, Gloo and so on are built in, by the names of `PARTS`.
        complaints: for each framework that does not work, why.
    """

    parts: Mapping[Framework, Mapping[str, bool]] = field(default_factory=dict)
    complaints: Mapping[Framework, str] = field(default_factory=dict)


def ask_horovod(build: Build, environ: Mapping[str, str]) -> Check:
    """Import Horovod for each framework of the build in the build's environment, and return what it says.

    Raises:
        ConfigurationError: the interpreter did not answer.
    """
    python = build.environment.python
    command = [str(python), "-E", "-c", _ASK, ",".join(PARTS), *build.frameworks]
    # The frameworks' notes about devices and instructions would hide what matters.
    variables = {**environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            command,
            cwd=NOWHERE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            env=variables,
        )
        answers = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise ConfigurationError(f"{python} does not say how Horovod was built: {error}; try again") from error
    return Check(
        parts={name: answers[name] for name in build.frameworks if isinstance(answers[name], dict)},
        complaints={name: answers[name] for name in build.frameworks if isinstance(answers[name], str)},
    )


def require_parts(build: Build, check: Check) -> None:
    """Raise ConfigurationError unless Horovod works with every framework and has what the build asked for."""
    for framework, complaint in check.complaints.items():
        first = next(iter(complaint.splitlines()), "")
        raise ConfigurationError(
            f"Horovod was installed, but does not work with {TITLES[framework]}: {first}; install what is missing, or "
            "build it anew with --rebuild"
        )
    for framework, parts in check.parts.items():
        for name, is_wanted in (("mpi", build.mpi), ("gloo", build.gloo)):
            if is_wanted and not parts[name]:
                raise ConfigurationError(
                    f"Horovod was installed for {TITLES[framework]} without {PARTS[name]}; build it anew with "
                    "--rebuild, or leave it out on purpose"
                )
