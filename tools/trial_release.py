"""Try a release: all packages go to an index on this machine, and from there into empty environments.

`python tools/trial_release.py FOLDER` builds the five packages, uploads them with twine to a pypiserver on the loopback
address, installs each by its name with its extras in an empty environment of each Python, and runs the first example
of its README there. `nox -s trial_release` runs it; pypiserver, twine and uv are beside Python. Other requirements come
from the index that uv is set up for, on Python 3.10 and 3.11 as constraints.txt pins them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # to run it as a script

from tools.package_checks import CONSTRAINTS, NAMES, CheckError, Environment, build, call, find_wheel, say, uv  # noqa: E402

PYTHONS = ("3.10", "3.11", "3.13")
PINNED = {"3.10", "3.11"}  # those that constraints.txt is for
# What is asked for, by name.
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "ops": ("gaudi-ops[tensorflow-cpu]",),
    "datasets": ("gaudi-datasets[tensorflow-cpu,scenes]",),
    "models": ("gaudi-models[tensorflow-cpu]",),
    "distributed": ("gaudi-distributed",),
    "apps": ("gaudi-apps[tensorflow-cpu]", "gaudi-datasets[scenes]"),
}
# The first example of these READMEs needs several hosts or a data set of its own; these commands are the nearest that
# run anywhere. Those of gaudi-apps begin with the data set that gaudi-datasets makes.
INSTEAD: dict[str, tuple[str, ...]] = {
    "distributed": ("gaudi-run --np 2 --dry_run python -c pass", "gaudi-run --help"),
    "apps": (
        "gaudi-datasets make-scenes --output_dir scenes --train 24 --val 8",
        "ssd_train --data scenes --minutes 10 --mode plan",
        "gaudi-run --preset ssd-habana-8 --dry_run",
    ),
}


def main(folder: Path, pythons: Sequence[str], names: Sequence[str]) -> None:
    """Release all packages, and try some of them in some Pythons."""
    dist = folder / "dist"
    dist.mkdir(parents=True)
    for name in NAMES:
        build(name, dist, folder / "direct")
    say("five packages built, each an sdist and a wheel")
    with serve_index(folder / "index") as address:
        files = [str(path) for path in sorted(dist.iterdir()) if path.suffix in (".whl", ".gz")]
        call([sys.executable, "-m", "twine", "check", "--strict", *files])
        account = ("--username", "trial", "--password", "trial")  # of an index that asks for none
        call([sys.executable, "-m", "twine", "upload", "--repository-url", address, *account, *files])
        say(f"{len(files)} files uploaded")
        for python in pythons:
            for name in names:
                try_package(name, python, address, dist, folder / f"{name}-{python}")


@contextlib.contextmanager
def serve_index(folder: Path) -> Iterator[str]:
    """Run an index of packages on the loopback address; give its address, and stop it at the end."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Without accounts, because only this machine reaches it; without a fallback, so that it has only what was uploaded.
    flags = ["--interface", "127.0.0.1", "--port", str(port), "--disable-fallback", "-P", ".", "-a", "."]
    command = [sys.executable, "-m", "pypiserver", "run", *flags, str(folder)]
    with (folder.parent / "index.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until_served(server, f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


def wait_until_served(server: subprocess.Popen[bytes], address: str) -> None:
    """Wait until an index answers."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=60):
                return
        except OSError:
            time.sleep(0.1)
    raise CheckError(f"pypiserver ended with {server.returncode} before it answered")


def try_package(name: str, python: str, address: str, dist: Path, folder: Path) -> None:
    """Install a package by its name from the index in an empty environment, and run the first example of its README."""
    environment = Environment(folder).create(python)
    pins = ["-c", str(CONSTRAINTS)] if python in PINNED else []
    # The first index that has a name gives it, so nobody else's package of that name is taken.
    uv("pip", "install", "--quiet", "-p", str(folder), "--index", f"{address}simple/", *pins, *REQUIREMENTS[name])
    environment.check()
    for wheel in folder.glob("lib/python*/site-packages/gaudi_*.dist-info"):
        ours = wheel.name.removeprefix("gaudi_").partition("-")[0]
        if (wheel / "direct_url.json").exists():
            raise CheckError(f"{wheel.name} came from a path, and not from the index")
        environment.compare_record(wheel / "RECORD", find_wheel(ours, dist))
    work = folder / "work"
    work.mkdir()
    began = time.monotonic()
    if (code := first_block(name, "python")) and name not in INSTEAD:
        environment.run(code, work)
        ran = f"{len(code.splitlines())} lines of Python"
    else:
        commands = INSTEAD.get(name) or find_commands(first_block(name, "console"))
        for command in commands:
            program, *arguments = shlex.split(command)
            call([str(folder.resolve() / "bin" / program), *arguments], work)
        ran = f"{len(commands)} commands"
    versions = json.dumps(environment.list_versions(("numpy", "tensorflow", "tensorflow-cpu")))
    seconds = time.monotonic() - began
    say(f"Python {python}: {' '.join(REQUIREMENTS[name])} by name; {ran} in {seconds:.0f} s; {versions}")


def first_block(name: str, language: str) -> str:
    """Return the first block of a language in a package's README, if no other comes before it; else nothing."""
    text = (ROOT / "packages" / name / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return found[2] if found and found[1] == language else ""


def find_commands(block: str) -> list[str]:
    """Return the commands of a block but its installation, whose lines may be continued."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if line and not line.startswith("pip ")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Try a release with an index on this machine.")
    parser.add_argument("folder", type=Path, help="made anew for builds, index and environments")
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, help="versions to try")
    parser.add_argument("--packages", nargs="+", default=NAMES, choices=NAMES, help="packages to try; all are uploaded")
    chosen = parser.parse_args()
    try:
        main(chosen.folder.resolve(), chosen.pythons, chosen.packages)
    except CheckError as error:
        sys.exit(f"error: {error}")
