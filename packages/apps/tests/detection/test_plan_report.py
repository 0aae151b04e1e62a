from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.cli.flag_rules import replace_flags
from gaudi_apps.detection.config import DataFlags, DeviceFlags, NetworkFlags, RunFlags, SSDConfig
from gaudi_apps.detection.plan import describe_training_set, print_plan
from gaudi_datasets.errors import DataError, MissingInputError
from gaudi_datasets.memory import format_bytes
from gaudi_datasets.program import make_console
from gaudi_datasets.records.tfrecords import frame_record
from gaudi_models.architectures import SSDArchitecture, count_state_bytes, list_ssd_tensors, measure_ssd


def show(config: SSDConfig) -> str:
    file = io.StringIO()
    print_plan(config, console=make_console(file=file, width=200, soft_wrap=True))
    return file.getvalue()


def plan_config(*, as_json: bool = False, **data: Any) -> SSDConfig:
    return SSDConfig(run=RunFlags(mode="plan", json=as_json), data=DataFlags(**data))


def test_json_plan_of_fake_data_is_cocos() -> None:
    plan = json.loads(show(plan_config(as_json=True, use_fake_data=True)))
    assert (plan["images"], plan["steps_per_epoch"], plan["total_steps"]) == (117266, 917, 45850)
    assert plan["parameters"] == 19972534
    assert plan["network"] == {"backbone": "resnet34", "image_size": 300, "default_boxes": 8732}
    assert plan["checkpoints_kept"] == 10
    assert plan["rate_changes"][1] == {"step": 4585, "learning_rate": 0.012, "reason": "warm-up ends"}
    assert plan["rate_changes"][-1]["reason"] == "drop to 0.01, not reached"
    assert "drop at step 45850" in plan["warnings"][0]


def test_the_plan_is_of_the_network_that_is_asked_for() -> None:
    config = SSDConfig(
        run=RunFlags(mode="plan", json=True),
        data=DataFlags(use_fake_data=True),
        network=NetworkFlags(backbone="resnet50", image_size=512),
    )
    plan = json.loads(show(config))
    assert plan["network"] == {"backbone": "resnet50", "image_size": 512, "default_boxes": 24564}
    parameters, kept_values = measure_ssd(80, SSDArchitecture("resnet50", 512))
    assert plan["parameters"] == parameters > 19972534
    tensors = list_ssd_tensors(80, SSDArchitecture("resnet50", 512))
    assert plan["checkpoint_bytes"] == count_state_bytes(tensors, tensors)
    gradients, kept = 4 * parameters, 128 * kept_values * 2  # images, bytes
    assert plan["estimated_memory_bytes"] == plan["checkpoint_bytes"] + gradients + kept


@pytest.mark.parametrize(
    ("steps", "report", "kept", "checkpoints"),
    [
        (8, {"save_checkpoints_steps": 8, "keep_ckpt_max": 2}, 1, 1),
        (8, {"save_checkpoints_steps": 8, "keep_ckpt_max": 2, "eval_epochs": 1.0}, 1, 2),
        (8, {"save_checkpoints_steps": 8, "keep_ckpt_max": 2, "save_checkpoints_minutes": 10.0}, 2, 2),
        (1, {"save_checkpoints_steps": 1, "keep_ckpt_max": 2, "save_checkpoints_minutes": 10.0}, 1, 1),
    ],
)
def test_the_plan_counts_each_checkpoint_with_its_average(
    steps: int, report: dict[str, Any], kept: int, checkpoints: int
) -> None:
    data = {"use_fake_data": True, "num_examples_per_epoch": 256}
    config = replace_flags(SSDConfig(), {"mode": "plan", "steps": steps, "ema_decay": 0.9, **data, **report})
    plan = json.loads(show(replace_flags(config, {"json": True})))
    tensors = list_ssd_tensors(80)
    state_bytes = count_state_bytes(tensors, tensors, averages=True)
    assert (plan["checkpoints_kept"], plan["checkpoint_bytes"]) == (kept, state_bytes)
    (disk,) = (line for line in show(config).splitlines() if line.split()[:1] == ["disk"])
    assert format_bytes(checkpoints * state_bytes) in disk


def test_the_plan_knows_what_is_computed_again() -> None:
    config = SSDConfig(
        run=RunFlags(mode="plan", json=True), data=DataFlags(use_fake_data=True), device=DeviceFlags(recompute=True)
    )
    plan = json.loads(show(config))
    state_and_gradients = plan["checkpoint_bytes"] + 4 * plan["parameters"]
    assert plan["estimated_memory_bytes"] == state_and_gradients + 128 * measure_ssd(80, recompute=True)[1] * 2


def test_table_names_what_counts() -> None:
    text = show(plan_config(num_examples_per_epoch=117266, batch_size=1024))
    for part in (
        "117266",
        "5750 (50 epochs of 115)",
        "0.096",
        "575 steps",
        "4600 and 5750",
        "warning: the drop",
    ):
        assert part in text


def test_manifest_of_records_made_by_ours(tmp_path: Path) -> None:
    manifest = {
        "images": {"kept": 90, "of": 100},
        "boxes": {"kept": 500, "of": 512, "dropped": {"no size": 12}},
        "categories": [{"id": 1, "name": "cell"}],
        "shards": [{"name": "train-00000-of-00002.tfrecord", "records": 45, "bytes": 2**20}] * 2,
    }
    (tmp_path / "train.json").write_text(json.dumps(manifest))
    text = show(plan_config(data_dir=str(tmp_path), batch_size=10))
    for part in ("90 of 100", "500 of 512", "450 (50 epochs of 9)", "2 MiB of records are there"):
        assert part in text
    plan = json.loads(show(plan_config(as_json=True, data_dir=str(tmp_path), num_examples_per_epoch=50)))
    assert (plan["images"], plan["data"]["num_classes"], plan["data"]["images_found"]) == (50, 1, 100)


def test_records_without_manifest_are_counted(tmp_path: Path) -> None:
    for shard in range(2):
        (tmp_path / f"train-0000{shard}-of-00002").write_bytes(frame_record(b"a") * (shard + 2))
    found = describe_training_set(plan_config(data_dir=str(tmp_path)))
    assert (found.images, found.num_classes, found.record_bytes) == (5, 80, 5 * 17)


@pytest.mark.parametrize("replacement", [None, "fifo"])
def test_a_shard_that_is_missing_is_named_as_in_training(tmp_path: Path, replacement: str | None) -> None:
    for shard in (0, 2):
        (tmp_path / f"train-0000{shard}-of-00003").write_bytes(frame_record(b"a"))
    if replacement:
        os.mkfifo(tmp_path / "train-00001-of-00003")
    with pytest.raises(MissingInputError, match="missing: train-00001-of-00003"):
        describe_training_set(plan_config(data_dir=str(tmp_path)))


def test_missing_and_bad_records(tmp_path: Path) -> None:
    config = plan_config(data_dir=str(tmp_path))
    with pytest.raises(MissingInputError, match=r"neither train\.json nor train-"):
        describe_training_set(config)
    assert describe_training_set(plan_config(data_dir=str(tmp_path), num_examples_per_epoch=7)).images == 7
    (tmp_path / "train-00000-of-00001").touch()
    with pytest.raises(DataError, match="hold no record"):
        describe_training_set(config)
    for text in ("", "[]", '{"version": 1}'):
        (tmp_path / "train.json").write_text(text)
        with pytest.raises(DataError, match=r"train\.json"):
            describe_training_set(config)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 * 2**20, "5 MiB"), (2**41, "2.05e+03 GiB")]
)
def test_bytes_in_words(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_static_batches_tell_what_they_were_made_of(tmp_path: Path) -> None:
    config = plan_config(data_dir=str(tmp_path), static=True, batch_size=4)
    with pytest.raises(MissingInputError, match=r"train-4\.json: is not there"):
        describe_training_set(config)
    folder = tmp_path / "worker_0"
    folder.mkdir()
    (folder / "train-4.json").write_text(json.dumps({"num_images": 30, "categories": [{"id": 1, "name": "cell"}]}))
    found = describe_training_set(config)
    assert (found.images, found.num_classes) == (30, 1)
    (folder / "train-4.json").write_text("{}")
    with pytest.raises(DataError, match="manifest"):
        describe_training_set(config)
