"""Build Horovod's wheel for an environment, keep it in the cache, and install it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from gaudi_distributed.comm.horovod_engine import (
    DISTRIBUTIONS,
    FRAMEWORKS,
    TITLES,
    VENDORS_HOROVOD,
    Framework,
    lacks_headers,
    make_headers_error,
)
from gaudi_distributed.errors import ConfigurationError, MissingProgramError

_HOROVOD = "horovod"
_ASK_SECONDS = 60.0
# Working folder of interpreters that are asked something: `python -c` looks for modules there first.
NOWHERE = Path("/")
_ASK_VERSIONS = """
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

    def find_version(self, framework: Framework) -> str:
        """Return the version of the distribution that owns a framework; empty without one."""
        return next((self.versions[name] for name in DISTRIBUTIONS[framework] if name in self.versions), "")


def inspect_environment(python: Path) -> Environment:
    """Ask an interpreter for its environment; nothing is imported there but the standard library.

    Raises:
        MissingProgramError: no such interpreter.
        ConfigurationError: it does not answer as Python does, or the vendor's build of Horovod is installed there.
    """
    if not python.is_file():
        raise MissingProgramError(
            f"--python {python}: does not exist", flag="--python", path=python, remedy="name one, like venv/bin/python"
        )
    names = [*(name for names in DISTRIBUTIONS.values() for name in names), "numpy", _HOROVOD, VENDORS_HOROVOD]
    try:
        answer = subprocess.run(
            [python, "-E", "-c", _ASK_VERSIONS, *names],
            cwd=NOWHERE,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=True,
        )
        report = json.loads(answer.stdout)
        versions = {str(name): str(version) for name, version in report["versions"].items()}
        tag, machine = str(report["tag"]), str(report["machine"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(
            f"--python {python}: is not a working Python interpreter ({error})",
            flag="--python",
            path=python,
            remedy="name one",
        ) from error
    horovod = versions.pop(_HOROVOD, "")
    if vendors := versions.pop(VENDORS_HOROVOD, ""):
        raise ConfigurationError(
            f"{python} has {VENDORS_HOROVOD} {vendors}, which owns the same module",
            path=python,
            remedy="use it, or uninstall it first",
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
        version = environment.find_version(framework)
        if wanted.get(framework) and not version:
            raise ConfigurationError(
                f"--with_{framework}: {environment.python} has no {TITLES[framework]}",
                flag=f"--with_{framework}",
                remedy="install it there first",
            )
        if version and wanted.get(framework) is not False:
            chosen[framework] = version
    if not chosen:
        raise ConfigurationError(
            f"{environment.python} has neither TensorFlow nor MXNet to build Horovod for",
            path=environment.python,
            remedy='install one first, like pip install "gaudi-apps[tensorflow-cpu]"',
        )
    if lacks_headers(chosen.get("tensorflow", "")):
        raise make_headers_error(chosen["tensorflow"])
    return chosen


HOROVOD = "0.28.1"
# Horovod has a setup.py of the old kind, and its CMake files are refused by CMake 4.
BUILD_TOOLS = ("pip", "wheel", "setuptools<80")
CMAKE = "cmake==3.31.6"
_FIRST_CMAKE, _BEYOND_CMAKE = (3, 13), (4, 0)
# From this version on, pip installs into other environments.
_FIRST_PIP = (22, 3)
# Build variables of Horovod's that have no flag here: GPUs, and where libraries are.
_USERS_VARIABLES = re.compile("HOROVOD_(GPU_|CPU_OPERATIONS$|NCCL_|CUDA_|ROCM_|BUILD_|CCL_)")
# Those that have one.
_FLAGS = {
    f"HOROVOD_{word}_{part.upper()}": f"--{word.lower()}_{part}"
    for word in ("WITH", "WITHOUT")
    for part in (*FRAMEWORKS, "mpi", "gloo")
}
_MAX_LINE = 300


@dataclass(frozen=True)
class Build:
    """The configuration of a wheel.

    Attributes:
        environment: what it is compiled against.
        frameworks: version of each framework that it is for.
        mpi: whether ranks can talk by MPI.
        gloo: whether ranks can talk by Gloo.
        variables: further build variables of Horovod's, like HOROVOD_GPU_OPERATIONS, that the user has set.
    """

    environment: Environment
    frameworks: Mapping[Framework, str]
    mpi: bool = True
    gloo: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.mpi and not self.gloo:
            raise ConfigurationError(
                "--without_mpi and --without_gloo: ranks need one of them", flag="--without_mpi", remedy="leave one out"
            )

    @property
    def key(self) -> str:
        """Return the name of the folder for such wheels: all that they are compiled against."""
        owners = {name for framework in self.frameworks for name in DISTRIBUTIONS[framework]} | {"numpy"}
        versions = {name: version for name, version in self.environment.versions.items() if name in owners}
        left_out = [name for name, is_in in (("mpi", self.mpi), ("gloo", self.gloo)) if not is_in]
        text = "\n".join(f"{name}={value}" for name, value in sorted(self.variables.items()))
        return "_".join(
            [
                f"horovod-{HOROVOD}",
                *(f"{name}-{versions[name]}" for name in sorted(versions)),
                self.environment.tag,
                self.environment.machine,
                *(f"no-{name}" for name in left_out),
                *([hashlib.sha256(text.encode()).hexdigest()[:12]] if text else []),
            ]
        )

    @property
    def build_environment(self) -> dict[str, str]:
        """Return the environment variables that Horovod's build reads."""
        parts: dict[str, bool] = {name: name in self.frameworks for name in FRAMEWORKS}
        parts |= {"mpi": self.mpi, "gloo": self.gloo}
        switches = {f"HOROVOD_{'WITH' if is_in else 'WITHOUT'}_{part.upper()}": "1" for part, is_in in parts.items()}
        return {**self.variables, **switches, "HOROVOD_WITHOUT_PYTORCH": "1"}


def find_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the build variables of Horovod's that the user has set and that have no flag here.

    Raises:
        ConfigurationError: one is set that has a flag.
    """
    for name, flag in _FLAGS.items():
        if environ.get(name):
            raise ConfigurationError(
                f"{name} is set, which has a flag",
                field=name,
                flag=flag,
                remedy=f"unset it, and give {flag} if it is meant",
            )
    return {name: value for name, value in environ.items() if _USERS_VARIABLES.match(name)}


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder that wheels are kept in, below the user's cache.

    Raises:
        ConfigurationError: the system knows no home of this user.
    """
    try:
        base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    except RuntimeError:
        raise ConfigurationError(
            "the home folder of this user is not known", field="HOME", remedy="set HOME or XDG_CACHE_HOME to a folder"
        ) from None
    return Path(base) / "gaudi" / "horovod"


def find_wheel(build: Build, environ: Mapping[str, str]) -> Path | None:
    """Return the wheel from the cache; None if it has to be built."""
    return next(iter(sorted((cache_folder(environ) / build.key).glob("horovod-*.whl"))), None)


def find_cmake(build: Build, environ: Mapping[str, str]) -> str | None:
    """Return the first CMake in PATH, or beside this Python, that Horovod's files are for; None: pip has to install it.

    Raises:
        MissingProgramError: there is no C++ compiler, no make, or no Open MPI with headers.
    """
    path = environ.get("PATH", os.defpath)
    compiler = _split_compiler(environ.get("CXX") or "g++")[0]
    if shutil.which(compiler, path=path) is None:
        raise MissingProgramError(
            f"{compiler}: there is no C++ compiler of this name, and Horovod is compiled with it",
            path=compiler,
            remedy="apt-get install g++, or set CXX",
        )
    if shutil.which("make", path=path) is None and "CMAKE_GENERATOR" not in environ:
        raise MissingProgramError(
            "make: is not in PATH, and CMake builds Horovod with it", path="make", remedy="apt-get install make"
        )
    if build.mpi:
        remedy = "apt-get install openmpi-bin libopenmpi-dev, put its bin folder into PATH, or give --without_mpi"
        mpicxx = shutil.which("mpicxx", path=path)
        if mpicxx is None:
            raise MissingProgramError("mpicxx: Open MPI with its headers is not in PATH", path="mpicxx", remedy=remedy)
        version = _ask(mpicxx, "--showme:version")
        if "Open MPI" not in version:
            raise MissingProgramError(
                f"{mpicxx}: is not Open MPI's ({version or 'it says no version'})", path=mpicxx, remedy=remedy
            )
    for folders in (path, str(Path(sys.executable).parent)):
        cmake = shutil.which("cmake", path=folders)
        found = re.search(r"version (\d+)\.(\d+)", _ask(cmake, "--version")) if cmake else None
        if found is not None and _FIRST_CMAKE <= (int(found[1]), int(found[2])) < _BEYOND_CMAKE:
            return cmake
    return None


def _ask(program: str, flag: str) -> str:
    try:
        done = subprocess.run([program, flag], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return next(iter((done.stdout + done.stderr).splitlines()), "")


def build_wheel(build: Build, cmake: str | None, environ: Mapping[str, str]) -> Path:
    """Build the wheel against the environment as it is, and return its path in the cache.

    The tools of the build, and CMake where `cmake` is None, are installed into a throwaway folder, and into the
    environment nothing.

    Raises:
        MissingProgramError: there is no pip, or no CMake, here or in the package index.
        ConfigurationError: the build failed; its log is named.
    """
    folder = cache_folder(environ) / build.key
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    python = str(build.environment.python)
    with tempfile.TemporaryDirectory() as place:
        needed = [*BUILD_TOOLS, *([] if cmake else [CMAKE])]
        try:
            run_pip(python, ["install", "--quiet", "--target", f"{place}/tools", *needed], environ, log)
        except ConfigurationError as error:
            raise MissingProgramError(
                f"what Horovod is built with ({', '.join(needed)}) could not be installed: {error}",
                remedy="it needs the package index, or PIP_FIND_LINKS with these packages",
            ) from error
        variables = {
            **environ,
            **build.build_environment,
            "PYTHONPATH": f"{place}/tools",
            "CXX": str(write_compiler(Path(place, "tools", "cxx"), environ.get("CXX") or "g++")),
            "HOROVOD_CMAKE": cmake or f"{place}/tools/cmake/data/bin/cmake",
            # Horovod would compile eight files at once, each of which takes up to 2 GB.
            "MAKEFLAGS": environ.get("MAKEFLAGS") or f"-j{len(os.sched_getaffinity(0))}",
        }
        # Without pip's cache, which would give a wheel that was built against another framework.
        pip = ["-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation", "--verbose"]
        command = [python, *pip, "--no-binary", "horovod", "--wheel-dir", place, f"horovod=={HOROVOD}"]
        run_logged(command, variables, log, f"Horovod {HOROVOD} could not be built")
        (built,) = Path(place).glob("horovod-*.whl")
        # Beside its place first: an interrupted build leaves no half wheel behind.
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            return Path(shutil.copy(built, staging)).replace(folder / built.name)


def write_compiler(path: Path, compiler: str) -> Path:
    """Write a program that compiles without debug information, and return its path.

    Horovod asks for it by the last of its own flags; it takes a third of the time of the build, and most of the wheel.
    The compiler is a command, as in CXX: it may have arguments, and quotes around a path with spaces.
    """
    path.write_text(f'#!/bin/sh\nexec {shlex.join(_split_compiler(compiler))} "$@" -g0\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def _split_compiler(compiler: str) -> list[str]:
    try:
        return shlex.split(compiler) or [""]
    except ValueError as error:
        raise ConfigurationError(f"CXX {compiler!r}: {error}", field="CXX", remedy="correct its quotes") from error


def install_wheel(build: Build, wheel: Path, environ: Mapping[str, str], constraints: Sequence[str] = ()) -> None:
    """Install a wheel into the environment, with what Horovod requires, in place of a Horovod that is there.

    Args:
        build: what the wheel is.
        wheel: its path.
        environ: variables for pip.
        constraints: files of constraints for what Horovod requires.

    Raises:
        MissingProgramError: there is no pip.
        ConfigurationError: pip failed.
    """
    python, log = str(build.environment.python), wheel.with_name("install.log")
    files = [word for name in constraints for word in ("--constraint", name)]
    run_pip(python, ["install", "--quiet", *files, str(wheel)], environ, log)
    if build.environment.horovod:
        # pip leaves a wheel of the same version as it is, whatever that was built for.
        run_pip(python, ["install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)], environ, log)


def run_pip(python: str, arguments: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
    """Run this environment's pip on the one of `python`, which needs none of its own."""
    try:
        pip = tuple(int(number) for number in re.findall(r"\d+", metadata.version("pip"))[:2])
    except metadata.PackageNotFoundError:
        pip = ()
    if pip < _FIRST_PIP:
        raise MissingProgramError(
            f"{sys.executable} has no pip of version 22.3 or later",
            path=sys.executable,
            remedy='pip install "gaudi-distributed[horovod]"',
        )
    run_logged([sys.executable, "-m", "pip", "--python", python, *arguments], dict(environ), log, "pip failed")


def run_logged(command: Sequence[str], environ: Mapping[str, str], log: Path, failure: str) -> None:
    """Run a command whose output goes to the end of a log.

    Raises:
        ConfigurationError: it did not end with 0; says the line of its output that tells most, and the log's path.
    """
    with log.open("ab") as file:
        start = file.seek(0, os.SEEK_END)
        status = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=dict(environ)
        ).returncode
    if status < 0:
        remedy = "where memory is scarce, set MAKEFLAGS=-j1"
        raise ConfigurationError(
            f"{failure} (killed by signal {-status}; {remedy})", path=log, remedy=f"all of it is in {log}"
        )
    if status:
        text = log.read_bytes()[start:].decode(errors="replace")
        raise ConfigurationError(
            f"{failure} ({find_reason(text) or f'status {status}'})", path=log, remedy=f"all of it is in {log}"
        )


def find_reason(output: str) -> str:
    """Return the most telling line of a failed build: the compiler's or CMake's first error, or pip's last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        # Of the compiler, or of its driver: "g++: fatal error: Killed signal terminated program cc1plus".
        if re.search(r"\.(c|cc|cpp|cu|h|hpp):\d+:\d+: (fatal )?error: |\+\+: fatal error: ", line):
            return line[:_MAX_LINE]
        if line.startswith("CMake Error"):
            # Its next line says what is wrong.
            return " ".join(lines[number : number + 2])[:_MAX_LINE]
    errors = [line for line in lines if line.startswith("ERROR: ")]
    return next(iter([*errors[-1:], *lines[-1:]]), "")[:_MAX_LINE]
