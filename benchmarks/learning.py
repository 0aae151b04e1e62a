"""Accuracy for processor-minutes: ssd_train and two detectors of PyTorch from random weights, on one processor.

`python -m benchmarks.learning --data DIR` in the environment of `nox -s bench`; it lasts hours, so it is none of
`nox -s bench`. Each program trains once for each budget of `--budgets`, by a schedule that is fitted to it: its first
steps or epochs are measured before, in runs that do not count. A budget is user and system time of all that the
training command starts, imports and evaluations included. All are scored by COCO's rules as ssd_train scores, on the
test images. What an earlier run left in `--output` is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.learners import Learner, Ours, Peer, TrainingError
from benchmarks.learning_data import write_data
from benchmarks.learning_table import RESULTS, Row, format_results, format_rows, list_margins
from benchmarks.results import describe_machine
from gaudi_datasets.detection.scoring import score_detections

BUDGETS = (5.0, 10.0, 20.0, 40.0)  # processor-minutes
NAMES = ("ours", "ultralytics", "torchvision")
TORCH = ("torch==2.14.1", "torchvision==0.29.1")
ULTRALYTICS = "ultralytics==8.4.190"


def make_parser() -> argparse.ArgumentParser:
    """Declare the flags."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="data set with train, val and test, in any layout")
    parser.add_argument("--budgets", type=parse_budgets, default=BUDGETS, help="processor-minutes, such as 5,10,20,40")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="some of the programs")
    parser.add_argument("--variant", action="append", default=[], metavar="FLAGS", help="ssd_train with these, too")
    parser.add_argument("--seed", type=int, default=0, help="of all trainings")
    parser.add_argument("--output", type=Path, default=Path("runs/learning"), help="folder of all runs")
    parser.add_argument("--write_results", action="store_true", help=f"write {RESULTS.name}, to be committed")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, and note what the runs in the output are of; it ends the program where that differs."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if not options.data.exists():
        parser.error(f"--data {options.data}: is not there")
    path, given = options.output / "given.json", {"data": str(options.data.resolve()), "seed": options.seed}
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
    """Train each program for each budget; 1 where one has no result, or where ssd_train is behind another one."""
    options = parse(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # that of all that is started
    data, output = options.data.resolve(), options.output.resolve()
    prepared = output / "data"
    if not (prepared / "data.yaml").exists():
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
            row = try_learner(learner, minutes, output, broken)
            rows = [one for one in rows if (one.program, one.minutes) != (row.program, row.minutes)] + [row]
            path.write_text(json.dumps([asdict(one) for one in rows], indent=2) + "\n", encoding="utf-8")
            print(f"{format_rows([row])}\n", flush=True)
    settings = {learner.name: learner.settings for learner in learners}
    chosen = [row for row in rows if row.program in settings and row.minutes in options.budgets]
    margins = list_margins(chosen, "ssd_train")
    print("\n".join([format_rows(chosen), "", *(margin.describe() for margin in margins)]))
    if options.write_results:
        RESULTS.write_text(format_results(describe_machine(), settings, chosen, margins), encoding="utf-8")
        print(f"written: {RESULTS}")
    return 1 if any(row.note for row in chosen) or any(margin.is_behind for margin in margins) else 0


def make_learners(options: argparse.Namespace, data: Path, output: Path) -> list[Learner]:
    """Make the programs that the command line names."""
    learners: list[Learner] = []
    if "ours" in options.only:
        learners += [Ours(data, output, options.seed, flags) for flags in ("", *options.variant)]
    peers: dict[str, tuple[str, str, tuple[str, ...], str]] = {
        "ultralytics": (
            "ultralytics YOLOv8n",
            "ultralytics_yolo.py",
            (*TORCH, ULTRALYTICS),
            f"{ULTRALYTICS}, yolov8n.yaml, 320 pixels, its own defaults (16 images a step, AdamW by `auto`, mosaics "
            "until the last 10 epochs), validated once, float32",
        ),
        "torchvision": (
            "torchvision SSDLite320",
            "torchvision_ssdlite.py",
            TORCH,
            f"{TORCH[1]}, MobileNetV3, 320 pixels, by the settings of its reference scripts (SGD, .15 for 192 images "
            "a step scaled to 24, cosine, crops by overlap), float32",
        ),
    }
    for key, (name, script, requirements, settings) in peers.items():
        if key in options.only:
            settings += f"; seed {options.seed}"
            learners.append(Peer(name, settings, script, requirements, output, output / "data", options.seed))
    return learners


def try_learner(learner: Learner, minutes: float, output: Path, broken: dict[str, str]) -> Row:
    """Train and score a program, and return its row, which says what failed.

    Args:
        learner: the program.
        minutes: of a processor.
        output: folder of all runs.
        broken: what could not be prepared before, by name; it is not tried again.
    """
    spent, schedule = 0.0, ""
    try:
        if learner.name in broken:
            raise TrainingError(broken[learner.name])
        try:
            learner.prepare(minutes)
        except TrainingError as error:
            broken[learner.name] = str(error)
            raise
        folder = learner.folder / f"{minutes:g}"
        spent, schedule = learner.train(minutes, folder)
        scores = score_detections(output / "data" / "test.json", learner.detect(folder)).figures
    except TrainingError as error:
        return Row(learner.name, minutes, spent / 60, schedule, note=str(error))
    return Row(learner.name, minutes, spent / 60, schedule, scores["AP"], scores["AP50"])


def read_rows(path: Path) -> list[Row]:
    """Return the rows of an earlier run, if there are any."""
    if not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**one) for one in found]


if __name__ == "__main__":
    sys.exit(main())
