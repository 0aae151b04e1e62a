"""Ranks as each launcher tells them; what is half set or contradicts itself is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gaudi_distributed import ConfigurationError, RankInfo, detect_rank, write_tf_config

HOROVOD = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_HOSTNAME": "node1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
WORKERS = ["a:2410", "a:2411", "b:2410", "b:2411"]
TF_CONFIG = {"TF_CONFIG": write_tf_config(WORKERS, 3)}
SLURM_JOB = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "4"}
PLACE = RankInfo(3, 4, 1, 2)


def find(environ: dict[str, str]) -> RankInfo:
    return replace(detect_rank(environ), host="localhost")


def config(**parts: Any) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps(parts)}


@pytest.mark.parametrize(
    "environ",
    [
        HOROVOD,
        OPEN_MPI,
        MPICH,
        SLURM,
        TF_CONFIG,
        HOROVOD | OPEN_MPI | TF_CONFIG,
        # mpirun in a job: its processes inherit the variables of the daemon's step, or of the script.
        OPEN_MPI | SLURM | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
        OPEN_MPI | SLURM_JOB,
        # srun with PMI.
        SLURM | {"PMI_RANK": "3", "PMI_SIZE": "4"},
    ],
)
def test_each_launcher_tells_the_place(environ: dict[str, str]) -> None:
    assert find(environ) == PLACE


@pytest.mark.parametrize("environ", [{}, SLURM_JOB, {"TF_CONFIG": ""}])
def test_a_process_by_itself(environ: dict[str, str]) -> None:
    assert find(environ) == RankInfo()


def test_the_host_is_the_launchers_name_for_it() -> None:
    assert detect_rank(HOROVOD).host == "node1"
    assert detect_rank(OPEN_MPI).host != ""


def test_slurm_with_uneven_hosts() -> None:
    counts = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1,1"}
    assert find(SLURM | counts | {"SLURM_PROCID": "5", "SLURM_NODEID": "2"}) == RankInfo(5, 8, 1, 2)
    assert find(SLURM | counts | {"SLURM_PROCID": "7", "SLURM_NODEID": "4", "SLURM_LOCALID": "0"}) == RankInfo(
        7, 8, 0, 1
    )


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HOROVOD_RANK": "0"}, "HOROVOD_RANK set and HOROVOD_SIZE, "),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE set"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK, PMI_SIZE set"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS set"),
        (HOROVOD | {"HOROVOD_RANK": "-1"}, "HOROVOD_RANK is '-1'"),
        (HOROVOD | {"HOROVOD_SIZE": ""}, "HOROVOD_SIZE is ''"),
        (HOROVOD | {"HOROVOD_SIZE": "4; rm -r /"}, "HOROVOD_SIZE is '4; rm -r /'"),
        (HOROVOD | {"HOROVOD_SIZE": "٤"}, "HOROVOD_SIZE is '٤'"),
        (HOROVOD | {"HOROVOD_SIZE": "3"}, "HOROVOD_RANK is 3 of 3"),
        (HOROVOD | {"HOROVOD_LOCAL_RANK": "2"}, "host 2 of 2"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "5"}, "host 1 of 5"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, "SLURM_NODEID is 1"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "not a list"),
        (
            HOROVOD | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"},
            "rank 3 of 4, OMPI_COMM_WORLD_RANK",
        ),
        (OPEN_MPI | {"TF_CONFIG": write_tf_config(WORKERS, 1)}, "rank 1 of 4"),
        (OPEN_MPI | {"TF_CONFIG": write_tf_config(WORKERS[:1], 0)}, "rank 0 of 1"),
        ({"TF_CONFIG": "{"}, "does not name"),
        ({"TF_CONFIG": "[" * 100000}, "RecursionError"),
        (config(cluster={"worker": WORKERS}), "KeyError: 'task'"),
        (config(cluster={"worker": WORKERS}, task={"type": "chief", "index": 0}), "a list of"),
        (config(cluster={"worker": WORKERS, "ps": ["c:1"]}, task={"type": "worker", "index": 0}), "a list of"),
        (config(cluster={"worker": WORKERS}, task={"type": "worker", "index": True}), "a list of"),
        (config(cluster={"worker": WORKERS}, task={"type": "worker", "index": 4}), "worker 4 is not"),
        (config(cluster={"worker": []}, task={"type": "worker", "index": 0}), "worker 0 is not"),
        (config(cluster={"worker": ["a:1", 2]}, task={"type": "worker", "index": 0}), "worker 2 is not"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        detect_rank(environ)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.field in {*environ, "HOROVOD_SIZE", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "SLURM_PROCID"}
    assert caught.value.remedy


def test_tf_config() -> None:
    assert json.loads(write_tf_config(["a:1", "[::1]:2"], 1)) == {
        "cluster": {"worker": ["a:1", "[::1]:2"]},
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.parametrize("worker", ["a", "a:", "a:0", "a:65536", ":1", "-o:1", "a b:1", "a;b:1", "a:1\n", "a:$(x)", ""])
def test_a_worker_is_host_and_port(worker: str) -> None:
    with pytest.raises(ConfigurationError, match="not host:port"):
        write_tf_config(["b:1", worker], 0)


def test_workers_are_named_once() -> None:
    with pytest.raises(ConfigurationError, match="'a:1' is named twice"):
        write_tf_config(["a:1", "b:1", "a:1"], 0)
