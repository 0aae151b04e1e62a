"""Rare classes, augmentation and a frozen backbone, from the flags to the steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gaudi_apps.detection.detector import SSDTask
from gaudi_apps.runtime.errors import RunChangedError
from gaudi_apps.training.checkpoint import CheckpointFolder
from gaudi_datasets.detection.coco import read_coco
from gaudi_datasets.detection.pipeline import synthetic_dataset, train_dataset
from gaudi_datasets.detection.sources import CocoSource, RecordSource, read_labels
from gaudi_datasets.errors import FlagError
from gaudi_datasets.sampling import REPEAT, InputOptions, SampleOrder
from gaudi_distributed import SingleProcess
from gaudi_models.architectures import SSDArchitecture

# Five images of one square each: two red, three blue.
COMMON = ("--batch_size", 2, "--lr_warmup_steps", 2, "--save_checkpoints_steps", 2, "--dtype", "fp32")
RARE = ("--repeat_factor", 0.9, "--class_weights", "balanced")
DRAWN = ("--mosaic", 0.5, "--zoom_out", 2, "--zoom_in", 0.5)
FACTORS = [np.sqrt(0.9 / share) for share in (0.6, 0.4, 0.6, 0.4, 0.6)]
Program = Callable[..., Any]


def test_records_and_files_have_the_same_labels(records: Path, annotation_file: Path, image_dir: Path) -> None:
    of_records: tuple[Any, ...] = read_labels(RecordSource(records, "train"))
    of_files: tuple[Any, ...] = read_labels(CocoSource(read_coco(annotation_file), image_dir, keep_empty=False))
    for one, other in zip(of_records, of_files, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [part.tolist() for part in of_files] == [[0, 1, 2, 3, 4], [2, 1, 2, 1, 2]]


def test_a_plan_states_the_images_of_an_epoch(ssd_train: Program, records: Path) -> None:
    done = ssd_train("--mode", "plan", "--json", "--data_dir", records, "--batch_size", 2, *RARE)
    assert done.status == 0, done.err
    plan = json.loads(done.out)
    assert plan["images"] == round(sum(FACTORS)) == 7
    assert plan["steps_per_epoch"] == 4
    rare = plan["rare_classes"]
    assert (rare["images_per_epoch"], rare["repeated_images"]) == (7, 5)
    assert rare["largest_repeat"] == pytest.approx(1.5)
    assert rare["class_weights"] == pytest.approx({"red": 1.25, "blue": 5 / 6})
    done = ssd_train("--mode", "plan", "--data_dir", records, "--batch_size", 2, *RARE)
    assert (done.status, done.err.count("Traceback")) == (0, 0)
    assert "images per epoch" in done.out


@pytest.mark.costly
def test_a_run_repeats_and_weighs_and_goes_on_exactly(ssd_train: Program, records: Path, tmp_path: Path) -> None:
    def train(folder: str, steps: int, *flags: object) -> Any:
        given = ("--data_dir", records, "--model_dir", tmp_path / folder, "--steps", steps, "--no_evaluate")
        return ssd_train(*given, *COMMON, *flags)

    def load(folder: str) -> Any:
        return CheckpointFolder(tmp_path / folder / "checkpoints").load_newest()

    assert train("whole", 5, *RARE, *DRAWN).status == 0
    for steps in (3, 5):
        done = train("parts", steps, *RARE, *DRAWN)
        assert done.status == 0, done.err
    whole, parts = load("whole"), load("parts")
    assert whole.metadata["image_sequence"] == parts.metadata["image_sequence"]
    assert whole.sha256 == parts.sha256
    assert whole.metadata["class_weights"] == pytest.approx([1, 1.25, 5 / 6])
    assert whole.metadata["position"] == {"epoch": 1, "image": 3}  # ten images into epochs of seven
    assert train("plain", 5).status == 0
    assert load("plain").sha256 != whole.sha256
    done = train("parts", 6, "--repeat_factor", 0.5, "--class_weights", "balanced", *DRAWN)
    assert (done.status, type(done.error), done.error.field) == (78, RunChangedError, "repeat_factor")


def test_each_repeat_of_an_image_is_augmented_by_itself(records: Path) -> None:
    source, options = RecordSource(records, "train"), InputOptions(7, image_size=64)
    factors = np.array([3.0, 1, 1, 1, 1])
    indices, epochs = SampleOrder(5, options, factors).at_step(0)
    assert sorted(epochs[indices == 0].tolist()) == [0, REPEAT, 2 * REPEAT]
    batch = next(iter(train_dataset(source, options, repeat_factors=factors)))
    images = batch["images"].numpy()[indices == 0]
    assert len({image.tobytes() for image in images}) == 3
    # The first of them is drawn as it would be without repeats.
    alone = next(iter(train_dataset(source, InputOptions(5, image_size=64))))
    place = SampleOrder(5, InputOptions(5)).at_step(0)[0].tolist().index(0)
    first = batch["images"].numpy()[(indices == 0) & (epochs == 0)][0]
    np.testing.assert_array_equal(first, alone["images"][place])


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--use_fake_data", "--repeat_factor", 0.1), "--repeat_factor"),
        (("--use_fake_data", "--class_weights", "balanced"), "--class_weights"),
        (("--use_fake_data", "--mosaic", 0.5), "--mosaic"),
        (("--use_fake_data", "--loader_processes", 2), "--loader_processes"),
        (("--data_dir", "x", "--static", "--loader_processes", 2), "--loader_processes"),
        (("--data_dir", "x", "--static", "--zoom_out", 4), "--zoom_out"),
        (("--data_dir", "x", "--zoom_out", 0.5), "--zoom_out"),
        (("--data_dir", "x", "--zoom_in", 0), "--zoom_in"),
        (("--data_dir", "x", "--static", "--repeat_factor", 0.1), "--repeat_factor"),
        (("--data_dir", "x", "--freeze", "backbone"), "--freeze"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    ssd_train: Program, tmp_path: Path, flags: tuple[object, ...], named: str
) -> None:
    done = ssd_train("--model_dir", tmp_path / "run", *flags)
    assert done.status == 64
    assert isinstance(done.error, FlagError)
    assert done.error.flag == named
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_a_frozen_backbone_keeps_every_bit() -> None:
    task = SSDTask(
        3,
        keras_policy="float32",
        weight_decay=5e-4,
        communicator=SingleProcess(),
        architecture=SSDArchitecture("resnet18"),
        ema_decay=0.9,
        frozen=True,
    )
    batch = next(iter(synthetic_dataset(InputOptions(2), num_classes=3)))
    before = task.read_state()
    assert not any(name.startswith(("momentum/conv1", "momentum/stage")) for name in before)
    for _ in range(2):
        assert task.train_step(batch, 0.01)["finite"]
    after = task.read_state()
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    frozen = {name for name in before if name.removeprefix("average/").startswith(("conv1", "stage"))}
    assert {name.rpartition("/")[2] for name in frozen} >= {"kernel", "gamma", "moving_mean", "moving_variance"}
    assert not changed & frozen
    assert {"extra1_conv1/kernel", "class_head1/kernel", "average/class_head1/kernel"} <= changed
