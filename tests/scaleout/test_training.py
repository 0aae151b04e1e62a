"""Real ranks on this machine train, score, stop and go on together as one process does alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from gaudi_apps.checkpoints import Checkpoint, CheckpointFolder

WAYS = {
    "mpi": ("--use_horovod",),
    "gloo": ("--use_horovod",),
    "multi_worker": ("--distribution_strategy", "multi_worker"),
}
STEPS = 5
GLOBAL_BATCH = 4
SSD = "gaudi_apps.ssd_train"
RESNET = "gaudi_apps.resnet_train"
COMMON = ("--global_batch_size", str(GLOBAL_BATCH), "--dtype", "fp32", "--deterministic")
ALL_TOGETHER = ("--distributed_bn",)
FLAGS = {"ssd": "scenes", "resnet": "classes"}
STATE = re.compile(r"step (\d+): state ([0-9a-f]{64})")

StartRanks = Callable[..., str]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of ssd_train for a data set of 24 scenes to train on and 11 to score on, which no batch divides."""
    folder = tmp_path_factory.mktemp("data") / "scenes"
    command = ["-m", "gaudi_datasets", "make-scenes", "--output_dir", str(folder), "--train", "24", "--val", "11"]
    subprocess.run([sys.executable, *command], check=True)
    flags = []
    for split in ("train", "val"):
        flags += [f"--{split}_annotations", str(folder / "annotations" / f"instances_{split}.json")]
        flags += [f"--{split}_images", str(folder / split)]
    schedule = ("--lr_warmup_steps", "2", "--save_checkpoints_steps", "3", "--threads", "1")
    return (SSD, *flags, *COMMON, *schedule)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of resnet_train with LARS for pictures of three colours, 24 to train on and 11 to score on."""
    folder = tmp_path_factory.mktemp("data") / "classes"
    generator = np.random.default_rng(0)
    for split, count in (("train", 24), ("validation", 11)):
        for number in range(count):
            noise = generator.integers(-60, 60, (64, 80, 3))
            pixels = np.clip(100 * np.eye(3)[number % 3] + 80 + noise, 0, 255).astype(np.uint8)
            path = folder / split / "abc"[number % 3] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), pixels)
    network = ("--model", "resnet18", "--image_size", "64", "--data_dir", str(folder), "--log_steps", "1")
    threads = ("--intra_op_parallelism_threads", "1", "--inter_op_parallelism_threads", "1")
    # The rate of LARS' preset is another one on several devices.
    rate = ("--optimizer", "LARS", "--base_learning_rate", "2.5", "--warmup_epochs", ".5")
    return (RESNET, *network, *threads, *rate, *COMMON, "--save_checkpoint_steps", "3")


@pytest.fixture(scope="module")
def ssd_alone(scenes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("ssd") / "alone"
    run_alone(*scenes, "--steps", STEPS, "--no_evaluate", "--model_dir", folder)
    return folder


@pytest.fixture(scope="module")
def resnet_alone(classes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, scored at its end."""
    folder = tmp_path_factory.mktemp("resnet") / "alone"
    run_alone(*classes, "--train_steps", STEPS, "--epochs_between_evals", 0, "--model_dir", folder)
    return folder


def run_alone(*words: object) -> str:
    done = subprocess.run([sys.executable, "-m", *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_together(start_ranks: StartRanks, way: str, size: int, *words: object) -> str:
    """Start ranks with batch norm over all of them; the lines that they print, of rank 0 only."""
    return start_ranks(way, size, ["-m", *map(str, words), *WAYS[way], *ALL_TOGETHER], seconds=900)


def load(folder: Path, step: int = STEPS) -> Checkpoint:
    newest = CheckpointFolder(folder / "checkpoints").load_newest()
    assert newest.step == step
    return newest


def assert_equal_states(output: str, folder: Path, size: int) -> None:
    """All ranks have the same bits, by the hashes in what rank 0 printed and in the logs of the others."""
    of_root = STATE.findall(output)
    assert of_root, output
    assert int(of_root[-1][0]) == STEPS
    for rank in range(1, size):
        log = (folder / f"worker_{rank}" / "log.txt").read_text()
        assert STATE.findall(log)[-len(of_root) :] == of_root, log


def assert_same_training(folder: Path, alone: Path) -> None:
    """The weights are those of one process, but for rounding; the images are the same in the same order."""
    one, other = load(alone), load(folder)
    assert other.facts == one.facts
    weights = [name for name in one.tensors if not name.startswith("momentum/")]
    assert one.tensors.keys() == other.tensors.keys()
    pairs = [(one.tensors[name].astype(np.float64), other.tensors[name]) for name in weights]
    difference = sum(np.square(mine - theirs).sum() for mine, theirs in pairs)
    assert np.sqrt(difference / sum(np.square(mine).sum() for mine, _ in pairs)) < 1e-4


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_ssd(
    scenes: tuple[str, ...], ssd_alone: Path, start_ranks: StartRanks, tmp_path: Path, way: str, size: int
) -> None:
    flags = ("--steps", STEPS, "--no_evaluate", "--model_dir", tmp_path)
    output = run_together(start_ranks, way, size, *scenes, *flags)
    assert_equal_states(output, tmp_path, size)
    assert_same_training(tmp_path, ssd_alone)
    assert output.count(f"step {STEPS}/{STEPS}") == 1  # others than rank 0 show nothing
    owned = json.loads((tmp_path / "run.json").read_text())["files"]
    assert {f"worker_{rank}/log.txt" for rank in range(1, size)} <= {*owned}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_resnet_with_lars(
    classes: tuple[str, ...], resnet_alone: Path, start_ranks: StartRanks, tmp_path: Path, way: str, size: int
) -> None:
    flags = ("--train_steps", STEPS, "--epochs_between_evals", 0, "--model_dir", tmp_path)
    output = run_together(start_ranks, way, size, *classes, *flags)
    assert_equal_states(output, tmp_path, size)
    assert_same_training(tmp_path, resnet_alone)
    # Scored at the end, each rank a part.
    assert "11/11 images" in output


@pytest.mark.parametrize(("way", "first", "then"), [("gloo", 2, 4), ("multi_worker", 4, 2), ("mpi", 2, 1)])
def test_a_run_goes_on_with_another_number_of_ranks(
    classes: tuple[str, ...],
    resnet_alone: Path,
    start_ranks: StartRanks,
    tmp_path: Path,
    way: str,
    first: int,
    then: int,
) -> None:
    flags = ("--epochs_between_evals", 0, "--lr_schedule", "constant", "--model_dir", tmp_path / "run")
    alone = (*classes, "--epochs_between_evals", 0, "--lr_schedule", "constant", "--model_dir", tmp_path / "alone")
    run_alone(*alone, "--train_steps", STEPS, "--skip_eval")
    run_together(start_ranks, way, first, *classes, *flags, "--train_steps", 3, "--skip_eval")
    assert load(tmp_path / "run", 3)
    output = run_together(start_ranks, way, then, *classes, *flags, "--train_steps", STEPS, "--skip_eval")
    assert "continuing after step 3" in output
    assert_same_training(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", ["ssd", "resnet"])
def test_several_ranks_score_as_one(
    request: pytest.FixtureRequest, start_ranks: StartRanks, tmp_path: Path, program: str, way: str
) -> None:
    """With as many images of a process in a batch, so that not even the rounding differs."""
    flags, trained = (request.getfixturevalue(name) for name in (FLAGS[program], f"{program}_alone"))
    folders = [tmp_path / name for name in ("alone", "together")]
    for folder in folders:
        shutil.copytree(trained, folder)
    score = (*flags, "--mode", "eval")
    run_alone(*score, "--global_batch_size", 2, "--model_dir", folders[0])
    output = run_together(start_ranks, way, 2, *score, "--global_batch_size", 4, "--model_dir", folders[1])
    evaluations = [json.loads((folder / "evaluation.json").read_text()) for folder in folders]
    assert evaluations[0] == evaluations[1]
    assert (evaluations[1]["images"], evaluations[1]["images_total"]) == (11, 11)
    assert output.count(f"step {STEPS}") == 1
    if program == "ssd":
        one, other = (json.loads((folder / "detections.json").read_text()) for folder in folders)
        assert one
        assert other == one


@pytest.mark.parametrize(
    "flags",
    [("--use_horovod", "--hvd_workers", "2"), ("--distribution_strategy", "mirrored", "--num_gpus", "2")],
    ids=["horovod", "mirrored"],
)
def test_a_program_starts_its_processes(
    classes: tuple[str, ...], resnet_alone: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    words = (*classes, "--train_steps", STEPS, "--epochs_between_evals", 0, "--model_dir", tmp_path)
    output = run_alone(*words, *flags, *ALL_TOGETHER)
    assert_equal_states(output, tmp_path, 2)
    assert_same_training(tmp_path, resnet_alone)


@pytest.fixture
def endless(classes: tuple[str, ...], tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that train for long."""
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        workers = [f"localhost:{each.getsockname()[1]}" for each in (one, two)]
    flags = (*WAYS["multi_worker"], "--train_steps", "100000", "--skip_eval", "--model_dir", str(tmp_path))
    processes = []
    for index in range(2):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        processes.append(
            subprocess.Popen(
                [sys.executable, "-u", "-m", *classes, *flags],
                env={**os.environ, "TF_CONFIG": config},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_a_signal_to_one_rank_stops_all_at_the_same_step(endless: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    root, other = endless
    for line in root.stdout or ():
        if line.startswith("step 4/"):
            break
    other.send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=120)[0] for process in endless]
    assert [process.returncode for process in endless] == [75, 75], outputs
    step = CheckpointFolder(tmp_path / "checkpoints").load_newest().step
    assert step >= 4
    assert STATE.findall(outputs[0])[-1] == STATE.findall((tmp_path / "worker_1" / "log.txt").read_text())[-1]
    assert f"stopped by SIGTERM to rank 1 after step {step}" in "".join(outputs)


def test_ranks_that_are_not_alike_do_not_begin(
    classes: tuple[str, ...], start_ranks: StartRanks, tmp_path: Path
) -> None:
    """Each rank has a seed of its own."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "from gaudi_apps.resnet_train import main\n"
        "main([*sys.argv[1:], '--seed', os.environ['HOROVOD_RANK']])\n"
    )
    with pytest.raises(AssertionError, match=r"the ranks differ in configuration.seed: rank 0: 0; rank 1: 1"):
        start_ranks("gloo", 2, [str(program), *classes[1:], *WAYS["gloo"], "--model_dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
