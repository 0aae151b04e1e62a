"""Files for schedulers: shapes, what they keep of the flags, and the published schema of an MPIJob."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gaudi_distributed.errors import ConfigurationError
from gaudi_distributed.launch.cli import launch

Plan = Callable[..., str]
SCHEMA = json.loads(Path(__file__).with_name("mpijob_schema.json").read_text())
MPIJOB = ["--mpijob", "-", "--image", "registry/gaudi:1"]


def make_job(plan: Plan, *flags: str, command: tuple[str, ...] = ("ssd_train",)) -> dict[str, Any]:
    job: dict[str, Any] = json.loads(plan([*MPIJOB, *flags, *command]))
    return job


@pytest.mark.parametrize(
    ("flags", "workers", "slots", "limits"),
    [
        (["--np", "2"], 1, 2, None),
        (["--np", "4", "--num_workers_per_hls", "2"], 2, 2, None),
        (["--preset", "habana-16"], 2, 8, {"habana.ai/gaudi": 8}),
        (["--num_workers_per_hls", "4", "--accelerator", "gpu"], 1, 4, {"nvidia.com/gpu": 4}),
    ],
)
def test_an_mpi_job_passes_the_published_schema(
    plan: Plan, flags: list[str], workers: int, slots: int, limits: dict[str, int] | None
) -> None:
    job = make_job(plan, *flags)
    jsonschema.validate(job, SCHEMA)
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert (replicas["Worker"]["replicas"], job["spec"]["slotsPerWorker"]) == (workers, slots)
    worker = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert worker.get("resources", {}).get("limits") == limits
    launcher = replicas["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"] == ["gaudi-run", "--cores_per_rank", "0", *flags, "ssd_train"]


def test_a_job_that_is_none_does_not_pass(plan: Plan) -> None:
    job = make_job(plan, "--np", "2")
    changes: list[dict[str, Any]] = [{"spec": {}}, {"kind": "Job"}, {"spec": {**job["spec"], "slots": 2}}]
    for change in changes:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**job, **change}, SCHEMA)


def test_arguments_are_text_whatever_they_look_like(plan: Plan) -> None:
    arguments = ("ssd_train", "yes", "1", "null", "- a: b", "$(HOME)", "a\nb")
    job = make_job(plan, "--np", "2", "--job_name", "job", command=arguments)
    jsonschema.validate(job, SCHEMA)
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["command"][-len(arguments) :] == list(arguments)


def test_the_launcher_finds_its_hosts_in_the_pod(plan: Plan, tmp_path: Path) -> None:
    """What the manifest runs, run where the operator runs it."""
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
        ("--preset 4xc4140", ["--nodes=4", "--ntasks-per-node=4", "--gpus-per-node=4"]),
        ("--np 2 --sbatch=--time=1:00 --sbatch=--partition=a", ["--time=1:00", "--partition=a"]),
        ("--np 2 --forward EDITOR", ["--export=EDITOR,PATH,PYTHONPATH,TF_CPP_MIN_LOG_LEVEL"]),
    ],
)
def test_a_script_for_slurm(plan: Plan, flags: str, options: list[str]) -> None:
    program = "" if "preset" in flags else " ssd_train --steps 5"
    script = plan(f"{flags} --slurm-script job.sh --job-name mine{program}")
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


def test_docker_is_not_for_slurm(plan: Plan) -> None:
    with pytest.raises(ConfigurationError, match="jobs of SLURM use singularity"):
        plan("--np 2 --slurm_script - --container docker --image a ssd_train")
