"""The script that `gaudi-run` writes for SLURM runs through sbatch, on one machine and on two hosts."""

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
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.scaleout.ports import find_ports
from tests.scaleout.two_hosts import ADDRESSES, TwoHosts, open_two_hosts

from gaudi_apps.training.checkpoint import CheckpointFolder, load_checkpoint

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


# A callback that waits after the third step until gaudi-run asks for the end, unless a file says that it did before.
PAUSE = """
import os
from pathlib import Path
from gaudi_apps.training.callbacks import Heartbeat
from gaudi_apps.training.trainer import Callback

class Pause(Callback):
    def on_train_begin(self):
        self.waits = not Path("preempted").exists()

    def on_step_end(self, step, scalars):
        if step == 3 and self.waits:
            (reporter,) = (each._reporter for each in self.trainer.callbacks if isinstance(each, Heartbeat))
            Path("told").write_text(f"rank {self.trainer.communicator.rank} is at step 3\\n")
            while not reporter.find_requester():
                os.sched_yield()
"""
# Changes the mount namespace, so that a host's own names are known, and what the system mounts stays.
NAMED = 'mount --bind "/etc/netns/$1/hosts" /etc/hosts && hostname "$0" && shift && exec "$@"'

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


def test_a_job_that_may_go_on_is_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    program = ["sh", "-c", "echo begins; test -e begun || { touch begun; exit 75; }"]
    status, log = submit(slurm, tmp_path, ["--np", "1", "--backend", "gloo", "--requeue", "1"], program)
    assert status == 0, log
    assert log.count("begins") == 2


def test_a_detector_trains_in_a_job(slurm: dict[str, str], tmp_path: Path) -> None:
    program = [sys.executable, SMALL_SSD, "--use_horovod", "--use_fake_data", "--no_evaluate"]
    program += ["--batch_size", "1", "--steps", "5", "--dtype", "fp32", "--model_dir", "run"]
    status, log = submit(slurm, tmp_path, ["--np", "2", "--backend", "openmpi"], program)
    assert status == 0, log
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"], log


def test_a_job_that_is_cancelled_saves_its_last_step_once(
    slurm: dict[str, str], tmp_path: Path, make_channel: Callable[[str], Any], wait_for_end: Callable[..., None]
) -> None:
    """Every process of the job is signalled: the ranks, mpirun, gaudi-run and the script."""
    environ = {**slurm, "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), slurm.get("PYTHONPATH", ""))))}
    (tmp_path / "pausing.py").write_text(PAUSE)
    program = [sys.executable, SMALL_SSD, "--use_horovod", "--use_fake_data", "--no_evaluate", "--batch_size", "1"]
    program += ["--dtype", "fp32", "--deterministic", "--steps", "6", "--model_dir", "run"]
    program += ["--callbacks", "pausing:Pause"]
    write = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "2", "--backend", "openmpi"]
    write += ["--slurm_script", "job.sh", "--sbatch=--output=job.log", *program]
    told = make_channel("told")
    subprocess.run(write, cwd=tmp_path, env=environ, check=True, timeout=SECONDS)
    started = subprocess.Popen(["sbatch", "--wait", "job.sh"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE)
    try:
        told.wait_for("rank 0 is at step 3", "rank 1 is at step 3", process=started)
        (tmp_path / "preempted").touch()
        job = started.stdout.readline().split()[-1].decode() if started.stdout else ""
        subprocess.run(["scancel", job], env=environ, check=True, timeout=SECONDS)
        wait_for_end(lambda: find_processes_in(tmp_path))
    finally:
        started.kill()
    log = (tmp_path / "job.log").read_text()
    # The status that sbatch ends with is 0 where it looks while the processes of a cancelled job are still ending.
    assert log.splitlines()[-1].startswith("gaudi-run: error: "), log
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    (step,) = folder.steps()
    assert step in (3, 4), log
    assert load_checkpoint(folder.path(step)).step == step
    assert "Traceback" not in log


def test_a_job_of_two_hosts_that_is_preempted_ends_like_an_undisturbed_one(
    two_hosts: tuple[TwoHosts, dict[str, str]], tmp_path: Path, make_channel: Callable[[str], Any]
) -> None:
    """SLURM ends it for a more urgent job and queues it again; it goes on from its last checkpoint."""
    hosts, environ = two_hosts
    environ = {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), environ.get("PYTHONPATH", ""))))}
    (tmp_path / "pausing.py").write_text(PAUSE)
    flags = ["--use_horovod", "--use_fake_data", "--no_evaluate", "--batch_size", "1", "--dtype", "fp32"]
    flags += ["--steps", "6", "--save_checkpoints_steps", "2"]
    program = [sys.executable, SMALL_SSD, *flags, "--deterministic", "--model_dir"]
    launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "2", "--backend", "openmpi"]
    alone = [*launcher, "--cores_per_rank", "0", *program, "alone"]
    subprocess.run(alone, cwd=tmp_path, env=environ, check=True, timeout=SECONDS)

    told = make_channel("told")
    job = [*launcher, "--num_workers_per_hls", "1", "--requeue", "2", "--sbatch=--output=job.log", "--slurm_script"]
    job += ["job.sh", *program, "run", "--callbacks", "pausing:Pause"]
    subprocess.run(job, cwd=tmp_path, env=environ, check=True, timeout=SECONDS)
    started = subprocess.Popen(hosts.inside(0, ["sbatch", "--wait", "job.sh"]), cwd=tmp_path, env=environ)
    try:
        told.wait_for("rank 0 is at step 3", "rank 1 is at step 3", process=started)
        (tmp_path / "preempted").touch()
        urgent = hosts.inside(0, ["srun", "--partition=urgent", "--nodes=2", "--exclusive", "hostname"])
        done = subprocess.run(urgent, cwd=tmp_path, env=environ, check=True, capture_output=True, timeout=SECONDS)
        assert sorted(done.stdout.split()) == [b"host0", b"host1"]
        status = started.wait(SECONDS)
    finally:
        started.kill()
    log = (tmp_path / "job.log").read_text()
    assert status == 0, log
    before, _, after = log.partition(": continuing after step ")
    # Whether the step that SIGTERM asks for is saved, or the daemon on the other host ends before, is up to SLURM.
    assert after.split(maxsplit=1)[0] == str(int(before.rpartition("/step-")[2])), log
    assert int(before.rpartition("/step-")[2]) in (2, 3, 4)
    saved = [
        load_checkpoint(CheckpointFolder(tmp_path / name / "checkpoints").path(6)).sha256 for name in ("alone", "run")
    ]
    assert saved[0] == saved[1], log


def find_processes_in(folder: Path) -> list[int]:
    """List the processes whose working folder is this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # it has ended
            if path.readlink() == folder:
                found.append(int(path.parent.name))
    return found


@pytest.fixture
def two_hosts(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TwoHosts, dict[str, str]]]:
    """Return two hosts, and the environment in which SLURM's programs find their cluster. Root only."""
    with (
        open_two_hosts(tmp_path_factory.mktemp("hosts"), serve) as hosts,
        open_cluster(serve, hosts) as environ,
    ):
        yield hosts, environ


@contextmanager
def open_cluster(serve: Serve, hosts: TwoHosts | None = None) -> Iterator[dict[str, str]]:
    """Run munged, slurmctld and slurmd in a folder of their own; yield the environment that names them.

    The cluster is this machine, or two hosts, of which the first one has slurmctld, too.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    user = pwd.getpwnam("munge")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)
        munge = folder / "munge"
        for path in (munge, folder / "state", *(folder / f"spool-host{number}" for number in (0, 1)), folder / "spool"):
            path.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(64))
        (munge / "key").chmod(0o600)
        for path in (munge, munge / "key"):
            os.chown(path, user.pw_uid, user.pw_gid)
        write_configuration(folder, hosts)
        names = ("key-file=key", "socket=socket", "pid-file=pid", "log-file=log", "seed-file=seed")
        options = [f"--{name}={munge / value}" for name, _, value in (each.partition("=") for each in names)]
        stack.enter_context(serve(["runuser", "-u", "munge", "--", "munged", "-F", *options], "Created socket"))
        settings = ["-D", "-f", str(folder / "slurm.conf")]
        control = ["slurmctld", *settings]
        daemons = [["slurmd", *settings]]
        if hosts is not None:
            control = hosts.inside(0, control)
            daemons = [list_slurmd(hosts, number, settings) for number in (0, 1)]
        stack.enter_context(serve(control, "Running as primary controller"))
        for daemon in daemons:
            stack.enter_context(serve(daemon, "slurmd started on"))
        yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "SECRET": "x"}


def list_slurmd(hosts: TwoHosts, number: int, settings: list[str]) -> list[str]:
    """Return the command that runs slurmd on a host, with what this machine has mounted for groups of processes."""
    name, namespace = f"host{number}", hosts.namespaces[number]
    inside = ["nsenter", f"--net=/run/netns/{namespace}", "unshare", "--uts", "--mount"]
    return [*inside, "bash", "-c", NAMED, name, namespace, "slurmd", "-N", name, *settings]


def write_configuration(folder: Path, hosts: TwoHosts | None) -> None:
    """Write slurm.conf for this machine alone, on ports that are free now, or for two hosts.

    A job that is queued again waits for as long as its credential holds, two minutes by default. One that is cancelled
    has the time that a busy machine takes to save.
    """
    addresses = {socket.gethostname().partition(".")[0]: "127.0.0.1"}
    if hosts is not None:
        addresses = {f"host{number}": address for number, address in enumerate(ADDRESSES)}
    host = next(iter(addresses))
    control, daemon = find_ports(2)
    settings = {
        "ClusterName": "one",
        "SlurmctldHost": f"{host}({addresses[host]})",
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={folder}/munge/socket,cred_expire=10",
        "CredType": "cred/munge",
        "StateSaveLocation": f"{folder}/state",
        "SlurmdSpoolDir": f"{folder}/spool" + "-%n" * (hosts is not None),
        "SlurmctldPidFile": f"{folder}/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
        "SlurmctldPort": control,
        "SlurmdPort": daemon,
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "MpiDefault": "none",
        "ReturnToService": 2,
        "SlurmdParameters": "config_overrides",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "KillWait": SECONDS,
    }
    lines = [f"{name}={value}" for name, value in settings.items()]
    for name, address in addresses.items():
        lines.append(f"NodeName={name} NodeAddr={address} CPUs={max(2, os.cpu_count() or 2)} State=UNKNOWN")
    lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1")
    lines.append("PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2")
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
