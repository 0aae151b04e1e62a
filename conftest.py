"""Fixtures of all packages' tests, which wait for events and never for a guessed time.

No test sleeps or reads a clock (tests/test_waiting.py sees to it). Programs that a test starts write lines to a channel
and wait at a gate; one that is to hang blocks in `signal.pause` or the like.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import select
import signal
import subprocess
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

with contextlib.suppress(ImportError):  # tests/gaudi_contract is run without it
    from hypothesis import HealthCheck, settings

    # Both limits of time would be missed beside other work. `--hypothesis-profile ci` chooses a profile by name; a test
    # that needs another number of examples says so itself.
    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("dev", untimed, max_examples=25)
    settings.register_profile("ci", untimed, max_examples=100)
    settings.register_profile("few", untimed, max_examples=5)
    settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Where pytest is loaded, tyro computes a tenth of what it has cached again, at random, to test itself: half of the time
# in which flags are parsed. Most of the rest is the description of a class of flags, which tests parse again and again.
with contextlib.suppress(ImportError):  # most packages have no tyro
    from tyro import _cli, _unsafe_cache
    from tyro._parsers import ParserSpecification

    vars(_unsafe_cache)["sys"] = types.SimpleNamespace(modules={})
    parse_arguments, describe_flags = vars(_cli)["_cli_impl"], ParserSpecification.from_callable_or_type
    descriptions: dict[Any, Any] = {}
    asks_for_help = False

    def parse_by_known_flags(*given: Any, args: Sequence[str], **options: Any) -> Any:
        """Parse arguments as tyro does."""
        global asks_for_help
        asks_for_help = not {"--help", "-h"}.isdisjoint(args)
        return parse_arguments(*given, args=args, **options)

    def describe_flags_once(flags: Any, **options: Any) -> Any:
        """Describe a class of flags once, and anew where help is asked for, whose texts it is given then."""
        key = (flags, options["description"])
        if asks_for_help or options["parent_classes"]:
            return describe_flags(flags, **options)
        if key not in descriptions:
            descriptions[key] = describe_flags(flags, **options)
        return descriptions[key]

    vars(_cli)["_cli_impl"] = parse_by_known_flags
    ParserSpecification.from_callable_or_type = describe_flags_once  # type: ignore[method-assign,assignment]

# TensorFlow leaves oneDNN's kernels off where a processor lacks AVX512_VNNI and the like. Without them it has neither
# channels first nor gradients of groups there, with which ours are compared.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

# nohup ignores one and a shell's background the other; so would all programs that tests start, and some hear them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported stays, so it is not looked through for garbage: not while it comes, nor in each test.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from here on, among what the tests make."""
    gc.freeze()
    gc.enable()


# It ends only what would never end, so it is far more than a busy machine takes.
PATIENCE_SECONDS = 600.0


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what programs remember in the user's cache away from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class Channel:
    """Lines that programs write to a FIFO, or read from it.

    A program writes with ``open(path, "a")``, a line at a time, and reads with ``open(path).readline()``; neither waits
    for the test.

    Args:
        path: of the FIFO, which is made.

    Attributes:
        path: the same.
        lines: all that were read here, in their order.
    """

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.lines: list[str] = []
        # Both ends, so that opening it never waits and reading it never meets an end.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""

    def read(self, process: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None) -> str:
        """Wait for the next line, of which `process` may be the writer.

        Raises:
            AssertionError: nothing came in time, or the process ended before it wrote.
        """
        while b"\n" not in self._rest:
            with open_process(process) as ended:
                ready = select.select([self._descriptor, *ended], [], [], PATIENCE_SECONDS)[0]
            assert ready, f"{self.path.name}: nothing came but {self.lines}"
            assert self._descriptor in ready, f"{self.path.name}: its writer ended after {self.lines}"
            self._rest += os.read(self._descriptor, 65536)
        line, _, self._rest = self._rest.partition(b"\n")
        self.lines.append(line.decode())
        return self.lines[-1]

    def wait_for(self, *lines: str, process: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None) -> None:
        """Read until each of the lines has come, before or now, in whatever order."""
        while not set(lines) <= set(self.lines):
            self.read(process)

    def write(self, line: str) -> None:
        """Write a line, for the program that reads."""
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        """Leave it; nothing can be read or written any more."""
        os.close(self._descriptor)


class Gate:
    """A lock at which programs wait until it is opened; who comes later passes at once.

    A program waits with ``fcntl.flock(open(path), fcntl.LOCK_SH)``.

    Args:
        path: of the file, which is made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        """Let all pass."""
        self._file.close()


@contextlib.contextmanager
def open_process(process: subprocess.Popen[str] | subprocess.Popen[bytes] | None) -> Iterator[list[int]]:
    """Return a descriptor that can be read once the process has ended; none without a process."""
    if process is None:
        yield []
        return
    descriptor = os.pidfd_open(process.pid)
    try:
        yield [descriptor]
    finally:
        os.close(descriptor)


def wait_for_end_of(find: Callable[[], Iterable[int]]) -> None:
    """Wait until there are no processes of those that `find` lists, by their ids.

    Raises:
        AssertionError: one lives on.
    """
    while pids := list(find()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pid)
                ended = select.select([descriptor], [], [], PATIENCE_SECONDS)[0]
                os.close(descriptor)
                assert ended, f"process {pid} lives on"


@pytest.fixture
def make_channel(tmp_path: Path) -> Iterator[Callable[[str], Channel]]:
    """Make channels in the test's folder, by their names."""
    with contextlib.ExitStack() as stack:

        def make(name: str) -> Channel:
            channel = Channel(tmp_path / name)
            stack.callback(channel.close)
            return channel

        yield make


@pytest.fixture
def make_gate(tmp_path: Path) -> Iterator[Callable[[str], Gate]]:
    """Make gates in the test's folder, by their names; in the end they are open."""
    with contextlib.ExitStack() as stack:

        def make(name: str) -> Gate:
            gate = Gate(tmp_path / name)
            stack.callback(gate.open)
            return gate

        yield make


@pytest.fixture(scope="session")
def wait_for_end() -> Callable[[Callable[[], Iterable[int]]], None]:
    """`wait_for_end_of`, which no test can import."""
    return wait_for_end_of


SERVER_ENVIRON = {
    "HOME": "/home/me",
    "PATH": "/usr/bin",
    "PYTHONPATH": "/src",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "EDITOR": "vi",
}


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the function that gives what `gaudi-run --dry_run` prints for words, on one of the originals' servers."""
    from gaudi_distributed.launch import choices, planning
    from gaudi_distributed.launch.experiments import list_experiments
    from gaudi_distributed.launch.flags import parse_flags
    from gaudi_distributed.launch.schedulers import is_job_file, make_job_file

    # Two sockets of 28 cores.
    server = tuple(tuple((socket * 28 + core,) for core in range(28)) for socket in (0, 1))
    monkeypatch.setattr(choices, "read_sockets", lambda: server)
    monkeypatch.setattr(choices, "find_program", lambda name, environ: name)
    monkeypatch.setattr(choices, "_find", lambda name, environ: f"/usr/bin/{name}")
    monkeypatch.setattr(choices, "preload_jemalloc", lambda environ: {"LD_PRELOAD": "/usr/lib64/libjemalloc.so.2"})
    monkeypatch.setattr(planning, "find_local_hosts", lambda cluster: frozenset({"localhost", "10.0.0.1"}))
    monkeypatch.setattr(planning, "own_address", lambda cluster, local, interface: "10.0.0.1")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.getegid", lambda: 100)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    monkeypatch.setattr("gaudi_distributed.launch.guard.__file__", "/site/guard.py")

    def describe(words: str | list[str], environ: Mapping[str, str] | None = None) -> str:
        options = parse_flags(words.split() if isinstance(words, str) else words)
        environ = {**SERVER_ENVIRON, **(environ or {})}
        if is_job_file(options):
            return make_job_file(options, environ)
        launches = [each.options for each in list_experiments(options, environ)]
        return "\n".join(planning.plan_launch(each, environ).describe() for each in launches)

    return describe
