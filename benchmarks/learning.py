"""Accuracy for processor-minutes: our programs and those of PyTorch, from random weights, on one processor.

`python -m benchmarks.learning --data DIR` compares detectors, and with ``--task classes`` classifiers, in the
environment of `nox -s bench`; it lasts hours, so it is none of `nox -s bench`. Each program trains once for each budget
of `--budgets`, by a schedule that is fitted to it: its first steps or epochs are measured before, in runs that do not
count. A budget is user and system time of all that the training command starts, imports and evaluations included. All
are scored on the test images, detectors by COCO's rules. What an earlier run left in `--output` is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.against_former import choose_dtype
from benchmarks.environments import TORCHVISION as TORCH
from benchmarks.learners import (
    ClassifierPeer,
    InstallationError,
    KerasPeer,
    Learner,
    OurClassifier,
    Ours,
    Peer,
    TrainingError,
)
from benchmarks.learning_data import write_data
from benchmarks.learning_table import (
    FOLDER,
    MachineResults,
    Row,
    format_results,
    format_rows,
    list_margins,
    merge_results,
    read_results,
    write_results_file,
)
from benchmarks.results import describe_machine
from gaudi_distributed.devices.machine import Machine, gather_processor, name_processor


@dataclass(frozen=True)
class Task:
    """Programs that are compared.

    Attributes:
        ours: the program of ours.
        names: that `--only` takes.
        budgets: processor-minutes.
        results: the file that `--write_results` writes.
        about: says there what the figures are.
    """

    ours: type[Ours]
    names: tuple[str, ...]
    budgets: tuple[float, ...]
    results: Path
    about: str


TASKS = {
    "detection": Task(
        Ours,
        ("ours", "ultralytics", "ultralytics_updates", "ssdlite", "ssd300", "keras"),
        (5.0, 10.0, 20.0, 40.0),
        FOLDER / "results_learning.md",
        "AP and AP50 are COCO's, of the test images, by one scorer for all; then AP of each class.",
    ),
    "classes": Task(
        OurClassifier,
        ("ours", "timm_sgd", "timm_adamw"),
        (2.0, 5.0, 10.0),
        FOLDER / "results_learning_classes.md",
        "Top-1 and top-5 are shares of the test images.",
    ),
}
ULTRALYTICS, TIMM = "ultralytics==8.4.190", "timm==1.0.31"


def make_parser() -> argparse.ArgumentParser:
    """Declare the flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data set with train, val and test, in any layout")
    parser.add_argument("--task", choices=TASKS, default="detection", help="classes: folders of classes, per split")
    parser.add_argument("--budgets", type=parse_budgets, help="processor-minutes, such as 5,10,20,40")
    names = sorted({name for task in TASKS.values() for name in task.names})
    parser.add_argument("--only", nargs="+", choices=names, help="some of the programs")
    parser.add_argument("--variant", action="append", default=[], metavar="FLAGS", help="our program with these, too")
    parser.add_argument("--seed", type=int, default=0, help="of all trainings")
    parser.add_argument("--output", type=Path, help="folder of all runs; default: runs/learning(_classes)")
    parser.add_argument("--write_results", action="store_true", help="add to the tables of the task, to be committed")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, and note what the runs in the output are of; it ends the program where that differs."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    task = TASKS[options.task]
    options.budgets, options.only = options.budgets or task.budgets, options.only or task.names
    if others := set(options.only) - set(task.names):
        parser.error(f"--only {' '.join(sorted(others))}: is not of --task {options.task}")
    if not options.data.exists():
        parser.error(f"--data {options.data}: is not there")
    options.output = options.output or Path("runs", task.results.stem.removeprefix("results_"))
    path = options.output / "given.json"
    given = {
        "data": str(options.data.resolve()), "seed": options.seed,
        "processor": [name_processor(), find_bf16_instruction()], "packages": [*TORCH, ULTRALYTICS, TIMM],
    }  # fmt: skip
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else given
    if before != given:
        parser.error(f"--output {options.output}: has runs of {before}; give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(given) + "\n", encoding="utf-8")
    return options


def parse_budgets(text: str) -> tuple[float, ...]:
    """Return the budgets that a text names, in rising order; raises ValueError."""
    budgets = tuple(sorted({float(word) for word in text.split(",")}))
    if not budgets[0] > 0:
        raise ValueError(f"{budgets[0]:g} is not above 0")
    return budgets


def main(arguments: Sequence[str] | None = None) -> int:
    """Train each program for each budget; 1 where one has no result, or where ours is behind another one."""
    options = parse(arguments)
    task = TASKS[options.task]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # that of all that is started
    data, output = options.data.resolve(), options.output.resolve()
    prepared = output / "data"
    if options.task == "detection" and not (prepared / "data.yaml").exists():
        write_data(data, prepared)
    learners = make_learners(options, data, output)
    path = output / "rows.json"
    rows = read_rows(path)
    broken: dict[str, str] = {}
    for minutes in options.budgets:
        for learner in learners:
            if any((row.program, row.minutes, row.note) == (learner.name, minutes, "") for row in rows):
                continue
            print(f"== {learner.name}: {minutes:g} processor-minutes", flush=True)
            row = try_learner(learner, minutes, broken)
            rows = [one for one in rows if (one.program, one.minutes) != (row.program, row.minutes)] + [row]
            path.write_text(json.dumps([asdict(one) for one in rows], indent=2) + "\n", encoding="utf-8")
            print(f"{format_rows([row])}\n", flush=True)
    settings = {learner.name: learner.settings for learner in learners}
    chosen = [row for row in rows if row.program in settings and row.minutes in options.budgets]
    margins = list_margins(chosen, task.ours.program)
    print("\n".join([format_rows(chosen), "", *(margin.describe() for margin in margins)]))
    if options.write_results:
        write_tables(task, settings, chosen)
    return 1 if any(row.note for row in chosen) or any(margin.is_behind for margin in margins) else 0


def find_bf16_instruction() -> str:
    """Name the instructions of this processor for bfloat16; empty without any."""
    return gather_processor(Machine(), os.sched_getaffinity(0)).bf16_by


def write_tables(task: Task, settings: Mapping[str, str], rows: Sequence[Row]) -> None:
    """Add what was seen on this machine to what is known, and write the tables anew."""
    instruction = find_bf16_instruction()
    known = task.results.with_suffix(".json")
    machines = merge_results(
        read_results(known), MachineResults({**describe_machine(), "bfloat16": instruction}, settings, rows)
    )
    write_results_file(known, machines)
    task.results.write_text(format_results(machines, task.ours.program, task.about), encoding="utf-8")
    print(f"written: {known}, {task.results}")


def make_learners(options: argparse.Namespace, data: Path, output: Path) -> list[Learner]:
    """Make the programs that the command line names."""
    learners: list[Learner] = []
    if "ours" in options.only:
        ours = TASKS[options.task].ours
        learners += [ours(data, output, options.seed, flags) for flags in ("", *options.variant)]
    places = output, output / "data", options.seed
    yolos = {
        "defaults": ("ultralytics", "", "16 images a step, 64 an update, warm-up of 3 epochs"),
        "updates": (
            "ultralytics_updates",
            ", more updates",
            "4 images a step and update, warm-up of half an epoch",
        ),
    }
    for recipe, (name, title, of_steps) in yolos.items():
        if name in options.only:
            settings = (
                f"{ULTRALYTICS}, yolov8n.yaml, 320 pixels, {of_steps}, else its own defaults (AdamW by `auto`, mosaics "
                f"until the last 10 epochs), validated at its end, float32; seed {options.seed}"
            )
            flags, packages = [f"--recipe={recipe}"], (*TORCH, ULTRALYTICS)
            title = f"ultralytics YOLOv8n{title}"
            learners.append(Peer(title, settings, "ultralytics_yolo.py", packages, *places, flags))
    ssds = {
        "ssdlite": ("SSDLite320", "MobileNetV3, 320 pixels", ".15 for 192 images a step scaled to 24, cosine"),
        "ssd300": ("SSD300", "VGG-16, 300 pixels", ".002 for 32 images a step scaled to 16, two drops"),
    }
    for recipe, (title, network, rate) in ssds.items():
        if recipe in options.only:
            settings = f"{TORCH[1]}, {network}, by its reference scripts (SGD, {rate}), float32; seed {options.seed}"
            flags = [f"--recipe={recipe}"]
            learners.append(Peer(f"torchvision {title}", settings, "torchvision_ssd.py", TORCH, *places, flags))
    dtype = choose_dtype()
    if "keras" in options.only:
        settings = (
            f"ResNet-34, 300 pixels, as one would write it with Keras and tf.data (SGD, the rate of ssd_train for 16 "
            f"images a step, cosine, crops by overlap, flips, colours), {dtype}; seed {options.seed}"
        )
        learners.append(KerasPeer("plain Keras SSD", settings, "keras_ssd.py", (), *places, [f"--dtype={dtype}"]))
    recipes = {
        "sgd": "SGD by the defaults of its script (.1 for 256 images, crops from .08, colours by .4)",
        "adamw": "AdamW (.001, decay .05), crops from .35, colours by .4",
    }
    for recipe, settings in recipes.items():
        if f"timm_{recipe}" in options.only:
            settings = f"ResNet-18, 128 pixels, {dtype}, 32 images a step, {settings}, cosine, label smoothing .1"
            settings, packages = f"{TIMM}, {settings}; seed {options.seed}", (*TORCH, TIMM)
            flags, found = [f"--recipe={recipe}", f"--dtype={dtype}"], (output, data, options.seed)
            learners.append(ClassifierPeer(f"timm, {recipe}", settings, "timm_resnet.py", packages, *found, flags))
    return learners


def try_learner(learner: Learner, minutes: float, broken: dict[str, str]) -> Row:
    """Train and score a program, and return its row, which says what failed.

    Args:
        learner: the program.
        minutes: of a processor.
        broken: what could not be installed before, by name; it is not tried again.
    """
    spent, schedule = 0.0, ""
    try:
        if learner.name in broken:
            raise InstallationError(broken[learner.name])
        try:
            learner.prepare(minutes)
        except InstallationError as error:
            broken[learner.name] = str(error)
            raise
        folder = learner.folder / f"{minutes:g}"
        spent, schedule = learner.train(minutes, folder)
        figures, by_class = learner.score(folder)
    except TrainingError as error:
        return Row(learner.name, minutes, spent / 60, schedule, note=str(error))
    return Row(learner.name, minutes, spent / 60, schedule, figures, by_class=by_class)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of an earlier run, if there are any."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**one) for one in found]


if __name__ == "__main__":
    sys.exit(main())
