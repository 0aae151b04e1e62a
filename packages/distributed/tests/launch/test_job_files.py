"""Files for schedulers: shapes, and what they keep of the flags; an MPIJob's text is in test_kubernetes.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gaudi_distributed.cluster.hosts import write_file
from gaudi_distributed.errors import ConfigurationError, UnsafeError
from gaudi_distributed.launch.cli import launch

Plan = Callable[..., str]


def test_the_launcher_finds_its_hosts_in_the_pod(plan: Plan, tmp_path: Path) -> None:
    """Run the command of the manifest where the operator runs it."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("ssd-worker-0.ssd slots=2\nssd-worker-1.ssd slots=2\n")
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "OMPI_MCA_orte_default_hostfile": str(hostfile)}
    text = plan("--cores_per_rank 0 --np 4 --num_workers_per_hls 2 ssd_train", environ)
    assert "    ssd-worker-0.ssd:2,ssd-worker-1.ssd:2\n    --bind-to\n    none\n" in text


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--np 4", ["--nodes=1", "--ntasks-per-node=4"]),
        ("--np 4 --num_workers_per_hls 2", ["--nodes=2", "--ntasks-per-node=2"]),
        ("--preset habana-16", ["--nodes=2", "--ntasks-per-node=8"]),
        ("--np 2 --sbatch=--time=1:00 --sbatch=--partition=a", ["--time=1:00", "--partition=a"]),
        ("--np 2 --forward EDITOR", ["--export=EDITOR,PATH,PYTHONPATH,TF_CPP_MIN_LOG_LEVEL"]),
    ],
)
def test_a_script_for_slurm(plan: Plan, flags: str, options: list[str]) -> None:
    script = plan(f"{flags} --slurm-script job.sh --job-name mine ssd_train --steps 5")
    lines = script.splitlines()
    assert lines[:2] == ["#!/bin/bash", "#SBATCH --job-name=mine"]
    assert [option for option in options if f"#SBATCH {option}" not in lines] == []
    assert "sbatch" not in script
    assert "job.sh" not in script


def test_a_file_is_written_as_a_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "job.sh"
    assert launch(["--np", "2", "--slurm_script", str(target), "ssd_train"], {"PATH": "/usr/bin"}) == 0
    assert target.read_text().startswith("#!/bin/bash\n")
    assert list(tmp_path.iterdir()) == [target]
    assert launch(["--np", "2", "--slurm_script", str(tmp_path / "no" / "job.sh"), "ssd_train"], {}) == 74
    assert capfd.readouterr().out == ""


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    target = tmp_path / "job.sh"
    os.mkfifo(target)
    with pytest.raises(UnsafeError) as caught:
        write_file(target, "")
    assert (caught.value.exit_status, caught.value.path) == (77, str(target))
    target.unlink()
    target.symlink_to("/dev/full")
    assert launch(["--np", "2", "--slurm_script", str(target), "ssd_train"], {"PATH": "/usr/bin"}) == 77
    assert (target.is_symlink(), [*tmp_path.iterdir()]) == (True, [target])


def test_docker_is_not_for_slurm(plan: Plan) -> None:
    with pytest.raises(ConfigurationError, match="SLURM use singularity"):
        plan("--np 2 --slurm_script - --container docker --image a ssd_train")
