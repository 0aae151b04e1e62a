"""The server as a program that can be disturbed: it starts, answers images, and cut ones, and is asked to end."""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.torture import shim

ROOT = Path(__file__).resolve().parents[2]
APPS = ROOT / "packages" / "apps" / "tests"
PATIENCE = 60.0  # seconds of an answer
BUSY = (429, 503)
STOPPED = 75


def run_serve(argv: Sequence[str]) -> None:
    """Run `gaudi-apps serve` in a child, which the faults are of, ask it all photos, and end as it does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pid = os.fork()
    if not pid:
        _serve([*argv, "--port", str(port)])
    os.environ.pop(shim.VARIABLE, None)
    ctypes.CDLL(None).torture_arm()  # without the variable it disarms
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # which are the server's
        signal.signal(number, signal.SIG_IGN)
    server = _Server(pid, port)
    answers = server.ask(sorted(Path("photos").iterdir()))
    if server.has_ended():
        if server.status < 0:
            if server.status != -signal.SIGKILL:
                signal.signal(-server.status, signal.SIG_DFL)
            os.kill(os.getpid(), -server.status)
        if not server.status:
            print("serve: error: was stopped before it had answered all", file=sys.stderr)
        sys.exit(server.status or STOPPED)
    Path("out").mkdir(exist_ok=True)
    Path("out/answers.json").write_text(json.dumps(answers, sort_keys=True))
    os.kill(pid, signal.SIGTERM)
    server.wait()
    sys.exit(server.status if server.status >= 0 else 1)


def exchange_network(build: Any, small: Any) -> None:
    """Put a function that builds a small network in place of another one, wherever it was imported."""
    name = str(build.__name__)
    for module in [module for path, module in list(sys.modules.items()) if path.startswith("gaudi_")]:
        if getattr(module, name, None) is build:
            setattr(module, name, small)


def build_network() -> Any:
    """Return the function that builds the network, by whose names of layers weights are read."""
    names = runpy.run_path(str(APPS / "small_serve.py"))["NAMES"]
    return partial(runpy.run_path(str(APPS / "small_ssd.py"))["build_small_ssd"], names=names)


def make_weights(path: Path) -> None:
    """Write weights that find several things in an image."""
    small = runpy.run_path(str(APPS / "small_ssd.py"))["build_small_ssd"]
    path.parent.mkdir(parents=True)
    runpy.run_path(str(APPS / "small_serve.py"))["write_small_weights"](path, small)


def _serve(argv: Sequence[str]) -> None:
    """Be the server, with a network that costs next to nothing."""
    status = 70
    try:
        import gaudi_models.ssd
        from gaudi_apps.cli import run_commands

        exchange_network(gaudi_models.ssd.build_ssd, build_network())
        run_commands.main([*argv])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Server:
    """The server's process, as its client sees it."""

    def __init__(self, pid: int, port: int) -> None:
        self._pid, self._port, self._has_ended = pid, port, False
        self.status = 0

    def has_ended(self, *, waits: bool = False) -> bool:
        """Return whether it has ended; one that is stopped goes on."""
        while not self._has_ended:
            found, state = os.waitpid(self._pid, os.WUNTRACED | (0 if waits else os.WNOHANG))
            if not found:
                return False
            if os.WIFSTOPPED(state):
                time.sleep(0.05)
                os.kill(self._pid, signal.SIGCONT)
            else:
                self._has_ended, self.status = True, os.waitstatus_to_exitcode(state)
        return True

    def wait(self) -> None:
        """Wait for its end."""
        self.has_ended(waits=True)

    def ask(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Ask for all images, whole and cut; return statuses and answers by name, as far as it lives."""
        answers = dict[str, Any]()
        for path in paths:
            content = path.read_bytes()
            for name, sent in ((path.name, content), (f"{path.name} cut", content[: len(content) // 3])):
                answers[name] = self._ask_once(sent)
                if self.has_ended():
                    return answers
        return answers

    def _ask_once(self, content: bytes) -> Any:
        """Send an image until it is answered; a server that still loads refuses it for now."""
        while not self.has_ended():
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
                connection.request("POST", "/predict", content)
                answer = connection.getresponse()
                text = answer.read()
                connection.close()
                if answer.status not in BUSY:
                    return [answer.status, json.loads(text)]
            time.sleep(0.02)
        return None
