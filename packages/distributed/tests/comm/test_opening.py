"""The environment of an engine follows from options and rank; errors come before TensorFlow is imported."""

from __future__ import annotations

import json

import pytest

from gaudi_distributed import (
    CommunicationOptions,
    ConfigurationError,
    RankInfo,
    SingleProcess,
    communication_environment,
    open_communicator,
    polling_environment,
)
from gaudi_distributed.comm.opening import ENGINES, find_engine

FOUR = RankInfo(1, 4, 1, 4)


def test_one_process_needs_nothing() -> None:
    assert communication_environment(CommunicationOptions(), RankInfo(), {}) == {}


def test_horovod_does_not_fuse_again() -> None:
    options = CommunicationOptions("horovod", hierarchical_allreduce=True)
    assert communication_environment(options, FOUR, {}) == {
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
    }
    plain = CommunicationOptions("horovod")
    assert communication_environment(plain, FOUR, {"HOROVOD_FUSION_THRESHOLD": "1024"}) == {}


def test_horovod_polls_seldom_where_it_takes_time_from_the_ranks() -> None:
    assert polling_environment({}) == {"HOROVOD_CYCLE_TIME": "25"}
    assert polling_environment({"HOROVOD_CYCLE_TIME": "3.5"}) == {}
    assert polling_environment({"HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1"}) == {}


@pytest.mark.parametrize("engine", ["multi_worker", "hpu"])
def test_tf_distribute_on_one_machine_has_a_port_for_each_rank(engine: str) -> None:
    options = CommunicationOptions(engine, first_port=3000)  # type: ignore[arg-type]
    variables = communication_environment(options, FOUR, {})
    assert json.loads(variables["TF_CONFIG"]) == {
        "cluster": {"worker": [f"localhost:{port}" for port in (3000, 3001, 3002, 3003)]},
        "task": {"type": "worker", "index": 1},
    }
    assert communication_environment(options, FOUR, {"TF_CONFIG": "given"}) == {}


@pytest.mark.parametrize(
    ("options", "rank_info", "words"),
    [
        (CommunicationOptions(), FOUR, "process 1 of 4"),
        (
            CommunicationOptions("multi_worker"),
            RankInfo(1, 4, 1, 2),
            "2 of 4 processes",
        ),
        (CommunicationOptions("mpi"), FOUR, "engine is 'mpi'"),  # type: ignore[arg-type]
        (CommunicationOptions("horovod", "int8"), FOUR, "compression 'int8'"),  # type: ignore[arg-type]
        (CommunicationOptions("horovod", "bf16"), FOUR, "compression is bf16"),
        (CommunicationOptions("hpu", hierarchical_allreduce=True), FOUR, "hierarchical allreduce"),
        (CommunicationOptions("horovod", fusion_threshold_mb=-1), FOUR, "threshold is -1"),
        (CommunicationOptions("multi_worker", first_port=0), FOUR, "first port is 0"),
        (CommunicationOptions("multi_worker", first_port=65533), FOUR, "first port is 65533"),
    ],
)
def test_what_cannot_work_is_one_line(options: CommunicationOptions, rank_info: RankInfo, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        communication_environment(options, rank_info, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gaudi_run_says_what_it_started_a_process_for() -> None:
    assert find_engine({}) is None
    assert [find_engine({"GAUDI_RUN_ENGINE": engine}) for engine in ENGINES] == [*ENGINES]
    with pytest.raises(ConfigurationError, match="GAUDI_RUN_ENGINE is ''"):
        find_engine({"GAUDI_RUN_ENGINE": ""})


def test_opening_looks_at_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_STEP_NUM_TASKS", "TF_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(open_communicator(CommunicationOptions()), SingleProcess)
    for part, value in (("RANK", "0"), ("SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_SIZE", "2")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{part}", value)
    with pytest.raises(ConfigurationError, match="process 0 of 2"):
        open_communicator(CommunicationOptions())
