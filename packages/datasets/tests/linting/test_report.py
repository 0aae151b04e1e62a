from __future__ import annotations

import io
import json
import re

import numpy as np

from gaudi_datasets.linting.report import LintReport, print_report, sort_findings
from gaudi_datasets.linting.rules import MISSING, NO_BOX, NO_SIZE, RULES, UNUSED, ClassCount, Finding
from gaudi_datasets.program import make_console

CLASSES = (ClassCount("[b]cat", 2, 3, 1, 2, 0, 0), ClassCount("dog", 0, 0, 0, 0, 0, 0))
FINDINGS = (
    Finding(MISSING, "images/a.jpg", "there is no such file"),
    *(Finding(NO_SIZE, f"gt.json: annotation {number}", "box [0] of no size") for number in range(12)),
    Finding(UNUSED, "gt.json", "class 'dog'"),
)
SIZES = np.array([[20, 40], [0, 0], [10, 80], [30, 60]], np.int32)
REPORT = LintReport("gt.json", "detection", 4, 3, 15, CLASSES, FINDINGS, SIZES)


def printed(report: LintReport, width: int = 60) -> str:
    text = io.StringIO()
    print_report(report, make_console(file=text, width=width))
    return text.getvalue()


def test_findings_come_in_the_order_of_the_rules_and_then_as_they_were() -> None:
    mixed = [Finding(UNUSED, "c", ""), Finding(NO_SIZE, "b", ""), Finding(UNUSED, "a", ""), Finding(MISSING, "z", "")]
    assert [finding.where for finding in sort_findings(mixed)] == ["z", "b", "c", "a"]
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))


def test_a_report_is_told_in_one_line() -> None:
    numbers = ["4", "3", "15", "2", "40x10", "80x30", "60x20"]
    assert re.findall(r"[\dx]*\d", REPORT.describe()) == numbers
    same = LintReport("x", "classification", 1, classes=(ClassCount("cat", 1),), sizes_hw=SIZES[:1])
    assert same.describe() == "1 image, 1 class, all 40x20 pixels"
    assert LintReport("x").describe() == "cannot be read"


def test_only_rules_that_lose_count_as_losses() -> None:
    assert REPORT.losses == 13
    assert LintReport("x", findings=(Finding(NO_BOX, "a", "b"),)).losses == 0


def test_the_table_names_all_rules_and_ten_findings_of_each() -> None:
    lines = printed(REPORT).splitlines()
    assert lines[0] == f"gt.json: {REPORT.describe()}"
    assert [line.split() for line in lines[1:4]] == [
        ["name", "images", "boxes", "small", "medium", "large", "crowds"],
        ["[b]cat", "2", "3", "1", "2", "0", "0"],
        ["dog", "0", "0", "0", "0", "0", "0"],
    ]
    assert lines[4:6] == [f"missing image: 1  ({MISSING.advice})", f"  images/a.jpg: {REPORT.findings[0].what}"]
    assert lines[7:17] == [f"  gt.json: annotation {number}: box [0] of no size" for number in range(10)]
    assert lines[17].startswith("  and 2 more;")
    assert lines[-1] == "  gt.json: class 'dog'"
    assert printed(LintReport("x", "detection")).splitlines()[-1].endswith("would be lost")


def test_long_paths_are_not_broken() -> None:
    where = "folder/" * 40
    assert f"  {where}: x\n" in printed(LintReport("x", findings=(Finding(MISSING, where, "x"),)))


def test_json_has_every_finding() -> None:
    document = json.loads(json.dumps(REPORT.as_json()))
    assert document["boxes"] == {"kept": 3, "of": 15}
    assert document["classes"][1] == {
        "name": "dog", "images": 0, "boxes": 0, "small": 0, "medium": 0, "large": 0, "crowds": 0,
    }  # fmt: skip
    assert document["sizes"] == {
        "height": {"min": 10, "median": 20, "max": 30},
        "width": {"min": 40, "median": 60, "max": 80},
    }
    assert len(document["findings"]) == 14
    assert document["findings"][0] == {
        "rule": "missing image", "loses": True, "where": "images/a.jpg", "what": REPORT.findings[0].what,
    }  # fmt: skip
    assert document["counts"] == {MISSING.name: 1, NO_SIZE.name: 12, UNUSED.name: 1}
    assert document["losses"] == 13
    labels = LintReport("x", "classification", classes=(ClassCount("cat", 7),)).as_json()
    assert (labels["boxes"], labels["classes"]) == (None, [{"name": "cat", "images": 7}])
