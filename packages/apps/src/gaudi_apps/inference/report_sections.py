"""Read what a run left in its folder, and make the parts of its page: figures, tables and charts."""

from __future__ import annotations

import base64
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from gaudi_apps.inference.report_charts import COLOURS, Line, draw_bars, draw_lines, draw_reliability, show_text
from gaudi_apps.training.history import Row, read_history
from gaudi_apps.training.reports import format_duration, smooth
from gaudi_apps.training.run_dir import ANALYSIS, RUN_FILE, RUN_LOG, RunFolder
from gaudi_datasets.documents import load_yaml
from gaudi_datasets.errors import MissingInputError
from gaudi_datasets.program import count_things
from gaudi_ops.files import read_file, read_text

Rows = list[tuple[str, str]]
LOSSES = ("loss", "class_loss", "box_loss")
SCORES = (("AP", "AP50", "AP75"), ("top_1", "top_5"))
SHOWN_CLASSES = 300  # in tables
SHOWN_CURVES = 10  # a colour each
NUM_THRESHOLDS = 101
MAX_IMAGES = 24
MAX_IMAGE_BYTES = 150_000
JPEG = b"\xff\xd8\xff"
TIDE = {
    "Cls": "wrong class",
    "Loc": "box not exact",
    "Both": "class and box",
    "Dupe": "second box",
    "Bkg": "nothing there",
    "Miss": "missed",
}


def list_run(run: RunFiles) -> Rows:
    """List command, plan, speed and environment."""
    log = run.log
    plan, data, starts = log.get("plan", {}), log.get("data", {}), log.get("starts", [])
    rows = [("Folder", str(run.folder))]
    if run.evaluation.get("export"):
        rows.append(("Metrics computed by", str(run.evaluation["export"])))
    for number, start in enumerate(starts, 1):
        rows.append((f"Command {number}" if len(starts) > 1 else "Command", shlex.join(map(str, start["command"]))))
    if data:
        counted = [count_things(data[name], word) for name, word in (("images", "image"), ("classes", "class"))]
        rows.append(("Training data", ", ".join(counted if data.get("classes") else counted[:1])))
    if plan:
        steps, images = count_things(plan["total_steps"], "step"), count_things(plan["global_batch"], "image")
        rows.append(("Plan", f"{steps} of {images}, epochs: {plan['epochs']:.4g}"))
        warmup = count_things(plan["warmup_steps"], "step")
        rates = f"{plan['lr_schedule']}, peak {plan['peak_learning_rate']:.4g}, warm-up {warmup}"
        rows.append(("Learning rate", rates))
    if starts:
        last = starts[-1]
        seconds = sum(float(start["seconds"]) for start in starts)
        rows.append(("Time", f"{format_duration(seconds)} in {count_things(len(starts), 'start')}"))
        if last.get("images_per_second"):
            rows.append(("Speed", f"{last['images_per_second']:.1f} images/s"))
        rows += [(str(name), str(value)) for name, value in last.get("environment", {}).items()]
    return rows


def list_evaluated(data: Mapping[str, Any]) -> Rows:
    """List the data that was evaluated."""
    words = {"images": "image", "boxes": "box", "crowds": "crowd", "classes": "class", "detections": "detection"}
    counts = [count_things(int(data[name]), word) for name, word in words.items() if data.get(name)]
    return [("Evaluated on", ", ".join([*filter(None, [str(data.get("name", ""))]), *counts]))]


def list_figures(run: RunFiles) -> Rows:
    """List the metrics of ``evaluation.json`` that stand at the top."""
    names = ("AP", "AP50", "AP75", "AR100") if is_detection(run) else ("top_1", "top_5", "loss")
    figures = read_figures(run)
    shown = [(name, figures[name]) for name in names if name in figures]
    rows = [(name, "-" if value is None else f"{value:.4f}") for name, value in shown]  # a dash: it is not defined
    if "threshold" in run.analysis:
        rows.append(("best threshold", f"{run.analysis['threshold']:.2f}"))
    images, total = run.evaluation.get("images"), run.evaluation.get("images_total")
    if images is not None:
        name = f"{run.evaluation.get('split') or ''} images".strip()
        rows.append((name, f"{images}" if images == total else f"{images} of {total}"))
    return rows


def is_detection(run: RunFiles) -> bool:
    """Return whether a run is of a detector, by its evaluation."""
    return "figures" in run.evaluation


def read_figures(run: RunFiles) -> dict[str, float | None]:
    """Return the metrics of ``evaluation.json`` by name."""
    if is_detection(run):
        return dict(run.evaluation["figures"])
    return {name: run.evaluation[name] for name in ("top_1", "top_5", "loss") if name in run.evaluation}


def draw_training(run: RunFiles) -> list[tuple[str, Markup]]:
    """Draw loss, learning rate and metrics over the steps."""
    charts = []
    steps = [row["step"] for row in run.history]
    lines = []
    for name, colour in zip(LOSSES, COLOURS, strict=False):
        values = np.array([row.get(name, np.nan) for row in run.history], np.float64)
        if np.isfinite(values).any():
            lines.append(Line("", steps, values, colour, is_faint=True))
            lines.append(Line(name.replace("_", " "), steps, smooth(values, max(1, len(values) // 50)), colour))
    if lines:
        charts.append(("Loss", draw_lines(lines, title="loss by step", x_label="step", y_range=(0, None))))
    if chart := draw_scores([("", run.evaluations)]):
        charts.append(("Metrics by validation", chart))
    rates = [row.get("learning_rate", np.nan) for row in run.history]
    if np.isfinite(rates).any():
        rate = Line("learning rate", steps, rates, COLOURS[4])
        charts.append(("Learning rate", draw_lines([rate], title="learning rate", x_label="step", y_range=(0, None))))
    return charts


def draw_scores(runs: Sequence[tuple[str, Sequence[Mapping[str, float]]]]) -> Markup | None:
    """Draw the metrics of evaluations by step: several of one run, or the first one of several named runs."""
    lines: list[Line] = []
    for name, rows in runs:
        names = next((scores for scores in SCORES if any(scores[0] in row for row in rows)), ())
        for score in names[: 1 if name else None]:
            points = [(row["step"], row[score]) for row in rows if score in row]
            if not points:
                continue
            colour = COLOURS[len(lines) % len(COLOURS)]
            lines.append(Line(f"{name} {score}".strip(), [x for x, _ in points], [y for _, y in points], colour))
    return draw_lines(lines, title="metrics by step", x_label="step", y_range=(0, None)) if lines else None


def list_classes(run: RunFiles) -> tuple[list[str], list[list[Any]], str]:
    """List metrics of each class: headings, rows of values, and a note on classes that are left out."""
    classes = run.evaluation.get("classes", [])
    names = name_classes(classes)
    if is_detection(run):
        counts = dict(zip(name_analysed(run), run.analysis.get("classes", []), strict=True))
        headings = ["class", "boxes", "AP", "AP50", "best F1", "at threshold"]
        rows = [_describe_class(name, one, counts.get(name)) for name, one in zip(names, classes, strict=True)]
        rows.sort(key=lambda row: -1 if row[1] is None else -row[1])
    else:
        headings = ["class", "images", "right", "accuracy", "most often taken for"]
        rows = [
            [name, one["images"], one["right"], one["accuracy"], _name_confused(one)]
            for name, one in zip(names, classes, strict=True)
        ]
        rows.sort(key=lambda row: 2.0 if row[3] is None else row[3])
    left_out = len(rows) - SHOWN_CLASSES
    return headings, rows[:SHOWN_CLASSES], f"{left_out} more classes are in evaluation.json" if left_out > 0 else ""


def name_classes(classes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of classes; beside those that several have, a number in the order of the classes."""
    uses, seen = Counter(one["name"] for one in classes), Counter[str]()
    names = []
    for one in classes:
        seen[one["name"]] += 1
        names.append(one["name"] if uses[one["name"]] == 1 else f"{one['name']} ({seen[one['name']]})")
    return names


def name_analysed(run: RunFiles) -> list[str]:
    """Name the classes of ``analysis.json`` as those of ``evaluation.json``.

    It has only the classes with the most boxes: where one of several of a name is left out, they get no numbers, for
    nothing tells which it is.
    """
    classes = run.analysis.get("classes", [])
    uses, scored = (Counter(one["name"] for one in each) for each in (classes, run.evaluation.get("classes", [])))
    numbered = zip(name_classes(classes), classes, strict=True)
    return [name if uses[one["name"]] == scored[one["name"]] else one["name"] for name, one in numbered]


def _describe_class(name: str, one: Mapping[str, Any], counts: Mapping[str, Any] | None) -> list[Any]:
    if counts is None:
        return [name, None, one["ap"], one["ap50"], None, None]
    best = float(compute_f1(counts).max(initial=0)) if counts["truth"] else None
    threshold = f"{counts['threshold']:.2f}" if best else None
    return [name, int(counts["truth"]), one["ap"], one["ap50"], best, threshold]


def _name_confused(one: Mapping[str, Any]) -> str:
    taken = sorted(one["taken_for"].items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{show_text(name, 40)} ({count})" for name, count in taken)


def compute_f1(counts: Mapping[str, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Compute F1 of a class, or of all, at each threshold."""
    hits, alarms = np.array(counts["hits"], np.float64), np.array(counts["false_alarms"], np.float64)
    return np.asarray(2 * hits / np.maximum(hits + alarms + counts["truth"], 1))


def sum_classes(run: RunFiles) -> dict[str, Any]:
    """Return hits and false alarms of all classes together, at each threshold, and boxes of the truth.

    An evaluation of an earlier version has the sums of the classes that are listed only.
    """
    if "all_classes" in run.analysis:
        return dict(run.analysis["all_classes"])
    classes = run.analysis["classes"]
    sums = {name: np.sum([one[name] for one in classes], axis=0).tolist() for name in ("hits", "false_alarms")}
    return {**sums, "truth": sum(one["truth"] for one in classes)}


def _sort_analysed(run: RunFiles) -> list[tuple[str, Mapping[str, Any]]]:
    """Return names and counts of the classes that were analysed, those with the most boxes first."""
    named = zip(name_analysed(run), run.analysis["classes"], strict=True)
    return sorted(named, key=lambda pair: -pair[1]["truth"])


def draw_thresholds(run: RunFiles) -> list[tuple[str, Markup]]:
    """Draw precision over recall, and F1 over the threshold, of the classes with the most boxes."""
    classes = _sort_analysed(run)
    shown = [(name, one) for name, one in classes if one["truth"]][:SHOWN_CURVES]
    recall, threshold = np.linspace(0, 1, NUM_THRESHOLDS), run.analysis["threshold"]
    xs = np.linspace(0, 1, NUM_THRESHOLDS)
    curves = [
        Line(name, recall, one["precision"], colour)
        for (name, one), colour in zip(shown, COLOURS, strict=False)
        if one["precision"] is not None
    ]
    scores = [Line(name, xs, compute_f1(one), colour) for (name, one), colour in zip(shown, COLOURS, strict=False)]
    scores.append(Line("all", xs, compute_f1(sum_classes(run)), "#0f172a", is_dashed=True))
    more = f", the {SHOWN_CURVES} classes with the most boxes" if len(classes) > SHOWN_CURVES else ""
    charts = []
    if curves:
        chart = draw_lines(
            curves, title="precision by recall", x_label="recall at IoU 0.5", x_range=(0, 1), y_range=(0, 1)
        )
        charts.append((f"Precision by recall{more}", chart))
    chart = draw_lines(
        scores, title="F1 by threshold", x_label="threshold of the score", x_range=(0, 1), y_range=(0, 1),
        mark="f1-mark", marked_x=threshold,
    )  # fmt: skip
    charts.append((f"F1 by threshold{more}", chart))
    return charts


def list_counts(run: RunFiles) -> dict[str, Any]:
    """Return what the slider of the threshold shows: names and counts by threshold, of all classes and of each."""
    classes = _sort_analysed(run)
    left_out = int(run.analysis.get("classes_left_out", 0))
    is_all = not left_out or "all_classes" in run.analysis
    name = "all classes" if is_all else f"the {len(classes)} classes with the most boxes"
    together = sum_classes(run) | {"name": name}
    rows = [
        {"truth": int(one["truth"]), "hits": list(map(int, one["hits"])), "alarms": list(map(int, one["false_alarms"]))}
        for one in (together, *(one for _, one in classes))
    ]
    return {
        "start": round(float(run.analysis["threshold"]) * (NUM_THRESHOLDS - 1)),
        "names": [together["name"], *(name for name, _ in classes)],
        "rows": rows,
        "left_out": left_out,
    }


def list_confidence(run: RunFiles) -> dict[str, Any]:
    """Return the same for a classifier: images that are answered at each threshold, and right answers."""
    answered, right = list(map(int, run.analysis["answered"])), list(map(int, run.analysis["right"]))
    row = {"truth": answered[0], "hits": right, "alarms": [a - b for a, b in zip(answered, right, strict=True)]}
    return {"start": 50, "names": ["all classes"], "rows": [row], "left_out": 0}


def tabulate_confusion(run: RunFiles) -> dict[str, Any]:
    """Return names and rows of cells, each a count and its share of the row, of the confusion matrix."""
    confusion = run.analysis["confusion"]
    names, background = list(confusion["names"]), bool(confusion["background"])
    matrix = np.array(confusion["matrix"], np.int64)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    cells = [
        [(int(count), float(share)) for count, share in zip(counts, row, strict=True)]
        for counts, row in zip(matrix, shares, strict=True)
    ]
    return {
        "columns": [*names, *["missed"] * background],
        "rows": list(zip([*names, *["nothing there"] * background], cells, strict=True)),
        "left_out": int(confusion["left_out"]),
        "threshold": run.analysis.get("threshold") if background else None,
    }


def draw_tide(run: RunFiles) -> Markup:
    """Draw by how much AP50 would rise without each kind of error."""
    tide = run.analysis["tide"]
    rows = []
    for name, meaning in TIDE.items():
        delta, count = float(tide["delta_ap"][name]), int(tide["counts"][name])
        rows.append((f"{meaning} ({name})", max(0.0, delta), f"+{delta:.3f}, {count_things(count, 'error')}"))
    return draw_bars(rows, title="AP50 lost by kind of error")


def draw_calibration(run: RunFiles) -> Markup:
    """Draw the share that is right by score."""
    rows = run.analysis["calibration"]["bins"]
    bins = [(one["low"], one["high"], one["score"], one["right"], one["count"]) for one in rows]
    label = "score of a detection" if is_detection(run) else "probability of the first answer"
    return draw_reliability(bins, title="share that is right by score", x_label=label)


def list_images(run: RunFiles, missing: dict[str, str]) -> list[dict[str, str]]:
    """Return source, file and caption of the images with the most errors; those that cannot be had are named."""
    images, failed = [], []
    for one in run.analysis.get("worst", [])[:MAX_IMAGES]:
        try:
            source = embed_image(run.folder, str(one["image"]))
        except (OSError, ValueError) as error:
            failed.append(show_text(error))
            continue
        if is_detection(run):
            counts = ((one["hits"], "hit"), (one["false_alarms"], "false alarm"), (one["misses"], "miss"))
            caption = ", ".join(count_things(int(count), word) for count, word in counts)
        else:
            caption = f"{one['taken_for']} {one['probability']:.2f}, is {one['truth']}"
        images.append({"source": source, "file": str(one["file_name"] or one["image_id"]), "caption": caption})
    if failed:
        missing[f"{len(failed)} of the images"] = failed[0]
    return images


def embed_image(folder: Path, name: str) -> str:
    """Return a JPEG of a run's folder as a data URI.

    Raises:
        ValueError: it is outside of the folder, or no JPEG of at most `MAX_IMAGE_BYTES`.
        OSError: it cannot be read.
    """
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is outside of the run")
    content = read_file(path, limit=MAX_IMAGE_BYTES)
    if not content.startswith(JPEG):
        raise ValueError(f"{name} is no JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


MAX_FILE_BYTES = 64 * 2**20  # of a JSON file; that of 5000 images and 80 classes has 200 kB


class RunFiles(NamedTuple):
    """The files of a run.

    Attributes:
        folder: of the run.
        settings: of ``run.json``.
        flags: of ``config.yaml``, with the steps that were trained.
        log: of ``run_log.json``: plan, data, and the command, speed and environment of each start.
        history: rows of ``history.jsonl``.
        evaluations: rows of ``evaluations.jsonl``.
        evaluation: of ``evaluation.json``.
        analysis: of ``analysis.json``.
        missing: what could not be had, by what a reader looks for.
    """

    folder: Path
    settings: Mapping[str, Any]
    flags: Mapping[str, Any]
    log: Mapping[str, Any]
    history: list[Row]
    evaluations: list[Row]
    evaluation: Mapping[str, Any]
    analysis: Mapping[str, Any]
    missing: dict[str, str]


def read_run(folder: Path) -> RunFiles:
    """Read the files of a run.

    Raises:
        MissingInputError: there is no folder, or no run in it.
        DataError: its ``run.json`` is damaged.
    """
    if not folder.is_dir():
        raise MissingInputError("there is no such folder", path=folder, remedy="give the --model_dir of a run")
    settings = RunFolder(folder).read_settings()
    if settings is None and not (folder / "evaluation.json").is_file():
        raise MissingInputError(
            f"holds no run: there is no {RUN_FILE}", path=folder, remedy="give the --model_dir of a run"
        )
    missing: dict[str, str] = {}
    if settings is None:
        missing["Settings"] = f"there is no {RUN_FILE}"
    flags = _read_object(folder / "config.yaml", "Flags", missing)
    log = _read_object(folder / RUN_LOG, "Command, plan, speed and environment", missing)
    plan = log.get("plan")
    total = plan.get("total_steps") if isinstance(plan, dict) else None
    # Of a length that was fitted to a time, the file has the first fit, by which a run goes on.
    if total and flags.get("steps") not in (None, 0, total):
        flags["steps"] = f"{total}, at first {flags['steps']}"
    return RunFiles(
        folder,
        settings or {},
        flags,
        log,
        _read_rows(folder / "history.jsonl", "Curves", missing),
        _read_rows(folder / "evaluations.jsonl", "Metrics during training", missing),
        _read_object(folder / "evaluation.json", "Metrics", missing),
        _read_object(folder / ANALYSIS, "Errors, thresholds, calibration and images", missing),
        missing,
    )


def _read_object(path: Path, purpose: str, missing: dict[str, str]) -> dict[str, Any]:
    """Read a JSON or YAML file that holds an object; where it does not, say so and return an empty one."""
    try:
        found = load_yaml(path) if path.suffix == ".yaml" else json.loads(read_text(path, limit=MAX_FILE_BYTES))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except FileNotFoundError:
        missing[purpose] = f"there is no {path.name}"
    except (OSError, ValueError, RecursionError) as error:
        missing[purpose] = f"{path.name} cannot be read: {next(iter(str(error).splitlines()), '')}"
    return {}


def _read_rows(path: Path, purpose: str, missing: dict[str, str]) -> list[Row]:
    """Read the rows of a history that hold a step and numbers."""
    try:
        rows = read_history(path)
    except (OSError, ValueError) as error:
        missing[purpose] = f"{path.name} cannot be read: {error}"
        return []
    if not rows:
        missing[purpose] = f"{path.name} has no rows" if path.is_file() else f"there is no {path.name}"
    return rows
