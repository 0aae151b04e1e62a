from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

from gaudi_apps.detection.evaluator import MEANINGS, print_scores, write_evaluation
from gaudi_datasets.detection.scoring import FIGURES, ClassScore, CocoScores
from gaudi_datasets.program import make_console

SCORES = CocoScores(
    figures={name: None if name == "AP_small" else 0.5 + number / 1000 for number, name in enumerate(FIGURES)},
    classes=(ClassScore("cat [wild]", 0.25, 0.75), ClassScore("dog", None, None)),
    images=72,
    images_total=80,
    detections=345,
)


def test_every_figure_and_class_is_in_the_table() -> None:
    file = io.StringIO()
    print_scores(SCORES, make_console(file=file, width=100))
    lines = [line.strip("│┃ ").replace("│", " ").split() for line in file.getvalue().splitlines()]
    assert ["COCO", "metrics,", "72/80", "images,", "345", "detections"] in lines
    assert ["AP", "0.50:0.95", "all", "100", "0.500"] in lines
    assert ["AP_small", "0.50:0.95", "small", "100", "-"] in lines
    assert ["AR1", "0.50:0.95", "all", "1", "0.506"] in lines
    assert ["cat", "[wild]", "0.250", "0.750"] in lines
    assert ["dog", "-", "-"] in lines


def test_a_note_is_shown_below_the_figures() -> None:
    for note in ("", "[nothing] found"):
        file = io.StringIO()
        print_scores(dataclasses.replace(SCORES, note=note), make_console(file=file, width=100))
        assert file.getvalue().splitlines()[-1].startswith("└") == (not note)
        assert file.getvalue().endswith(f"{note}\n")


def test_the_meaning_of_every_figure_is_known() -> None:
    assert tuple(MEANINGS) == FIGURES


def test_evaluation_file_holds_metadata_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    write_evaluation(path, SCORES, step=809, images_per_second=6.5)
    document = json.loads(path.read_text())
    assert (document["step"], document["images_per_second"]) == (809, 6.5)
    assert document["figures"]["AP"] == 0.5
    assert document["figures"]["AP_small"] is None
    assert document["classes"][0] == {"name": "cat [wild]", "ap": 0.25, "ap50": 0.75}
    assert (document["images"], document["images_total"]) == (72, 80)
    assert [entry.name for entry in tmp_path.iterdir()] == ["evaluation.json"]
