"""Compare the errors that programs print with one file for each, tests/data/error_text/PROGRAM.txt, and runs.txt.

Other tests assert the fields of an error. `UPDATE_ERROR_TEXT=1 pytest tests/test_error_text.py` writes the files anew;
read what changed in them as a user would.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gaudi_apps.training.checkpoint import (
    CheckpointFolder,
    load_checkpoint,
    require_classes,
    require_names,
    require_shape,
)
from gaudi_apps.training.run_dir import RunFolder
from gaudi_apps.training.trainer import require_finite, require_finite_state
from gaudi_datasets.documents import seal
from gaudi_datasets.errors import GaudiError
from gaudi_ops.program import describe_error

FOLDER = Path(__file__).parent / "data" / "error_text"
MODULES = {
    "ssd_train": "gaudi_apps.ssd_train",
    "resnet_train": "gaudi_apps.resnet_train",
    "resnext_train": "gaudi_apps.resnext_train",
    "ssd_mxnet_train": "gaudi_apps.ssd_mxnet_train",
    "gaudi-run": "gaudi_distributed.launch.cli",
    "gaudi-apps": "gaudi_apps.cli.run_commands",
    "gaudi-datasets": "gaudi_datasets.cli",
}
RANK_1_OF_4 = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4"
# By program: arguments that cannot be right, behind variables of the environment; a plan ends at once where they are.
COMMANDS = {
    "ssd_train": (
        "--bath_size 3 --mode plan",
        "--batch_size x --mode plan",
        "--use_fake_data --batch_size 0 --mode plan",
        "--use_fake_data --epochs -1 --mode plan",
        "--use_fake_data --base_lr nan --mode plan",
        "--mode train",
        "--mode plan --data_dir nowhere",
        "--mode plan --data_dir notes",
        "--use_fake_data --inference cat.jpg --mode plan",
        "--use_fake_data --checkpoint best --mode plan",
        "--config nowhere.yaml --mode plan",
        "--config unknown.yaml --mode plan",
        "--config broken.yaml --mode plan",
        "--use_fake_data --num_examples_per_epoch 1e3 --mode plan",
        "--use_fake_data --mode eval",
        "--use_fake_data --mode verify-resume --use_horovod",
        "GAUDI_RUN_ENGINE=nccl --use_fake_data",
        "GAUDI_RUN_ENGINE=multi_worker --use_fake_data --use_horovod",
        f"{RANK_1_OF_4} --use_fake_data --use_horovod --hvd_workers 2",
        f"{RANK_1_OF_4} --use_fake_data --use_horovod --distributed_bn --bn_group 8",
        f"{RANK_1_OF_4} --use_fake_data --mode verify-resume",
        f"{RANK_1_OF_4} --use_fake_data --mode plan -ds mirrored --batch_size 10",
    ),
    "resnet_train": (
        "--bach_size 3 --mode plan",
        "--image_size big --use_synthetic_data --mode plan",
        "--use_synthetic_data --model resnet49",
        "--use_synthetic_data --base_learning_rate 0 --mode plan",
        "--use_synthetic_data --ema_decay 1 --mode plan",
        "--use_synthetic_data --image_size 0 --mode plan",
        "--use_synthetic_data --inference cat.jpg --mode plan",
        "--use_synthetic_data --mixup_alpha -1 --mode plan",
        "--mode eval",
        "--data_dir nowhere --mode plan",
        "--config unknown.yaml --mode plan",
    ),
    "resnext_train": (
        "--bach_size 3 --mode plan",
        "--model resnet50 --use_synthetic_data",
        "--use_synthetic_data --max_train_steps -1 --mode plan",
        "--use_synthetic_data --num_train_files 3 --mode plan",
        "--eval_only --mode export --data_dir x",
        "--use_synthetic_data --crop 3 --mode plan",
        "--jpeg_data_dir nowhere --mode plan",
        "--use_synthetic_data --pruning_final_sparsity 2 --mode plan",
        "--use_synthetic_data --profile_steps 3 --mode plan",
        "--config broken.yaml --mode plan",
    ),
    "ssd_mxnet_train": (
        "--batch-sise 3 --mode plan",
        "--synthetic --batch-size 0 --mode plan",
        "--synthetic --precision fp64 --mode plan",
        "--dataset plain --mode plan",
        "--dataset plain --coco-root nowhere --mode plan",
        "--synthetic --bulk-last-wgrad --mode plan",
        "--synthetic --lr -1 --mode plan",
        "--synthetic --profile-start 3 --mode plan",
        "--synthetic --mode verify",
        "--synthetic --mode val",
        "--system C4141 --mode plan",
        "GAUDI_RUN_ENGINE=multi_worker --synthetic",
        "GAUDI_RUN_WORKER=0 --synthetic",
        "--config unknown.yaml --mode plan",
    ),
    "gaudi-apps": (
        "",
        "repot runs/cells",
        "report",
        "report nowhere",
        "report notes",
        "report --run runs/cells",
        "compare nowhere",
        "compare nowhere elsewhere",
    ),
    "gaudi-run": (
        "",
        "--np 2",
        "--np 0 -- python train.py",
        "--np two -- python train.py",
        "--nodes 2 -- python train.py",
        "--np 2 --hosts a:1 -- python train.py",
        "--np 2 --hostfile nowhere -- python train.py",
        "--np 2 --backend ssh -- python train.py",
        "--min_np 3 --max_np 2 --host_discovery_script ./hosts -- python train.py",
        "doctor --nothing",
        "SYSTEM=habana-8 --submission",
        "SYSTEM=dss8440 NEXP=0 --submission",
        "SYSTEM=dss8440 CLEAR_CACHES=yes --submission",
        "SYSTEM=dss8440 DATESTAMP=../x --submission",
        "SYSTEM=dss8440 DATADIR=nowhere --submission",
        "SYSTEM=dss8440 DATADIR=empty --submission",
        "SYSTEM=dss8440 --submission ssd_mxnet_train --synthetic",
        "SYSTEM=dss8440 PRETRAINED_DIR=empty --submission ssd_mxnet_train --synthetic",
        "SYSTEM=dss8440 --submission --preset c4140",
        "SYSTEM=dss8440 CONT=registry/ssd:1 --submission --image other",
        "SYSTEM=dss8440 --submission ssd_train --synthetic --pretrained_backbone a.pth",
    ),
    "gaudi-datasets": (
        "",
        "convert",
        "convert coco --split train",
        "convert coco --annotations nowhere.json --images . --output_dir out --split train",
        "convert coco --annotations notes --images . --output_dir out --split train",
        "convert coco --annotations results.json --images . --output_dir out --split train",
        "convert coco --annotations missing.json --images . --output_dir out --split train",
        "convert coco --annotations missing.json --images nowhere --output_dir out --split train",
        "convert coco --annotations twice.json --images . --output_dir out --split train",
        "convert coco --annotations . --images . --output_dir out --split train",
        "convert folders --folder nowhere --output_dir out --split train",
        "convert voc --folder . --output_dir out --split train",
        "score --ground_truth notes --detections notes",
        "show nowhere",
        "fetch nothing",
        "fetch weights nothing",
        "fetch coco --output_dir own --max_images -1",
        "lint",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a working folder: notes, an empty folder, two bad configurations and three bad annotation files."""
    (tmp_path / "notes").write_text("these are notes")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unknown.yaml").write_text("bath_size: 3\n")
    (tmp_path / "broken.yaml").write_text("batch_size: [3\n")
    image = {"id": 1, "file_name": "1.jpg", "width": 8, "height": 8}
    for name, images in (("missing", [image]), ("twice", [image, image])):
        box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 4]}
        document = {"images": images, "annotations": [box], "categories": [{"id": 1, "name": "cat"}]}
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    (tmp_path / "results.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield tmp_path
    for number, handler in handlers.items():
        signal.signal(number, handler)


def describe(program: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a program within this process, and return its command, its exit status and what it wrote to the user."""
    words = shlex.split(command)
    variables = list(itertools.takewhile(lambda word: re.match("[A-Z_]+=", word), words))
    arguments = words[len(variables) :]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        for name, _, value in (variable.partition("=") for variable in variables):
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            importlib.import_module(MODULES[program]).main()
    assert end.value.code not in (None, 0), command
    out, err = capsys.readouterr()
    text = "\n".join(line.rstrip() for line in f"{out}{err}".replace(f"{Path.cwd()}", "FOLDER").splitlines())
    return f"$ {' '.join([*variables, program, *arguments])}\n[{end.value.code}]\n{text}\n"


@pytest.mark.parametrize("program", COMMANDS)
def test_errors_print_as_they_are_kept(
    program: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    had_tensorflow = "tensorflow" in sys.modules
    names = sorted(path.name for path in folder.iterdir())
    found = "\n".join(describe(program, command, capsys, monkeypatch) for command in COMMANDS[program])
    assert ("tensorflow" in sys.modules) == had_tensorflow
    assert sorted(path.name for path in folder.iterdir()) == names
    compare(f"{program}.txt", found)


def test_errors_of_runs_print_as_they_are_kept(folder: Path) -> None:
    """Of folders of runs and checkpoints, which a program looks at once TensorFlow has started."""
    settings = {"batch_size": 8, "base_lr": 0.1}
    begin = functools.partial(RunFolder.begin, files=("history.jsonl",), folders=("pictures",))
    begin(RunFolder(Path("run")), settings)
    for name in ("taken", "without", "broken", "leaving"):
        Path(name).mkdir()
    Path("taken", "pictures").mkdir()
    Path("broken", "run.json").write_text("[]")
    begin(RunFolder(Path("leaving")), settings)
    record = Path("leaving", "run.json")
    changed = json.loads(record.read_text().replace("history.jsonl", "../notes"))
    record.write_text(json.dumps(seal(changed)))
    damaged = CheckpointFolder(Path("without", "checkpoints"))
    damaged.save(3, {"kernel": np.zeros(2)}, {})
    (damaged.path(3) / "manifest.json").unlink()
    rows = {"loss": np.float32(2), "finite": False}
    classes = {"categories": [1]}
    calls: dict[str, Callable[[], object]] = {
        "other settings": lambda: begin(RunFolder(Path("run")), {"batch_size": 9, "base_lr": 0.1}),
        "several other settings": lambda: begin(RunFolder(Path("run")), {"batch_size": 9, "base_lr": 1}),
        "files of nobody": lambda: begin(RunFolder(Path("taken")), settings),
        "no record": lambda: begin(RunFolder(Path("broken")), settings),
        "nothing to clean": lambda: RunFolder(Path("without")).clean(),
        "files elsewhere": lambda: RunFolder(Path("leaving")).clean(),
        "no checkpoint": lambda: CheckpointFolder(Path("nowhere")).load_newest(),
        "no whole checkpoint": lambda: damaged.load_newest(report=lambda text: None),
        "a damaged checkpoint": lambda: load_checkpoint(damaged.path(3)),
        "other tensors": lambda: require_names(["a", "b"], ["a", "c"]),
        "another shape": lambda: require_shape("a", [2, 3], [2, 4]),
        "other classes": lambda: require_classes({"categories": [2]}, classes, "checkpoint of step 3"),
        "no classes": lambda: require_classes({}, classes, "checkpoint of step 3"),
        "a loss": lambda: require_finite(7, 0.1, rows, np.arange(20)),
        "a weight": lambda: require_finite_state({"kernel": np.array([np.nan])}, 7),
    }
    found = []
    for name, call in calls.items():
        with pytest.raises(GaudiError) as caught:
            call()
        found.append(f"{name}\n[{caught.value.exit_status}]\n{describe_error(caught.value)}\n")
    compare("runs.txt", "\n".join(found))


def compare(name: str, found: str) -> None:
    """Compare a text with the file that is kept of it, which is written anew where the user asks for it."""
    kept = FOLDER / name
    if os.environ.get("UPDATE_ERROR_TEXT"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(found, encoding="utf-8")
    assert found == kept.read_text(encoding="utf-8")
