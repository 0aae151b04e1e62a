"""The benchmark of accuracy for processor-minutes: what it counts, fits, writes for other programs, and tells."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import learning  # noqa: E402
from benchmarks.learners import (  # noqa: E402
    EPOCHS,
    EVERY,
    STEPS,
    InstallationError,
    KerasPeer,
    OurClassifier,
    Ours,
    Scores,
    TrainingError,
    count_right,
    fit_epochs,
    fit_steps,
    mark_step,
    score_by_coco,
)
from benchmarks.learning_data import list_yolo_lines, write_data  # noqa: E402
from benchmarks.learning_table import (  # noqa: E402
    MachineResults,
    Row,
    format_results,
    format_rows,
    list_margins,
    merge_results,
    read_results,
    write_results_file,
)
from benchmarks.peers import program  # noqa: E402
from benchmarks.processor_time import ReadLine, read_tree, run_measured  # noqa: E402

from gaudi_datasets.detection.examples import DetectionExample  # noqa: E402
from gaudi_datasets.detection.scoring import score_detections  # noqa: E402

# Uses a processor for so many seconds, by its own clock.
BUSY = "import resource\nwhile sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) < {seconds}: pass\n"
ROWS = [
    Row("ssd_train", 5.0, 4.9, "160 steps", {"AP": 0.45, "AP50": 0.8}, by_class={"cat": 0.25}),
    Row("other", 5.0, 5.2, "14 epochs", {"AP": 0.2, "AP50": 0.81}),
    Row("third", 5.0, note="a | b\nc"),
    Row("ssd_train", 10.0, 9.9, "330 steps", {"AP": 0.5, "AP50": 0.88}),
    Row("other", 10.0, 10.1, "30 epochs", {"AP": 0.4, "AP50": 0.7}),
    Row("ssd_train --backbone resnet18", 10.0, 9.9, "500 steps", {"AP": 0.6, "AP50": 0.9}),
]


def run_python(tmp_path: Path, text: str, **more: Any) -> tuple[int, float]:
    """Run a program in Python, and return its status and processor seconds."""
    (tmp_path / "program.py").write_text(text)
    return run_measured([sys.executable, str(tmp_path / "program.py")], tmp_path / "logs" / "log", **more)


def test_time_of_children_and_their_children_counts(tmp_path: Path) -> None:
    inner = BUSY.format(seconds=0.3)
    middle = f"import subprocess, sys\n{inner}subprocess.run([sys.executable, '-c', {inner!r}])\n"
    outer = f"import subprocess, sys\n{inner}subprocess.run([sys.executable, '-c', {middle!r}])\nprint('done')\n"
    status, seconds = run_python(tmp_path, outer)
    assert status == 0
    assert seconds >= 0.9
    assert (tmp_path / "logs" / "log").read_text() == "done\n"


def test_time_until_a_line_counts_what_runs_and_what_has_ended(tmp_path: Path) -> None:
    inner = BUSY.format(seconds=0.3)
    lines = (
        "import subprocess, sys",
        f"subprocess.run([sys.executable, '-c', {inner!r}])",
        f"child = subprocess.Popen([sys.executable, '-c', {inner + 'print(1, flush=True); input()'!r}], "
        "stdin=subprocess.PIPE, stdout=subprocess.PIPE)",
        "child.stdout.readline()",
        "print('both', flush=True)",
        "child.communicate(b'x')",
    )
    marks: dict[str, float] = {}

    def read_line(line: str, read_seconds: Callable[[], float]) -> None:
        marks[line.strip()] = read_seconds()

    status, seconds = run_python(tmp_path, "\n".join(lines), read_line=read_line)
    assert status == 0
    assert marks["both"] >= 0.58  # the kernel counts by ticks
    assert seconds >= 0.6


def test_a_status_and_a_signal_are_told(tmp_path: Path) -> None:
    assert run_python(tmp_path, "raise SystemExit(7)")[0] == 7
    assert run_python(tmp_path, "import os; os.kill(os.getpid(), 9)")[0] == -9


def test_a_process_that_is_gone_has_no_time() -> None:
    assert read_tree(2**22 + 1) == 0


def make_marks(step: float, evaluation: float, start: float) -> dict[int, float]:
    """Make the marks of a measured run."""
    return {one: start + step * one + evaluation * (one > EVERY) for one in range(1, STEPS + 1)}


def test_steps_fit_into_the_budget() -> None:
    marks = make_marks(1.5, 6.0, 10.0)
    total = marks[STEPS] + 6.0 + 5.0 + 15.0  # the last evaluation, that of the test images, and the end
    length = fit_steps(300.0, marks, total, per_epoch=26)
    evaluations = -(-length.steps // length.evaluation_steps)
    used = 10.0 + 1.5 * length.steps + 6.0 * evaluations + 5.0 + 15.0
    assert 295 < used <= 300
    assert fit_steps(600.0, marks, total, per_epoch=26).steps > 2 * length.steps


def test_epochs_fit_into_the_budget() -> None:
    measured = {1: 30.0, 4: 75.0}  # 15 a start, 15 an epoch
    assert fit_epochs(300.0, measured) == 19
    assert fit_epochs(1.0, measured) == 1
    assert [fit_epochs(seconds, {0: 60.0, 1: 100.0}) for seconds in (20.0, 100.0, 299.0, 300.0)] == [1, 1, 5, 6]
    assert fit_epochs(300.0, {0: 20.0, **measured}) == 19
    with pytest.raises(TrainingError):
        fit_epochs(300.0, {1: 30.0, 4: 30.0})


def test_steps_are_marked() -> None:
    marks: dict[int, float] = {}
    for line in ("step 3/24  loss 16.6  rate 0.0004\n", "about 8:33 to step 24, by the first\n", "epoch 1\n"):
        mark_step(marks, line, lambda: 2.5)
    assert marks == {3: 2.5}


def test_results_of_others_are_coco_records(tmp_path: Path) -> None:
    boxes = [(10.0, 20.0, 40.0, 60.0), (0.0, 0.0, 5.0, 5.0)]
    records = program.to_records(7, boxes, [2, 1], [0.5, 0.75])
    assert records == [
        {"image_id": 7, "category_id": 1, "bbox": [0.0, 0.0, 5.0, 5.0], "score": 0.75},
        {"image_id": 7, "category_id": 2, "bbox": [10.0, 20.0, 30.0, 40.0], "score": 0.5},
    ]
    many = program.to_records(7, boxes * 120, [1, 2, 2, 2] * 60, [0.1] * 240)
    assert Counter(record["category_id"] for record in many) == {1: 60, 2: program.MOST_DETECTIONS}
    program.write_detections(tmp_path / "found.json", records)
    assert json.loads((tmp_path / "found.json").read_text()) == records


def test_lines_of_yolo() -> None:
    example = DetectionExample(
        encoded=b"",
        boxes_yxyx=np.array([[0.25, 0.5, 0.75, 1.0], [0, 0, 1, 1]], np.float32),
        labels=np.array([2, 1], np.int32),
        is_crowd=np.array([False, True]),
        areas=np.ones(2, np.float32),
        image_id=1,
        height=100,
        width=200,
        file_name="a.jpg",
    )
    assert list(list_yolo_lines(example)) == ["1 0.750000 0.500000 0.500000 0.500000\n"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write a data set of VOC with an image for each split, and return its folder."""
    import cv2

    folder = tmp_path / "voc"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    for number, split in enumerate(("train", "val", "test")):
        pixels = np.full((60, 80, 3), 40 * number, np.uint8)
        (folder / "JPEGImages" / f"{split}_one.jpg").write_bytes(cv2.imencode(".jpg", pixels)[1].tobytes())
        (folder / "ImageSets/Main" / f"{split}.txt").write_text(f"{split}_one\n")
        (folder / "Annotations" / f"{split}_one.xml").write_text(
            f"<annotation><filename>{split}_one.jpg</filename><size><width>80</width><height>60</height><depth>3</depth>"
            "</size><object><name>cell</name><difficult>0</difficult><bndbox><xmin>11</xmin><ymin>6</ymin><xmax>50</xmax>"
            "<ymax>36</ymax></bndbox></object></annotation>"
        )
    return folder


def test_a_data_set_is_written_for_others(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    assert write_data(data, folder) == {"train": 1, "val": 1, "test": 1}
    ((image, path),) = program.read_images(folder, "test")
    assert path.read_bytes() == (data / "JPEGImages" / "test_one.jpg").read_bytes()
    truth = json.loads((folder / "test.json").read_text())
    (category_id,) = program.read_category_ids(folder)
    left, top, width, height = truth["annotations"][0]["bbox"]
    (line,) = (folder / "labels" / "test" / path.name).with_suffix(".txt").read_text().splitlines()
    shares = [float(word) for word in line.split()]
    expected = [0, (left + width / 2) / 80, (top + height / 2) / 60, width / 80, height / 60]
    assert shares == pytest.approx(expected, abs=1e-6)
    found = program.to_records(image["id"], [(left, top, left + width, top + height)], [category_id], [0.9])
    assert score_detections(folder / "test.json", found).figures["AP"] == pytest.approx(1)
    assert "test: images/test" in (folder / "data.yaml").read_text().splitlines()


def test_test_images_are_needed(data: Path, tmp_path: Path) -> None:
    (data / "ImageSets/Main/test.txt").unlink()
    with pytest.raises(ValueError, match="test"):
        write_data(data, tmp_path / "written")


def test_margins_are_of_each_budget() -> None:
    margins = list_margins(ROWS, "ssd_train")
    assert [(margin.minutes, margin.other.program, margin.is_behind) for margin in margins] == [
        (5.0, "other", True),
        (10.0, "other", False),
    ]
    assert margins[0].differences == pytest.approx({"AP": 0.25, "AP50": -0.01})


def test_table_has_what_failed() -> None:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in format_rows(ROWS).splitlines()]
    assert cells[2] == ["ssd_train", "5", "4.9", "160 steps", ".450", ".800", ".250", ""]
    assert cells[4] == ["third", "5", "", "", "", "", "", "a / b c"]
    assert len(cells) == 2 + len(ROWS)


def test_results_hold_machine_settings_and_table() -> None:
    machines = [
        MachineResults({"machine": name, "bfloat16": "", "date": "now"}, {"other": "its own"}, ROWS) for name in "ab"
    ]
    lines = format_results(machines, "ssd_train", "").splitlines()
    assert [line[:4] for line in lines if line.startswith("## ")] == ["## a", "## b"]
    assert lines.count("- other: its own") == lines.count("- date: now") == 2
    assert sum(line.startswith("| ") for line in lines) == 2 * (2 + len(ROWS))


def test_what_was_seen_is_added_by_machine(tmp_path: Path) -> None:
    first = MachineResults({"machine": "a", "bfloat16": "AMX"}, {"other": "old"}, ROWS)
    path = tmp_path / "seen.json"
    assert read_results(path) == []
    again = replace(ROWS[1], figures={"AP": 0.3, "AP50": 0.9})
    new = MachineResults({"machine": "a", "bfloat16": "AMX"}, {"ssd_train": "new"}, [again])
    # Without these instructions it is another machine.
    other = MachineResults({"machine": "a", "bfloat16": ""}, {}, [again])
    write_results_file(path, merge_results(merge_results([first], new), other))
    both, alone = read_results(path)
    assert (both.settings, alone) == ({"other": "old", "ssd_train": "new"}, other)
    assert [row for row in both.rows if row.program == "other" and row.minutes == 5.0] == [again]
    assert len(both.rows) == len(ROWS)


class Fake:
    """A program that fails, at once or while it trains, or detects nothing."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.settings, self.folder, self.prepared = name, "none", folder / name, 0

    def prepare(self, minutes: float) -> None:
        """Fail if it is named so."""
        self.prepared += 1
        if self.name == "uninstallable":
            raise InstallationError("no such release")
        if self.name == "hasty" and minutes < 2:
            raise TrainingError("too little time")

    def train(self, minutes: float, folder: Path) -> tuple[float, str]:
        """Pretend."""
        return 60 * minutes, "1 epoch"

    def score(self, folder: Path) -> Scores:
        """Score what detects nothing."""
        folder.mkdir(parents=True)
        program.write_detections(folder / "detections.json", [])
        return score_by_coco(self.folder.parent / "output" / "data" / "test.json", folder / "detections.json")


def test_what_cannot_be_installed_is_in_the_table(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    learners = [Fake(tmp_path, "ssd_train"), Fake(tmp_path, "uninstallable"), Fake(tmp_path, "hasty")]
    monkeypatch.setattr(learning, "make_learners", lambda *_: learners)
    task = replace(learning.TASKS["detection"], results=tmp_path / "results.md")
    monkeypatch.setitem(learning.TASKS, "detection", task)
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None)
    output = tmp_path / "output"
    arguments = ["--data", str(data), "--budgets", "2,1", "--output", str(output), "--write_results"]
    assert learning.main(arguments) == 1
    rows = learning.read_rows(output / "rows.json")
    assert [(row.program, row.minutes, row.used, row.figures, row.note) for row in rows] == [
        ("ssd_train", 1.0, 1.0, {"AP": 0.0, "AP50": 0.0}, ""),
        ("uninstallable", 1.0, 0.0, {}, "no such release"),
        ("hasty", 1.0, 0.0, {}, "too little time"),
        ("ssd_train", 2.0, 2.0, {"AP": 0.0, "AP50": 0.0}, ""),
        ("uninstallable", 2.0, 0.0, {}, "no such release"),
        ("hasty", 2.0, 2.0, {"AP": 0.0, "AP50": 0.0}, ""),
    ]
    assert [one.prepared for one in learners] == [2, 1, 2]
    categories = json.loads((output / "data" / "test.json").read_text())["categories"]
    nothing = {one["name"]: 0.0 for one in categories}
    assert [dict(row.by_class) for row in rows] == [nothing, {}, {}, nothing, {}, nothing]
    assert (tmp_path / "results.md").read_text().count("no such release") == 2
    assert learning.main(arguments) == 1  # what has a result is not trained again
    assert [one.prepared for one in learners] == [2, 2, 3]
    assert "uninstallable" in capsys.readouterr().out


def test_selection(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["--output", str(tmp_path / "output")]
    words = ["--data", str(tmp_path), *output]
    options = learning.parse([*words, "--budgets", "10,5", "--variant=--backbone resnet18"])
    assert options.budgets == (5.0, 10.0)
    names = [one.name for one in learning.make_learners(options, tmp_path, tmp_path)]
    ours, peers = names[:2], names[2:]
    assert ours == ["ssd_train", "ssd_train --backbone resnet18"]
    assert peers.pop(1) == "ultralytics YOLOv8n, more updates"
    assert peers == ["ultralytics YOLOv8n", "torchvision SSDLite320", "torchvision SSD300", "plain Keras SSD"]
    assert learning.parse([*words, "--task", "classes"]).budgets == (2.0, 5.0, 10.0)
    options = learning.parse([*words, "--task", "classes", "--only", "ours", "timm_adamw"])
    names = [one.name for one in learning.make_learners(options, tmp_path, tmp_path)]
    assert names == ["resnet_train", "timm, adamw"]
    wrong = (
        ["--only", "timm_sgd"],
        ["--budgets", "0"],
        ["--data", str(tmp_path / "none")],
        ["--output", output[1], "--seed", "1"],
    )
    for flag, *more in wrong:
        with pytest.raises(SystemExit) as end:
            learning.parse([*words, flag, *more])
        assert end.value.code == 2
        assert flag in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("make", "flags", "chosen"),
    [
        (Ours, "", ["--backbone=resnet18", "--batch_size=2"]),
        (Ours, "--batch_size 2", ["--backbone=resnet18"]),
        (OurClassifier, "", ["--model=resnet18", "--image_size=96", "--batch_size=2", "--color_jitter=0.2"]),
        (OurClassifier, "--image_size 96", ["--model=resnet18", "--batch_size=2", "--color_jitter=0.2"]),
    ],
)
def test_our_program_has_the_network_and_the_batch_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: type[Ours], flags: str, chosen: list[str]
) -> None:
    settings = [{"flag": "ema", "value": 1}, {"flag": "color_jitter", "value": 0.2}]
    recipe = [*settings, *([] if "image_size" in flags else [{"flag": "image_size", "value": 96}])]
    plan = {
        "network": {"backbone": "resnet18"},
        "model": "resnet18",
        "recipe": recipe,
        "global_batch": 2,
        "steps_per_epoch": 103,
    }
    done = subprocess.CompletedProcess([], 0, json.dumps(plan), "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    commands: list[list[str]] = []

    def run(command: list[str], log: Path, variables: Any, read_line: Any = None) -> float:
        commands.append(command)
        for step in range(1, 25 if read_line else 1):
            read_line(f"step {step}/24  loss 9", lambda step=step: 10.0 + step)
        return 40.0

    monkeypatch.setattr("benchmarks.learners.run", run)
    ours = make(tmp_path, tmp_path, 0, flags)
    ours.prepare(5.0)
    _, schedule = ours.train(5.0, tmp_path / "run")
    steps = f"{commands[1][-4].removeprefix('--steps=')} steps of 2"
    assert schedule.split(", ")[:-1] == ["resnet18", *["96"] * ("--image_size=96" in chosen), steps]
    names = ("--backbone=", "--model=", "--image_size=", "--batch_size=", "--color_jitter=")
    for command in commands:
        assert [word for word in command if word.startswith(names)] == chosen


def test_a_long_epoch_is_measured_once_and_never_trained_again(tmp_path: Path) -> None:
    trained: list[int] = []

    class Slow(KerasPeer):
        def _train(self, epochs: int, folder: Path, read_line: ReadLine | None = None) -> float:
            trained.append(epochs)
            if read_line:
                read_line(f"{program.BEGINS}\n", lambda: 20.0)
            folder.mkdir(parents=True)
            (folder / "weights").write_text(str(epochs))
            return 20.0 + 80.0 * epochs

    def train(minutes: float) -> tuple[float, str]:
        peer = Slow("slow", "", "slow.py", (), tmp_path, tmp_path, 0)
        peer.prepare(minutes)
        return peer.train(minutes, tmp_path / f"{minutes:g}")

    assert train(1.0) == (100.0, "1 epochs")
    assert (train(5.5), trained) == ((260.0, "3 epochs"), [1, 3])
    assert (train(7.0), trained) == ((420.0, "5 epochs"), [1, 3, 4, 5])
    assert (train(6.0), trained) == ((340.0, "4 epochs"), [1, 3, 4, 5])
    assert [(tmp_path / name / "weights").read_text() for name in ("1", "5.5", "7", "6")] == ["1", "3", "5", "4"]


def test_only_test_images_are_scored(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text('{"split": "val"}')
    with pytest.raises(TrainingError, match="val"):
        Ours(tmp_path, tmp_path, 0).score(tmp_path)
    with pytest.raises(TrainingError, match="val"):
        OurClassifier(tmp_path, tmp_path, 0).score(tmp_path)


def test_named_classes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").write_text('{"split": "test", "top_1": 0.25, "top_5": 0.75}')
    assert OurClassifier(tmp_path, tmp_path, 0).score(tmp_path).figures == {"top-1": 0.25, "top-5": 0.75}
    classes = [*"abcdef"]
    for name in ("a/1.jpg", "b/1.jpg", "f/1.jpg"):
        (tmp_path / "test" / name).parent.mkdir(parents=True)
        (tmp_path / "test" / name).touch()
    named = dict.fromkeys(("a/1.jpg", "b/1.jpg", "f/1.jpg"), classes)
    assert count_right(tmp_path / "test", named) == pytest.approx({"top-1": 1 / 3, "top-5": 2 / 3})
    with pytest.raises(TrainingError, match="2 of 3"):
        count_right(tmp_path / "test", {name: classes for name in named if name[0] != "f"})


def test_epochs_of_the_measured_runs_differ() -> None:
    assert len(set(EPOCHS)) == len(EPOCHS) == 2
