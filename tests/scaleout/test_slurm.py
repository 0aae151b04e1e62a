"""The script that `gaudi-run` writes for SLURM runs through sbatch, on a cluster of this one machine."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.scaleout.ports import find_ports

SECONDS = 1800  # ends a test that would never end
# ssd_train with a network that costs next to nothing.
SMALL_SSD = str(Path(__file__).parents[2] / "packages/apps/tests/small_ssd.py")
SHOW = """
import json, os, sys
from gaudi_distributed.cluster.rank_info import detect_rank
rank_info = detect_rank(os.environ)
values = [rank_info.rank, rank_info.size, os.environ["SLURM_JOB_ID"] != "", "SECRET" in os.environ]
print("shown", json.dumps([*values, sys.argv[1:]]))
"""


Serve = Callable[[Sequence[str], str], AbstractContextManager[None]]


@pytest.fixture(scope="module")
def slurm(serve: Serve) -> Iterator[dict[str, str]]:
    """Return the environment in which SLURM's programs find the cluster. Root only."""
    with open_cluster(serve) as environ:
        yield environ


def submit(environ: dict[str, str], folder: Path, flags: list[str], program: list[str]) -> tuple[int, str]:
    """Write a script by gaudi-run, submit it, wait for its end; return its exit status and all that it said."""
    write = [sys.executable, "-m", "gaudi_distributed.launch", *flags, "--slurm_script", "job.sh"]
    write += ["--sbatch=--output=job.log", *program]
    subprocess.run(write, cwd=folder, env=environ, check=True, timeout=SECONDS)
    done = subprocess.run(
        ["sbatch", "--wait", "job.sh"],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    log = folder / "job.log"
    return done.returncode, log.read_text() if log.exists() else done.stdout + done.stderr


@pytest.mark.parametrize("backend", ["openmpi", "gloo"])
def test_ranks_of_a_job(slurm: dict[str, str], tmp_path: Path, backend: str) -> None:
    arguments = ["a b", "$(touch canary)", "it's"]
    status, log = submit(slurm, tmp_path, ["--np", "2", "--backend", backend], [sys.executable, "-c", SHOW, *arguments])
    assert status == 0, log
    shown = sorted(json.loads(line[6:]) for line in log.splitlines() if line.startswith("shown "))
    assert shown == [[rank, 2, True, False, arguments] for rank in (0, 1)], log
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.log", "job.sh"]


def test_the_status_of_a_rank_is_that_of_the_job(slurm: dict[str, str], tmp_path: Path) -> None:
    code = "import os, sys; sys.exit(70 * int(os.environ['OMPI_COMM_WORLD_RANK']))"
    status, log = submit(slurm, tmp_path, ["--np", "2", "--backend", "openmpi"], [sys.executable, "-c", code])
    assert status == 70, log


def test_a_detector_trains_in_a_job(slurm: dict[str, str], tmp_path: Path) -> None:
    program = [sys.executable, SMALL_SSD, "--use_horovod", "--use_fake_data", "--no_evaluate"]
    program += ["--batch_size", "1", "--steps", "5", "--dtype", "fp32", "--model_dir", "run"]
    status, log = submit(slurm, tmp_path, ["--np", "2", "--backend", "openmpi"], program)
    assert status == 0, log
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"], log


@contextmanager
def open_cluster(serve: Serve) -> Iterator[dict[str, str]]:
    """Run munged, slurmctld and slurmd in a folder of their own; yield the environment that names them."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    user = pwd.getpwnam("munge")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        munge = folder / "munge"
        for path in (munge, folder / "state", folder / "spool"):
            path.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(64))
        (munge / "key").chmod(0o600)
        for path in (munge, munge / "key"):
            os.chown(path, user.pw_uid, user.pw_gid)
        write_configuration(folder)
        names = ("key-file=key", "socket=socket", "pid-file=pid", "log-file=log", "seed-file=seed")
        options = [f"--{name}={munge / value}" for name, _, value in (each.partition("=") for each in names)]
        stack.enter_context(serve(["runuser", "-u", "munge", "--", "munged", "-F", *options], "Created socket"))
        for name, sign in (("slurmctld", "Running as primary controller"), ("slurmd", "slurmd started on")):
            stack.enter_context(serve([name, "-D", "-f", str(folder / "slurm.conf")], sign))
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "SECRET": "x"}


def write_configuration(folder: Path) -> None:
    """Write slurm.conf for this machine alone, on ports that are free now."""
    host = socket.gethostname().partition(".")[0]
    control, daemon = find_ports(2)
    settings = {
        "ClusterName": "one",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge/socket",
        "CredType": "cred/munge",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool",
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd.pid",
        "SlurmctldPort": control,
        "SlurmdPort": daemon,
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "SlurmdParameters": "config_overrides",
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    lines.append(f"NodeName={host} NodeAddr=127.0.0.1 CPUs={max(2, os.cpu_count() or 2)} State=UNKNOWN")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
