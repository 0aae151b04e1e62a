"""All ranks start again where they end with 75, and nobody asked for that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gaudi_distributed.launch import running
from gaudi_distributed.launch.cli import launch

RESTART = re.compile(r"restart (\d+) of (\d+) in ")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "RESTART_SECONDS", 0.0)


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
    monkeypatch.setattr(running, "RESTART_SECONDS", 100.0)
    monkeypatch.setattr(running, "_pause", pauses.append)
    assert run(tmp_path, (75, 75, 75, 0), "--max_restarts", "3") == (0, 4)
    assert pauses == [100, 200, 300]


def test_an_elastic_run_has_restarts_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    elastic = ("--max_np", "2", "--host_discovery_script", "hosts.sh")
    assert launch([*elastic, "--max_restarts", "1", "train"], {}) == 64
    assert "--max_restarts" in capfd.readouterr().err
