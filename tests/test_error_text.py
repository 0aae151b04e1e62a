"""Compare the errors that programs print with one file for each: tests/data/error_text/PROGRAM.txt.

Other tests assert the fields of an error. `UPDATE_ERROR_TEXT=1 pytest tests/test_error_text.py` writes the files anew;
read what changed in them as a user would.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "data" / "error_text"
MODULES = {
    "ssd_train": "gaudi_apps.ssd_train",
    "resnet_train": "gaudi_apps.resnet_train",
    "resnext_train": "gaudi_apps.resnext_train",
    "ssd_mxnet_train": "gaudi_apps.ssd_mxnet_train",
    "gaudi-run": "gaudi_distributed.launch.cli",
    "gaudi-datasets": "gaudi_datasets.cli",
}
# By program: arguments that cannot be right; a plan ends at once where they are.
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
        "--config unknown.yaml --mode plan",
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
        "lint",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a working folder with a file of notes, two bad configurations and three bad annotation files."""
    (tmp_path / "notes").write_text("these are notes")
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
    monkeypatch.setattr(sys, "argv", [program, *shlex.split(command)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(MODULES[program]).main()
    assert end.value.code not in (None, 0), command
    out, err = capsys.readouterr()
    text = "\n".join(line.rstrip() for line in f"{out}{err}".splitlines())
    return f"$ {program} {command}".rstrip() + f"\n[{end.value.code}]\n{text}\n"


@pytest.mark.parametrize("program", COMMANDS)
def test_errors_print_as_they_are_kept(
    program: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    had_tensorflow = "tensorflow" in sys.modules
    names = sorted(path.name for path in folder.iterdir())
    found = "\n".join(describe(program, command, capsys, monkeypatch) for command in COMMANDS[program])
    assert ("tensorflow" in sys.modules) == had_tensorflow
    assert sorted(path.name for path in folder.iterdir()) == names
    kept = FOLDER / f"{program}.txt"
    if os.environ.get("UPDATE_ERROR_TEXT"):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(found, encoding="utf-8")
    assert found == kept.read_text(encoding="utf-8")
