"""Find the hosts of a run, and fill them with ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from gaudi_distributed.cluster.hosts import Cluster, Host, RankAssignment, find_cluster
from gaudi_distributed.errors import ConfigurationError

SLURM = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "OMPI_MCA_orte_default_hostfile": "mpi_hosts"}
FILES = {"mpi_hosts": "job-worker-0.job slots=2\njob-worker-1.job slots=2\n", "hosts": "a slots=2\nb slots=2\n"}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files into the working folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def find(environ: dict[str, str] | None = None, **request: object) -> tuple[list[tuple[str, int]], str]:
    cluster, source = find_cluster(environ or {}, **request)  # type: ignore[arg-type]
    return [(host.name, host.slots) for host in cluster.hosts], source


def test_ranks_are_dealt_host_by_host() -> None:
    cluster = Cluster((Host("a", 2), Host("::1", 1)))
    assert cluster.assign_ranks() == [
        RankAssignment("a", 0, 3, 0, 2, 0, 2),
        RankAssignment("a", 1, 3, 1, 2, 0, 1),
        RankAssignment("::1", 2, 3, 0, 1, 1, 2),
    ]
    assert (cluster.size, cluster.most_slots) == (3, 2)
    assert cluster.workers == ("a:2410", "a:2411", "[::1]:2412")


@pytest.mark.parametrize(
    ("hosts", "port"),
    [
        ((), 2410),
        ((Host("a"), Host("A")), 2410),
        ((Host("a", 0),), 2410),
        ((Host("a b"),), 2410),
        ((Host("a", 2),), 65535),
    ],
)
def test_wrong_clusters(hosts: tuple[Host, ...], port: int) -> None:
    with pytest.raises(ConfigurationError):
        Cluster(hosts, port)


@pytest.mark.parametrize(
    ("environ", "request_", "expected"),
    [
        ({}, {"np": 3}, ([("localhost", 3)], "")),
        ({}, {}, ([("localhost", 1)], "")),
        ({}, {"slots": 4}, ([("localhost", 4)], "")),
        ({}, {"hosts": "a:2,b:2"}, ([("a", 2), ("b", 2)], "--hosts")),
        ({}, {"hosts": "a:2,b:2", "np": 3}, ([("a", 2), ("b", 1)], "--hosts")),
        ({}, {"hosts": "a:2,b:2", "np": 2}, ([("a", 2)], "--hosts")),
        ({}, {"hosts": "a,b", "np": 4}, ([("a", 2), ("b", 2)], "--hosts")),
        ({}, {"hosts": "a,b", "slots": 3}, ([("a", 3), ("b", 3)], "--hosts")),
        ({}, {"hosts": "a,b", "slots": 3, "np": 4}, ([("a", 3), ("b", 1)], "--hosts")),
        ({}, {"hostfile": Path("hosts")}, ([("a", 2), ("b", 2)], "--hostfile")),
        ({"MULTI_HLS_IPS": "10.0.0.1,10.0.0.2"}, {}, ([("10.0.0.1", 8), ("10.0.0.2", 8)], "MULTI_HLS_IPS")),
        ({"MULTI_HLS_IPS": "10.0.0.1,10.0.0.2"}, {"np": 4}, ([("10.0.0.1", 2), ("10.0.0.2", 2)], "MULTI_HLS_IPS")),
        ({"MULTI_HLS_IPS": "10.0.0.1"}, {"slots": 2}, ([("10.0.0.1", 2)], "MULTI_HLS_IPS")),
        (SLURM, {}, ([("n1", 2), ("n2", 2)], "SLURM_JOB_NODELIST")),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, {"np": 2}, ([("n1", 1), ("n2", 1)], "SLURM_JOB_NODELIST")),
        (SLURM, {"hosts": "n2:1"}, ([("n2", 1)], "--hosts")),
        (KUBERNETES, {}, ([("job-worker-0.job", 2), ("job-worker-1.job", 2)], "Kubernetes' host file")),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"np": 2}, ([("localhost", 2)], "")),
    ],
)
def test_sources(environ: dict[str, str], request_: dict[str, object], expected: object) -> None:
    assert find(environ, **request_) == expected


@pytest.mark.parametrize(
    ("environ", "request_", "words"),
    [
        ({}, {"hosts": "a:2", "np": 3}, "--np 3: --hosts has slots for 2"),
        ({}, {"hosts": "a:2,b:2", "slots": 3}, "--hosts gives 2, 2 ranks"),
        ({}, {"hosts": "a,b", "np": 3}, "names 2 hosts without"),
        ({}, {"hosts": "a,b"}, "names 2 hosts without"),
        ({}, {"np": 8, "slots": 4}, "--np 8: this machine has 4"),
        ({}, {"hosts": "c:1", "hostfile": Path("hosts")}, "--hosts names c, which --hostfile"),
        (SLURM, {"hosts": "a:2"}, "--hosts names a, which SLURM_JOB_NODELIST"),
        ({**SLURM, "MULTI_HLS_IPS": "10.0.0.1"}, {}, "names 10.0.0.1, which SLURM_JOB_NODELIST"),
        ({**KUBERNETES, "MULTI_HLS_IPS": "10.0.0.1"}, {}, "Kubernetes' host file"),
        ({"MULTI_HLS_IPS": ""}, {}, "'' is not"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2"}, {}, "names 2 hosts"),
        (SLURM, {"np": 5}, "--np 5: SLURM_JOB_NODELIST has slots"),
    ],
)
def test_contradictions(environ: dict[str, str], request_: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as caught:
        find(environ, **request_)
    assert caught.value.exit_status == 78


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere: cannot") as caught:
        find_cluster({}, hostfile=tmp_path / "nowhere")
    assert caught.value.exit_status == 66
