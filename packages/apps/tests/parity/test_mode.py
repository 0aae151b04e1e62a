"""The mode parity of the programs, with networks that cost next to nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.detection.application import SSDApplication
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_apps.training.recording import MANIFEST, StepTensor, choose_tolerances, compare_step, read_recording

SMALL_PROGRAM = Path(__file__).parents[1] / "small_ssd.py"


@pytest.fixture
def flags(records: Path, tmp_path: Path) -> list[object]:
    return ["--mode", "parity", "--data_dir", records, "-b", 2, "--model_dir", tmp_path / "run"]


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finished") / "run"


@pytest.fixture
def checkpoints(ssd_train: Callable[..., Any], records: Path, finished_run: Path, tmp_path: Path) -> CheckpointFolder:
    """Of a run of three steps, one each, which is trained once for all tests."""
    if not finished_run.exists():
        done = ssd_train(
            *("--data_dir", records, "-b", 2, "--steps", 3, "--save_checkpoints_steps", 1, "--no_evaluate"),
            *("--model_dir", finished_run),
        )
        assert done.status == 0, done.err
    shutil.copytree(finished_run, tmp_path / "run")
    return CheckpointFolder(tmp_path / "run" / "checkpoints")


@pytest.mark.costly
def test_two_recordings_on_one_machine_are_equal(
    ssd_train: Callable[..., Any], flags: list[object], tmp_path: Path
) -> None:
    for name in ("one", "other"):
        done = ssd_train(*flags, "--parity_output", tmp_path / name)
        assert (done.status, done.err) == (0, "")
        assert f"{tmp_path / name}: recorded; compare by --parity_against recorded=" in done.out
    one, other = (read_recording(tmp_path / name) for name in ("one", "other"))
    assert (one.steps, one.settings) == (2, other.settings)
    assert one.side["weights"] == "seed 0"
    tolerances = choose_tolerances(["fp32", "fp32"])
    for step in (1, 2):
        tensors = [StepTensor(tensor, one.read(tensor)) for tensor in one.list_step(step)]
        assert not any(found.is_beyond for found in compare_step(tensors, other, step, tolerances))
    done = ssd_train(*flags, "--parity_against", f"recorded={tmp_path / 'one'}", "--json")
    assert done.status == 0, done.err
    document = json.loads(done.out)
    assert (document["equal"], document["first"], len(document["tensors"])) == (True, None, len(one.tensors))
    assert not (tmp_path / "run").exists()


@pytest.mark.costly
@pytest.mark.parametrize("name", ["hidden/kernel", "conv1_bn/moving_variance"])
def test_a_changed_weight_is_named(
    ssd_train: Callable[..., Any],
    checkpoints: CheckpointFolder,
    flags: list[object],
    tmp_path: Path,
    name: str,
) -> None:
    """One of them, by a thousandth, is the first that differs, with its layer."""
    newest = checkpoints.load_newest()
    tensors = {key: np.array(tensor) for key, tensor in newest.tensors.items()}
    tensors[name].reshape(-1)[-1] += 1e-3
    CheckpointFolder(tmp_path / "changed" / "checkpoints").save(newest.step, tensors, newest.metadata)
    assert ssd_train(*flags, "--parity_output", tmp_path / "recording").status == 0
    changed = [*flags[:-1], tmp_path / "changed", "--parity_against", f"recorded={tmp_path / 'recording'}"]
    done = ssd_train(*changed)
    assert done.status == 70
    assert f"step 1: weight {name} of layer {name.partition('/')[0]}" in done.err
    assert f"{0.001:.3g}" in done.err
    assert any("first" in line and "weight" in line for line in done.out.splitlines())
    first = json.loads(ssd_train(*changed, "--json").out)["first"]
    assert (first["part"], first["name"]) == ("weight", name)
    assert first["max_difference"] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.costly
def test_checkpoints_are_compared(
    ssd_train: Callable[..., Any],
    checkpoints: CheckpointFolder,
    flags: list[object],
    tmp_path: Path,
) -> None:
    assert ssd_train(*flags, "--checkpoint", 1, "--parity_output", tmp_path / "first").status == 0
    done = ssd_train(*flags, "--checkpoint", 1, "--parity_against", f"recorded={tmp_path / 'first'}")
    assert (done.status, done.err) == (0, "")
    done = ssd_train(*flags, "--parity_against", f"recorded={tmp_path / 'first'}")
    assert done.status == 70
    assert "step 1: weight conv1_bn/" in done.err
    assert read_recording(tmp_path / "first").side["weights"] == "checkpoint of step 1"


@pytest.mark.costly
def test_a_recording_by_other_flags_or_of_other_data_is_refused(
    ssd_train: Callable[..., Any], flags: list[object], tmp_path: Path
) -> None:
    assert ssd_train(*flags, "--parity_output", tmp_path / "recording").status == 0
    fake = ["--mode", "parity", "-f", "-b", 2, "--model_dir", tmp_path / "run"]
    for changed, named in (
        ([*flags, "-b", 1], "batch_size is 2 there and 1 here"),
        ([*flags, "--seed", 4], "seed is 0 there and 4 here"),
        ([*flags, "--parity_steps", 1], "parity_steps is 2 there and 1 here"),
        (fake, 'there and "random images" here'),
    ):
        done = ssd_train(*changed, "--parity_against", f"recorded={tmp_path / 'recording'}")
        name = "data" if changed is fake else named.partition(" ")[0]
        assert done.status == 78
        assert done.err.startswith(f"ssd_train: error: {tmp_path / 'recording'}: {name} is ")
        assert f"{named}; " in done.err


@pytest.mark.costly
def test_a_checkpoint_of_other_classes_is_refused(
    ssd_train: Callable[..., Any], checkpoints: CheckpointFolder, tmp_path: Path
) -> None:
    fake = ["--mode", "parity", "-f", "-b", 2, "--model_dir", tmp_path / "run"]
    done = ssd_train(*fake, "--parity_output", tmp_path / "recording")
    assert done.status == 65
    assert "step 3: " in done.err


def test_faults_of_folders(ssd_train: Callable[..., Any], flags: list[object], tmp_path: Path) -> None:
    done = ssd_train(*flags, "--parity_against", f"recorded={tmp_path / 'nothing'}")
    assert (done.status, done.err.count("\n")) == (66, 1)
    (tmp_path / "taken").mkdir()
    done = ssd_train(*flags, "--parity_output", tmp_path / "taken")
    assert (done.status, done.err.count("\n")) == (77, 1)
    (tmp_path / "taken" / MANIFEST).write_text("{}")
    done = ssd_train(*flags, "--parity_against", f"recorded={tmp_path / 'taken'}")
    assert (done.status, done.err.count("\n")) == (65, 1)


@pytest.mark.parametrize(
    ("against", "named"),
    [("dtype=bf17", "bf17"), ("checkpoint=all", "--checkpoint all"), ("epochs=3", "epochs=3")],
)
def test_the_other_sides_flags_are_checked_first(
    ssd_train: Callable[..., Any], flags: list[object], against: str, named: str
) -> None:
    done = ssd_train(*flags, "--parity_against", against)
    assert (done.status, done.out) == (64, "")
    assert named in done.err


@pytest.mark.slow
def test_the_other_side_is_a_process_of_its_own(
    ssd_train: Callable[..., Any],
    checkpoints: CheckpointFolder,
    flags: list[object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SSDApplication, "program", (str(SMALL_PROGRAM),))
    done = ssd_train(*flags, "--json", "--parity_against", "dtype=bf16", "cross_entropy=mme")
    assert done.status == 0, done.err
    document = json.loads(done.out)
    assert (document["this_side"]["precision"], document["other_side"]["precision"]) == ("fp32", "bf16")
    assert any(one["max_difference"] > 0 for one in document["tensors"])
    done = ssd_train(*flags, "--parity_against", "checkpoint=7")
    assert (done.status, done.out) == (66, "")
    assert "the other side (checkpoint=7): " in done.err
    assert "has no checkpoint 7" in done.err
    assert done.err.count("\n") == 1
