"""Rendezvous of training while processes come and go, against a launcher's real meeting point."""

from __future__ import annotations

import json
import os
import runpy
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gaudi_apps import ssd_train
from gaudi_apps.cli.flags import DistributionFlags
from gaudi_apps.cli.launch import check_elastic
from gaudi_apps.detection.application import SSDApplication
from gaudi_apps.runtime.errors import FailureReporter, RanksChangedError
from gaudi_apps.runtime.session import ElasticState
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.checkpoint import Checkpoint
from gaudi_apps.training.recipe import Choice, Recipe
from gaudi_apps.training.run import _share_clean
from gaudi_datasets.errors import FlagError
from gaudi_distributed.cluster.rendezvous import SCOPE, SIZES, WORKER, RendezvousClient, RendezvousServer

run_ranks = runpy.run_path(str(Path(__file__).parents[1] / "ranks_in_threads.py"))["run_ranks"]

Tell = Callable[[int, "dict[str, str] | None"], None]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tell]:
    """Be the launcher of worker 1: what is told is its assignment in a round."""
    with RendezvousServer("127.0.0.1") as rendezvous:
        for name, value in {WORKER: "1", "HOROVOD_RANK": "", **rendezvous.environment}.items():
            monkeypatch.setenv(name, value)

        def tell(number: int, variables: dict[str, str] | None) -> None:
            with rendezvous.lock:
                rendezvous.values[f"{SCOPE}/assignment_1"] = json.dumps(
                    {"round": number, "variables": variables}
                ).encode()

        yield tell


def test_commits_are_due_by_steps() -> None:
    elastic = ElasticState(every=4)
    assert [step for step in range(1, 10) if elastic.is_due(step)] == [4, 5, 6, 7, 8, 9]
    elastic.newest = Checkpoint(5, {}, {}, "")
    assert [step for step in range(6, 12) if elastic.is_due(step)] == [9, 10, 11]
    assert not ElasticState().is_due(1000)


def test_elastic_needs() -> None:
    good = DistributionFlags(use_horovod=True, global_batch_size=8)
    check_elastic("train", good, {SIZES: "1,2,4"})
    with pytest.raises(FlagError, match="--mode eval"):
        check_elastic("eval", good, {})
    for flags in (DistributionFlags(use_horovod=True), DistributionFlags(global_batch_size=8)):
        with pytest.raises(FlagError, match="--use_horovod and --global_batch_size"):
            check_elastic("train", flags, {})


@pytest.mark.parametrize(
    ("flag", "others"),
    [
        ("--hvd_workers", {"hvd_workers": 2}),
        ("--num_workers_per_hls", {"num_workers_per_hls": 2}),
        ("--global_batch_size", {"global_batch_size": 6}),
        ("--bn_group", {"distributed_bn": True, "bn_group": 2}),
    ],
)
def test_what_other_numbers_of_ranks_cannot_do_is_refused_at_first(flag: str, others: dict[str, Any]) -> None:
    """A round of two would begin with it, and one of one or of four would end the run."""
    flags = DistributionFlags(**{"use_horovod": True, "global_batch_size": 8, **others})
    with pytest.raises(FlagError) as caught:
        check_elastic("train", flags, {SIZES: "1,2,4"})
    assert caught.value.flag == flag


def test_training_that_is_done(tell: Tell) -> None:
    tell(1, {"HOROVOD_RANK": "0"})
    elastic = ElasticState(7, RendezvousClient(os.environ))
    assert elastic.every == 7
    assert elastic.begin_round()
    assert os.environ["HOROVOD_RANK"] == "0"


def test_worker_that_is_not_needed(tell: Tell) -> None:
    tell(1, None)
    assert not ElasticState(7, RendezvousClient(os.environ)).begin_round()


def test_ranks_that_change_begin_another_round(tell: Tell, capsys: pytest.CaptureFixture[str]) -> None:
    tell(1, {"HOROVOD_RANK": "0"})
    elastic = ElasticState(7, RendezvousClient(os.environ))
    assert elastic.begin_round()
    elastic.newest = Checkpoint(5, {}, {}, "")
    with elastic.recovering():
        raise RanksChangedError
    assert "step 5" in capsys.readouterr().out


def test_the_next_round_has_the_length_that_was_fitted(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be another process in it, which has not measured."""
    seen: list[tuple[int, bool, bool]] = []

    def compute(mode: str, app: Any, reporter: Any, elastic: ElasticState) -> None:
        seen.append((app.config.run.steps, app.recipe.is_fitted, app.config.run.clean))
        if len(seen) == 1:
            fitted = Recipe((Choice("steps", 77, "fitted"),), minutes=10.0, is_fitted=True)
            app.use_recipe(fitted)
            elastic.newest = Checkpoint(5, {}, {}, "")
            tell(2, {"HOROVOD_RANK": "0"})
            raise RanksChangedError

    monkeypatch.setattr("gaudi_apps.cli.program._compute", compute)
    # Horovod is not here.
    monkeypatch.setattr("gaudi_apps.cli.program.find_distribution", lambda *_: Distribution())
    monkeypatch.setattr("gaudi_distributed.comm.horovod_engine.end_horovod", lambda: None)
    tell(1, {"HOROVOD_RANK": "0"})
    flags = ("--use_horovod", "--global_batch_size", "8", "--device", "cpu", "--clean")
    config = ssd_train.PROGRAM.parse(["--use_fake_data", *flags, "--minutes", "10", "--model_dir", str(tmp_path)])
    ssd_train.PROGRAM._compute_rounds("train", config, FailureReporter())
    assert seen == [(0, False, True), (77, True, False)]


def test_who_joins_a_run_that_was_cleaned_does_not_clean_it() -> None:
    """Worker 2 is new, and all workers have the same flags."""
    flags = ("--use_fake_data", "--use_horovod", "--global_batch_size", "8", "--device", "cpu", "--clean")
    config = ssd_train.PROGRAM.parse(flags)
    kept = replace(config, run=replace(config.run, clean=False))
    for first, cleans in ((kept, False), (config, True)):  # who was in the round before is rank 0
        apps = [SSDApplication(each, Distribution()) for each in (first, config)]

        def share(rank: Any, apps: list[SSDApplication] = apps) -> tuple[bool, bool]:
            app = apps[rank.rank]
            session: Any = SimpleNamespace(app=app, communicator=rank, settings=app.settings)
            _share_clean(session)
            return app.config.run.clean, session.settings.clean

        assert run_ranks(2, share) == [(cleans, cleans)] * 2


@pytest.mark.parametrize("moment", ["round", "between"])
def test_a_stop_at_the_end_of_a_round_holds_for_the_next(
    tell: Tell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    seen: list[str] = []

    def compute(mode: str, app: Any, reporter: FailureReporter, elastic: ElasticState) -> None:
        with reporter.noting_stops() as stop:
            seen.append(stop.name)
            if len(seen) == 1:
                if moment == "round":
                    signal.raise_signal(signal.SIGTERM)
                tell(2, {"HOROVOD_RANK": "0"})
                raise RanksChangedError

    def end_horovod() -> None:
        if moment == "between":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("gaudi_apps.cli.program._compute", compute)
    # Horovod is not here.
    monkeypatch.setattr("gaudi_apps.cli.program.find_distribution", lambda *_: Distribution())
    monkeypatch.setattr("gaudi_distributed.comm.horovod_engine.end_horovod", end_horovod)
    tell(1, {"HOROVOD_RANK": "0"})
    flags = ("--use_fake_data", "--use_horovod", "--global_batch_size", "8", "--device", "cpu")
    config = ssd_train.PROGRAM.parse([*flags, "--model_dir", str(tmp_path)])
    ssd_train.PROGRAM._compute_rounds("train", config, FailureReporter())
    assert seen == ["", "SIGTERM"]


def test_error_ends_training(tell: Tell) -> None:
    """Only the loss or the coming of ranks begins another round."""
    tell(1, {"HOROVOD_RANK": "0"})
    elastic = ElasticState(7, RendezvousClient(os.environ))
    assert elastic.begin_round()
    with pytest.raises(ZeroDivisionError), elastic.recovering():
        raise ZeroDivisionError
