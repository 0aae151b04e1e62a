"""All ranks start again where they end with 75, and nobody asked for that."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from gaudi_distributed.errors import RunEndedError
from gaudi_distributed.launch import experiments
from gaudi_distributed.launch.cli import launch
from gaudi_distributed.launch.flags import parse_flags
from gaudi_distributed.launch.planning import plan_launch
from gaudi_distributed.launch.processes import make_ssh_error

RESTART = re.compile(r"restart (\d+) of (\d+) in ")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "RESTART_SECONDS", 0.0)


def run(folder: Path, statuses: tuple[int, ...], *flags: str) -> tuple[int, int]:
    """Launch a program that ends with these statuses one after the other; return the status, and its starts."""
    ends = " ".join(map(str, statuses))
    program = f'echo >> "$0"; set -- {ends}; shift $(($(wc -l < "$0") - 1)); exit $1'
    starts = folder / "starts"
    status = launch(["--np", "1", "--backend", "multi_worker", *flags, "sh", "-c", program, str(starts)], {})
    return status, len(starts.read_text().splitlines())


@pytest.mark.parametrize(
    ("statuses", "most", "status", "starts"),
    [((75, 75, 0), 5, 0, 3), ((75, 75, 75), 1, 75, 2), ((75, 3), 5, 3, 2), ((75,), 0, 75, 1), ((1,), 5, 1, 1)],
)
def test_restarts(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    statuses: tuple[int, ...],
    most: int,
    status: int,
    starts: int,
) -> None:
    assert run(tmp_path, statuses, "--max_restarts", str(most)) == (status, starts)
    told = [tuple(map(int, found)) for found in RESTART.findall(capfd.readouterr().err)]
    assert told == [(number, most) for number in range(1, starts)]


def test_pauses_grow_to_a_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(experiments, "RESTART_SECONDS", 100.0)
    monkeypatch.setattr(experiments, "_wait", lambda seconds, _: pauses.append(seconds))
    assert run(tmp_path, (75, 75, 75, 0), "--max_restarts", "3") == (0, 4)
    assert pauses == [100, 200, 300]


def test_a_host_that_was_lost_is_waited_for_and_one_that_was_never_there_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lost, refused = RunEndedError("lost", 75), make_ssh_error("rank 1 on b")
    for ends, status in (([lost, refused, refused, None], 0), ([refused, None], 78)):
        left = iter(ends)

        def start(*_: object, left: Iterator[Exception | None] = left) -> None:
            if error := next(left):
                raise error

        monkeypatch.setattr(experiments, "start", start)
        assert launch(["--np", "1", "--max_restarts", "3", "sh"], {}) == status


@pytest.mark.parametrize(("environ", "numbers"), [({}, "012"), ({"GAUDI_RUN_RESTART": "4"}, "456")])
def test_ranks_know_that_they_are_started_again(tmp_path: Path, environ: dict[str, str], numbers: str) -> None:
    """Also those of a gaudi-run in a container, which another one outside starts again."""
    program = 'printf "$GAUDI_RUN_RESTART" >> "$0"; [ $(wc -c < "$0") = 3 ] || exit 75'
    words = ["--np", "1", "--backend", "multi_worker", "--max_restarts", "5", "sh", "-c", program]
    assert launch([*words, str(tmp_path / "seen")], environ) == 0
    assert (tmp_path / "seen").read_text() == numbers


@pytest.mark.parametrize("backend", ["openmpi", "gloo", "multi_worker"])
def test_ranks_of_other_hosts_are_told_too(backend: str) -> None:
    for environ, flags in (({}, ["--max_restarts", "1"]), ({"SLURM_RESTART_COUNT": "1"}, list[str]())):
        name = "GAUDI_RUN_RESTART" if flags else "SLURM_RESTART_COUNT"
        words = ["--hosts", "10.0.0.1:1,10.0.0.2:1", "--interface", "eth0", "--backend", backend, "--dry_run", *flags]
        planned = plan_launch(parse_flags([*words, "sh"]), environ)
        assert all(name in process.forwarded for process in planned.processes)
        assert backend != "openmpi" or ["-x", name] in [list(each) for each in pairwise(planned.processes[0].argv)]


def test_a_container_starts_its_ranks_again_only_once(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--np", "2", "--docker", "--image", "image", "--dry_run", "--max_restarts", "3", "ssd_train"]
    assert launch(words, {}) == 0
    assert "--max_restarts" not in capfd.readouterr().out


def test_trials_of_a_submission_do_not_start_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(["--submission", "--max_restarts", "1", "train"], {}) == 64
    assert "--max_restarts" in capfd.readouterr().err


def test_an_elastic_run_has_restarts_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    elastic = ("--max_np", "2", "--host_discovery_script", "hosts.sh")
    assert launch([*elastic, "--max_restarts", "1", "train"], {}) == 64
    assert "--max_restarts" in capfd.readouterr().err
