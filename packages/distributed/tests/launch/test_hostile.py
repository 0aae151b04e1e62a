"""Hostile or contradictory values are refused, or reach the program as they are; no shell ever reads them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.launch.cli import launch

Plan = Callable[..., str]
TOUCH = "touch canary"

# Flags, environment, exit status, and words of the error. The working folder has a file that no command may make.
REFUSED: dict[str, tuple[list[str], dict[str, str], int, str]] = {
    "host ;": (["--hosts", f"a;{TOUCH}:1"], {}, 78, "not a host"),
    "host $()": (["--hosts", f"$({TOUCH}):1"], {}, 78, "not a host"),
    "host backtick": (["--hosts", f"`{TOUCH}`:1"], {}, 78, "not a host"),
    "host pipe": (["--hosts", f"a|{TOUCH}:1"], {}, 78, "not a host"),
    "host option": (["--hosts", f"-oProxyCommand={TOUCH}:1"], {}, 78, "not a host"),
    "host newline": (["--hosts", f"a\n{TOUCH}:1"], {}, 78, "not a host"),
    "host at": (["--hosts", "root@a:1"], {}, 78, "not a host"),
    "host ssh uri": (["--hosts", "ssh://a:1"], {}, 78, "ranks on"),
    "host twice": (["--hosts", "a:1,a:1"], {}, 78, "named twice"),
    "host twice by case": (["--hosts", "node:1,NODE:1"], {}, 78, "named twice"),
    "slots 0": (["--hosts", "a:0"], {}, 78, "from 1 to 1024"),
    "slots -1": (["--hosts", "a:-1"], {}, 78, "from 1 to 1024"),
    "slots huge": (["--hosts", "a:99999"], {}, 78, "from 1 to 1024"),
    "slots command": (["--hosts", f"a:1;{TOUCH}"], {}, 78, "from 1 to 1024"),
    "ipv6 zone": (["--hosts", "[fe80::1%eth0]:1"], {}, 78, "not a host"),
    "ipv6 bare": (["--hosts", "fe80::1"], {}, 78, "ranks on"),
    "address beyond": (["--hosts", "10.0.0.256:1"], {}, 78, "not a host"),
    "np 0": (["--np", "0"], {}, 64, "'0' is not"),
    "np text": (["--np", f"2;{TOUCH}"], {}, 64, "is not a number"),
    "np beyond slots": (["--np", "4", "--hosts", "localhost:2"], {}, 78, "slots for 2 ranks"),
    "port 0": (["--np", "1", "--ssh_port", "0"], {}, 64, "'0' is not"),
    "port beyond": (["--np", "1", "--ssh_port", "65536"], {}, 78, "ssh port 65536"),
    "ports beyond": (["--np", "2", "--first_port", "65535"], {}, 78, "ports 65535 to 65536"),
    "ssh port variable": (["--np", "1"], {"DOCKER_SSHD_PORT": f"22 -oProxyCommand={TOUCH}"}, 78, "DOCKER_SSHD_PORT is"),
    "ssh config": (["--np", "1", "--ssh_config", f"-oProxyCommand={TOUCH}"], {}, 66, "does not exist"),
    "interface option": (["--np", "1", "--interface", "-x"], {}, 64, "expected one argument"),
    "interface command": (["--np", "1", "--interface", f"eth0;{TOUCH}"], {}, 64, "not an interface"),
    "interface variable": (["--np", "1"], {"MPI_TCP_INCLUDE": f"$({TOUCH})"}, 64, "not an interface"),
    "interface network": (["--np", "1", "--interface", "10.0.0.0/99"], {}, 64, "is not a network"),
    "no interface by MPI": (["--np", "2", "--backend", "openmpi", "--interface", "eth9"], {}, 78, "--interface eth9"),
    "no interface by Gloo": (["--np", "2", "--backend", "gloo", "--interface", "eth9"], {}, 78, "--interface eth9"),
    "no interface": (["--np", "2", "--backend", "multi_worker"], {"MPI_TCP_INCLUDE": "eth9"}, 78, "eth9"),
    "two interfaces": (["--np", "1", "--interface", "eth0"], {"MPI_TCP_INCLUDE": "eth1"}, 78, "give one"),
    "mpi root": (["--np", "1"], {"MPI_ROOT": f"/opt/$({TOUCH})"}, 78, "MPI_ROOT"),
    "mpi root relative": (["--np", "1", "--mpi_root", "opt"], {}, 78, "MPI_ROOT 'opt'"),
    "hosts of two kinds": (["--hosts", "a:1"], {"MULTI_HLS_IPS": "10.0.0.1"}, 78, "which MULTI_HLS_IPS"),
    "loopback among hosts": (
        ["--hosts", "10.0.0.2:1,LocalHost:1", "--backend", "multi_worker", "--dry_run"],
        {},
        78,
        "host LocalHost: is",
    ),
    "loopback address": (
        ["--hosts", "127.0.0.1:1,10.0.0.2:1", "--backend", "multi_worker", "--dry_run"],
        {},
        78,
        "host 127.0.0.1: is",
    ),
    "hls ips": (["--np", "1"], {"MULTI_HLS_IPS": f"10.0.0.1 {TOUCH}"}, 78, "not a host"),
    "slurm list": (["--np", "1"], {"SLURM_JOB_NODELIST": f"n[1-$({TOUCH})]"}, 78, "number or range"),
    "slurm half set": ([], {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "1"}, 78, "counts ranks of 1"),
    "rank inside": (["--np", "1"], {"OMPI_COMM_WORLD_RANK": "1"}, 78, "already a rank"),
    "rank half set": (["--np", "1"], {"HOROVOD_LOCAL_RANK": "0"}, 78, "HOROVOD_LOCAL_RANK set"),
    "rank of tensorflow": (["--np", "1"], {"TF_CONFIG": "{}"}, 78, "TF_CONFIG set"),
    "forward a value": (["--np", "1", "--forward", "A=1"], {}, 64, "is not a name"),
    "forward a secret": (["--np", "1", "--forward", "MY_API_KEY"], {"MY_API_KEY": "x"}, 77, "like a secret"),
    "forward nothing": (["--np", "1", "--forward", "NOT_SET_HERE"], {}, 64, "is not set here"),
    "image": (["--np", "1", "--container", "docker", "--image", "--privileged"], {}, 64, "expected one argument"),
    "image by equals": (["--np", "1", "--container", "docker", "--image=--privileged"], {}, 64, "not an image"),
    "no image": (["--np", "1", "--container", "singularity"], {}, 66, "apptainer build gaudi-vision-default.sif"),
    "no image for GPUs": (["--np", "1", "--docker", "--accelerator", "gpu"], {}, 64, "name one by --image"),
    "image alone": (["--np", "1", "--image", "a"], {}, 64, "go with --container"),
    "mount": (["--np", "1", "--container", "docker", "--image", "a", "--mount", "/a:/b:rw,z"], {}, 64, "--mount"),
    "docker elsewhere": (
        ["--hosts", "a.invalid:1", "--container", "docker", "--image", "a"],
        {},
        78,
        "this machine only",
    ),
    "sbatch option": (["--np", "1", "--slurm_script", "-", f"--sbatch=--time=1\n{TOUCH}"], {}, 64, "--sbatch"),
    "sbatch wrap": (["--np", "1", "--slurm_script", "-", f"--sbatch=--wrap={TOUCH}"], {}, 64, "--sbatch"),
    "sbatch export": (["--np", "1", "--slurm_script", "-", "--sbatch=--export=ALL"], {}, 64, "--export=ALL"),
    "sbatch alone": (["--np", "1", "--sbatch=--time=1"], {}, 64, "goes with --slurm_script"),
    "job name": (["--np", "1", "--mpijob", "-", "--image", "a", "--job_name", "A_b"], {}, 64, "--job_name 'A_b'"),
    "job hosts": (["--hosts", "a:1", "--slurm_script", "-"], {}, 64, "scheduler gives hosts"),
    "two jobs": (["--np", "1", "--slurm_script", "-", "--mpijob", "-"], {}, 64, "--slurm_script and --mpijob"),
    "uneven job": (
        ["--np", "3", "--num_workers_per_hls", "2", "--slurm_script", "-"],
        {},
        78,
        "--num_workers_per_hls 2",
    ),
    "scale out alone": (["--np", "2", "--scale_out", "tcp"], {}, 64, "are for Gaudis"),
    "scale out nowhere": (["--np", "2", "--accelerator", "hpu", "--scale_out", "tcp"], {}, 78, "only host"),
    "too many cores": (["--np", "1", "--cores_per_rank", "99999"], {}, 78, "give no more"),
    "unknown flag": (["--npp", "2"], {}, 64, "unknown flag --npp"),
    "unknown backend": (["--np", "2", "--backend", f"$({TOUCH})"], {}, 64, "invalid choice"),
    "nothing asked": ([], {}, 64, "--np or --hosts"),
    "no program": (["--np", "1", "--", "-x"], {}, 64, "in place of"),
    "grace": (["--np", "1", "--grace", "nan"], {}, 64, "number of seconds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name: str, canary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags, environ, expected, words = REFUSED[name]
    program = [] if "--" in flags else [sys.executable]
    status = launch([*flags, *program], {**os.environ, **environ})
    out, err = capfd.readouterr()
    assert (status, out) == (expected, "")
    assert words in err
    assert err.startswith("gaudi-run: error: ")
    assert len(err.splitlines()) == 1
    assert list(canary.parent.iterdir()) == []


def test_a_refusal_is_the_exit_status_of_the_program(canary: Path) -> None:
    done = run(["--hosts", f"$({TOUCH}):1", "ssd_train"], {})
    assert (done.returncode, done.stdout) == (78, "")
    assert len(done.stderr.splitlines()) == 1
    assert not canary.exists()


def test_mpirun_gets_no_ipv6_address(plan: Plan) -> None:
    with pytest.raises(ConfigurationError, match="host ::1: mpirun"):
        plan("--hosts [::1]:2 --backend openmpi ssd_train")


def test_an_argument_that_mpirun_would_take_for_its_own_is_refused(plan: Plan) -> None:
    with pytest.raises(ConfigurationError, match="an argument is ':'"):
        plan(["--np", "2", "--backend", "openmpi", "ssd_train", ":", "--np", "1", "touch", "canary"])


ARGUMENTS = [
    *(
        "; touch canary",
        "$(touch canary)",
        "`touch canary`",
        "| touch canary",
        "&& touch canary",
        "> canary",
        "a\ntouch canary",
    ),
    *(
        "--np",
        "--",
        "-x",
        "'",
        '"',
        "\\",
        " leading",
        "trailing ",
        "",
        "*",
        "~",
        "$HOME",
        "{a,b}",
        "!x",
        "ünïcode",
        "\t",
        ":",
    ),
]


def test_arguments_reach_the_program_as_they_are(canary: Path) -> None:
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    done = run(["--np", "1", "--backend", "multi_worker", sys.executable, "-c", code, *ARGUMENTS], {})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ARGUMENTS
    assert not canary.exists()


def test_values_of_variables_reach_the_program_as_they_are(canary: Path) -> None:
    code = "import json, os; print(json.dumps(os.environ['TF_TEXT'])); print({'SECRET', 'EDITOR'} & set(os.environ))"
    text = "; touch canary\n$(touch canary) 'x' \"y\" ünïcode"
    environ = {"TF_TEXT": text, "SECRET": "x", "EDITOR": "vi"}
    done = run(["--np", "1", "--backend", "multi_worker", sys.executable, "-c", code], environ)
    assert done.stdout.splitlines() == [json.dumps(text), "set()"], done.stderr
    assert not canary.exists()


def test_a_script_for_slurm_quotes_every_argument(canary: Path) -> None:
    """The shell runs the script, with a program that shows its arguments before the launcher."""
    done = run(["--np", "1", "--slurm_script", "job.sh", "--job_name", "job", "ssd_train", *ARGUMENTS], {})
    assert done.returncode == 0, done.stderr
    script = Path("job.sh").read_text().replace("exec", 'exec "$0" -c "$1"', 1)
    code = "import json, sys; print(json.dumps(sys.argv[1:]))"
    shown = subprocess.run(["bash", "-c", script, sys.executable, code], capture_output=True, text=True, check=True)
    words = json.loads(shown.stdout)
    assert words[:3] == [sys.executable, "-m", "gaudi_distributed.launch"]
    assert words[words.index("ssd_train") + 1 :] == ARGUMENTS
    assert not canary.exists()


def run(arguments: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run gaudi-run as a process of its own, in the working folder."""
    command = [sys.executable, "-m", "gaudi_distributed.launch", *arguments]
    return subprocess.run(
        command, env={**os.environ, **environ}, capture_output=True, text=True, timeout=600, check=False
    )
