"""Real ranks on this machine train, score, stop and go on together as one process does alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import cv2
import numpy as np
import pytest
from tests.scaleout.ports import RARELY, find_ports

from gaudi_apps.training.checkpoint import Checkpoint, CheckpointFolder, load_checkpoint
from gaudi_apps.training.recipe import Choice, Recipe

WAYS = {
    "mpi": ("--use_horovod",),
    "gloo": ("--use_horovod",),
    "multi_worker": ("--distribution_strategy", "multi_worker"),
}
MIRRORED = ("--distribution_strategy", "mirrored", "--num_gpus", "2")
STEPS = 5
GLOBAL_BATCH = 4
SSD = ("-m", "gaudi_apps.ssd_train", "--backbone", "resnet18")
RESNET = ("-m", "gaudi_apps.resnet_train")
# The same programs with each layer of their networks, but fewer channels.
NARROW = str(Path(__file__).with_name("narrow_program.py"))
# And with networks that cost next to nothing: what is tested of them is how ranks work together.
SMALL_SSD = (str(Path(__file__).parents[2] / "packages/apps/tests/small_ssd.py"),)
SMALL_RESNET_PROGRAM = str(Path(__file__).with_name("failing_program.py"))
SMALL_RESNET = (SMALL_RESNET_PROGRAM, "{}", "small")
COMMON = ("--dtype", "fp32", "--deterministic")
BATCH = ("--global_batch_size", str(GLOBAL_BATCH))
ALL_TOGETHER = ("--distributed_bn",)
PROGRAMS = {
    "ssd": SSD,
    "narrow_ssd": (NARROW, "ssd_train", *SSD[2:]),
    "small_ssd": SMALL_SSD,
    "resnet": RESNET,
    "narrow_resnet": (NARROW, "resnet_train"),
    "small_resnet": SMALL_RESNET,
}
STATE = re.compile(r"step (\d+): state ([0-9a-f]{64})")
# A program on a machine of its own, as far as files go: arguments are a folder, and then its flags.
OWN_MACHINE = """
import os, runpy, sys
from gaudi_distributed.cluster.rank_info import detect_rank
folder = os.path.join(sys.argv[1], f"machine_{detect_rank(os.environ).rank}")
os.makedirs(folder, exist_ok=True)
os.chdir(folder)
"""
OWN_RESNET = f'{OWN_MACHINE}runpy.run_path({SMALL_RESNET_PROGRAM!r})["main"]({{}}, "small", sys.argv[2:])'
OWN_SSD = f"{OWN_MACHINE}del sys.argv[1]\nrunpy.run_path({SMALL_SSD[0]!r}, run_name='__main__')"
OWN_SEED = """
import os, sys
from gaudi_apps.resnet_train import main
main([*sys.argv[1:], "--seed", os.environ["HOROVOD_RANK"]])
"""

StartRanks = Callable[..., str]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return flags of ssd_train for 24 scenes to train on and 11 to score on, which no batch divides."""
    folder = tmp_path_factory.mktemp("data") / "scenes"
    command = ["-m", "gaudi_datasets", "make-scenes", "--output_dir", str(folder), "--train", "24", "--val", "11"]
    subprocess.run([sys.executable, *command], check=True)
    flags = []
    for split in ("train", "val"):
        flags += [f"--{split}_annotations", str(folder / "annotations" / f"instances_{split}.json")]
        flags += [f"--{split}_images", str(folder / split)]
    return (*flags, *COMMON, "--lr_warmup_steps", "2", "--threads", "1")


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return flags of resnet_train with LARS for images of three colours, 24 to train on and 11 to score on."""
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
    # The rate of LARS' preset is another one on several devices, and its schedule goes by the last step of a command.
    rate = ("--optimizer", "LARS", "--base_learning_rate", "2.5", "--lr_schedule", "constant", "--warmup_epochs", ".5")
    return (*network, *threads, *rate, *COMMON, "--epochs_between_evals", "0", "--save_checkpoint_steps", "3")


@pytest.fixture(scope="module")
def alone(
    scenes: tuple[str, ...], classes: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return the function that trains a network in one process, once; a classifier has checkpoints of steps 3 and 5."""

    @cache
    def train(network: str) -> Path:
        folder = tmp_path_factory.mktemp(network) / "alone"
        if network.endswith("ssd"):
            flags: tuple[object, ...] = (*scenes, "--steps", STEPS, "--no_evaluate")
        else:
            flags = (*classes, "--train_steps", STEPS, "--skip_eval")
        run(*PROGRAMS[network], *flags, *BATCH, "--model_dir", folder)
        return folder

    return train


def run(*words: object) -> str:
    """Run a program that has to succeed, and return its output."""
    environ = {**os.environ, **(RARELY if "gloo" in words else {})}
    done = subprocess.run([sys.executable, *map(str, words)], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_launch(backend: str, size: int) -> list[object]:
    """Return the beginning of a command that starts ranks by gaudi-run, as `run` takes it."""
    spread = ("--cores_per_rank", 0, "--first_port", find_ports(size)[0])
    return ["-m", "gaudi_distributed.launch", "--np", size, "--backend", backend, *spread, "--", sys.executable]


def load(folder: Path, step: int = STEPS) -> Checkpoint:
    """Load the newest checkpoint of a run."""
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


def assert_same_training(found: Checkpoint, expected: Checkpoint) -> None:
    """Check that weights are equal but for rounding, and images equal in the same order."""
    one, other = dict(found.metadata), dict(expected.metadata)
    # The hashes of the rows that both wrote: their losses are rounded in other orders.
    assert len(one.pop("history")) == len(other.pop("history"))
    assert one == other
    assert find_difference(found, expected) < 1e-4


def find_difference(one: Checkpoint, other: Checkpoint) -> float:
    """Compute the norm of the difference between two networks' weights over the norm of the second ones."""
    assert one.tensors.keys() == other.tensors.keys()
    names = [name for name in one.tensors if not name.startswith("momentum/")]
    pairs = [(one.tensors[name].astype(np.float64), other.tensors[name].astype(np.float64)) for name in names]
    squares = sum(np.square(mine - theirs).sum() for mine, theirs in pairs)
    return float(np.sqrt(squares / sum(np.square(theirs).sum() for _, theirs in pairs)))


@pytest.mark.parametrize(
    ("network", "way", "size"),
    [
        ("narrow_ssd", "mpi", 2),
        pytest.param("ssd", "mpi", 2, marks=pytest.mark.whole),
        *(("small_ssd", way, 4) for way in ("gloo", "multi_worker")),
        *(pytest.param("small_ssd", way, 2, marks=pytest.mark.whole) for way in WAYS),
        pytest.param("small_ssd", "mpi", 4, marks=pytest.mark.whole),
    ],
)
def test_ssd(
    alone: Callable[[str], Path],
    scenes: tuple[str, ...],
    start_ranks: StartRanks,
    tmp_path: Path,
    network: str,
    way: str,
    size: int,
) -> None:
    flags = ("--steps", str(STEPS), "--no_evaluate", "--model_dir", str(tmp_path))
    output = start_ranks(way, size, [*PROGRAMS[network], *scenes, *BATCH, *flags, *WAYS[way], *ALL_TOGETHER])
    assert_equal_states(output, tmp_path, size)
    assert_same_training(load(tmp_path), load(alone(network)))
    assert output.count(f"step {STEPS}/{STEPS}") == 1  # others than rank 0 show nothing
    owned = json.loads((tmp_path / "run.json").read_text())["files"]
    assert {f"worker_{rank}/log.txt" for rank in range(1, size)} <= {*owned}


@pytest.mark.parametrize(
    ("network", "start", "size"),
    [
        ("narrow_resnet", "gloo", 2),
        ("narrow_resnet", "mirrored", 2),
        *(pytest.param("resnet", start, 2, marks=pytest.mark.whole) for start in ("gloo", "mirrored")),
        *(("small_resnet", start, 4) for start in ("openmpi", "multi_worker")),
        *(pytest.param("small_resnet", start, 2, marks=pytest.mark.whole) for start in ("openmpi", "gloo")),
        pytest.param("small_resnet", "gloo", 4, marks=pytest.mark.whole),
    ],
)
def test_resnet_with_lars(
    alone: Callable[[str], Path], classes: tuple[str, ...], tmp_path: Path, network: str, start: str, size: int
) -> None:
    """Started by gaudi-run, which tells the program what its ranks talk by, or, mirrored, by the program itself."""
    flags: tuple[object, ...] = (*classes, *ALL_TOGETHER, "--train_steps", STEPS, "--model_dir", tmp_path)
    if start == "mirrored":
        command = [*PROGRAMS[network], *flags, *MIRRORED, "--batch_size", GLOBAL_BATCH]
    else:
        command = [*list_launch(start, size), *PROGRAMS[network], *flags, *BATCH]
    output = run(*command)
    assert_equal_states(output, tmp_path, size)
    assert_same_training(load(tmp_path), load(alone(network)))
    # Scored at the end, each rank a part.
    assert "11/11 images" in output


@pytest.fixture(scope="module")
def three_steps(classes: tuple[str, ...]) -> tuple[object, ...]:
    """Return the beginning of a command that trains the small classifier for three steps in a folder."""
    return (*SMALL_RESNET, *classes, *BATCH, "--train_steps", 3, "--skip_eval", "--model_dir")


@pytest.fixture(scope="module")
def two_alone(three_steps: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train as two ranks, each with a batch norm of its own images."""
    folder = tmp_path_factory.mktemp("two") / "alone"
    run(*list_launch("gloo", 2), *three_steps, folder)
    return folder


@pytest.mark.parametrize("start", ["gloo", "multi_worker", pytest.param("openmpi", marks=pytest.mark.whole)])
def test_batch_norm_over_groups(
    three_steps: tuple[object, ...], two_alone: Path, alone: Callable[[str], Path], tmp_path: Path, start: str
) -> None:
    """Over groups of two among four ranks it is that of two ranks by themselves, which have as many images."""
    run(*list_launch(start, 4), *three_steps, tmp_path / "groups", *ALL_TOGETHER, "--bn_group", 2)
    groups = load(tmp_path / "groups", 3)
    assert groups.metadata["batch_norm_images"] == 2
    assert_same_training(groups, load(two_alone, 3))
    over_all = load_checkpoint(CheckpointFolder(alone("small_resnet") / "checkpoints").path(3))
    assert over_all.metadata["batch_norm_images"] == 4
    assert find_difference(groups, over_all) > 1e-2


def test_a_run_goes_on_with_other_ranks_which_have_no_files(
    classes: tuple[str, ...], alone: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each rank has a machine of its own; rank 0's has the checkpoints, and the others get logs."""
    program = tmp_path / "program.py"
    program.write_text(OWN_RESNET)
    command = (program, tmp_path, *classes, *BATCH, "--skip_eval", "--model_dir", "run", "--train_steps")
    run(*list_launch("gloo", 2), *command, 2, *ALL_TOGETHER)
    output = run(*list_launch("openmpi", 4), *command, 4, *ALL_TOGETHER)
    assert "continuing after step 2" in output
    assert "continuing after step 4" in run(*command, STEPS)
    for rank in (1, 2, 3):
        folder = tmp_path / f"machine_{rank}" / "run"
        assert [path.name for path in folder.iterdir()] == [f"worker_{rank}"]
        assert STATE.findall((folder / f"worker_{rank}" / "log.txt").read_text())[-1] == STATE.findall(output)[-1]
    assert_same_training(load(tmp_path / "machine_0" / "run"), load(alone("small_resnet")))


def test_ranks_agree_on_the_split_and_follow_the_recipe_of_rank_0(tmp_path: Path) -> None:
    """Each rank has a machine of its own; rank 0's has a run, whose length was fitted there."""
    command = ["make-scenes", "--output_dir", tmp_path / "scenes", "--train", 12, "--val", 1]
    run("-m", "gaudi_datasets", *command)
    data, folder = tmp_path / "data", tmp_path / "machine_0" / "run"
    shutil.copytree(tmp_path / "scenes" / "train", data / "images")
    shutil.copyfile(tmp_path / "scenes" / "annotations" / "instances_train.json", data / "annotations.json")
    fitted: dict[str, int | float | str] = {
        "steps": STEPS,
        "batch_size": 2,
        "base_lr": 0.01,
        "lr_schedule": "cosine",
        "eval_epochs": 1.0,
    }
    choices = tuple(Choice(flag, value, "so") for flag, value in fitted.items())
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(Recipe(choices, minutes=60.0, is_fitted=True).to_document()))
    program = tmp_path / "program.py"
    program.write_text(OWN_SSD)
    flags = (
        "--data",
        data,
        "--minutes",
        60,
        "--val_share",
        0.3,
        "--model_dir",
        "run",
        "--device",
        "cpu",
        "--dtype",
        "fp32",
    )
    output = run(*list_launch("gloo", 2), program, tmp_path, *flags)
    assert_equal_states(output, folder, 1)
    log = (tmp_path / "machine_1" / "run" / "worker_1" / "log.txt").read_text()
    assert STATE.findall(log) == STATE.findall(output)
    split = json.loads((folder / "split.json").read_text())
    assert {name: len(files) for name, files in split.items()} == {"train": 8, "val": 4}
    assert not {*split["train"]} & {*split["val"]}
    assert json.loads((folder / "evaluation.json").read_text())["images"] == 4


@pytest.mark.parametrize(
    ("program", "flags"),
    [
        ("ssd", ("--use_horovod", "--hvd_workers", "2")),
        ("resnet", MIRRORED),
    ],
    ids=["ssd-horovod", "resnet-mirrored"],
)
def test_several_ranks_score_as_one(
    request: pytest.FixtureRequest,
    alone: Callable[[str], Path],
    tmp_path: Path,
    program: str,
    flags: tuple[str, ...],
) -> None:
    """Which the program starts itself, with as many images in a batch of one: not even the rounding differs."""
    data, network = request.getfixturevalue({"ssd": "scenes", "resnet": "classes"}[program]), f"narrow_{program}"
    folders = [tmp_path / name for name in ("alone", "together")]
    for folder in folders:
        shutil.copytree(alone(network), folder)
    score = (*PROGRAMS[network], *data, "--mode", "eval", "--model_dir")
    run(*score, folders[0], "--global_batch_size", 2)
    output = run(*score, folders[1], "--global_batch_size", 4, *flags)
    evaluations = [json.loads((folder / "evaluation.json").read_text()) for folder in folders]
    assert evaluations[0] == evaluations[1]
    assert (evaluations[1]["images"], evaluations[1]["images_total"]) == (11, 11)
    assert output.count(f"step {STEPS}") == 1
    if program == "ssd":
        one, other = (json.loads((folder / "detections.json").read_text()) for folder in folders)
        assert one
        assert other == one


@pytest.fixture
def endless(classes: tuple[str, ...], tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that train for long."""
    workers = [f"localhost:{port}" for port in find_ports(2)]
    flags = (*BATCH, *WAYS["multi_worker"], "--train_steps", "100000", "--skip_eval", "--model_dir", str(tmp_path))
    processes = []
    for index in range(2):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        processes.append(
            subprocess.Popen(
                [sys.executable, "-u", *SMALL_RESNET, *classes, *flags],
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
    outputs = [process.communicate(timeout=1800)[0] for process in endless]
    assert [process.returncode for process in endless] == [75, 75], outputs
    step = CheckpointFolder(tmp_path / "checkpoints").load_newest().step
    assert step >= 4
    assert STATE.findall(outputs[0])[-1] == STATE.findall((tmp_path / "worker_1" / "log.txt").read_text())[-1]
    assert all(named in "".join(outputs) for named in ("stopped by SIGTERM to rank 1 ", f" after step {step}"))


def test_ranks_that_are_not_alike_do_not_begin(classes: tuple[str, ...], tmp_path: Path) -> None:
    """Each rank has a seed of its own."""
    program = tmp_path / "program.py"
    program.write_text(OWN_SEED)
    words = [*list_launch("gloo", 2), program, *classes, *BATCH, "--model_dir", tmp_path / "run"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 78, done.stderr
    named = "the ranks differ in configuration.seed: rank 0: 0; rank 1: 1; start all of them with the same"
    assert named in done.stderr.strip().splitlines()[-1]
    assert done.stderr.count("the ranks differ") == 1
    assert not (tmp_path / "run").exists()
