"""The program from its flags to its files, with a small network."""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.mxnet.mlperf import _LogFile
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_distributed.devices.machine import Machine, gather_processor
from gaudi_models.weights import read_weights

STEPS = 6  # of 2 of 5 images: epochs end after 2.5 and 5 steps


def read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def list_events(folder: Path) -> list[Any]:
    """List keys of MLPerf's log with the epochs that they are of."""
    events = [json.loads(line.removeprefix(":::MLLOG")) for line in (folder / "mlperf.log").read_text().splitlines()]
    return [(event["key"], event["metadata"].get("epoch_num")) for event in events]


def load(folder: Path) -> Any:
    return CheckpointFolder(folder / "checkpoints").load_newest()


def assert_equal_runs(one: Path, other: Path) -> None:
    """Check that the weights are the same, bit for bit, after the same images in the same order."""
    first, second = load(one), load(other)
    assert (first.step, first.sha256) == (second.step, second.sha256)
    assert first.metadata["image_sequence"] == second.metadata["image_sequence"] != ""


@pytest.fixture
def trained(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> Path:
    """Train a run that validates after each epoch and writes MLPerf's log."""
    flags = ("--val-interval", 1, "--target-map", 0, "--mlperf", "--profile-start", 2, "--profile-stop", 3)
    done = ssd_mxnet_train("--steps", STEPS, *flags, "--model_dir", tmp_path / "whole")
    assert done.status == 0, done.err
    assert f"step {STEPS}/{STEPS}  loss" in done.out
    assert "5/5 images" in done.out
    return tmp_path / "whole"


@pytest.mark.costly
def test_a_run_leaves_what_all_programs_leave(trained: Path) -> None:
    losses = [row["loss"] for row in read_lines(trained / "history.jsonl")]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert [row["step"] for row in read_lines(trained / "evaluations.jsonl")] == [3, 5, 6]
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert (evaluation["step"], evaluation["images"], evaluation["images_total"]) == (STEPS, 5, 5)
    assert load(trained).metadata["position"] == {"epoch": 2, "image": 2}
    assert load(trained).metadata["settings"]["precision"] == "fp32"  # which auto is here
    owned = json.loads((trained / "run.json").read_text())["files"]
    there = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    assert {name for name in there if not name.startswith(("checkpoints", "best", "run.json"))} <= {*owned}
    trace = json.loads((trained / "summaries" / "trace.json").read_text())
    assert any("Convolution" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.costly
def test_the_log_of_mlperf_passes_the_parser_of_the_official_checker(trained: Path) -> None:
    from mlperf_logging.compliance_checker.mlp_compliance import make_checker
    from mlperf_logging.compliance_checker.mlp_parser import parse_file

    path = str(trained / "mlperf.log")
    lines, errors = parse_file(path, ruleset="0.7.0")
    assert errors == []
    keys = [line.key for line in lines if not line.key.startswith(("opt_", "submission_", "block"))]
    epochs = ["epoch_start", "eval_start", "eval_accuracy", "eval_stop", "epoch_stop", "run_start", "run_stop"]
    order = [key for key in keys if key in epochs]
    evaluation = ["eval_start", "eval_accuracy", "eval_stop"]
    # The third step ends the first epoch, and is evaluated then; the third epoch is not over at the end.
    change = ["epoch_stop", "epoch_start", *evaluation]
    assert order == ["run_start", "epoch_start", *change, *change, *evaluation, "run_stop"]
    assert lines[-1].value["metadata"]["status"] == "aborted"  # there was no target
    logged = {line.key: line.value["value"] for line in lines}
    assert (logged["global_batch_size"], logged["train_samples"], logged["eval_samples"]) == (2, 5, 5)
    # Of all checks of the open division the short run fails that of its accuracy alone.
    checker = make_checker("training", "0.7.0", quiet=True, werror=False)
    checker.check_loglines(lines, "training_0.7.0/common.yaml")
    assert [*checker.overwritable, *checker.not_overwritable] == [
        "Failed checks for eval_accuracy : v['value'] >= 0.230 and v['value'] < 1.0"
    ]


@pytest.mark.parametrize(("told", "logged"), [(None, False), ("0", False), ("1", True)])
def test_the_log_of_mlperf_is_printed_and_says_whether_caches_were_cleared(
    ssd_mxnet_train: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    told: str | None,
    logged: bool,
) -> None:
    if told is not None:
        monkeypatch.setenv("GAUDI_RUN_CACHES_CLEARED", told)
    done = ssd_mxnet_train("--mode", "train", "--steps", 1, "--mlperf", "--model_dir", tmp_path)
    assert done.status == 0, done.err
    printed = [line for line in done.out.splitlines() if line.startswith(":::MLLOG")]
    assert printed == (tmp_path / "mlperf.log").read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG")) for line in printed]
    assert [event["value"] for event in events if event["key"] == "cache_clear"] == [logged]


@pytest.mark.costly
def test_a_continued_run_is_the_uninterrupted_one(
    ssd_mxnet_train: Callable[..., Any], trained: Path, tmp_path: Path
) -> None:
    flags = ("--val-interval", 1, "--target-map", 0, "--mlperf", "--model_dir", tmp_path / "parts")
    for steps in (1, 4, STEPS):  # the first two end within an epoch
        assert ssd_mxnet_train("--steps", steps, *flags).status == 0
    assert_equal_runs(trained, tmp_path / "parts")
    history = [[row["loss"] for row in read_lines(path / "history.jsonl")] for path in (trained, tmp_path / "parts")]
    assert history[0] == history[1]
    epochs = [
        [event for event in list_events(path) if not event[0].startswith("eval_")]  # the parts validate their ends
        for path in (trained, tmp_path / "parts")
    ]
    assert epochs[0] == epochs[1]
    assert "nothing to train" in ssd_mxnet_train("--steps", STEPS, *flags).out


@pytest.mark.costly
def test_a_killed_run_has_the_log_of_one_that_was_not(
    ssd_mxnet_train: Callable[..., Any], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--steps", STEPS, "--val-interval", 1, "--target-map", 0, "--mlperf", "--model_dir", tmp_path / "killed")
    save = CheckpointFolder.save

    def fail(self: CheckpointFolder, step: int, *content: Any) -> Path:
        """Keep no checkpoint of the last step, before which the second epoch ends in the log."""
        if step == STEPS:
            raise OSError(28, "No space left on device")
        return save(self, step, *content)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "save", fail)
        assert ssd_mxnet_train(*flags, "--save_checkpoints_steps", 4).status == 74
    assert load(tmp_path / "killed").step == 4
    assert ssd_mxnet_train(*flags).status == 0
    assert list_events(tmp_path / "killed") == list_events(trained)


@pytest.mark.costly
def test_a_run_of_a_checkpoint_without_the_length_of_the_log_goes_on(
    ssd_mxnet_train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--mode", "train", "--mlperf", "--model_dir", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("gaudi_apps.mxnet.mlperf.MLPerfLog.add_state", lambda self, state: state)
        assert ssd_mxnet_train("--steps", 1, *flags).status == 0
    before = (tmp_path / "mlperf.log").read_text()
    assert load(tmp_path).run_state.log_bytes is None
    assert ssd_mxnet_train("--steps", 2, *flags).status == 0
    assert (tmp_path / "mlperf.log").read_text().startswith(before)


def test_one_process_has_batch_norm_over_its_own_images(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    flags = ("--mode", "train", "--steps", 1, "--bn-group", 4, "--mlperf", "--model_dir", tmp_path)
    assert ssd_mxnet_train(*flags).status == 0
    events = [json.loads(line.removeprefix(":::MLLOG")) for line in (tmp_path / "mlperf.log").read_text().splitlines()]
    assert [event["value"] for event in events if event["key"] == "model_bn_span"] == [2]


@pytest.mark.costly
def test_a_run_that_is_killed_while_its_end_waits_for_scores_gets_them(
    ssd_mxnet_train: Callable[..., Any], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "killed"
    flags = ("--steps", STEPS, "--val-interval", 1, "--target-map", 0, "--mlperf", "--model_dir", folder)

    def take(self: Any, *, wait: bool = False, on_wait: Any = None) -> Any:
        if wait:
            raise KeyboardInterrupt
        return ()

    with monkeypatch.context() as patch:
        patch.setattr("gaudi_apps.mxnet.evaluation.BackgroundScoring.take", take)
        assert ssd_mxnet_train(*flags, "--async-val").status == 75
    assert load(folder).step == 3
    assert (folder / "evaluations.jsonl").read_text() == ""
    monkeypatch.setattr("gaudi_apps.mxnet.evaluation.BackgroundScoring", ScoringHere)
    assert ssd_mxnet_train(*flags, "--async-val").status == 0
    assert (folder / "evaluations.jsonl").read_text() == (trained / "evaluations.jsonl").read_text()
    assert_equal_runs(trained, folder)
    assert sorted(map(str, list_events(folder))) == sorted(map(str, list_events(trained)))
    assert list_events(folder)[-1] == list_events(trained)[-1]


@pytest.mark.costly
def test_the_log_keeps_scores_that_came_after_the_checkpoint_of_a_killed_run(
    ssd_mxnet_train: Callable[..., Any], trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = tmp_path / "killed", itertools.count(1)
    flags = ("--steps", STEPS, "--val-interval", 1, "--target-map", 0, "--mlperf", "--model_dir", folder)

    def take(self: ScoringHere, **options: Any) -> list[Any]:
        """Hold the score of the third step, which has a checkpoint, until the fourth."""
        call = next(calls)
        if call == 5:
            raise KeyboardInterrupt
        jobs = self.jobs if call == 4 else []
        self.jobs = [job for job in self.jobs if job not in jobs]
        return jobs

    monkeypatch.setattr("gaudi_apps.mxnet.evaluation.BackgroundScoring", ScoringHere)
    with monkeypatch.context() as patch:
        patch.setattr(ScoringHere, "take", take)
        assert ssd_mxnet_train(*flags, "--async-val").status == 75
    assert (load(folder).step, [row["step"] for row in read_lines(folder / "evaluations.jsonl")]) == (3, [3])
    assert ssd_mxnet_train(*flags, "--async-val").status == 0
    assert sorted(map(str, list_events(folder))) == sorted(map(str, list_events(trained)))
    assert (folder / "evaluations.jsonl").read_text() == (trained / "evaluations.jsonl").read_text()


class ScoringHere:
    """Score in this process, where the network is the small one; each when it is submitted."""

    def __init__(self, open_scoring: Any) -> None:
        self._score, self.jobs = open_scoring(), list[Any]()
        self.pending_steps = list[int]()

    def submit(self, checkpoint: Any) -> None:
        result = futures.Future[Any]()
        result.set_result(self._score(checkpoint.tensors))
        self.jobs.append((checkpoint, result))

    def take(self, **options: Any) -> list[Any]:
        jobs, self.jobs = self.jobs, []
        return jobs

    def close(self) -> None:
        pass


def test_a_log_that_the_disk_does_not_take_is_an_error() -> None:
    log = _LogFile("/dev/full")
    with pytest.raises(OSError, match="/dev/full"):
        log.emit(logging.makeLogRecord({"msg": "a line"}))
    log.close()


@pytest.mark.slow
def test_validation_in_the_background_finds_the_same_in_the_same_order(
    trained: Path, coco_root: Path, tmp_path: Path
) -> None:
    """As a process, whose network for the process beside it is the small one, too."""
    folder = tmp_path / "background"
    script = Path(__file__).parents[1] / "small_ssd_mxnet.py"
    flags = ["--dataset", "plain", "--coco-root", coco_root, "--batch-size", 2, "--log-interval", 1, "-j", 2]
    flags += ["--steps", STEPS, "--val-interval", 1, "--target-map", 0, "--async-val", "--model_dir", folder]
    command = [sys.executable, script, *flags]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (folder / "evaluations.jsonl").read_text() == (trained / "evaluations.jsonl").read_text()
    assert_equal_runs(trained, folder)
    assert json.loads((folder / "evaluation.json").read_text())["step"] == STEPS


@pytest.mark.costly
def test_a_target_ends_training(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    flags = ("--val-epochs", 1, "--mlperf", "--model_dir", tmp_path)
    # No box is found so soon, but any is good enough for a target of next to nothing.
    done = ssd_mxnet_train("--steps", 40, "--lr", 0.05, *flags, "--target-map", 1e-30)
    assert done.status == 0, done.err
    if "training ends: the target of 1e-32 is reached" in done.out:
        assert load(tmp_path).step == 2
        assert '"status": "success"' in (tmp_path / "mlperf.log").read_text()


@pytest.mark.costly
def test_checkpoints_are_scored_used_and_exported(
    ssd_mxnet_train: Callable[..., Any], trained: Path, image_dir: Path, tmp_path: Path
) -> None:
    flags = ("--model_dir", trained)
    done = ssd_mxnet_train("--mode", "val", "--checkpoint", "all", *flags)
    assert done.status == 0, done.err
    scores = json.loads((trained / "checkpoint_scores.json").read_text())
    steps = [row["step"] for row in scores]
    assert steps[-1] == STEPS
    assert len(steps) > 1
    assert done.out.count("5/5 images") == len(steps)

    out = tmp_path / "predictions"
    use = ("--mode", "predict", "--inference", image_dir / "1.png", image_dir, "--output_dir", out)
    done = ssd_mxnet_train(*use, "--score-threshold", 0, *flags, data=False)
    assert done.status == 0, done.err
    assert len(list(out.glob("*.png"))) == 5
    table = json.loads((out / "files.json").read_text())
    assert [one["file_name"] for one in table["images"]] == [f"{number}.png" for number in range(1, 6)]
    assert [one["name"] for one in table["categories"]] == ["red", "blue"]
    found = json.loads((out / "detections.json").read_text())
    assert {one["category_id"] for one in found} <= {1, 2}
    # Each box has its line, however many are drawn.
    assert done.out.count(f"{image_dir / '1.png'}: 0.") == sum(one["image_id"] == 1 for one in found) > 10

    done = ssd_mxnet_train("--mode", "export", "--output_dir", tmp_path / "export", *flags, data=False)
    assert done.status == 0, done.err
    weights = read_weights(tmp_path / "export" / "weights.safetensors")
    newest = load(trained)
    for name, values in weights.tensors.items():
        np.testing.assert_array_equal(values, newest.tensors[name], err_msg=name)
    assert weights.pool_padding == "symmetric"
    # A checkpoint is a file of weights for a new run, too.
    start = ("--pretrained-backbone", newest_path(trained), "--steps", 1, "--mode", "train")
    done = ssd_mxnet_train(*start, "--model_dir", tmp_path / "next")
    assert "variables loaded" in done.out, done.err


def newest_path(folder: Path) -> Path:
    return CheckpointFolder(folder / "checkpoints").path(STEPS)


def test_a_dry_run_makes_a_step_and_writes_nothing(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    done = ssd_mxnet_train("--dry_run", "--steps", STEPS, "--model_dir", tmp_path / "run")
    assert done.status == 0, done.err
    assert f"dry run: step 1/{STEPS} of {tmp_path / 'run'} would be made" in done.out
    assert "5 images an epoch, " in done.out
    assert " 2 a step, loss" in done.out
    assert not (tmp_path / "run").exists()
    assert ssd_mxnet_train("--dry_run", "--lr", "inf", "--model_dir", tmp_path / "run").status == 70


def test_random_images_measure_speed(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    done = ssd_mxnet_train("--synthetic", "--steps", 3, "--model_dir", tmp_path, data=False)
    assert done.status == 0, done.err
    assert "images/s" in done.out
    assert load(tmp_path).metadata["settings"]["data"] == "random images"
    assert not (tmp_path / "evaluation.json").exists()  # there is nothing to find in them


def test_numbers_that_are_none_end_the_run(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    done = ssd_mxnet_train("--lr", "inf", "--steps", 3, "--model_dir", tmp_path)
    assert (done.status, done.error.record) == (70, "step 1")
    assert "at rate inf, " in done.err
    assert "; image ids " in done.err
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.costly
def test_another_run_is_not_mixed_in(ssd_mxnet_train: Callable[..., Any], tmp_path: Path) -> None:
    assert ssd_mxnet_train("--mode", "train", "--steps", 1, "--model_dir", tmp_path).status == 0
    done = ssd_mxnet_train("--mode", "train", "--steps", 2, "--seed", 1, "--model_dir", tmp_path)
    assert done.status == 78
    assert "has seed 0, this one 1" in done.err
    # From the configuration that the run left it goes on.
    config = ("--config", tmp_path / "config.yaml")
    assert ssd_mxnet_train("--mode", "train", *config, "--steps", 2).status == 0
    assert load(tmp_path).step == 2


@pytest.mark.parametrize("flags", [("--precision", "fp16"), ("--data-layout", "NHWC")])
def test_what_the_device_cannot_is_said_at_the_start(
    ssd_mxnet_train: Callable[..., Any], tmp_path: Path, flags: tuple[str, str]
) -> None:
    done = ssd_mxnet_train(*flags, "--device", "cpu", "--steps", 1, "--model_dir", tmp_path / "run")
    assert done.status == 78
    has_bf16 = "avx512bw" in gather_processor(Machine(), os.sched_getaffinity(0)).flags
    able = "fp32 with NCHW or bf16 with NCHW" if has_bf16 else "fp32 with NCHW"
    assert done.err.endswith(f"use {able}\n")
    assert not (tmp_path / "run").exists()


def test_a_missing_gpu_is_said(ssd_mxnet_train: Callable[..., Any]) -> None:
    done = ssd_mxnet_train("--device", "gpu", "--steps", 1)
    assert done.status == 78
    assert "MXNet finds no GPU" in done.err
