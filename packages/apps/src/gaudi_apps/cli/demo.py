"""The demonstration: make images of handwritten digits, train the detector on them, score it on unseen ones.

It runs the programs that a user runs, and shows each command.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gaudi_apps.cli.flags import DeviceFlags
from gaudi_apps.training.recipe import choose_type, find_host
from gaudi_datasets.flags import parse_flags
from gaudi_ops.program import run_program, say

PROG = "gaudi_apps.cli.demo"


@dataclass(frozen=True)
class DemoFlags:
    """Size of the demonstration; the training says after its first steps how long it takes here."""

    output_dir: Path = Path("runs/demo")
    """Folder of images, records and the trained model; a demonstration that was stopped goes on from there."""
    steps: int = 440
    """Training steps, of 8 images each."""
    train: int = 1200
    """Training images."""
    val: int = 200
    """Images to score."""

    def __post_init__(self) -> None:
        if min(self.steps, self.train, self.val) < 1:
            raise ValueError("--steps, --train and --val must be at least 1")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the demonstration with the given arguments (those of the command line when None) and leave the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    run_program(lambda: _run(arguments), prog=PROG)


def _run(arguments: Sequence[str]) -> int:
    flags = parse_flags(DemoFlags, arguments, prog=f"python -m {PROG}", description=__doc__)
    for command in list_commands(flags, str(choose_type(find_host(DeviceFlags())).value)):
        say(f"$ python -m {shlex.join(command)}")
        status = subprocess.run([sys.executable, "-m", *command], check=False).returncode
        if status != 0:
            return status
    return 0


def list_commands(flags: DemoFlags, dtype: str) -> list[list[str]]:
    """List the commands of the demonstration, each a module and its arguments; `dtype` is that of the training."""
    scenes, records, model = (flags.output_dir / name for name in ("scenes", "records", "model"))
    make = ["--output_dir", str(scenes), "--train", str(flags.train), "--val", str(flags.val)]
    commands = [["gaudi_datasets", "make-scenes", *make]]
    for split in ("train", "val"):
        annotations = scenes / "annotations" / f"instances_{split}.json"
        source = ["--annotations", str(annotations), "--images", str(scenes / split)]
        target = ["--output_dir", str(records), "--split", split, "--overwrite"]
        commands.append(["gaudi_datasets", "convert", "coco", *source, *target])
    paths = ["--data_dir", str(records), "--model_dir", str(model)]
    warmup_steps = min(80, flags.steps // 2)
    schedule = f"--steps {flags.steps} --base_lr 0.08 --lr_schedule cosine --lr_warmup_steps {warmup_steps}"
    # A mirrored digit is none.
    others = "--batch_size 8 --flip_probability 0 --log_steps 10 --dtype"
    commands.append(["gaudi_apps.ssd_train", *paths, *schedule.split(), *others.split(), dtype])
    return commands


if __name__ == "__main__":
    main()
