"""Training from begin to end with a network that costs next to nothing; test_run.py has the program itself."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import cv2
import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
import yaml

from gaudi_apps.cli.flag_rules import list_flags
from gaudi_apps.cli.flags import ScalingFlags
from gaudi_apps.detection import detector
from gaudi_apps.detection.config import SSDConfig
from gaudi_apps.detection.evaluator import DetectionEvaluator, Scored
from gaudi_apps.training.callbacks import Heartbeat
from gaudi_apps.training.checkpoint import MANIFEST, TENSORS, Checkpoint, CheckpointFolder, load_checkpoint
from gaudi_apps.training.history import read_history
from gaudi_apps.training.run_dir import LOCK, RunFolder
from gaudi_datasets.detection.scoring import FIGURES, CocoScores
from gaudi_datasets.detection.sources import RecordSource
from gaudi_datasets.detection.static_batches import write_static_batches
from gaudi_datasets.documents import seal
from gaudi_datasets.records.tfrecords import frame_record, index_records, read_record
from gaudi_datasets.sampling import InputOptions
from gaudi_models.architectures import SSDArchitecture

# Five images in batches of two: three steps an epoch. Lists of flags are given as tuples.
COMMON = (*("--batch_size", 2), *("--lr_warmup_steps", 2), *("--save_checkpoints_steps", 2), *("--dtype", "fp32"))
Program = Callable[..., Any]
NOTHING = {"positions": np.zeros(0, np.int64)}


@pytest.fixture
def train(ssd_train: Program, records: Path) -> Program:
    """Train in a folder, without scoring unless the flags say so."""

    def run(folder: Path, *flags: object, scored: bool = False) -> Any:
        unscored = () if scored else ("--no_evaluate",)
        return ssd_train("--data_dir", records, "--model_dir", folder, *COMMON, *unscored, *flags)

    return run


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finished")


@pytest.fixture
def copy_run(train: Program, finished_runs: Path) -> Callable[[Path, int], None]:
    """Put a finished run of some steps into a folder; each is trained once for all tests."""

    def copy(folder: Path, steps: int) -> None:
        finished = finished_runs / str(steps)
        if not finished.exists():
            assert train(finished, "--steps", steps).status == 0
        shutil.copytree(finished, folder, dirs_exist_ok=True)

    return copy


@pytest.fixture
def train_files(ssd_train: Program, annotation_file: Path, image_dir: Path) -> Program:
    """Train on annotations and image files, without records."""

    def run(folder: Path, *flags: object) -> Any:
        training = ("--train_annotations", annotation_file, "--train_images", image_dir)
        files = (*training, "--val_annotations", annotation_file, "--val_images", image_dir)
        return ssd_train(*files, "--model_dir", folder, *COMMON, *flags)

    return run


def load(folder: Path, which: str = "checkpoints") -> Checkpoint:
    return CheckpointFolder(folder / which).load_newest()


def list_steps(folder: Path, which: str = "checkpoints") -> list[int]:
    return CheckpointFolder(folder / which).steps()


def list_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_state(one: Checkpoint, other: Checkpoint) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_allclose(tensor, other.tensors[name], rtol=1e-4, atol=1e-6, err_msg=name)


def stop_after(step: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the signal sent to this process in the next training, once, when that step is done."""
    on_step_end = Heartbeat.on_step_end

    def send(self: Heartbeat, done: int, logs: Any) -> None:
        on_step_end(self, done, logs)
        if done == step:
            monkeypatch.setattr(Heartbeat, "on_step_end", on_step_end)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Heartbeat, "on_step_end", send)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """AP of the evaluations to come, in their order, in place of the true ones."""
    figures: list[float] = []

    def score(*arguments: Any) -> Scored:
        return CocoScores(dict.fromkeys(FIGURES, figures.pop(0)), (), 5, 5, 0), []

    monkeypatch.setattr(DetectionEvaluator, "evaluate", lambda *arguments: NOTHING)
    monkeypatch.setattr(DetectionEvaluator, "compute", score)
    return figures


@pytest.mark.costly
def test_mpirun_gets_plain_lines(train: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if the terminal that it opens were one
    for name, value in {"RANK": "0", "SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    done = train(tmp_path, "--steps", 1)
    assert "\nstep 1/1  loss" in done.out
    assert "\x1b[2K" not in done.out


@pytest.mark.costly
def test_a_run_leaves_what_belongs_to_it(train: Program, tmp_path: Path) -> None:
    done = train(tmp_path, "--steps", 3, "--vis_dataloader", "--profile", "2,2", scored=True)
    assert done.status == 0, done.err
    assert "5/5 images" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("analysis.json", "checkpoints", "config.yaml", "curves.png", "dataloader", "detections.json"),
        *("evaluation.json", "evaluations.jsonl", "history.jsonl", "pictures", "report.html", "run.json"),
        *("run_log.json", "summaries", "training_data.json", "validation_data.json"),
    ]
    assert [row["step"] for row in read_history(tmp_path / "history.jsonl")] == [1, 2, 3]
    log = json.loads((tmp_path / "run_log.json").read_text())
    assert (log["program"], log["plan"]["total_steps"], log["data"]["images"]) == ("ssd_train", 3, 5)
    assert [(one["first_step"], one["last_step"]) for one in log["starts"]] == [(0, 3)]
    assert log["starts"][0]["images_per_second"] > 0
    assert {"Device", "Processors", "System", "Versions"} == set(log["starts"][0]["environment"])
    assert f"report: {tmp_path / 'report.html'}" in done.out
    assert json.loads((tmp_path / "evaluation.json").read_text())["step"] == 3
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 5
    assert len(list((tmp_path / "dataloader").iterdir())) == 16
    assert list(tmp_path.rglob("*.xplane.pb")) != []
    # All but the checkpoints, which are known by their form, are in the record of the run.
    owned = json.loads((tmp_path / "run.json").read_text())["files"]
    assert {name for name in list_files(tmp_path) if not name.startswith("checkpoints/")} - {*owned} == {"run.json"}

    checkpoint = load(tmp_path)
    assert checkpoint.step == 3
    assert checkpoint.metadata["position"] == {"epoch": 1, "image": 1}
    assert [category["name"] for category in checkpoint.metadata["categories"]] == ["red", "blue"]
    assert checkpoint.metadata["settings"]["batch_size"] == 2
    assert len(checkpoint.metadata["settings"]["data"]) == 64

    (tmp_path / "notes.txt").write_text("mine")
    done = train(tmp_path, "--steps", 1, "--batch_size", 1, "--clean")
    assert done.status == 0, done.err
    assert list_steps(tmp_path) == [1]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (tmp_path / "pictures").exists()
    assert not (tmp_path / "dataloader").exists()
    assert list(tmp_path.rglob("*.xplane.pb")) == []


@pytest.mark.costly
def test_the_configuration_beside_a_run_makes_the_same_run(train: Program, ssd_train: Program, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    train(one, "--steps", 2, "--lr_drop_epochs", 0.5, 1, "--k", -3, "--flip_probability", 0)
    flags = yaml.safe_load((one / "config.yaml").read_text())
    assert flags["lr_drop_epochs"] == [0.5, 1.0]
    known = {name for name, _ in list_flags(SSDConfig())}
    of_commands = {"config", "clean", "debug", "json", "minutes", "mode", "runtime", "task_index", "verify_data"}
    of_commands |= {each.name for each in fields(ScalingFlags)}
    assert known - flags.keys() == of_commands
    done = ssd_train("--config", one / "config.yaml", "--model_dir", two)
    assert done.status == 0, done.err
    assert load(two).metadata == load(one).metadata
    assert_same_state(load(two), load(one))
    # And for the other modes.
    done = ssd_train("--config", one / "config.yaml", "--mode", "eval")
    assert done.status == 0, done.err
    assert "step 2" in done.out


@pytest.mark.costly
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_stopped_saves_its_step_and_goes_on(
    train: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = ("--steps", 5, "--ema_decay", 0.5)
    assert train(whole, *flags).status == 0
    # As typed, where a restart or a round of an elastic run has left --clean out.
    typed = ["--clean"] * (number == signal.SIGHUP)
    monkeypatch.setattr("sys.argv", ["ssd_train", *typed])
    stop_after(3, number, monkeypatch)
    done = train(broken, *flags, scored=True)
    assert done.status == 75
    assert done.err.splitlines()[-1] == f"ssd_train: error: {done.error}"
    assert f" by {number.name} after step 3, " in str(done.error)
    assert done.error.remedy.endswith("command without --clean continues" if typed else "command continues")
    assert list_steps(broken) == [2, 3]
    assert not (broken / "evaluation.json").exists()
    done = train(broken, *flags)
    assert done.status == 0, done.err
    assert "step-00000003: continuing after step 3" in done.out
    assert (list_steps(whole), list_steps(broken)) == ([2, 4, 5], [2, 3, 4, 5])
    assert load(broken).metadata == load(whole).metadata
    assert_same_state(load(broken), load(whole))
    histories = [read_history(folder / "history.jsonl") for folder in (whole, broken)]
    assert [row["step"] for row in histories[1]] == [1, 2, 3, 4, 5]
    assert [row["loss"] for row in histories[1]] == pytest.approx([row["loss"] for row in histories[0]], rel=1e-4)
    assert "has 5 of 5 steps" in train(broken, *flags).out


@pytest.mark.costly
def test_the_newest_checkpoint_that_can_be_read_is_used(train: Program, tmp_path: Path) -> None:
    assert train(tmp_path, "--steps", 4).status == 0
    uninterrupted = load(tmp_path)
    (tmp_path / "checkpoints" / "step-00000004" / TENSORS).write_bytes(b"")
    done = train(tmp_path, "--steps", 4)
    assert done.status == 0
    assert "warning: " in done.err
    assert "step-00000004/state.safetensors: " in done.err
    assert "its manifest says" in done.err
    assert "continuing after step 2" in done.out
    assert load(tmp_path).step == 4
    assert load(tmp_path).metadata == uninterrupted.metadata
    for step in (2, 4):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / MANIFEST).unlink()
    before = list_files(tmp_path / "checkpoints")
    done = train(tmp_path, "--steps", 4)
    assert done.status == 65
    assert done.error.path == str(tmp_path / "checkpoints")
    assert "of its 2 checkpoints" in done.err
    assert list_files(tmp_path / "checkpoints") == before


@pytest.mark.costly
def test_another_configuration_is_refused_and_more_steps_are_not(
    train: Program, copy_run: Callable[[Path, int], None], tmp_path: Path
) -> None:
    copy_run(tmp_path, 1)
    before = list_files(tmp_path)
    for flags, named in (
        (("--base_lr", 0.01), "base_lr 0.003, this one 0.01"),
        (("--seed", 1), "seed 0, this one 1"),
        (("--ema_decay", 0.5), "ema_decay 0.0, this one 0.5"),
        (("--lr_schedule", "cosine"), "lr_schedule 'piecewise', this one 'cosine'"),
    ):
        done = train(tmp_path, "--steps", 1, *flags)
        assert done.status == 78
        assert named in done.err
        assert list_files(tmp_path) == before
    done = train(tmp_path, "--steps", 2, "--num_parallel_calls", 3, "--keep_ckpt_max", 1)
    assert done.status == 0, done.err
    assert list_steps(tmp_path) == [2]


@pytest.mark.costly
def test_a_cosine_run_cannot_be_prolonged(train: Program, tmp_path: Path) -> None:
    assert train(tmp_path, "--steps", 1, "--lr_schedule", "cosine").status == 0
    done = train(tmp_path, "--steps", 2, "--lr_schedule", "cosine")
    assert done.status == 78
    assert "steps 1, this one 2" in done.err


@pytest.mark.costly
def test_other_data_is_refused(
    train: Program, copy_run: Callable[[Path, int], None], records: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    copy_run(folder, 1)
    for path in records.glob("val*"):
        (tmp_path / path.name.replace("val", "train")).write_bytes(path.read_bytes())
    manifest = json.loads((tmp_path / "train.json").read_text().replace('"val', '"train'))
    manifest["images"]["of"] += 1  # what else they were made of is part of what they are
    (tmp_path / "train.json").write_text(json.dumps(seal(manifest)))
    done = train(folder, "--steps", 1, "--data_dir", tmp_path)
    assert done.status == 78
    assert (done.error.path, done.error.field) == (str(folder / "run.json"), "data")


@pytest.mark.costly
def test_a_replaced_shard_is_noticed_but_by_a_run_of_an_earlier_release(
    train: Program, records: Path, tmp_path: Path
) -> None:
    """Without a manifest the records alone tell; earlier releases noted the shards' names and sizes."""
    folder, data = tmp_path / "run", tmp_path / "data"
    data.mkdir()
    (shard,) = records.glob("train-*")
    contents = [read_record(place) for place in index_records(shard)]
    (data / shard.name).write_bytes(shard.read_bytes())
    assert train(folder, "--steps", 1, "--data_dir", data).status == 0
    former = RecordSource(data, "train").former_fingerprint
    (data / shard.name).write_bytes(b"".join(map(frame_record, reversed(contents))))
    done = train(folder, "--steps", 2, "--data_dir", data)
    assert (done.status, done.error.field) == (78, "data")
    run = json.loads((folder / "run.json").read_text())
    run["settings"]["data"] = former
    (folder / "run.json").write_text(json.dumps(seal(run)))
    assert train(folder, "--steps", 2, "--data_dir", data).status == 0


def test_what_no_run_wrote_is_left_alone(train: Program, tmp_path: Path) -> None:
    CheckpointFolder(tmp_path / "checkpoints").save(1, {"a": np.zeros(3)}, {})
    before = list_files(tmp_path)
    for flags in ((), ("--clean",)):
        done = train(tmp_path, "--steps", 1, *flags)
        assert done.status == 77
        assert list_files(tmp_path) == before


def test_a_wrong_command_cleans_nothing(train: Program, copy_run: Callable[[Path, int], None], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    copy_run(folder, 1)
    before = list_files(folder)
    assert train(folder, "--steps", 1, "--clean", "--data_dir", tmp_path / "nowhere").status == 66
    assert list_files(folder) == before


@pytest.mark.costly
def test_an_infinite_rate_ends_the_run_before_anything_is_saved(train: Program, tmp_path: Path) -> None:
    done = train(tmp_path, "--steps", 4, "--base_lr", "inf")
    assert done.status == 70
    ids = [int(number) for number in done.err.partition("image ids ")[2].partition(".")[0].split(", ")]
    assert len(ids) == 2
    assert {*ids} <= {1, 2, 3, 4, 5}
    assert "step 1: loss" in done.err
    assert not (tmp_path / "checkpoints").exists()
    assert read_history(tmp_path / "history.jsonl") == []
    # What the run that failed has left is its own all the same.
    done = train(tmp_path, "--steps", 1, "--clean")
    assert done.status == 0, done.err


@pytest.mark.costly
def test_weights_that_overflow_end_the_run_and_the_last_good_ones_stay(train: Program, tmp_path: Path) -> None:
    done = train(tmp_path, "--steps", 9, "--base_lr", 1e37, "--lr_warmup_steps", 3, "--save_checkpoints_steps", 1)
    assert done.status == 70
    assert "finite" in done.err
    steps = list_steps(tmp_path)
    assert 0 < len(steps) < 9
    assert all(np.isfinite(tensor).all() for tensor in load(tmp_path).tensors.values())


@pytest.mark.costly
def test_a_disk_that_is_full_ends_the_run_and_its_last_checkpoint_stays(train: Program, tmp_path: Path) -> None:
    """Files may have as many bytes as nothing but a checkpoint needs."""
    assert train(tmp_path, "--steps", 1, "--ema_decay", 0.9).status == 0
    before = list_files(tmp_path / "checkpoints")
    assert len(before["step-00000001/state.safetensors"]) > 100_000
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        done = train(tmp_path, "--steps", 2, "--ema_decay", 0.9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.status == 74, done.err
    assert "/checkpoints/step-00000002: " in done.err
    assert list_files(tmp_path / "checkpoints") == before
    assert train(tmp_path, "--steps", 2, "--ema_decay", 0.9).status == 0
    assert list_steps(tmp_path) == [1, 2]


@pytest.mark.costly
def test_a_box_that_is_no_number_is_named_with_record_and_image(train: Program, records: Path, tmp_path: Path) -> None:
    """As a converter of somebody else may have left it: the record's checksum is right."""
    (source,) = records.glob("train-*")
    contents = []
    for place in index_records(source):
        example = tf.train.Example.FromString(read_record(place))
        feature = example.features.feature
        if list(feature["image/source_id"].bytes_list.value) == [b"4"]:
            feature["image/object/bbox/xmax"].float_list.value[0] = np.nan
            number = place.number
        contents.append(frame_record(example.SerializeToString()))
    (tmp_path / source.name).write_bytes(b"".join(contents))
    (tmp_path / "train.json").write_bytes((records / "train.json").read_bytes())
    manifest = json.loads((tmp_path / "train.json").read_text())
    content = (tmp_path / source.name).read_bytes()
    manifest["shards"][0] |= {"bytes": len(content), "crc32c": f"{google_crc32c.value(content):08x}"}
    (tmp_path / "train.json").write_text(json.dumps(seal(manifest)))
    done = train(tmp_path / "run", "--steps", 9, "--data_dir", tmp_path)
    assert done.status == 65
    assert f"{source.name}: record {number} (image 4): feature image/object/bbox: " in done.err
    assert len(done.err.splitlines()[-1]) < 500


@pytest.mark.costly
def test_the_best_checkpoint_is_kept_besides_the_newest(
    train: Program, ssd_train: Program, records: Path, tmp_path: Path, scores: list[float]
) -> None:
    scores += [0.1, 0.5, 0.3, 0.4]
    done = train(tmp_path, "--steps", 4, "--eval_epochs", 0.34, "--save_checkpoints_steps", 1, "--keep_ckpt_max", 2)
    assert done.status == 0, done.err
    assert [(row["step"], row["AP"]) for row in read_history(tmp_path / "evaluations.jsonl")] == [
        *((1, 0.1), (2, 0.5), (3, 0.3), (4, 0.4))
    ]
    assert list_steps(tmp_path) == [3, 4]
    assert list_steps(tmp_path, "best") == [2]
    state = {"best": 0.5, "best_step": 2, "scored_on": f"{RecordSource(records, 'val').fingerprint} 5"}
    assert load(tmp_path, "best").metadata["early_stop"] == {**state, "without_gain": 0}
    assert load(tmp_path).metadata["early_stop"] == {**state, "without_gain": 2}
    assert not (tmp_path / "evaluation.json").exists()  # --no_evaluate: not after training

    for which, steps in (("best", [2]), ("newest", [4]), ("3", [3]), ("all", [3, 4])):
        scores[:] = [0.1 * step for step in steps]
        done = ssd_train("--mode", "eval", "--data_dir", records, "--model_dir", tmp_path, "--checkpoint", which)
        assert done.status == 0, done.err
        assert [line.partition(" on ")[0] for line in done.out.splitlines() if line.startswith("step ")] == [
            f"step {n}" for n in steps
        ]
        assert json.loads((tmp_path / "evaluation.json").read_text())["step"] == steps[-1]
    rows = json.loads((tmp_path / "checkpoint_scores.json").read_text())
    assert [(row["step"], row["AP"]) for row in rows] == [(3, pytest.approx(0.3)), (4, pytest.approx(0.4))]
    # As in the original, which scores all of them without being asked; what is damaged is passed over.
    damage = tmp_path / "checkpoints" / "step-00000003" / "manifest.json"
    scores[:] = [0.6, 0.7]
    for steps, content in (([3, 4], damage.read_bytes()), ([4], b"")):
        damage.write_bytes(content)
        done = ssd_train("--mode", "eval", "--data_dir", records, "--model_dir", tmp_path)
        assert (done.status, "step-00000003" in done.err) == (0, not content), done.err
        rows = json.loads((tmp_path / "checkpoint_scores.json").read_text())
        assert [row["step"] for row in rows] == steps
        scores[:] = [0.8]
    done = ssd_train("--mode", "eval", "--data_dir", records, "--model_dir", tmp_path, "--checkpoint", 2)
    assert done.status == 66
    assert done.error.path == str(tmp_path / "checkpoints")
    assert "no checkpoint 2;" in done.err


@pytest.mark.costly
def test_a_best_checkpoint_of_steps_that_are_done_again_is_none(
    train: Program, tmp_path: Path, scores: list[float]
) -> None:
    command = ("--steps", 4, "--eval_epochs", 0.34, "--save_checkpoints_steps", 1)
    scores += [0.1, 0.2, 0.3, 0.9]
    assert train(tmp_path, *command).status == 0
    assert list_steps(tmp_path, "best") == [4]
    for step in (3, 4):
        shutil.rmtree(CheckpointFolder(tmp_path / "checkpoints").path(step))
    scores += [0.5, 0.4]
    done = train(tmp_path, *command)
    assert (done.status, scores) == (0, []), done.err
    assert list_steps(tmp_path, "best") == [3]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("flags", "given", "steps", "numbers"),
    [
        (("--target_ap", 0.5), [0.2, 0.6], 2, ["0.5", "0.6000", "2"]),
        (("--patience", 2), [0.3, 0.2, 0.1], 3, ["2", "0.3000", "1"]),
    ],
)
def test_training_ends_early_and_stays_ended(
    train: Program,
    tmp_path: Path,
    scores: list[float],
    flags: Sequence[Any],
    given: list[float],
    steps: int,
    numbers: list[str],
) -> None:
    scores += given
    command = ("--steps", 6, "--eval_epochs", 0.34, "--save_checkpoints_steps", 4, *flags)
    done = train(tmp_path, *command)
    assert done.status == 0, done.err
    (reason,) = re.findall("^training ends: (.*)$", done.out, re.MULTILINE)
    assert re.findall(r"[\d.]+", reason) == numbers
    assert load(tmp_path).step == steps
    done = train(tmp_path, *command)
    assert done.status == 0, done.err
    assert f"nothing to train: {reason}" in done.out
    assert load(tmp_path).step == steps


@pytest.mark.costly
def test_patience_counts_on_after_a_stop(
    train: Program, tmp_path: Path, scores: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores += [0.3, 0.2, 0.1]
    command = ("--steps", 6, "--eval_epochs", 0.34, "--patience", 2)
    stop_after(2, signal.SIGTERM, monkeypatch)
    assert train(tmp_path, *command).status == 75
    assert scores == [0.1]  # the evaluation of step 2 is part of what was saved
    assert train(tmp_path, *command).status == 0
    assert load(tmp_path).step == 3


@pytest.mark.costly
def test_the_average_of_the_weights_is_what_is_scored(
    train: Program,
    ssd_train: Program,
    small_network: Callable[..., Any],
    records: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def evaluate(*arguments: Any) -> Any:
        seen.append(built[-1].get_layer("class").kernel.numpy())
        return NOTHING

    built: list[Any] = []

    def build(*arguments: Any, **options: Any) -> Any:
        built.append(small_network(*arguments, **options))
        return built[-1]

    monkeypatch.setattr("gaudi_apps.detection.detector.build_ssd", build)
    scored: Scored = CocoScores(dict.fromkeys(FIGURES, 0.5), (), 5, 5, 0), []
    monkeypatch.setattr(DetectionEvaluator, "evaluate", evaluate)
    monkeypatch.setattr(DetectionEvaluator, "compute", lambda *given: scored)
    done = train(tmp_path, "--steps", 3, "--ema_decay", 0.9, "--base_lr", 0.3, "--eval_epochs", 1, scored=True)
    assert done.status == 0, done.err
    tensors = load(tmp_path).tensors
    assert tensors["average/updates"] == 3
    assert np.abs(tensors["average/class/kernel"] - tensors["class/kernel"]).max() > 1e-4
    assert len(seen) == 1  # once for the end of training and for the epoch that ends there
    np.testing.assert_array_equal(seen[0], tensors["average/class/kernel"])
    done = ssd_train("--mode", "eval", "--checkpoint", "newest", "--data_dir", records, "--model_dir", tmp_path)
    assert done.status == 0, done.err
    np.testing.assert_array_equal(seen[1], tensors["average/class/kernel"])
    np.testing.assert_array_equal(
        built[-1].get_layer("conv1_bn").moving_mean.numpy(), tensors["average/conv1_bn/moving_mean"]
    )


@pytest.mark.costly
def test_weights_to_begin_with(train: Program, tmp_path: Path) -> None:
    gamma = np.array([0.5, 2, 3], np.float32)
    np.savez(tmp_path / "weights.npz", **{"conv1_bn/gamma": gamma, "conv1_bn/beta": np.zeros(3, np.float32)})
    # The rate of the first step is 0.
    done = train(tmp_path / "run", "--steps", 1, "--ema_decay", 0.9, "--resnet_checkpoint", tmp_path / "weights.npz")
    assert done.status == 0, done.err
    assert "weights.npz" in done.out
    tensors = load(tmp_path / "run").tensors
    for name in ("conv1_bn/gamma", "average/conv1_bn/gamma"):
        np.testing.assert_array_equal(tensors[name], gamma)


@pytest.mark.costly
def test_a_wrong_file_of_weights_leaves_all_as_it_was(
    train: Program, copy_run: Callable[[Path, int], None], tmp_path: Path
) -> None:
    np.savez(tmp_path / "other.npz", **{"conv1/kernel": np.zeros((7, 7, 3, 64), np.float32)})
    payload = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    (tmp_path / "evil.pickle").write_bytes(payload)
    cases = {"nothing.npz": 66, "other.npz": 65, "evil.pickle": 77}
    new, old = tmp_path / "new", tmp_path / "old"
    copy_run(old, 1)
    before = list_files(old)
    for name, status in cases.items():
        for folder in (new, old):
            done = train(folder, "--steps", 1, "--clean", "--resnet_checkpoint", tmp_path / name)
            assert done.status == status, done.err
            assert name in done.err
        assert train(new, "--steps", 1, "--resnet_checkpoint", tmp_path / name).status == status
    assert not new.exists()
    assert not (tmp_path / "ran").exists()
    assert list_files(old) == before


@pytest.mark.costly
def test_static_batches_are_the_same_training(
    train: Program, copy_run: Callable[[Path, int], None], records: Path, tmp_path: Path
) -> None:
    write_static_batches(RecordSource(records, "train"), tmp_path / "static", InputOptions(2), steps=2)
    live, static = tmp_path / "live", tmp_path / "run"
    copy_run(live, 2)
    for steps in (1, 2):
        done = train(static, "--steps", steps, "--data_dir", tmp_path / "static", "--static", scored=True)
        assert done.status == 0, done.err
    assert load(static).metadata["image_sequence"] == load(live).metadata["image_sequence"]
    assert_same_state(load(static), load(live))


@pytest.mark.costly
def test_random_images_need_no_data(ssd_train: Program, tmp_path: Path) -> None:
    done = ssd_train("--use_fake_data", "--model_dir", tmp_path, "--steps", 1, *COMMON)
    assert done.status == 0, done.err
    assert len(load(tmp_path).metadata["categories"]) == 80


@pytest.mark.costly
def test_a_checkpoint_is_used(
    train: Program,
    ssd_train: Program,
    records: Path,
    image_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run"
    assert train(run, "--steps", 3).status == 0
    done = ssd_train("--mode", "predict", "--model_dir", run, "--inference", image_dir, "--batch_size", 2)
    assert done.status == 0, done.err
    assert "5 images, " in done.out
    table = json.loads((run / "predictions" / "files.json").read_text())
    assert [category["name"] for category in table["categories"]] == ["red", "blue"]

    exports: list[Any] = []

    # The network's answers are ties, of which any one is right: too little to compare exports by.
    def run_export(*given: Any, **options: Any) -> dict[Path, Any]:
        exports.append((given, options))
        return {}

    monkeypatch.setattr(detector, "run_export", run_export)
    use = ("--model_dir", run, "--checkpoint", 2, "--output_dir", tmp_path / "out")
    done = ssd_train("--mode", "export", *use, "--data_dir", records, "--export_format", "onnx", "safetensors")
    assert done.status == 0, done.err
    ((model, categories, encoded, folder, formats), options) = exports[0]
    assert [category.name for category in categories] == ["red", "blue"]
    assert len(encoded) > 0
    assert (folder, formats) == (tmp_path / "out", ("onnx", "safetensors"))
    request = options.pop("request")
    assert request.precisions == ("fp32",)
    assert request.evaluator.num_images == 5
    assert options == {"step": 2, "architecture": SSDArchitecture(), "pool_padding": "same", "box_voting": False}
    saved = load_checkpoint(run / "checkpoints" / "step-00000002").tensors
    assert all(np.array_equal(variable, saved[variable.name.removesuffix(":0")]) for variable in model.variables)


@pytest.mark.parametrize("metadata", [{"categories": [{"id": 1, "name": "cat", "supercategory": ""}]}, {}])
def test_a_checkpoint_of_other_classes_is_refused(
    train: Program, copy_run: Callable[[Path, int], None], tmp_path: Path, metadata: dict[str, Any]
) -> None:
    copy_run(tmp_path, 1)
    CheckpointFolder(tmp_path / "checkpoints").save(2, {"a": np.zeros(3, np.float32)}, metadata)
    done = train(tmp_path, "--steps", 3)
    assert done.status == 65
    assert (done.error.record, done.error.field) == ("checkpoint of step 2", "categories")
    assert ("of other classes" if metadata else "does not name") in done.err


@pytest.mark.parametrize("mode", ["eval", "predict", "export"])
@pytest.mark.parametrize("which", ["newest", "best", "7"])
def test_without_a_checkpoint_there_is_nothing_to_use(
    ssd_train: Program, records: Path, image_dir: Path, tmp_path: Path, mode: str, which: str
) -> None:
    inference = () if mode == "eval" else ("--inference", image_dir)
    folder = tmp_path / "none"
    done = ssd_train("--data_dir", records, "--model_dir", folder, "--mode", mode, "--checkpoint", which, *inference)
    assert done.status == 66
    assert done.error.path == str(folder / ("best" if which == "best" else "checkpoints"))
    assert "--model_dir" in done.error.remedy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_files_without_records_give_the_same_training(train: Program, train_files: Program, tmp_path: Path) -> None:
    assert train(tmp_path / "records", "--steps", 4, "--deterministic", scored=True).status == 0
    assert train_files(tmp_path / "files", "--steps", 4, "--deterministic").status == 0
    one, other = load(tmp_path / "records"), load(tmp_path / "files")
    assert one.metadata["image_sequence"] == other.metadata["image_sequence"]
    for name, tensor in one.tensors.items():
        np.testing.assert_array_equal(tensor, other.tensors[name], err_msg=name)
    figures = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("records", "files")]
    assert figures[0] == figures[1]


@pytest.mark.costly
def test_a_bad_image_ends_the_training_or_is_skipped(train_files: Program, image_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(image_dir, tmp_path / "images"))
    pixels = np.random.default_rng(0).integers(0, 256, (120, 150, 3), np.uint8)
    encoded = cv2.imencode(".jpg", pixels)[1].tobytes()
    (folder / "3.png").write_bytes(encoded[: len(encoded) // 2] + b"\xff\xd9")
    flags = ("--steps", 3, "--train_images", folder)
    done = train_files(tmp_path / "fail", *flags)
    assert done.status == 65
    assert "3.png" in done.err
    done = train_files(tmp_path / "skip", *flags, "--on_bad_image", "skip", "--verify_data")
    assert done.status == 0, done.err
    assert "image 1 of 5" in done.err
    assert "verified" in done.out


def test_files_that_are_not_there_are_named(train_files: Program, tmp_path: Path) -> None:
    done = train_files(tmp_path / "run", "--train_images", tmp_path / "nowhere")
    assert (done.status, (tmp_path / "run").exists()) == (66, False)
    assert "nowhere" in done.err


@pytest.mark.costly
def test_a_training_beside_another_ends_and_writes_nothing(train: Program, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run").lock():
        before = list_files(tmp_path)
        assert train(tmp_path / "run", "--steps", 1).status == 75
        assert list_files(tmp_path) == before
    assert train(tmp_path / "run", "--steps", 1).status == 0
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.costly
def test_the_position_in_the_data_is_that_of_the_step(
    train: Program, copy_run: Callable[[Path, int], None], tmp_path: Path
) -> None:
    copy_run(tmp_path, 2)
    folder = CheckpointFolder(tmp_path / "checkpoints")
    newest = folder.load_newest()
    folder.save(999, newest.tensors, newest.metadata)  # with the run's id: its position is that of step 2
    done = train(tmp_path, "--steps", 2)
    assert done.status == 65
    assert str(folder.path(999)) in done.err
