"""The programs on real photographs, short: convert, train some steps, evaluate every image."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import pytest

from gaudi_datasets.documents import seal
from gaudi_datasets.records.tfrecords import encode_index, frame_record, index_records, read_record

FOLDER = Path(os.environ.get("REAL_DATA", ""))

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif(
        not os.environ.get("REAL_DATA"), reason="REAL_DATA is unset; it must name the folder of real data"
    ),
]


def run(module: str, *arguments: str | Path) -> str:
    """Run one of the programs; return what it printed, and fail if it failed."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


def read_losses(model_dir: Path) -> list[float]:
    lines = (model_dir / "history.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_blood_cells_are_learnt(trained_on_blood_cells: Any) -> None:
    model_dir = trained_on_blood_cells.model_dir
    assert "72/72 images" in trained_on_blood_cells.output
    losses = read_losses(model_dir)
    assert len(losses) == 12
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    evaluation = json.loads((model_dir / "evaluation.json").read_text())
    assert evaluation["step"] == 12
    assert [one["name"] for one in evaluation["classes"]] == ["Platelets", "RBC", "WBC"]
    assert len(list((model_dir / "pictures").glob("*.png"))) == 8


def test_a_resnext_begins_to_learn_clothes(tmp_path: Path) -> None:
    """ResNeXt-50 for 30 steps: from the loss of a guess among ten classes, by more than batches differ."""
    flags = "--batch_size 32 --image_size 64 --max_train_steps 30 --zero_gamma --dtype fp32 --display_steps 1"
    schedule = "--base_learning_rate 0.064 --warmup_epochs 0.25 --disable_eval --resnet_size 50"
    folders: list[str | Path] = ["--data_dir", FOLDER / "clothing", "--model_dir", tmp_path / "run"]
    run("gaudi_apps.resnext_train", *flags.split(), *schedule.split(), *folders)
    losses = read_losses(tmp_path / "run")
    assert len(losses) == 30
    assert losses[0] == pytest.approx(2.303, abs=0.15)
    assert sum(losses[-10:]) < sum(losses[:10]) - 0.5


def test_numbers_that_are_none_end_a_training(blood_cells: Path, tmp_path: Path) -> None:
    shutil.copytree(blood_cells, tmp_path / "records")
    train: list[str | Path] = ["--data_dir", tmp_path / "records", "--batch_size", "4", "--steps", "3", "--no_evaluate"]
    train += ["--backbone", "resnet18_quarter", "--dtype", "fp32"]
    train += ["--model_dir", tmp_path / "run"]
    error = run_into_error(70, *train, "--base_lr", "inf")
    of_first_step = re.search(r"step 1: loss \S+ at rate (nan|inf), .*; image ids (\d+), (\d+, ){2}\d+\. ", error)
    assert of_first_step
    assert not (tmp_path / "run" / "checkpoints").exists()

    image_id = of_first_step[2]
    record = spoil_boxes(tmp_path / "records", image_id)
    error = run_into_error(65, *train, "--clean")
    assert f"record {record} (image {image_id}): feature image/object/bbox: " in error


def run_into_error(status: int, *flags: str | Path) -> str:
    """Train; return the last line of the error, and fail unless it ends with the status."""
    command = [sys.executable, "-m", "gaudi_apps.ssd_train", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == status, done.stderr[-2000:]
    return done.stderr.splitlines()[-1]


def spoil_boxes(records: Path, image_id: str) -> int:
    """Set the boxes of an image to NaN, with checksums and an index that are right; return the number of its record."""
    import tensorflow as tf

    for path in sorted(records.glob("train-0*")):
        contents = [read_record(place) for place in index_records(path)]
        for number, content in enumerate(contents):
            example = tf.train.Example.FromString(content)
            features = example.features.feature
            if features["image/source_id"].bytes_list.value[0].decode() == image_id:
                xmin = features["image/object/bbox/xmin"].float_list.value
                xmin[:] = [float("nan") for _ in xmin]
                contents[number] = example.SerializeToString()
                shard = b"".join(map(frame_record, contents))
                path.write_bytes(shard)
                manifest = json.loads((records / "train.json").read_text())
                (listed,) = (one for one in manifest["shards"] if one["name"] == path.name)
                listed |= {"bytes": len(shard), "crc32c": f"{google_crc32c.value(shard):08x}"}
                index = encode_index(sorted(records.glob("train-0*")))
                (records / "train.index").write_bytes(index)
                manifest["index"] = hashlib.sha256(index).hexdigest()
                (records / "train.json").write_text(json.dumps(seal(manifest)))
                return number
    raise AssertionError(f"no record has the image {image_id}")


def test_photographs_of_coco_are_trained_on(trained_on_photographs: Any) -> None:
    assert "57/57 images" in trained_on_photographs.output
    assert len(read_losses(trained_on_photographs.model_dir)) == 4
    evaluation = json.loads((trained_on_photographs.model_dir / "evaluation.json").read_text())
    assert len(evaluation["classes"]) == 80


def test_the_published_figures_are_met_by_the_program() -> None:
    folder = FOLDER / "coco_eval_oracle"
    truth = folder / "instances_val2014_100.json"
    detections = folder / "instances_val2014_fakebbox100_results.json"
    out = run("gaudi_datasets", "score", "--json", "--ground_truth", truth, "--detections", detections)
    figures = json.loads(out)["figures"]
    published = [0.505, 0.697, 0.573, 0.586, 0.519, 0.501, 0.387, 0.594, 0.595, 0.640, 0.566, 0.564]
    assert [round(value, 3) for value in figures.values()] == published
