"""Build Horovod once for an environment, and keep the wheel: a build takes minutes, and nobody publishes one.

`python horovod_wheel.py PYTHON` prints the path of the wheel for the environment of that interpreter, which must hold
TensorFlow and MXNet. Needed from the system: a C++ compiler and Open MPI with its headers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

HOROVOD = "0.28.1"
# What builds Horovod: it calls setup.py of old, and its CMake files are refused by CMake 4.
BUILD_TOOLS = ("pip", "wheel", "setuptools<80", "cmake==3.31.6")
BUILD_VARIABLES = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_MXNET": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITH_MPI": "1",
}
# What the wheel is compiled against; NumPy, because MXNet is imported while building.
COMPILED_AGAINST = ("tensorflow", "tensorflow-cpu", "mxnet", "numpy")
_ASK = """
import json, platform, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
print(json.dumps({"versions": found, "tag": tag, "machine": platform.machine()}))
"""


def provide_wheel(python: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Return Horovod's wheel for the environment of the interpreter `python`, from the cache or built now.

    Raises:
        FileNotFoundError: the environment lacks TensorFlow or MXNet, or the system a compiler or Open MPI.
        subprocess.CalledProcessError: the build failed; its output was printed.
    """
    facts = json.loads(subprocess.check_output([python, "-I", "-c", _ASK, *COMPILED_AGAINST], text=True))
    versions: dict[str, str] = facts["versions"]
    if "mxnet" not in versions or not {"tensorflow", "tensorflow-cpu"} & set(versions):
        raise FileNotFoundError(f"{python} has {versions}; Horovod is built where TensorFlow and MXNet are installed")
    folder = cache_folder(environ) / wheel_key(versions, facts["tag"], facts["machine"])
    kept = sorted(folder.glob("horovod-*.whl"))
    return kept[0] if kept else build(python, versions, folder)


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder that wheels are kept in, below the user's cache."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gaudi" / "horovod"


def wheel_key(versions: Mapping[str, str], tag: str, machine: str) -> str:
    """Return the name of the folder for wheels that were compiled against these versions."""
    return "_".join([f"horovod-{HOROVOD}", *(f"{name}-{versions[name]}" for name in sorted(versions)), tag, machine])


def build(python: Path, versions: Mapping[str, str], folder: Path) -> Path:
    """Build the wheel in a throwaway environment with the same versions, and move it into `folder`."""
    for program, package in (("g++", "g++"), ("mpicxx", "openmpi-bin libopenmpi-dev")):
        if shutil.which(program) is None:
            raise FileNotFoundError(f"{program} is missing, and Horovod is compiled with it; apt-get install {package}")
    with tempfile.TemporaryDirectory() as place:
        environment = Path(place, "environment")
        run_uv("venv", "--python", str(python), str(environment))
        inside = environment / "bin"
        pins = [f"{name}=={version}" for name, version in versions.items()]
        run_uv("pip", "install", "--python", str(inside / "python"), *BUILD_TOOLS, *pins)
        # Horovod's setup.py finds cmake by PATH.
        environ = {**os.environ, **BUILD_VARIABLES, "PATH": f"{inside}{os.pathsep}{os.environ['PATH']}"}
        # Without pip's cache, which would give a wheel that was built against another TensorFlow.
        pip = [str(inside / "python"), "-m", "pip", "wheel", "--no-cache-dir", "--no-deps", "--no-build-isolation"]
        command = [*pip, "--no-binary", "horovod", "--wheel-dir", place, f"horovod=={HOROVOD}"]
        subprocess.run(command, check=True, env=environ, stdout=sys.stderr)
        (built,) = Path(place).glob("horovod-*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        # Beside its place first: a build that is interrupted leaves no half wheel behind.
        staged = shutil.copy(built, folder / f"{built.name}.{os.getpid()}")
        return Path(staged).replace(folder / built.name)


def run_uv(*arguments: str) -> None:
    """Run the uv that is installed beside this Python."""
    subprocess.run([sys.executable, "-m", "uv", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    sys.stdout.write(f"{provide_wheel(Path(sys.argv[1]).absolute())}\n")
