"""Both programs from begin to end with a network that costs next to nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf

from gaudi_apps.runtime.tensorflow import TensorFlow
from gaudi_apps.training.checkpoint import Checkpoint, CheckpointFolder
from gaudi_apps.training.history import read_history

Program = Callable[..., Any]
COMMON = ("--image_size", 32, "--batch_size", 4, "--lr_schedule", "constant", "--base_learning_rate", 3.2)


@pytest.fixture
def train(run_classifier: Program, folders: Path) -> Program:
    def run(folder: Path, *flags: object) -> Any:
        return run_classifier("--data_dir", folders, "--model_dir", folder, *COMMON, "--log_steps", 1, *flags)

    return run


def load(folder: Path, which: str = "checkpoints") -> Checkpoint:
    return CheckpointFolder(folder / which).load_newest()


def assert_same_state(one: Checkpoint, other: Checkpoint) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        np.testing.assert_allclose(tensor, other.tensors[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.costly
def test_the_best_checkpoint_is_of_pruned_weights(run_classifier: Program, folders: Path, tmp_path: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    for split in ("train", "validation"):
        shutil.copytree(folders / split, data / split)
    flags = ("--data", data, "--model_dir", run, "--image_size", 32, "--batch_size", 4, "--eval_epochs", 1)
    prune = ("--pruning_method", "polynomial_decay", "--pruning_begin_step", 0, "--pruning_end_step", 4)
    done = run_classifier(*flags, "--steps", 9, *prune, "--pruning_frequency", 1, "--pruning_final_sparsity", 0.75)
    assert done.status == 0, done.err
    rows = read_history(run / "evaluations.jsonl")
    assert rows[0]["step"] < 5 <= CheckpointFolder(run / "best").steps()[0]
    assert np.mean(load(run, "best").tensors["conv1/kernel"] == 0) == 0.75
    assert not [name for name in load(run).tensors if "average" in name]


@pytest.mark.slow
def test_a_run_learns_and_leaves_what_belongs_to_it(train: Program, run_classifier: Program, tmp_path: Path) -> None:
    done = train(tmp_path, "--train_epochs", 8, "--vis_dataloader", "--warmup_epochs", 1)
    assert done.status == 0, done.err
    assert "hardware media loading" not in done.out
    assert "jemalloc" not in done.out
    assert "9/9 images: top-1 1.0000" in done.out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("analysis.json", "best", "checkpoints", "config.yaml", "curves.png", "dataloader", "evaluation.json"),
        *("evaluations.jsonl", "history.jsonl", "pictures", "report.html", "run.json", "run_log.json", "summaries"),
        "training_data.json",
        "validation_data.json",
    ]
    rows = read_history(tmp_path / "evaluations.jsonl")
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert rows[-1]["loss"] < rows[0]["loss"]
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert (evaluation["images"], evaluation["images_total"], evaluation["top_5"]) == (9, 9, 1.0)
    assert evaluation["classes"][0] == {"name": "blue", "images": 3, "right": 3, "accuracy": 1.0, "taken_for": {}}
    owned = json.loads((tmp_path / "run.json").read_text())["files"]
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {one for one in files if not one.startswith(("best/", "checkpoints/"))} - {*owned} == {"run.json"}
    metadata = load(tmp_path).metadata
    assert [one["name"] for one in metadata["classes"]] == ["blue", "green", "red"]
    assert (metadata["model"], metadata["image_size"]) == ("resnet50", 32)
    assert metadata["padding"] == "symmetric_stem"

    done = train(tmp_path, "--mode", "eval", "--checkpoint", "all")
    assert done.status == 0, done.err
    assert [row["step"] for row in json.loads((tmp_path / "checkpoint_scores.json").read_text())][-1] == 24
    assert train(tmp_path, "--train_epochs", 8, "--seed", 1).status == 78


def test_a_run_goes_on_as_if_it_had_not_stopped(train: Program, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    flags = (
        "--optimizer",
        "Adam",
        "--base_learning_rate",
        0.002,
        "--mixup_alpha",
        0.2,
        "--dropout",
        0.5,
        "--ema_decay",
        0.9,
        "--skip_eval",
    )
    assert train(whole, "--train_steps", 6, *flags).status == 0
    assert train(broken, "--train_steps", 2, *flags).status == 0
    done = train(broken, "--train_steps", 6, *flags)
    assert done.status == 0, done.err
    assert "continuing after step 2" in done.out
    assert load(broken).metadata["image_sequence"] == load(whole).metadata["image_sequence"]
    assert_same_state(load(broken), load(whole))
    assert {"steps", "adam_updates"} < load(whole).tensors.keys()


@pytest.mark.costly
def test_a_bad_image_ends_the_training_or_is_skipped(run_classifier: Program, folders: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(folders, tmp_path / "data"))
    pixels = np.random.default_rng(0).integers(0, 256, (48, 40, 3), np.uint8)
    encoded = cv2.imencode(".jpg", pixels)[1].tobytes()
    (data / "train" / "red" / "0.png").write_bytes(encoded[: len(encoded) // 2] + b"\xff\xd9")
    flags = ("--data_dir", data, *COMMON, "--train_steps", 4, "--skip_eval")
    done = run_classifier(*flags, "--model_dir", tmp_path / "fail")
    assert done.status == 65
    assert "0.png" in done.err
    done = run_classifier(*flags, "--model_dir", tmp_path / "skip", "--on_bad_image", "skip")
    assert done.status == 0, done.err
    assert "image 1 of 12" in done.err


@pytest.mark.slow
def test_several_steps_in_a_call_are_the_same_steps(train: Program, tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    flags = ("--train_steps", 7, "--skip_eval", "--ema_decay", 0.9, "--warmup_epochs", 1)
    assert train(one, *flags).status == 0
    done = train(several, *flags, "--steps_per_loop", 3, "--log_steps", 5, "-cs", 100)
    assert done.status == 0, done.err
    assert [row["step"] for row in read_history(several / "history.jsonl")] == [5, 7]
    assert load(one).metadata["image_sequence"] == load(several).metadata["image_sequence"]
    assert_same_state(load(several), load(one))


@pytest.mark.costly
def test_a_threshold_ends_training(train: Program, tmp_path: Path) -> None:
    done = train(tmp_path, "--train_epochs", 30, "--stop_threshold", 0.2, "--warmup_epochs", 0)
    assert done.status == 0, done.err
    assert "the target of 0.2 " in done.out
    assert load(tmp_path).step < 90


@pytest.mark.costly
def test_several_folders_are_trained_on(train: Program, tmp_path: Path) -> None:
    done = train(
        tmp_path, "--train_splits", "train", "more", "--train_epochs", 1, "--skip_eval", "--cache_decoded_image"
    )
    assert done.status == 0, done.err
    assert load(tmp_path).step == 4  # of 18 images, 4 a step
    assert not (tmp_path / "evaluation.json").exists()


@pytest.mark.costly
def test_folders_of_jpeg_files_are_trained_on(
    run_classifier: Program, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are train/ and val/, and the same data by either flag, so a run may change from one to the other."""
    (tmp_path / "images").mkdir()
    for split, name in (("train", "train"), ("validation", "val")):
        (tmp_path / "images" / name).symlink_to(folders / split)
    flags = ("--image_size", 32, "--batch_size", 4, "--model_dir", tmp_path / "run", "--no_use_cosine_lr")

    def train(*more: object) -> str:
        done = run_classifier(*flags, *more, program="resnext_train")
        assert done.status == 0, done.err
        return str(done.out)

    with monkeypatch.context() as patch:
        patch.setattr(TensorFlow, "list_devices", lambda self: ["HPU"])
        out = train("--jpeg_data_dir", tmp_path / "images", "--max_train_steps", 1)
    assert out.count("hardware media loading") == 1
    assert f"read from {tmp_path / 'images'}" in out
    assert "9/9 images: top-1" in out
    train("--data_dir", folders, "--max_train_steps", 2, "--disable_eval")
    assert load(tmp_path / "run").step == 2


@pytest.mark.slow
def test_a_new_head_on_loaded_features(train: Program, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    features = {
        "conv1/kernel": generator.normal(size=(3, 3, 3, 8)).astype(np.float32),
        **{f"conv1_bn/{name}": np.ones(8, np.float32) for name in ("gamma", "beta", "moving_mean", "moving_variance")},
    }
    head = {"logits/kernel": np.zeros((8, 7), np.float32), "logits/bias": np.zeros(7, np.float32)}
    np.savez(tmp_path / "weights.npz", **features, **head)
    steps = ("--train_steps", 4)
    done = train(tmp_path / "run", "--fine_tune", "--pretrained_filepath", tmp_path / "weights.npz", *steps)
    assert done.status == 0, done.err
    tensors = load(tmp_path / "run").tensors
    for name, tensor in features.items():
        np.testing.assert_array_equal(tensors[name], tensor)
    assert tensors["logits/kernel"].shape == (8, 3)
    assert {name for name in tensors if name.startswith("momentum/")} == {
        "momentum/logits/kernel",
        "momentum/logits/bias",
    }


@pytest.mark.slow
def test_a_checkpoint_is_used(train: Program, folders: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = train(run, "--train_epochs", 8, "--warmup_epochs", 0, "--skip_eval", "--enable_checkpoint_and_export")
    assert done.status == 0, done.err
    model = tf.saved_model.load(str(run / "export" / "saved_model"))
    red = (folders / "validation" / "red" / "0.png").read_bytes()
    answer = model.signatures["serving_default"](encoded=tf.constant([red, red]))["probabilities"].numpy()
    assert answer.shape == (2, 3)
    assert answer.argmax(axis=1).tolist() == [2, 2]
    assert model.signatures["class_names"]()["class_names"].numpy().tolist() == [b"blue", b"green", b"red"]

    done = train(run, "--mode", "predict", "--inference", folders / "validation" / "green", "--top", 2)
    assert done.status == 0, done.err
    assert "3 images" in done.out
    table = json.loads((run / "predictions" / "predictions.json").read_text())
    assert [one["classes"][0]["class"] for one in table["images"]] == ["green"] * 3
    assert len(table["images"][0]["classes"]) == 2
    assert (run / "predictions" / table["images"][0]["drawn"]).is_file()

    formats = ("--export_format", "tflite", "safetensors", "--export_features")
    done = train(run, "--mode", "export", "--output_dir", tmp_path / "out", *formats)
    assert done.status == 0, done.err
    names = ["safetensors", "safetensors-features", "tflite", "tflite-features"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    manifest = json.loads((tmp_path / "out" / "tflite-features" / "export.json").read_text())
    assert (manifest["step"], manifest["model"], manifest["padding"]) == (24, "resnet50", "symmetric_stem")
    assert [one["name"] for one in manifest["classes"]] == ["blue", "green", "red"]


@pytest.mark.costly
def test_resnext_train(run_classifier: Program, folders: Path, tmp_path: Path) -> None:
    paths = ("--data_dir", folders, "--model_dir", tmp_path, "--image_size", 32, "-bs", 4)
    done = run_classifier(*paths, "-mts", 5, "-dis", 2, "-ebe", 0, "--disable_warmup", program="resnext_train")
    assert done.status == 0, done.err
    assert load(tmp_path).metadata["model"] == "resnext101"
    assert load(tmp_path).metadata["padding"] == "same"
    assert [row["step"] for row in read_history(tmp_path / "history.jsonl")] == [2, 4, 5]
    done = run_classifier(*paths, "--eval_only", "-mes", 1, program="resnext_train")
    assert done.status == 0, done.err
    assert "4/9 images: top-1" in done.out


@pytest.mark.costly
def test_random_images_need_no_data(run_classifier: Program, tmp_path: Path) -> None:
    done = run_classifier("--use_synthetic_data", "--model_dir", tmp_path, "--train_steps", 2, *COMMON)
    assert done.status == 0, done.err
    assert len(load(tmp_path).metadata["classes"]) == 1000


def test_other_classes_and_missing_folders_are_named(train: Program, folders: Path, tmp_path: Path) -> None:
    done = train(tmp_path / "run", "--eval_split", "nowhere")
    assert done.status == 66
    assert "nowhere" in done.err
    (tmp_path / "data" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "data" / "train" / "cat" / "1.png").write_bytes((folders / "train" / "red" / "0.png").read_bytes())
    done = train(tmp_path / "run", "--data_dir", tmp_path / "data", "--skip_eval", "--train_steps", 1)
    assert done.status == 65
    assert done.error.path == str(tmp_path / "data" / "train")
    assert " cat only" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.costly
def test_static_shapes_are_checked_where_asked(train: Program, tmp_path: Path) -> None:
    flags = ("--train_steps", 3, "--skip_eval", "--warmup_epochs", 0)
    assert train(tmp_path / "unchecked", *flags).status == 0
    done = train(tmp_path / "checked", *flags, "--check_static_shapes", "--steps_per_loop", 3, "--log_steps", 3)
    assert done.status == 0, done.err
    assert_same_state(load(tmp_path / "checked"), load(tmp_path / "unchecked"))


@pytest.mark.costly
def test_steps_that_xla_compiles_learn_the_same(
    train: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gaudi_apps.training.keras_task import KerasTask

    compiled: list[Any] = []
    monkeypatch.setattr(KerasTask, "compile_by_xla", note_calls(KerasTask.compile_by_xla, compiled))
    flags = ("--train_steps", 2, "--skip_eval", "--warmup_epochs", 0, "--log_steps", 1)
    assert train(tmp_path / "plain", *flags).status == 0
    done = train(tmp_path / "compiled", *flags, "--enable_xla")
    assert done.status == 0, done.err
    assert len(compiled) == 1
    losses = [
        [row["loss"] for row in read_history(tmp_path / name / "history.jsonl")] for name in ("plain", "compiled")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    done = train(tmp_path / "plain", *flags, "--enable_xla")
    assert done.status == 78
    assert "enable_xla" in done.err
    for refused in (("--use_horovod",), ("--mixup_alpha", 0.2), ("--pruning_method", "polynomial_decay")):
        done = train(tmp_path / "refused", *flags, "--enable_xla", *refused)
        assert (done.status, done.error.flag) == (64, "--enable_xla")


@pytest.mark.costly
def test_blocks_that_are_computed_again_learn_the_same(train: Program, tmp_path: Path) -> None:
    flags = ("--train_steps", 3, "--skip_eval", "--warmup_epochs", 0, "--dropout", 0.5)
    assert train(tmp_path / "plain", *flags).status == 0
    done = train(tmp_path / "again", *flags, "--recompute", "--steps_per_loop", 3, "--log_steps", 3)
    assert done.status == 0, done.err
    assert_same_state(load(tmp_path / "again"), load(tmp_path / "plain"))
    for refused in (("--use_horovod", "--distributed_bn"), ("--mode", "parity", "--parity_against", "dtype=bf16")):
        done = train(tmp_path / "refused", *flags, "--recompute", *refused)
        assert (done.status, done.error.flag) == (64, "--recompute")


def note_calls(method: Any, calls: list[Any]) -> Any:
    """Wrap a method so that each call adds its object to a list."""

    def note(self: Any) -> None:
        calls.append(self)
        method(self)

    return note


@pytest.mark.costly
def test_a_batch_of_another_size_ends_a_checked_run(
    train: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gaudi_datasets.classification import pipeline

    whole = pipeline.train_dataset

    def planted(*given: Any, **named: Any) -> Any:
        dataset = whole(*given, **named)
        return dataset.take(1).concatenate(dataset.skip(1).map(lambda one: {name: x[:3] for name, x in one.items()}))

    monkeypatch.setattr(pipeline, "train_dataset", planted)
    done = train(tmp_path, "--train_steps", 3, "--skip_eval", "--warmup_epochs", 0, "--check_static_shapes")
    assert done.status == 78
    assert done.error.field == "images"
    assert "step 2 of" in done.err
    assert "padding" in done.error.remedy
