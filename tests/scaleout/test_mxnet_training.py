"""Real ranks of ssd_mxnet_train train, score and go on together as one process does alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.scaleout.leftovers import Traces

from gaudi_apps.training.checkpoint import CheckpointFolder

REAL = ("-m", "gaudi_apps.ssd_mxnet_train")
# The same program with each layer of its network, but fewer channels.
NARROW = (str(Path(__file__).with_name("narrow_program.py")), "ssd_mxnet_train")
# And with a network that costs next to nothing: what is tested of it is how ranks work together.
SMALL = (str(Path(__file__).parents[2] / "packages/apps/tests/small_ssd_mxnet.py"),)
# A program of a test becomes the same by this.
SHRINK = f"import runpy; runpy.run_path({SMALL[0]!r}, run_name='__mp_main__')\n"
STEPS, GLOBAL_BATCH = 3, 4

StartRanks = Callable[..., str]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the ranks time: a step of the real network takes long where tests share a machine."""
    monkeypatch.setenv("GAUDI_RUN_STALL_SECONDS", "600")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return flags for a data set of 24 scenes to train on and 5 to score on, which no batch divides."""
    folder = tmp_path_factory.mktemp("data") / "scenes"
    command = ["-m", "gaudi_datasets", "make-scenes", "--output_dir", str(folder), "--train", "24", "--val", "5"]
    subprocess.run([sys.executable, *command], check=True)
    data = ("--coco-root", str(folder), "--dataset", "plain", "-j", "1", "--log-interval", "1")
    return (*data, "--lr-warmup-epochs", "0.4", "--steps", str(STEPS), "--save_checkpoints_steps", "2")


@pytest.fixture(scope="module")
def real_alone(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train in one process."""
    return run_alone(tmp_path_factory.mktemp("real"), *REAL, *flags)


@pytest.fixture(scope="module")
def narrow_alone(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the narrow network in one process."""
    return run_alone(tmp_path_factory.mktemp("narrow"), *NARROW, *flags)


@pytest.fixture(scope="module")
def small_alone(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the small network in one process."""
    return run_alone(tmp_path_factory.mktemp("small"), *SMALL, *flags)


def run_alone(folder: Path, *words: str) -> Path:
    command = [sys.executable, *words, "--batch-size", str(GLOBAL_BATCH), "--model_dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_together(start_ranks: StartRanks, way: str, *words: object) -> str:
    return start_ranks(way, 2, [*map(str, words), "--batch-size", str(GLOBAL_BATCH // 2), "--bn-group", "2"])


def load(folder: Path) -> Any:
    return CheckpointFolder(folder / "checkpoints").load_newest()


def assert_equal_ranks(output: str, folder: Path) -> None:
    """Both have the same bits, by the hashes in what rank 0 printed and in the log of the other."""
    states = [line.rpartition("state ")[2] for line in output.splitlines() if f"step {STEPS}: state " in line]
    assert len(states) == 1, output
    assert f"step {STEPS}: state {states[0]}" in (folder / "worker_1" / "log.txt").read_text()


def assert_same_training(folder: Path, alone: Path) -> None:
    """Weights and momentum are those of one process, but for rounding; the images are the same in the same order.

    Rounding is 1.0e-5 of the real network by the kernels of a processor with AVX2 alone, and less by AVX-512's.
    """
    one, other = load(alone), load(folder)
    for fact in ("image_sequence", "position", "categories", "batch_norm_images"):
        assert one.metadata[fact] == other.metadata[fact], fact
    assert one.tensors.keys() == other.tensors.keys()
    pairs = [(one.tensors[name].astype(np.float64), other.tensors[name]) for name in one.tensors]
    difference = sum(np.square(mine - theirs).sum() for mine, theirs in pairs)
    assert np.sqrt(difference / sum(np.square(mine).sum() for mine, _ in pairs)) < 2e-5


@pytest.mark.parametrize(
    ("network", "way", "more"),
    [
        ("small", "gloo", ("--gradient-predivide-factor", "2")),
        ("small", "mpi", ("--horovod-num-groups", "3")),
        ("narrow", "gloo", ("--horovod-num-groups", "3", "--gradient-predivide-factor", "2")),
        pytest.param(
            *("real", "gloo", ("--horovod-num-groups", "3", "--gradient-predivide-factor", "2")),
            marks=pytest.mark.whole,
        ),
    ],
    ids=["small-gloo", "small-mpi", "narrow-gloo", "real-gloo"],
)
def test_two_ranks_train_as_one_process(
    request: pytest.FixtureRequest,
    flags: tuple[str, ...],
    start_ranks: StartRanks,
    tmp_path: Path,
    network: str,
    way: str,
    more: tuple[str, ...],
) -> None:
    program = {"real": REAL, "narrow": NARROW, "small": SMALL}[network]
    alone = request.getfixturevalue(f"{network}_alone")
    output = run_together(start_ranks, way, *program, *flags, *more, "--model_dir", tmp_path)
    assert_equal_ranks(output, tmp_path)
    assert_same_training(tmp_path, alone)
    assert "5/5 images" in output  # each rank scored a part
    figures = [json.loads((folder / "evaluation.json").read_text())["figures"] for folder in (tmp_path, alone)]
    for name, value in figures[0].items():
        assert (value is None) == (figures[1][name] is None), name
        assert value is None or value == pytest.approx(figures[1][name], abs=1e-3), name


def test_a_run_of_two_ranks_goes_on_and_validates_in_the_background(
    flags: tuple[str, ...], small_alone: Path, start_ranks: StartRanks, tmp_path: Path
) -> None:
    run_together(start_ranks, "gloo", *SMALL, *flags, "--steps", "2", "--mode", "train", "--model_dir", tmp_path)
    output = run_together(start_ranks, "gloo", *SMALL, *flags, "--async-val", "--model_dir", tmp_path)
    assert "continuing after step 2" in output
    assert_equal_ranks(output, tmp_path)
    assert_same_training(tmp_path, small_alone)
    rows = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [STEPS]


def test_ranks_that_are_not_alike_do_not_begin(flags: tuple[str, ...], start_ranks: StartRanks, tmp_path: Path) -> None:
    """Each rank has a rate of its own."""
    program = tmp_path / "program.py"
    program.write_text(
        SHRINK + "import os, sys\n"
        "from gaudi_apps.ssd_mxnet_train import main\n"
        "main([*sys.argv[1:], '--lr', f\"0.00{5 + int(os.environ['HOROVOD_RANK'])}\"])\n"
    )
    words = [str(program), *flags, "--batch-size", "2", "--model_dir", str(tmp_path / "run")]
    with pytest.raises(AssertionError, match=r"differ in configuration\.base_lr: rank 0: 0\.005; rank 1: 0\.006"):
        start_ranks("gloo", 2, words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("backend", "lost"), [("gloo", 1), ("openmpi", 0)])
def test_a_lost_rank_ends_the_run_which_then_goes_on(
    flags: tuple[str, ...], small_alone: Path, tmp_path: Path, backend: str, lost: int
) -> None:
    """It is lost in the last step, while the other waits for its gradients, and after a checkpoint."""
    program, model_dir = tmp_path / "program.py", tmp_path / "run"
    program.write_text(
        SHRINK + "import os, signal, sys, threading\n"
        "from gaudi_apps.ssd_mxnet_train import main\n"
        "from gaudi_distributed.failure import RankClient\n"
        "report = RankClient.set_progress\n"
        "def at(self, step, phase, images=0):\n"
        "    report(self, step, phase, images)\n"
        f"    if (phase, step) == ('step', {STEPS - 1}):\n"
        "        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGKILL]).start()\n"
        "        threading.Event().wait()\n"
        f"if os.environ.get('HOROVOD_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '{lost}':\n"
        "    RankClient.set_progress = at\n"
        "main(sys.argv[1:])\n"
    )
    words = (*flags, "--batch-size", str(GLOBAL_BATCH // 2), "--bn-group", "2", "--model_dir", str(model_dir))
    launcher = [sys.executable, "-m", "gaudi_distributed.launch", "--np", "2", "--backend", backend]
    launcher += ["--cores_per_rank", "0", "--no_jemalloc", "--", sys.executable]
    traces = Traces(tmp_path / "traces")
    command = traces.inside([*launcher, str(program), *words])
    done = subprocess.run(command, env=traces.environ, capture_output=True, text=True, timeout=1800)
    assert (traces.processes(), traces.files()) == ([], [])
    assert done.returncode == 75, done.stdout + done.stderr
    (cause,) = [line for line in done.stderr.splitlines() if "error: " in line]
    assert f"rank {lost} on " in cause
    assert f" at step {STEPS - 1} (step): " in cause
    assert "killed or crashed" in cause
    subprocess.run([*launcher, *SMALL, *words], check=True, capture_output=True, timeout=1800)
    assert_same_training(model_dir, small_alone)
