"""`gaudi-run` over ssh, between two hosts that network namespaces play."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.scaleout.two_hosts import ADDRESSES, HUNG_PORT, PORT, Serve, TwoHosts, list_sshd, open_two_hosts

# ssd_train with a network that costs next to nothing.
SMALL_SSD = str(Path(__file__).parents[2] / "packages/apps/tests/small_ssd.py")
WORKER = str(Path(__file__).parents[2] / "packages/distributed/tests/launch/worker_program.py")
SECONDS = 1800.0  # ends a test that would never end
HOSTS = ",".join(f"{address}:2" for address in ADDRESSES)
SHOW = """
import json, os, socket, sys
sys.path[:0] = json.loads(os.environ.get("TF_TEST_PATH", "[]"))
from gaudi_distributed.cluster.rank_info import detect_rank
rank_info = detect_rank(os.environ)
numbers = [rank_info.rank, rank_info.size, rank_info.local_rank]
print(json.dumps([*numbers, socket.gethostname(), os.environ["TF_TEXT"], sys.argv[1:]]))
"""
# Sums the ranks' numbers by the engine that the launcher names.
TALK = """
import gc, json, os, sys
gc.disable()  # what is imported stays
sys.path[:0] = json.loads(os.environ["TF_TEST_PATH"])
import gaudi_distributed as together
options = together.CommunicationOptions(os.environ["GAUDI_RUN_ENGINE"])
together.apply_environment(together.communication_environment(options, together.detect_rank(os.environ), os.environ))
together.open_device("cpu")
communicator = together.open_communicator(options)
import tensorflow as tf
(total,) = communicator.allreduce([tf.constant(10.0**communicator.rank)], average=False)
print("total", float(total), flush=True)
communicator.close()
gc.freeze()  # nor is it looked through at the end
"""
TEXT = "two words; $(touch canary)\n'quoted'"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> Iterator[TwoHosts]:
    with open_two_hosts(tmp_path_factory.mktemp("hosts"), serve) as opened:
        yield opened


def launcher(hosts: TwoHosts, *flags: str) -> list[str]:
    """Return the command that launches four ranks on both hosts, from the first of them."""
    ssh = ["--ssh_config", str(hosts.ssh_config), "--ssh_port", str(PORT)]
    command = [
        sys.executable,
        "-m",
        "gaudi_distributed.launch",
        "--hosts",
        HOSTS,
        "--cores_per_rank",
        "0",
        *ssh,
        *flags,
    ]
    return hosts.inside(0, command)


def environment() -> dict[str, str]:
    return {**os.environ, "TF_TEXT": TEXT, "TF_TEST_PATH": json.dumps(sys.path), "SECRET": "x"}


def launch(
    hosts: TwoHosts, folder: Path, flags: Sequence[str], program: Sequence[str], seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launcher(hosts, *flags), *program],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )


@pytest.mark.parametrize("backend", ["openmpi", "gloo", "multi_worker"])
def test_two_ranks_on_each_of_two_hosts(hosts: TwoHosts, tmp_path: Path, backend: str) -> None:
    arguments = ["a b", "$(touch canary)", "'"]
    flags = ["--backend", backend, *(["--interface", "wire"] if backend == "gloo" else [])]
    done = launch(hosts, tmp_path, flags, [sys.executable, "-c", SHOW, *arguments])
    assert done.returncode == 0, done.stderr
    shown = sorted(json.loads(line) for line in done.stdout.splitlines())
    assert shown == [[rank, 4, rank % 2, f"host{rank // 2}", TEXT, arguments] for rank in range(4)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("backend", ["openmpi", "gloo", "multi_worker"])
def test_ranks_of_both_hosts_talk(hosts: TwoHosts, tmp_path: Path, backend: str) -> None:
    done = launch(hosts, tmp_path, ["--backend", backend, "--interface", "wire"], [sys.executable, "-c", TALK])
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("total")] == ["total 1111.0"] * 4


def test_a_detector_trains_on_two_hosts(hosts: TwoHosts, tmp_path: Path) -> None:
    program = [sys.executable, SMALL_SSD, "--use_horovod", "--use_fake_data", "--no_evaluate"]
    program += ["--batch_size", "1", "--steps", "10", "--dtype", "fp32", "--model_dir", "run"]
    done = launch(hosts, tmp_path, ["--backend", "openmpi"], program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000010"]
    assert sorted(path.name for path in (tmp_path / "run").glob("worker_*")) == ["worker_1", "worker_2", "worker_3"]


def test_a_program_starts_ranks_on_the_servers_of_a_variable(hosts: TwoHosts, tmp_path: Path) -> None:
    """By MULTI_HLS_IPS and the originals' other variables; ssh is one that knows the keys of the hosts."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {hosts.ssh_config} "$@"\n')
    ssh.chmod(0o755)
    program = [sys.executable, "-m", "gaudi_apps.resnet_train", "--use_synthetic_data", "--skip_eval"]
    program += ["--use_horovod", "--num_workers_per_hls", "1", "--model", "resnet18", "--image_size", "32"]
    program += ["--batch_size", "2", "--train_steps", "2", "--dtype", "fp32", "--model_dir", "run"]
    variables = {
        "MULTI_HLS_IPS": ",".join(ADDRESSES),
        "MPI_TCP_INCLUDE": "wire",
        "DOCKER_SSHD_PORT": str(PORT),
        "PATH": f"{ssh.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        hosts.inside(0, program),
        cwd=tmp_path,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert sorted(path.name for path in (tmp_path / "run").glob("worker_*")) == ["worker_1"]
    assert f"2 ranks on {ADDRESSES[0]}:1, {ADDRESSES[1]}:1" in done.stderr


@pytest.mark.parametrize("backend", ["openmpi", "multi_worker"])
def test_a_host_with_another_key_is_refused(hosts: TwoHosts, tmp_path: Path, backend: str) -> None:
    known = hosts.folder / "known_hosts"
    right = known.read_text()
    known.write_text(right.splitlines()[0] + "\n")
    try:
        done = launch(hosts, tmp_path, ["--backend", backend], ["touch", "canary"])
    finally:
        known.write_text(right)
    assert done.returncode == 78  # and not 75, on which a scheduler would start it again
    assert "Host key verification" in done.stderr
    assert ADDRESSES[1] in done.stderr.splitlines()[-1]
    # The first host has no key to check: it is this machine.
    assert backend == "multi_worker" or not (tmp_path / "canary").exists()


def examine(hosts: TwoHosts, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the status of `gaudi-run doctor` on the first host, and its checks by name."""
    ssh = ["--ssh_config", str(hosts.ssh_config), "--ssh_port", str(PORT)]
    command = [sys.executable, "-m", "gaudi_distributed.launch", "doctor", "--json", "--hosts", HOSTS, *ssh, *flags]
    done = subprocess.run(
        hosts.inside(0, command), env=environment(), capture_output=True, text=True, check=False, timeout=SECONDS
    )
    return done.returncode, {check["check"]: check for check in json.loads(done.stdout)["checks"]}


@pytest.mark.parametrize(
    ("flags", "starter"),
    [
        (["--backend", "openmpi"], "mpirun is there"),
        (["--backend", "gloo", "--interface", "wire"], "with gaudi-distributed is there"),
        (["--backend", "multi_worker", "--interface", "10.77.0.0/24"], "with gaudi-distributed is there"),
    ],
)
def test_the_doctor_reaches_the_other_host(hosts: TwoHosts, flags: list[str], starter: str) -> None:
    status, checks = examine(hosts, *flags)
    assert status == 0, checks
    other = checks[f"host {ADDRESSES[1]}"]
    assert other["level"] == "ok"
    assert starter in other["text"]
    assert abs(other["facts"]["skew"]) <= other["facts"]["uncertainty"]  # the clock of both is one
    assert checks["network"]["facts"]["chosen"] == "wire"
    assert f"host {ADDRESSES[0]}" not in checks


def test_the_doctor_names_what_keeps_ranks_from_another_host(hosts: TwoHosts) -> None:
    known = hosts.folder / "known_hosts"
    right = known.read_text()
    known.write_text(right.splitlines()[0] + "\n")
    try:
        status, checks = examine(hosts)
    finally:
        known.write_text(right)
    assert status == 78
    assert "Host key verification" in checks[f"host {ADDRESSES[1]}"]["text"]
    status, checks = examine(hosts, "--backend", "gloo", "--remote_python", "/nowhere/python", "--interface", "lo")
    assert status == 78
    assert "no /nowhere/python with gaudi-distributed" in checks[f"host {ADDRESSES[1]}"]["text"]
    assert checks["network"]["level"] == "fault"


@pytest.mark.parametrize("backend", ["openmpi", "multi_worker"])
def test_a_killed_launcher_leaves_nothing_on_any_host(
    hosts: TwoHosts,
    tmp_path: Path,
    backend: str,
    make_channel: Callable[[str], Any],
    wait_for_end: Callable[[Callable[[], list[int]]], None],
) -> None:
    mark, told = uuid.uuid4().hex, make_channel("told")
    code = "import signal; open('told', 'w').write('here\\n'); signal.pause()"
    program = [sys.executable, "-c", code, mark]
    process = subprocess.Popen([*launcher(hosts, "--backend", backend), *program], cwd=tmp_path, env=environment())
    for _ in range(4):
        told.read(process)
    process.kill()
    process.wait()
    wait_for_end(partial(find_processes, mark))


def test_a_rank_that_fails_on_the_other_host_ends_all(hosts: TwoHosts, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    code = "import json, os, signal, sys; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']; "
    code += "sys.exit(9) if rank == 3 else signal.pause()"
    done = launch(hosts, tmp_path, ["--backend", "multi_worker"], [sys.executable, "-c", code, mark])
    assert done.returncode == 9
    assert f"rank 3 on {ADDRESSES[1]}: ended with status 9" in done.stderr.splitlines()[-1]
    assert find_processes(mark) == []


def test_a_host_without_python_is_named(hosts: TwoHosts, tmp_path: Path) -> None:
    flags = ["--backend", "gloo", "--interface", "wire", "--remote_python", "/nowhere/python"]
    done = launch(hosts, tmp_path, flags, [sys.executable, "-c", "import signal; signal.pause()"])
    assert done.returncode == 66
    assert f"rank 2 on {ADDRESSES[1]}: cannot start Python" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("status", "expected"), [(2, 2), (-1, 255)])
def test_a_rank_of_the_other_host_has_its_own_status(
    hosts: TwoHosts, tmp_path: Path, status: int, expected: int
) -> None:
    """Also that of ssh when it fails."""
    code = "import os, signal, sys; "
    code += f"sys.exit({status}) if os.environ['HOROVOD_RANK'] == '3' else signal.pause()"
    done = launch(hosts, tmp_path, ["--backend", "gloo", "--interface", "wire"], [sys.executable, "-c", code])
    assert done.returncode == expected
    assert f"rank 3 on {ADDRESSES[1]}: ended with status {expected}" in done.stderr.splitlines()[-1]


@pytest.fixture
def hung_login(hosts: TwoHosts, serve: Serve, make_channel: Callable[[str], Any], tmp_path: Path) -> Iterator[Any]:
    """Let logins to the second host hang at another port, behind the exchange of keys; the channel hears of each."""
    told = make_channel("logins")
    script = tmp_path / "login.sh"
    script.write_text(f'#!/bin/sh\necho "here" > "{told.path}"\nexec tail -f /dev/null\n')
    script.chmod(0o755)
    with serve(list_sshd(hosts, 1, HUNG_PORT, ForceCommand=str(script)), "Server listening on "):
        yield told


@pytest.mark.parametrize("backend", ["openmpi", "multi_worker"])
def test_a_host_whose_login_hangs_is_named(hosts: TwoHosts, tmp_path: Path, hung_login: Any, backend: str) -> None:
    ssh = ["--ssh_config", str(hosts.ssh_config), "--ssh_port", str(HUNG_PORT)]
    command = [sys.executable, "-m", "gaudi_distributed.launch", "--hosts", HOSTS, "--cores_per_rank", "0", *ssh]
    done = subprocess.run(
        hosts.inside(0, [*command, "--backend", backend, sys.executable, "-c", "import signal; signal.pause()"]),
        env={**environment(), "GAUDI_RUN_JOIN_SECONDS": "5"},
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert done.returncode == 78, done.stderr
    last = done.stderr.splitlines()[-1]
    assert ADDRESSES[1] in last
    assert "GAUDI_RUN_JOIN_SECONDS" in last


@pytest.mark.parametrize("backend", ["openmpi", "multi_worker"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_login_hangs(
    hosts: TwoHosts, tmp_path: Path, hung_login: Any, backend: str, number: signal.Signals
) -> None:
    """Also with a request that no pipe takes whole."""
    ssh = ["--ssh_config", str(hosts.ssh_config), "--ssh_port", str(HUNG_PORT)]
    command = [sys.executable, "-m", "gaudi_distributed.launch", "--hosts", HOSTS, "--cores_per_rank", "0", *ssh]
    environ = {**environment(), "TF_TEST_LONG": "x" * 100_000, "GAUDI_RUN_JOIN_SECONDS": f"{2 * SECONDS}"}
    program = [sys.executable, "-c", "import signal; signal.pause()"]
    process = subprocess.Popen(
        hosts.inside(0, [*command, "--backend", backend, *program]), env=environ, stderr=subprocess.PIPE, text=True
    )
    try:
        assert hung_login.read(process) == "here"
        process.send_signal(number)
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 75


def test_a_host_that_joins_an_elastic_run_later(
    hosts: TwoHosts, tmp_path: Path, make_channel: Callable[[str], Any]
) -> None:
    """The run begins with its own machine only, and has an interface."""
    told, orders = make_channel("told"), {number: make_channel(f"orders_{number}") for number in (1, 2)}
    listed, script = tmp_path / "hosts", tmp_path / "hosts.sh"
    looks = "".join(f'echo look > "{each.path}"\n' for each in orders.values())
    script.write_text(f'#!/bin/sh\ncat "{listed}"\n{looks}')
    script.chmod(0o755)
    listed.write_text(f"{ADDRESSES[0]}:1\n")
    ssh = ["--ssh_config", str(hosts.ssh_config), "--ssh_port", str(PORT)]
    command = [
        sys.executable,
        "-m",
        "gaudi_distributed.launch",
        "--max_np",
        "2",
        "--host_discovery_script",
        str(script),
    ]
    command += ["--interface", "wire", *ssh, sys.executable, WORKER, str(tmp_path)]
    process = subprocess.Popen(hosts.inside(0, command), env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        told.wait_for("worker 1 in round 1: rank 0 of 1", process=process)
        draft = tmp_path / "draft"
        draft.write_text(f"{ADDRESSES[0]}:1\n{ADDRESSES[1]}:1\n")
        draft.rename(listed)
        told.wait_for("worker 1 in round 2: rank 0 of 2", "worker 2 in round 1: rank 1 of 2", process=process)
        for each in orders.values():
            each.write("done")
        error = process.communicate(timeout=SECONDS)[1]
    finally:
        process.kill()
    assert process.returncode == 0, error


def find_processes(mark: str) -> list[int]:
    """Return the ids of processes, of all namespaces, that have the mark as an argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if mark in words:
            found.append(int(path.parent.name))
    return found
