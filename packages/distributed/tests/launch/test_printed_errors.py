"""The one place that pins how errors of gaudi-run print: a line on standard error, and an exit status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from gaudi_distributed.launch.cli import launch

GOLDEN = Path(__file__).parent / "golden" / "errors.txt"
COMMANDS: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("", {}),
    ("--np 2", {}),
    ("--np x ssd_train", {}),
    ("--host a ssd_train", {}),
    ("--preset habana-16 ssd_train", {}),
    ("--np 2 --preset habana-8 ssd_train", {}),
    ("--np 3 --hosts a:1,b:1 ssd_train", {}),
    ("--hosts a,b ssd_train", {}),
    ("--hosts a_b:1 ssd_train", {}),
    ("--hostfile /no/such/file ssd_train", {}),
    ("--np 2 --interface eth0/33 ssd_train", {}),
    ("--np 2 --backend gloo no_such_program", {"PATH": "/usr/bin"}),
    ("--np 2 ssd_train", {"HOROVOD_RANK": "0"}),
    ("--np 2 --forward MY_TOKEN ssd_train", {"MY_TOKEN": "x"}),
    ("--np 2 --image a ssd_train", {}),
    ("--np 2 --container docker --image -a ssd_train", {}),
    ("--np 2 --sbatch=--time=1 ssd_train", {}),
    ("--np 2 ssd_train", {"DOCKER_SSHD_PORT": "ssh"}),
    ("--np 2 ssd_train", {"MPI_ROOT": "opt"}),
    ("doctor --np 2 ssd_train", {}),
    ("doctor --nothing", {}),
    ("install-horovod --python /no/python", {}),
)


def test_errors_print_as_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", "/usr/bin/python3")
    printed = ""
    for command, environ in COMMANDS:
        status = launch(command.split(), environ)
        out, err = capsys.readouterr()
        assert out == ""
        variables = "".join(f"{name}={value} " for name, value in environ.items())
        printed += f"$ {variables}gaudi-run {command}\n{err}status {status}\n"
    assert printed == GOLDEN.read_text(encoding="utf-8")


def test_too_little_memory_is_one_line_and_its_own_status(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host1\n" * 10**6)
    code = """
import re, resource, sys
from pathlib import Path
from gaudi_distributed.launch import cli, planning, running
size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 20),) * 2)
cli.main(["--hostfile", sys.argv[1], "--np", "2", "true"])
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "hosts"], capture_output=True, text=True)
    assert done.returncode == 74, done.stderr
    assert "not enough memory" in done.stderr
    assert len(done.stderr.splitlines()) == 1
