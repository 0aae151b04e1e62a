from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gaudi_apps.cli import run_commands
from gaudi_apps.detection.error_analysis import compute_f1
from gaudi_apps.inference.report_charts import LEFT, RIGHT, WIDTH, Line, draw_lines, find_ticks, show_text, thin
from gaudi_apps.inference.report_page import make_comparison, make_report, write_comparison, write_report
from gaudi_apps.inference.report_sections import list_classes, list_counts, list_run, read_run
from gaudi_datasets.errors import DataError, FlagError, MissingInputError, UnsafeError

MAX_BYTES = 10_000_000
VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """Read a page: its elements, the cells of the tables by id, texts, and addresses that something is loaded from."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.json = ""
        self.text = ""
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(html)
        assert self._open == []  # what is opened is closed, so no name has closed anything

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.elements.append(tag)
        self.handlers += [name for name in found if name.startswith("on")]
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag not in VOID:
            self._open.append((tag, found.get("id") or ""))
        if tag == "tr" and (table := self._table()):
            self.tables.setdefault(table, []).append([])
        if tag in ("td", "th") and (table := self._table()):
            self.tables[table][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        inside = {tag for tag, _ in self._open}
        if "script" in inside:
            self.json += data if self._open[-1][1] == "counts" else ""
            return
        self.text += data
        if inside & {"td", "th"} and (table := self._table()):
            self.tables[table][-1][-1] += data.strip()

    def _table(self) -> str:
        return next((name for tag, name in reversed(self._open) if tag == "table"), "")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(hostile_run: Path) -> Page:
    path = write_report(hostile_run)
    assert path == hostile_run / "report.html"
    return Page(path.read_text(encoding="utf-8"))


def test_figures_are_those_of_the_evaluation(page: Page, hostile_run: Path) -> None:
    evaluation = read(hostile_run / "evaluation.json")
    shown = dict(page.tables["metrics"])
    assert list(shown) == list(evaluation["figures"])
    for name, value in evaluation["figures"].items():
        assert shown[name] == ("-" if value is None else f"{value:.4f}")
    classes = {row[0]: row for row in page.tables["class-table"][1:]}
    assert len(classes) == len(evaluation["classes"])
    for one in evaluation["classes"]:
        row = classes[show_text(one["name"], 200)]
        assert row[2:4] == [f"{one['ap']:.4f}", f"{one['ap50']:.4f}"]


def test_counts_of_the_slider_are_those_of_the_analysis(page: Page, hostile_run: Path) -> None:
    """The row of all classes comes first; hits and misses are all boxes; at the threshold F1 is highest."""
    analysis = read(hostile_run / "analysis.json")
    together, *classes = json.loads(page.json)
    start = round(100 * analysis["threshold"])
    assert together["truth"] == analysis["data"]["boxes"] == 42
    assert together["hits"][0] + together["alarms"][0] == analysis["data"]["detections"]
    assert sorted(one["hits"] for one in classes) == sorted(one["hits"] for one in analysis["classes"])
    scores = compute_f1(together["hits"], together["alarms"], together["truth"])
    assert scores[start] == scores.max()
    assert [row[0] for row in page.tables["counts-table"]][:2] == ["class", "all classes"]
    assert len(page.tables["counts-table"]) == len(classes) + 2


def test_names_do_not_break_out(page: Page, hostile_run: Path) -> None:
    assert page.handlers == []
    assert page.elements.count("script") == 2
    assert "<script>alert(1)</script>" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert not set(page.text) & set("\u202e\x1b")
    assert max(map(len, re.findall(r"(?:long )+", page.text))) < 400
    source = (hostile_run / "report.html").read_text(encoding="utf-8")
    assert "<img src=x" not in source
    assert source.count("<title>") - source.count("<svg") >= 1


def test_nothing_is_loaded(page: Page, hostile_run: Path) -> None:
    images = [address for address in page.addresses if address.startswith("data:image/jpeg;base64,")]
    assert len(images) == 6
    others = [address for address in page.addresses if address not in images]
    assert all(address.startswith("#") or address == "data:," for address in others)
    source = (hostile_run / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in source
    assert "@import" not in source
    assert "url(" not in source


def test_the_page_belongs_to_the_run(hostile_run: Path, page: Page) -> None:
    assert {"report.html", "analysis.json"} <= set(read(hostile_run / "run.json")["files"])


@pytest.mark.costly
def test_5000_images_make_a_page_that_opens(large_run: Path) -> None:
    path = write_report(large_run)
    assert 4_000_000 < path.stat().st_size < MAX_BYTES  # with as many images as there may be, of the largest size
    large = Page(path.read_text(encoding="utf-8"))
    assert len(large.elements) < 12_000
    assert len(large.tables["class-table"]) == 81
    assert read(large_run / "analysis.json")["data"]["images"] == 5000


@pytest.fixture
def copied(hostile_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(hostile_run, tmp_path / "run"))


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"kind": 3}', '{"classes": 7, "worst": [1], "data": 4, "tide": {}}', "[" * 100_000]
)
@pytest.mark.parametrize("name", ["analysis.json", "run_log.json"])
def test_what_is_missing_or_damaged_is_named(copied: Path, name: str, content: str | None) -> None:
    (copied / name).unlink()
    if content is not None:
        (copied / name).write_text(content)
    run = read_run(copied)
    html = make_report(run)
    found = Page(html)
    assert [name for name, _ in found.tables["metrics"]][:3] == ["AP", "AP50", "AP75"]
    if content is None:
        assert name in found.text
    assert 'id="missing"' in html or content == '{"kind": 3}' or name == "run_log.json"


@pytest.mark.parametrize("content", ['{"figures": null}', '{"classes": null}', '{"figures": {}, "classes": [3]}'])
def test_a_damaged_evaluation_is_named_where_runs_are_compared(copied: Path, content: str) -> None:
    whole = read_run(copied)
    (copied / "evaluation.json").write_text(content)
    found = Page(make_comparison([read_run(copied), whole._replace(folder=copied / "other")]))
    assert "not as expected" in found.text


@pytest.mark.parametrize(("fitted", "shown"), [(21, ("30", "21")), (30, ("30",)), (0, ("0",))])
def test_the_flags_tell_the_steps_that_were_trained(copied: Path, fitted: int, shown: tuple[str, ...]) -> None:
    config = copied / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8") + f"steps: {fitted}\n", encoding="utf-8")
    assert tuple(re.findall(r"\d+", str(read_run(copied).flags["steps"]))) == shown


def test_every_file_but_the_record_may_be_missing(copied: Path) -> None:
    for path in copied.iterdir():
        if path.is_file() and path.name != "run.json":
            path.unlink()
    assert "evaluation.json" in Page(make_report(read_run(copied))).text


def test_an_image_outside_of_the_run_is_not_embedded(copied: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jpg"
    shutil.copy(next((copied / "pictures").glob("*.jpg")), secret)
    analysis = read(copied / "analysis.json")
    for row, name in zip(
        analysis["worst"], ["../secret.jpg", str(secret), "run.json", "pictures/none.jpg"], strict=False
    ):
        row["image"] = name
    (copied / "pictures" / "link.jpg").symlink_to(secret)
    analysis["worst"][4]["image"] = "pictures/link.jpg"
    (copied / "analysis.json").write_text(json.dumps(analysis))
    found = Page(make_report(read_run(copied)))
    assert sum(address.startswith("data:image/jpeg") for address in found.addresses) == 1
    assert "5 of the images" in found.text


def test_another_report_is_not_replaced(copied: Path) -> None:
    (copied / "report.html").write_text("<p>mine</p>")
    with pytest.raises(UnsafeError) as caught:
        write_report(copied)
    assert Path(str(caught.value.path)) == copied / "report.html"
    assert (copied / "report.html").read_text() == "<p>mine</p>"


@pytest.mark.costly
def test_runs_are_compared(make_run: Callable[..., Path], tmp_path: Path) -> None:
    names = ["cat", "dog"]
    folders = [make_run(images=12, names=names, files=["a"], seed=seed) for seed in (1, 2)]
    folders = [Path(shutil.move(folder, tmp_path / name)) for folder, name in zip(folders, "ab", strict=True)]
    html = make_comparison([read_run(folder) for folder in folders])
    found = Page(html)
    evaluations = [read(folder / "evaluation.json") for folder in folders]
    metrics = {row[0]: row[1:] for row in found.tables["compared-metrics"]}
    for name in ("AP", "AP50", "AR100"):
        assert metrics[name] == [f"{one['figures'][name]:.4f}" for one in evaluations]
    classes = {row[0]: row[1:] for row in found.tables["compared-classes"]}
    assert classes["cat"] == [f"{one['classes'][0]['ap']:.4f}" for one in evaluations]
    flags = {row[0]: row[1:] for row in found.tables["compared-flags"]}
    assert flags["base_lr"] == ["0.02", "0.03"]
    assert "batch_size" not in flags
    assert "cannot be compared" in found.text  # the images are others
    assert found.addresses == ["data:,"]
    assert found.text.count("loss by step") == 1
    write_comparison(folders, tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8") == html


def test_a_detector_and_a_classifier_are_not_compared(copied: Path, tmp_path: Path) -> None:
    other, page = Path(shutil.copytree(copied, tmp_path / "other")), tmp_path / "page.html"
    (other / "evaluation.json").unlink()
    write_comparison([copied, other], page)
    page.unlink()
    classes = [{"name": "cat", "accuracy": 0.5}]
    (other / "evaluation.json").write_text(json.dumps({"step": 1, "top_1": 0.5, "classes": classes}))
    with pytest.raises(FlagError) as refused:
        write_comparison([copied, other], page)
    assert (refused.value.flag, page.exists()) == ("run_dirs", False)


@pytest.mark.costly
def test_classes_of_one_name_are_told_apart(make_run: Callable[..., Path]) -> None:
    folder = make_run(images=12, names=["crack", "crack", "dent"], files=["a"])
    run = read_run(folder)
    names = ["crack (1)", "crack (2)", "dent"]
    classes = {row[0]: row for row in Page(make_report(run)).tables["class-table"][1:]}
    truth = dict(zip(names, (one["truth"] for one in run.analysis["classes"]), strict=True))
    scores = dict(zip(names, (f"{one['ap']:.4f}" for one in run.evaluation["classes"]), strict=True))
    assert truth["crack (1)"] != truth["crack (2)"]
    assert {name: (row[1], row[2]) for name, row in classes.items()} == {
        name: (f"{truth[name]}", scores[name]) for name in names
    }
    counts = list_counts(run)
    assert {name: row["truth"] for name, row in zip(counts["names"][1:], counts["rows"][1:], strict=True)} == truth
    compared = {row[0]: row[1:] for row in Page(make_comparison([run, run])).tables["compared-classes"][1:]}
    assert compared == {name: [scores[name]] * 2 for name in names}
    # Of one that the analysis leaves out, nothing tells which it is.
    left = run._replace(analysis={**run.analysis, "classes": run.analysis["classes"][1:], "classes_left_out": 1})
    rows = {row[0]: row[1] for row in list_classes(left)[1]}
    assert rows == {"crack (1)": None, "crack (2)": None, "dent": truth["dent"]}
    assert set(list_counts(left)["names"][1:]) == {"crack", "dent"}


def test_runs_on_other_numbers_of_images_are_not_compared(copied: Path) -> None:
    run = read_run(copied)
    data = {**run.analysis["data"], "images": run.analysis["data"]["images"] + 1}
    other = run._replace(analysis={**run.analysis, "data": data})
    assert "cannot be compared" not in make_comparison([run, run])
    assert "cannot be compared" in make_comparison([run, other])


def test_scores_of_an_export_are_told_as_its_own(copied: Path) -> None:
    run = read_run(copied)
    other = run._replace(folder=copied / "other", evaluation={**run.evaluation, "export": "onnx-<b>8"})
    rows = dict(list_run(other))
    assert rows.keys() - dict(list_run(run)).keys() == {"Metrics computed by"}
    assert rows["Metrics computed by"] == "onnx-<b>8"
    assert [Page(make_report(one)).text.count("onnx-<b>8") for one in (run, other)] == [0, 2]
    assert [Page(make_comparison([run, one])).text.count("onnx-<b>8") for one in (run, other)] == [0, 2]


def test_sums_are_named_by_the_classes_they_are_of(copied: Path) -> None:
    run = read_run(copied)
    together = {**run.analysis["all_classes"], "truth": 12345}
    counts = list_counts(run._replace(analysis={**run.analysis, "classes_left_out": 7, "all_classes": together}))
    assert (counts["names"][0], counts["rows"][0]["truth"], counts["left_out"]) == ("all classes", 12345, 7)
    earlier = {name: value for name, value in run.analysis.items() if name != "all_classes"} | {"classes_left_out": 7}
    counts = list_counts(run._replace(analysis=earlier))
    assert counts["names"][0] != "all classes"
    assert counts["rows"][0]["truth"] == sum(one["truth"] for one in run.analysis["classes"])


def test_the_program(hostile_run: Path, tmp_path: Path, run_main: Callable[..., Any]) -> None:
    done = run_main(run_commands.main, ["report", hostile_run])
    assert (done.status, done.out) == (0, f"{hostile_run / 'report.html'}\n")
    report = (hostile_run / "report.html").read_bytes()
    assert run_main(run_commands.main, ["report", hostile_run]).status == 0
    assert (hostile_run / "report.html").read_bytes() == report
    output = tmp_path / "two.html"
    done = run_main(run_commands.main, ["compare", hostile_run, hostile_run, "--output", output])
    assert (done.status, done.out) == (0, f"{output}\n")
    assert Page(output.read_text(encoding="utf-8")).handlers == []
    for arguments, error, status in (
        (["report", tmp_path / "none"], MissingInputError, 66),
        (["report", tmp_path], MissingInputError, 66),
        (["compare", hostile_run, "-o", output], FlagError, 64),
    ):
        done = run_main(run_commands.main, arguments)
        assert (done.status, type(done.error)) == (status, error)
    (tmp_path / "run.json").write_text("{")
    assert isinstance(run_main(run_commands.main, ["report", tmp_path]).error, DataError)


def test_thinning_keeps_extremes() -> None:
    values = [0.0] * 10_000
    values[1234], values[7777] = 5.0, -3.0
    xs, ys = thin(range(10_000), values)
    assert len(xs) <= 400
    assert (ys.max(), ys.min()) == (5, -3)
    assert (xs[0], xs[-1]) == (0, 9999)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.1, 0.13), (-5, 7000), (0, 1e-9), (3, 1e12)])
def test_ticks_are_round_and_within(low: float, high: float) -> None:
    ticks = find_ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert all(low - 1e-9 * high <= tick <= high * (1 + 1e-9) for tick in ticks)


@pytest.mark.parametrize(("x", "place"), [(6, WIDTH - RIGHT), (0, LEFT), (-6, LEFT)])
def test_the_axis_of_one_point_begins_or_ends_at_zero(x: float, place: float) -> None:
    drawn = draw_lines([Line("AP", [x], [0.5], "#000")], title="AP", x_label="step")
    assert re.findall(r'<circle cx="([0-9.]+)"', drawn) == [f"{place:.1f}"]


def test_a_line_has_gaps_where_it_is_not_finite() -> None:
    line = Line("<b>", [0, 1, 2, 3], [1.0, float("nan"), 2.0, 3.0], "#000")
    drawn = draw_lines([line], title="a & b", x_label="step")
    path = re.search(r'<path d="([^"]*)"', drawn)
    assert path is not None
    assert path[1].count("M") == 2
    assert "&lt;b&gt;" in drawn
    assert "<b>" not in drawn
    assert "a &amp; b" in drawn
