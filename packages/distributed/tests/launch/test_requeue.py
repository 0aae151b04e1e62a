"""The script of a job that is queued again, run by bash; only what asks SLURM to queue it is ours here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gaudi_distributed.launch.cli import launch

PROGRAM = Path(__file__).with_name("rank_program.py")
SECONDS = 600  # ends a test that would never end


class Job:
    """The script of a job, and what it runs of SLURM and of the system, which note their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.script = folder, folder / "job.sh"
        for name in ("scontrol", "sleep"):
            path = folder / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(f'#!/bin/sh\necho "{name}: $*" >> {folder}/called\n')
            path.chmod(0o755)

    def write(self, *words: str, environ: Mapping[str, str] | None = None) -> None:
        flags = ("--np", "1", "--backend", "multi_worker", "--slurm_script", str(self.script))
        assert launch([*flags, *words], environ or {}) == 0

    def start(self, restarts: int = 0) -> subprocess.Popen[bytes]:
        path = f"{self.folder}/bin{os.pathsep}{os.environ['PATH']}"
        variables = {"PATH": path, "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": f"{restarts}"}
        return subprocess.Popen(["bash", self.script], env={**os.environ, **variables})

    def called(self) -> list[str]:
        path = self.folder / "called"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("status", "restarts", "called"),
    [
        (75, 0, ["sleep: 5", "scontrol: requeue 5"]),
        (75, 2, ["sleep: 20", "scontrol: requeue 5"]),
        (75, 8, ["sleep: 300", "scontrol: requeue 5"]),
        (75, 9, []),
        (3, 0, []),
        (0, 0, []),
    ],
)
def test_a_run_that_may_go_on_is_queued_again(job: Job, status: int, restarts: int, called: list[str]) -> None:
    job.write("--requeue", "9", "sh", "-c", f"exit {status}")
    assert job.start(restarts).wait(SECONDS) == status
    assert job.called() == called


@pytest.mark.parametrize(("number", "called"), [(signal.SIGTERM, []), (signal.SIGUSR1, ["scontrol: requeue 5"])])
def test_who_ends_a_job_is_not_contradicted_and_its_limit_of_time_is_no_end(
    job: Job,
    make_channel: Callable[[str], Any],
    make_gate: Callable[[str], Any],
    number: int,
    called: list[str],
) -> None:
    """The run saves and ends with 75 in both cases; in a pause, the limit of time would hit before it is queued."""
    told, disk = make_channel("told"), make_gate("disk")
    disk.open()
    job.write("--requeue", "1", sys.executable, str(PROGRAM), "mark", str(job.folder), "save=75")
    process = job.start()
    told.wait_for("rank 0 is here", process=process)
    process.send_signal(number)
    assert process.wait(SECONDS) == 75
    assert (job.folder / "saved0").exists()
    assert job.called() == called


def test_options_of_sbatch_that_are_given_win(job: Job) -> None:
    job.write("--requeue", "1", "--sbatch=--signal=B:USR1@600", "--sbatch=--open-mode=truncate", "true")
    options = [
        line.removeprefix("#SBATCH ") for line in job.script.read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert {"--signal=B:USR1@600", "--open-mode=truncate", "--requeue"} <= {*options}
    assert len({option.partition("=")[0] for option in options}) == len(options)


def test_a_job_has_restarts_of_its_own(job: Job) -> None:
    job.write("--requeue", "1", "true", environ={"SLURM_RESTART_COUNT": "2", "GAUDI_RUN_RESTART": "2", "TF_X": "1"})
    assert "#SBATCH --export=TF_X" in job.script.read_text().splitlines()


def test_a_run_that_is_no_job_of_slurm_cannot_be_queued_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(["--np", "1", "--requeue", "1", "true"], {}) == 64
    assert "--requeue" in capfd.readouterr().err
