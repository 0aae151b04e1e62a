"""The Python environment that Horovod is built for: its interpreter and the frameworks that it holds."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from gaudi_distributed.errors import ConfigurationError, MissingProgramError

Framework = Literal["tensorflow", "mxnet"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
TITLES: Mapping[Framework, str] = {"tensorflow": "TensorFlow", "mxnet": "MXNet"}
# The distributions that own each framework's module.
DISTRIBUTIONS: Mapping[Framework, tuple[str, ...]] = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "intel-tensorflow"),
    "mxnet": ("mxnet", "mxnet-cu112", "mxnet-cu110"),
}
# From this TensorFlow on, headers that Horovod is compiled against are not shipped.
FIRST_WITHOUT_HEADERS = (2, 20)
_HOROVOD, _VENDORS_HOROVOD = "horovod", "habana-horovod"
_ASK_SECONDS = 60.0
# Working folder of interpreters that are asked something: `python -c` looks for modules there first.
NOWHERE = Path("/")
_ASK = """
import json, platform, sys
from importlib import metadata
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
print(json.dumps({"versions": versions, "tag": tag, "machine": platform.machine()}))
"""


@dataclass(frozen=True)
class Environment:
    """An environment, as its interpreter describes it.

    Attributes:
        python: path of the interpreter.
        tag: of the interpreter in names of wheels, like "cp311".
        machine: processor, like "x86_64".
        versions: version of each distribution that owns a framework, and of NumPy, by name.
        horovod: installed version of Horovod, or "".
    """

    python: Path
    tag: str
    machine: str
    versions: Mapping[str, str] = field(default_factory=dict)
    horovod: str = ""

    def find(self, framework: Framework) -> tuple[str, str]:
        """Return name and version of the distribution that owns a framework; two empty strings without one."""
        found = [name for name in DISTRIBUTIONS[framework] if name in self.versions]
        return (found[0], self.versions[found[0]]) if found else ("", "")


def inspect_environment(python: Path) -> Environment:
    """Ask an interpreter for its environment; nothing is imported there but the standard library.

    Raises:
        MissingProgramError: no such interpreter.
        ConfigurationError: it does not answer as Python does, or the vendor's build of Horovod is installed there.
    """
    if not python.is_file():
        raise MissingProgramError(f"--python {python}: there is no such interpreter; name one, like venv/bin/python")
    names = [*(name for names in DISTRIBUTIONS.values() for name in names), "numpy", _HOROVOD, _VENDORS_HOROVOD]
    try:
        answer = subprocess.run(
            [python, "-E", "-c", _ASK, *names],
            cwd=NOWHERE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
        )
        facts = json.loads(answer.stdout)
        versions = {str(name): str(version) for name, version in facts["versions"].items()}
        tag, machine = str(facts["tag"]), str(facts["machine"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"--python {python}: is no Python interpreter that works ({error}); name one"
        ) from error
    horovod = versions.pop(_HOROVOD, "")
    if vendors := versions.pop(_VENDORS_HOROVOD, ""):
        raise ConfigurationError(
            f"{python} has {_VENDORS_HOROVOD} {vendors}, which owns the same module; use it, or uninstall it first"
        )
    return Environment(python, tag, machine, versions, horovod)


def choose_frameworks(environment: Environment, wanted: Mapping[Framework, bool | None]) -> dict[Framework, str]:
    """Return the frameworks to build for, with their versions; None in `wanted` stands for "if it is installed".

    Raises:
        ConfigurationError: a framework that is wanted is not installed, none is left, or it is a TensorFlow that
            Horovod cannot be compiled against.
    """
    chosen = {}
    for framework in FRAMEWORKS:
        _, version = environment.find(framework)
        if wanted.get(framework) and not version:
            raise ConfigurationError(
                f"--with_{framework}: {environment.python} has no {TITLES[framework]}; install it there first"
            )
        if version and wanted.get(framework) is not False:
            chosen[framework] = version
    if not chosen:
        raise ConfigurationError(
            f"{environment.python} has neither TensorFlow nor MXNet to build Horovod for; install one first, like "
            'pip install "gaudi-apps[tensorflow-cpu]"'
        )
    if lacks_headers(chosen.get("tensorflow", "")):
        raise ConfigurationError(describe_missing_headers(chosen["tensorflow"]))
    return chosen


def lacks_headers(tensorflow: str) -> bool:
    """Tell whether a version of TensorFlow, like "2.15.1", comes without headers that Horovod needs; "" does not."""
    numbers = tensorflow.split(".")[:2]
    return all(number.isdigit() for number in numbers) and tuple(map(int, numbers)) >= FIRST_WITHOUT_HEADERS


def describe_missing_headers(tensorflow: str) -> str:
    """Return the error for such a version: what works in its place."""
    return (
        f"Horovod cannot be built for TensorFlow {tensorflow}, which does not ship its headers; use TensorFlow 2.15 to "
        "2.18 (lanes default and gaudi), or tf.distribute with --distribution_strategy multi_worker"
    )
