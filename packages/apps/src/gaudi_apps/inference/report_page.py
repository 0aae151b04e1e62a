"""Write the page of a run, and the page that compares several: one file each, which asks nobody for anything.

What exports cost is on the page of their run, and is printed when they are made.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gaudi_apps.inference import report_sections as sections
from gaudi_apps.inference.exported_models import read_manifest, read_manifests
from gaudi_apps.inference.report_charts import COLOURS, Line, draw_lines, show_text
from gaudi_apps.inference.report_sections import RunFiles, read_run
from gaudi_apps.training.reports import smooth
from gaudi_apps.training.run_dir import REPORT, RunFolder
from gaudi_datasets.errors import FlagError, UnsafeError
from gaudi_datasets.program import count_things, make_console
from gaudi_ops.files import read_file, write_file
from gaudi_ops.program import say

if TYPE_CHECKING:
    from gaudi_apps.inference.converters import Agreement
    from gaudi_apps.inference.exporter import Export

MARK = '<meta name="generator" content="gaudi-apps">'
MAX_RUNS = len(COLOURS)
LONGEST_TITLE = 300
FAULTS = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into the folder of a run, from the files that are there.

    Returns:
        the page.

    Raises:
        MissingInputError: there is no run.
        DataError: its ``run.json`` is damaged.
        UnsafeError: another program's ``report.html`` is there.
    """
    page = folder / REPORT
    _write(page, make_report(read_run(folder)))
    RunFolder(folder).register_files(page)
    return page


def renew_report(folder: Path) -> None:
    """Write ``report.html`` again where it is, after what it shows has changed; see `write_report`."""
    if (folder / REPORT).is_file():
        write_report(folder)


def write_comparison(folders: Sequence[Path], page: Path) -> None:
    """Write a page that compares runs.

    Raises:
        MissingInputError, DataError, UnsafeError: as by `write_report`.
        FlagError: there are too few or too many runs, or they are of detectors and of classifiers.
    """
    if not 2 <= len(folders) <= MAX_RUNS:
        raise FlagError(f"{len(folders)} given: must be 2 to {MAX_RUNS} runs", flag="run_dirs")
    runs = [read_run(folder) for folder in folders]
    if len({sections.is_detection(run) for run in runs if run.evaluation}) > 1:
        raise FlagError("detectors and classifiers have other metrics; compare them apart", flag="run_dirs")
    page.parent.mkdir(parents=True, exist_ok=True)
    _write(page, make_comparison(runs))


def _write(page: Path, html: str) -> None:
    if page.exists() and MARK not in read_file(page)[:4096].decode(errors="replace"):
        raise UnsafeError("is there, and no report of ours", path=page, remedy="move it away")
    write_file(page, html.encode(errors="replace"))


def make_report(run: RunFiles) -> str:
    """Make the page of a run as HTML. Parts that its files do not hold are named on it."""
    missing = dict(run.missing)
    attempt = functools.partial(_attempt, missing)
    has_errors = bool(run.analysis.get("classes"))
    if reason := attempt("Errors", lambda: run.analysis["missing"].get("errors"), use="missing" in run.analysis):
        missing["Errors, thresholds and calibration"] = str(reason)
    if {"step"} <= run.analysis.keys() & run.evaluation.keys() and run.analysis["step"] != run.evaluation["step"]:
        missing["Errors of the same step"] = f"they are of step {run.analysis['step']}"
    parts = {
        "figures": attempt("Metrics", sections.list_figures, run, use=bool(run.evaluation)),
        "all_figures": attempt(
            "All metrics", lambda: list(sections.read_figures(run).items()), use=bool(run.evaluation)
        ),
        "rows": attempt("Command, plan and speed", sections.list_run, run),
        "data": attempt("Data", sections.list_evaluated, run.analysis.get("data"), use="data" in run.analysis),
        "charts": attempt("Curves", sections.draw_training, run),
        "classes": attempt("Classes", sections.list_classes, run, use=bool(run.evaluation)),
        "threshold_charts": attempt("Thresholds", sections.draw_thresholds, run, use=has_errors),
        "counts": attempt("Thresholds", sections.list_counts, run, use=has_errors)
        or attempt("Thresholds", sections.list_confidence, run, use="answered" in run.analysis),
        "confusion": attempt("Confusion", sections.tabulate_confusion, run, use="confusion" in run.analysis),
        "tide": attempt("Kinds of error", sections.draw_tide, run, use="tide" in run.analysis),
        "calibration": attempt("Calibration", sections.draw_calibration, run, use="calibration" in run.analysis),
        "exports": attempt("Exports", lambda: tabulate([*read_manifests(run.folder).values()])),
        "threshold": run.analysis.get("threshold"),
        "ece": attempt("Calibration", lambda: run.analysis["calibration"]["ece"], use="calibration" in run.analysis),
        "images": attempt("Images", sections.list_images, run, missing, use="worst" in run.analysis),
    }
    return (
        _open_templates()
        .get_template("report.html.j2")
        .render(
            run=run,
            name=run.folder.resolve().name,
            program=attempt("Program", lambda: run.log.get("program", "")),
            step=run.evaluation.get("step"),
            is_detection=sections.is_detection(run),
            missing=missing,
            **parts,
        )
    )


def _attempt(missing: dict[str, str], part: str, make: Callable[..., Any], *arguments: Any, use: bool = True) -> Any:
    """Make a part of the page; None where the files do not hold what it needs, which is noted."""
    if not use:
        return None
    try:
        return make(*arguments)
    except FAULTS as error:
        missing[part] = f"the files of the run are not as expected ({type(error).__name__}: {error})"
        return None


def make_comparison(runs: Sequence[RunFiles]) -> str:
    """Make the page that compares runs as HTML."""
    names = name_runs([run.folder for run in runs])
    missing: dict[str, str] = {}
    for name, run in zip(names, runs, strict=True):
        missing |= {f"{name}: {part}": reason for part, reason in run.missing.items()}
    attempt = functools.partial(_attempt, missing)
    data = attempt("Data", lambda: {_identify_data(run.analysis["data"]) for run in runs if run.analysis}) or ()
    notes = ["The runs were evaluated on different images: their metrics cannot be compared."] * (len(data) > 1)
    notes += [
        f"The metrics of {show_text(name, 60)} are those of its export {show_text(run.evaluation['export'], 60)}."
        for name, run in zip(names, runs, strict=True)
        if run.evaluation.get("export")
    ]
    charts = [
        ("Loss", attempt("Loss", _overlay_losses, names, runs)),
        ("Metric", attempt("Metrics during training", lambda: sections.draw_scores(_pair_scores(names, runs)))),
    ]
    return (
        _open_templates()
        .get_template("compare.html.j2")
        .render(
            names=names,
            notes=notes,
            figures=attempt("Metrics", lambda: _align([sections.read_figures(run) for run in runs], True)) or [],
            classes=attempt("Classes", lambda: _align([_read_class_scores(run) for run in runs], True)) or [],
            score="AP" if any(map(sections.is_detection, runs)) else "accuracy",
            about=attempt("Plan and speed", lambda: _align([dict(sections.list_run(run)) for run in runs])) or [],
            flags=[row for row in _align([run.flags for run in runs]) if len({repr(value) for value in row[1]}) > 1],
            charts=[(title, chart) for title, chart in charts if chart],
            missing=missing,
        )
    )


def _identify_data(data: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return what differs where others of the images were evaluated: the data set, and how many of its images."""
    return data.get("fingerprint"), data.get("images")


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders, or their paths where two names are alike."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _overlay_losses(names: Sequence[str], runs: Sequence[RunFiles]) -> Markup | None:
    lines = []
    for name, run, colour in zip(names, runs, COLOURS, strict=False):
        values = np.array([row.get("loss", np.nan) for row in run.history], np.float64)
        if np.isfinite(values).any():
            steps = [row["step"] for row in run.history]
            lines.append(Line(name, steps, smooth(values, max(1, len(values) // 50)), colour))
    return draw_lines(lines, title="loss by step", x_label="step", y_range=(0, None)) if lines else None


def _pair_scores(names: Sequence[str], runs: Sequence[RunFiles]) -> list[tuple[str, Sequence[Mapping[str, float]]]]:
    """Return names and evaluations; the last evaluation alone where there was none during training."""
    pairs: list[tuple[str, Sequence[Mapping[str, float]]]] = []
    for name, run in zip(names, runs, strict=True):
        figures = {key: value for key, value in sections.read_figures(run).items() if value is not None}
        final = [{"step": run.evaluation["step"], **figures}] if figures and "step" in run.evaluation else []
        pairs.append((name, run.evaluations or final))
    return pairs


def _read_class_scores(run: RunFiles) -> dict[str, float | None]:
    score = "ap" if sections.is_detection(run) else "accuracy"
    classes = run.evaluation.get("classes", [])
    named = zip(sections.name_classes(classes), classes, strict=True)
    return {name: one[score] for name, one in itertools.islice(named, sections.SHOWN_CLASSES)}


def _align(columns: Sequence[Mapping[str, Any]], compare: bool = False) -> list[tuple[str, list[Any], Any]]:
    """Return a row for each name: the value in each column, None where it has none, and the best one if they differ."""
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name) for column in columns]
        known = [value for value in values if isinstance(value, int | float)]
        best = (min if name == "loss" else max)(known) if compare and len(set(known)) > 1 else None
        rows.append((str(name), values, best))
    return rows


@functools.cache
def _open_templates() -> jinja2.Environment:
    """Open the templates of this package; all that they show is escaped."""
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("gaudi_apps.inference"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "label": show_label,
        "plain": functools.partial(show_text, limit=LONGEST_TITLE),
        "value": show_value,
        "flag": lambda value: f"{value:g}" if isinstance(value, float) else show_value(value),
        "share": "{:.2f}".format,
    }
    return templates


def show_label(text: object, limit: int = 80) -> Markup:
    """Return a name of the user's: cut, on one line, and apart from the direction of what is around it."""
    return Markup('<bdi title="{}">{}</bdi>').format(show_text(text, LONGEST_TITLE), show_text(text, limit))


def show_value(value: Any) -> str | Markup:
    """Return a cell of a table: a number with at most four digits behind the point, or a text."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 100 else f"{value:.6g}"
    return f"{value}" if isinstance(value, int) else show_label(value, 200)


class ExportTable(NamedTuple):
    """A table of exports.

    Attributes:
        headings: of the columns.
        rows: texts, a row for each export.
        note: which images, and what speed was measured on.
    """

    headings: list[str]
    rows: list[list[str]]
    note: str


def report_exports(exports: Mapping[Path, Export], images: int) -> None:
    """Print what was compared on a number of images, and the table of what was measured."""
    for path, export in exports.items():
        say(describe_export(path, images, export.agreement))
    print_exports([read_manifest(path) for path in exports])


def describe_export(path: Path, images: int, agreement: Agreement) -> str:
    """Describe the comparison of an export on a number of images in one line."""
    checked = count_things(images, "image")
    if not agreement.compared:
        return f"{path}: nothing was detected on {checked} to compare; check it on other images"
    relation = "agree with" if agreement.is_close else "compared with those of"
    return f"{path}: {agreement.compared} outputs on {checked} {relation} the network ({agreement})"


def print_exports(manifests: list[dict[str, Any]]) -> None:
    """Print the table of exports that were evaluated, if any was."""
    table = tabulate(manifests)
    if table is None:
        return
    # Eighty columns hold it so, which is what a pipe has.
    shown = Table(title="Exports", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column, heading in enumerate(table.headings):
        words = heading.replace(" at", "\nat").replace(" ms", "\nms").replace(" lost", "\nlost")
        shown.add_column(words, justify="right" if column > 1 else "left", overflow="fold", vertical="bottom")
    for row in table.rows:
        shown.add_row(*row)
    make_console().print(shown)
    say(table.note)


def tabulate(manifests: list[dict[str, Any]]) -> ExportTable | None:
    """Make the table of exports that were evaluated, with those that this processor cannot; None where none was.

    Raises:
        KeyError, TypeError: a manifest is not as expected.
    """
    scored = [one for one in manifests if "evaluation" in one and "speed" in one]
    if not scored:
        return None
    metric = str(scored[0]["evaluation"]["metric"])
    headings = ["export", "precision", "MB", "images/s at 1", "at 16", "p50 ms", "p99 ms", metric, f"{metric} lost"]
    rows = [_make_row(one, metric) for one in manifests if one in scored or "not_evaluated" in one]
    machines = sorted({_describe_machine(one["speed"]) for one in scored})
    notes = [f"of {'; '.join(sorted({_describe_images(one) for one in scored}))}"]
    notes.append(f"speed without decoding and resizing, by {'; '.join(machines)}")
    notes += [f"{one['kind']}: speed with {' and '.join(one['speed']['included'])}" for one in scored
              if one["speed"].get("included")]  # fmt: skip
    notes += [f"-: {reason}" for reason in sorted({str(one["not_evaluated"]) for one in manifests
                                                   if "not_evaluated" in one})]  # fmt: skip
    return ExportTable(headings, rows, "; ".join(notes))


def _make_row(manifest: dict[str, Any], metric: str) -> list[str]:
    """Make the row of an export, with dashes for what was not measured, or is of another metric."""
    kind = [str(manifest["kind"]), str(manifest["precision"]), f"{manifest['bytes'] / 1e6:.1f}"]
    if "not_evaluated" in manifest:
        return [*kind, *["-"] * 6]
    evaluation, speed = manifest["evaluation"], manifest["speed"]
    rates, latency = speed["images_per_second"], speed["latency_ms"]
    times = [f"{rates['1']:.1f}", f"{rates['16']:.1f}", f"{latency['p50']:.4g}", f"{latency['p99']:.4g}"]
    lost = round(evaluation["lost"], 4) + 0.0  # no minus before nothing
    return [*kind, *times, f"{evaluation[metric]:.4f}" if metric in evaluation else "-", f"{lost:.4f}"]


def _describe_images(manifest: dict[str, Any]) -> str:
    """Describe the step of an export, and the images that it was evaluated on."""
    evaluation = manifest["evaluation"]
    images = f"{evaluation['images']} of {evaluation['images_total']} {evaluation['split']} images"
    return f"step {manifest['step']} on {images}" if "step" in manifest else images


def _describe_machine(speed: dict[str, Any]) -> str:
    """Describe what computed: the processor, the threads, and a device that is not the CPU."""
    threads = count_things(int(speed.get("threads", speed["processors"])), "thread")
    device = str(speed.get("device", "CPU"))
    name = str(speed.get("processor") or "an unknown processor")
    return f"{threads} of {name}" if device == "CPU" else f"{device} and {threads} of {name}"
